"""Driving a gang by a recording: one lease for each recorded lease, as many steps ahead as credit allows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, cast

import msgspec
import numpy as np

from worker.recording import Frame, Recording
from workerproto.client import Client, ClientError, TimedOut
from workerproto.codec import unpack, unpack_floats
from workerproto.messages import HeaderFlag, Kind, New, Refused, Result, RowFlag, Sample, Step

LIMIT_S = 600.0
"""For one answer; the gang's own --step-timeout is what is meant to end a step that hangs."""


class Difference(NamedTuple):
    """Where a token is another. recorded, replayed: token ids, or the code of a refusal. lease: 1 is the first of the
    recording; position: of the new token in its request."""

    lease: int
    step: int
    request: int | None
    position: int | None
    recorded: int | str
    replayed: int | str


@dataclass
class Outcome:
    """left_out: frames that are not steps. compared, same: sampled tokens."""

    steps: int = 0
    tokens: int = 0
    sampled: int = 0
    compared: int = 0
    same: int = 0
    refused: int = 0
    left_out: int = 0
    first: Difference | None = None


def needs_of(recording: Recording) -> tuple[int, int, int, int]:
    """What its steps really use: rows of a step, tokens of a step, positions of a request, blocks."""
    rows = tokens = positions = blocks = 0
    for frame in recording.frames:
        if frame.header.kind is not Kind.STEP or not isinstance(step := frame.message, Step):
            continue
        counts = unpack(step.counts)
        rows, tokens = max(rows, len(counts)), max(tokens, int(counts.sum()))
        positions = max(positions, int((unpack(step.positions) + counts).max(initial=0)))
        for packed in (*(new.blocks for new in step.new), *(one.blocks for one in step.resumed), step.grants):
            blocks = max(blocks, int(unpack(packed).max(initial=-1)) + 1)
    return rows, tokens, positions, blocks


def replay_all(endpoint: str, recording: Recording, *, at_recorded_speed: bool) -> Outcome:
    """Raises ClientError."""
    outcome = Outcome()
    began = time.monotonic_ns()
    start = recording.frames[0].nanoseconds if recording.frames else 0
    for lease, frames in _leases(recording):
        answers = {frame.header.seq: frame for frame in frames if frame.header.kind in (Kind.RESULT, Kind.REFUSED)}
        steps = [frame for frame in frames if frame.header.kind is Kind.STEP]
        # Of several masks of one step the last were taken.
        masks = {sample.step: sample for frame in frames if isinstance(sample := frame.message, Sample)}
        outcome.left_out += sum(frame.header.kind is Kind.CONTROL for frame in frames)
        with Client(endpoint, name="workerctl replay") as client:
            client.wait_ready(LIMIT_S)
            waiting: deque[tuple[Frame, Step]] = deque()
            for frame in steps:
                due = began + frame.nanoseconds - start
                while at_recorded_speed and (early := (due - time.monotonic_ns()) / 1e9) > 0:
                    if not waiting:
                        time.sleep(early)
                    else:  # take what comes meanwhile
                        _take(client, waiting, answers, lease, outcome, recording, early)
                while client.credit < 1:
                    _take(client, waiting, answers, lease, outcome, recording)
                step = cast(Step, frame.message)
                flags, sample = frame.header.flags, masks.get(frame.header.seq)
                client.submit(step, resync=bool(flags & HeaderFlag.RESYNC), sample_follows=sample is not None)
                if sample is not None:
                    client.sample(sample.rows, sample.masks)
                waiting.append((frame, step))
            while waiting:
                _take(client, waiting, answers, lease, outcome, recording)
    return outcome


def _leases(recording: Recording) -> Iterator[tuple[int, list[Frame]]]:
    """Frames by lease, in order; late answers of one lease may stand behind the first steps of the next."""
    order: dict[tuple[int, int], int] = {}  # a gang that was restarted has forgotten all requests, as for a new lease

    def number(frame: Frame) -> int:
        return order.setdefault((frame.header.epoch, frame.header.lease), len(order) + 1)

    for lease, group in groupby(sorted(recording.frames, key=number), key=number):
        yield lease, list(group)


