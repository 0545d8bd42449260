"""A first reading of a recording: whether it hangs together, and what has to be known before it is fed to a gang."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import cast

from worker.recording import Frame, Recording
from workerproto.codec import unpack
from workerproto.messages import Done, HeaderFlag, Kind, Sample, Step
from workerproto.operations import UpdateBegin, name_of

UPDATE_BEGIN = name_of(UpdateBegin())
_SENT = (Kind.STEP, Kind.SAMPLE, Kind.CONTROL)
_KINDS = (*_SENT, Kind.RESULT, Kind.REFUSED, Kind.DONE)


@dataclass
class Survey:
    """rows, tokens: of the largest step. positions: of the longest request. blocks: that are named. seconds: in which
    what is fed was recorded. masks: the frame of a step -> that of its masks, the last of several; bytes of the file.
    cut: it ends in the middle of a frame. prefix: greatest common divisor of the prefixes' lengths, 0 where there are
    none. updated: an epoch -> the byte from which on its weights are no more those of the start.
    """

    rows: int = 0
    tokens: int = 0
    positions: int = 0
    blocks: int = 0
    seconds: float = 0.0
    masks: dict[int, int] = field(default_factory=dict)
    cut: bool = False
    prefix: int = 0
    updated: dict[int, int] = field(default_factory=dict)

    def comparable(self, frame: Frame) -> bool:
        """Whether it is of the weights that the gang started with. What follows an update is neither fed nor measured:
        it is of weights that a replay has not, and steps may have been refused for want of them."""
        begun = self.updated.get(frame.header.epoch)
        return begun is None or frame.at < begun


class Leases:
    """Numbers of leases, from 1 on in the order of the recording. A gang that was restarted has forgotten all requests,
    as for a new lease."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def number(self, frame: Frame) -> int:
        return self._numbers.setdefault((frame.header.epoch, frame.header.lease), len(self._numbers) + 1)


def survey(recording: Recording) -> Survey:
    """Raises ValueError with the byte: damaged, or in another order than any scheduler sends; OSError."""
    found, leases, last = Survey(), Leases(), None
    lease = sequence = began = ended = 0
    waiting: dict[int, int] = {}  # sequence of a step -> its frame
    for frame in recording.frames():
        kind, seq = frame.header.kind, frame.header.seq
        if kind not in _KINDS:
            raise recording.damaged(frame.at, f"{kind.name} is not of the ordered stream")
        message = recording.message(frame)
        number, last, began = leases.number(frame), frame, began or frame.nanoseconds
        if isinstance(message, Done) and message.op == UPDATE_BEGIN:
            found.updated.setdefault(frame.header.epoch, frame.at)
        if found.comparable(frame):
            ended = frame.nanoseconds
        if kind not in _SENT:
            continue
        if number != lease:
            if number < lease:
                raise recording.damaged(frame.at, f"{kind.name} {seq} is of a lease that had ended")
            lease, sequence = number, 0
            waiting.clear()
        if seq <= sequence:
            raise recording.damaged(frame.at, f"{kind.name} {seq} of lease {number} comes after {sequence}")
        sequence = seq
        if not found.comparable(frame):
            continue
        if isinstance(message, Step):
            _measure(recording, frame, message, found)
            if frame.header.flags & HeaderFlag.SAMPLE_FOLLOWS:
                waiting[seq] = frame.at
        elif isinstance(message, Sample) and message.step in waiting:
            found.masks[waiting[message.step]] = frame.at
    found.cut = not recording.is_whole(last)
    found.seconds = max(0, ended - began) / 1e9
    return found


def _measure(recording: Recording, frame: Frame, step: Step, found: Survey) -> None:
    try:
        counts = unpack(step.counts)
        ends = unpack(step.positions) + counts
        if not len(counts) == len(unpack(step.ids)) == len(unpack(step.row_flags)) == len(ends):
            raise ValueError("its rows differ in number from array to array")
        named = (*(new.blocks for new in step.new), *(one.blocks for one in step.resumed), step.grants)
        blocks = [int(unpack(packed).max(initial=-1)) + 1 for packed in named]
    except ValueError as error:
        raise recording.damaged(frame.at, f"step {frame.header.seq}: {error}") from None
    found.rows, found.tokens = max(found.rows, len(counts)), max(found.tokens, int(counts.sum()))
    found.positions = max(found.positions, int(ends.max(initial=0)))
    found.blocks = max(found.blocks, *blocks)
    alignment = max(1, recording.facts.kv.alignment)  # of others the gang has refused the step
    prefixes = (*(new.computed for new in step.new), *(one.computed for one in step.resumed))
    found.prefix = gcd(found.prefix, *(length for length in prefixes if not length % alignment))


def masks_of(recording: Recording, survey: Survey, step: Frame) -> Sample | None:
    """The masks that a step was given, or None."""
    at = survey.masks.get(step.at)
    return None if at is None else cast(Sample, recording.message(recording.frame_at(at)))