def _take(
    client: Client, waiting: deque[tuple[Frame, Step]], answers: dict[int, Frame], lease: int, outcome: Outcome,
    recording: Recording, patience_s: float = LIMIT_S,
) -> None:  # fmt: skip
    """One answer, if one comes in time, compared with the recorded one."""
    message = _receive(client, patience_s)
    if message is None:
        return
    frame, step = waiting.popleft()
    recorded = answers.get(frame.header.seq)
    rows = unpack(step.ids)
    outcome.steps += 1
    if isinstance(message, Refused):
        outcome.refused += 1
    else:
        outcome.tokens += int(unpack(step.counts).sum())
        outcome.sampled += len(unpack(message.tokens))
    if recorded is None or not recording.tokens:
        return
    was = recorded.message
    if isinstance(was, Refused) or isinstance(message, Refused):
        here, there = _name(message), _name(cast(Result | Refused, was))
        if here != there:
            outcome.first = outcome.first or Difference(lease, frame.header.seq, None, None, there, here)
        return
    old, new = unpack(cast(Result, was).tokens), unpack(message.tokens)
    sampled = np.flatnonzero(unpack(step.row_flags) & int(RowFlag.SAMPLE))
    outcome.compared += len(old)
    outcome.same += int((old == new).sum())
    if outcome.first is None and (old != new).any():
        place = int((old != new).argmax())
        row = int(sampled[place])
        position = int(unpack(step.positions)[row] + unpack(step.counts)[row])
        outcome.first = Difference(lease, frame.header.seq, int(rows[row]), position, int(old[place]), int(new[place]))


def _name(message: Result | Refused) -> str:
    return str(message.code) if isinstance(message, Refused) else "accepted"


def _receive(client: Client, patience_s: float) -> Result | Refused | None:
    try:
        message = client.receive(patience_s).message
    except TimedOut:
        if patience_s < LIMIT_S:
            return None
        raise
    if not isinstance(message, Result | Refused):
        raise ClientError(f"the gang answered a step with {type(message).__name__}: {message}")
    return message


def margin_at(endpoint: str, recording: Recording, first: Difference) -> float | None:
    """How far apart the two best logits are where the first difference is: its lease is fed again up to that step, with
    logprobs asked for. None if the gang gives none, or no token was sampled there.
    """
    if first.request is None:
        return None
    frames = next(frames for lease, frames in _leases(recording) if lease == first.lease)
    steps = [frame for frame in frames if frame.header.kind is Kind.STEP and frame.header.seq <= first.step]
    result: Result | Refused | None = None
    step = Step()
    wants: dict[int, int] = {}
    with Client(endpoint, name="workerctl replay") as client:
        facts = client.wait_ready(LIMIT_S)
        if facts.limits.logprobs < 2:
            return None
        for frame in steps:
            while client.credit < 1:
                _receive(client, LIMIT_S)
            step = _with_logprobs(cast(Step, frame.message))
            wants |= {new.id: new.sampling.logprobs for new in step.new}
            client.submit(step, resync=bool(frame.header.flags & HeaderFlag.RESYNC))
        while client.unanswered:
            result = _receive(client, LIMIT_S)
    if not isinstance(result, Result):
        return None
    ids, flags = unpack(step.ids), unpack(step.row_flags)
    before = 0
    for request, flag in zip(ids.tolist(), flags.tolist(), strict=True):
        if not flag & int(RowFlag.SAMPLE):
            continue
        count = 1 + min(wants[request], facts.vocabulary)
        if request == first.request:
            best = unpack_floats(result.logprob_values)[before + 1 : before + 3]
            return float(best[0] - best[1])  # of logarithms of one softmax: what they were divided by falls out
        before += count
    return None


def _with_logprobs(step: Step) -> Step:
    def more(new: New) -> New:
        sampling = msgspec.structs.replace(new.sampling, logprobs=max(2, new.sampling.logprobs))
        return msgspec.structs.replace(new, sampling=sampling)

    return msgspec.structs.replace(step, new=[more(new) for new in step.new])
