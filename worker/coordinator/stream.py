"""The ordered stream to the ranks: one sequence of the gang, the same bytes to all of them, what is in flight, and the
answers of the output rank.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, cast

import msgspec
import zmq

from worker.config import HARD_FRAME_BYTES
from worker.coordinator.lease import Lease
from worker.coordinator.sockets import all_or_none
from worker.gang_messages import PERFORM, RESET, STOP, seal, unseal
from worker.run_files import RunFiles
from worker.step_trace import DONE, FLAG_RELAYED, StepTrace
from workerproto.codec import decode_body, encode_body
from workerproto.messages import HeaderFlag, Kind, Refused

FRAMES_WAITING = 16
"""Messages that are read ahead of one peer; the rest stays with it, and costs memory of its own, not of ours."""

HEADERS_KEPT = 200
MEETING_MS = 500

# As plain integers: an operation with an IntFlag makes another one, which takes microseconds.
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)
_SAMPLE_FOLLOWS = int(HeaderFlag.SAMPLE_FOLLOWS)
_UNANSWERED = (STOP, PERFORM)
"""Kinds that the output rank does not answer here."""


class InFlight(NamedTuple):
    """A frame that waits for its answer. `lease` is None for what no scheduler has sent."""

    gang_seq: int
    lease: Lease | None
    lease_seq: int
    place: int  # of its record in the trace


class _Sent(NamedTuple):
    """A Sample, and the gang sequence of the step that it is for."""

    frame: InFlight
    step: int


class Relayed(NamedTuple):
    """What is kept of a frame that went to the ranks: nothing of its contents. `time`: of the wall clock."""

    time: float
    seq: int
    lease_seq: int
    kind: int
    flags: int
    bytes: int


class Stream:
    """answers: the socket of the output rank's answers. headers: of the last frames that went to the ranks. recent: the
    last that want an answer, answered or not. trace: of the frames relayed.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], files: RunFiles, *, world_size: int, output_rank: int
    ) -> None:
        self._epoch = files.epoch
        endpoints = [(zmq.DEALER, files.steps_endpoint(rank)) for rank in range(world_size)]
        endpoints.append((zmq.PULL, files.answers_endpoint(output_rank)))
        *self._steps, self.answers = all_or_none(bind(context, kind, endpoint) for kind, endpoint in endpoints)
        self.in_flight: deque[InFlight] = deque()
        self.recent: deque[InFlight] = deque(maxlen=64)
        self._head_since = 0.0
        self.trace = StepTrace()
        self.headers: deque[Relayed] = deque(maxlen=HEADERS_KEPT)
        self._open = 0  # gang sequence of a step that waits for its scheduler's masks
        self._samples: dict[int, _Sent] = {}  # by gang sequence, until their steps are answered
        self._sequence = 0
        self._primaries: dict[int, int] = {}  # refusals that later ones may name: gang to lease sequence

    @property
    def head_since(self) -> float:
        """Since when (monotonic seconds) the oldest frame in flight waits for its answer; 0 if none is, or if it is its
        scheduler that it waits for.
        """
        return 0.0 if self._open and self.head == self._open else self._head_since

    @property
    def head(self) -> int | None:
        """Gang sequence of the oldest frame in flight."""
        try:
            return self.in_flight[0].gang_seq
        except IndexError:
            return None

    def send(
        self, kind: int, flags: int = 0, body: bytes = b"", lease: Lease | None = None, lease_seq: int = 0
    ) -> None:
        self._sequence = sequence = self._sequence + 1
        if kind == Kind.STEP and flags & _SAMPLE_FOLLOWS:
            self._open = sequence
        elif kind == RESET and self._open:  # which ends it
            self._open, self._head_since = 0, time.monotonic()
        if kind in _UNANSWERED:
            return self._to_ranks(sequence, lease_seq, kind, flags, body, lease_seq)
        place = self._record(sequence)  # before a rank can begin with it; what is not told by times comes after
        self._to_ranks(sequence, lease_seq, kind, flags, body, lease_seq)
        self._expect(InFlight(sequence, lease, lease_seq, place))

    def send_sample(self, body: bytes, lease: Lease, lease_seq: int, step: int) -> None:
        """Masks for the step that waits for them, which the scheduler calls `step`; they are answered if refused."""
        self._sequence = sequence = self._sequence + 1
        self._samples[sequence] = _Sent(InFlight(sequence, lease, lease_seq, 0), self._open)
        if self.head == self._open:
            self._head_since = time.monotonic()  # until now it was the scheduler that was waited for
        self._open = 0
        self._to_ranks(sequence, lease_seq, Kind.SAMPLE, 0, body, step)

    def _to_ranks(self, sequence: int, lease_seq: int, kind: int, flags: int, body: bytes, named: int = 0) -> None:
        frame = seal(kind, flags, self._epoch, sequence, named)
        for socket in self._steps:
            try:
                socket.send(frame, _MORE)
                socket.send(body, _NOW)
            except zmq.Again:
                pass  # its process is gone, which the main thread is about to see
        self.headers.append(Relayed(time.time(), sequence, lease_seq, kind, flags, len(body)))  # while they read

    def meet(self) -> None:
        """Each rank has sent a frame when it connected, before it said that it was warm. Until that has come, a step
        that is sent may reach nobody: a bound socket drops what it has no peer for. Raises RuntimeError."""
        for rank, socket in enumerate(self._steps):
            if not socket.poll(MEETING_MS):
                raise RuntimeError(f"rank {rank} is warm, but has not connected for steps")
            socket.recv()

    def expect(self, gang_seq: int, lease: Lease | None, lease_seq: int) -> None:
        """An answer is due, to what went another way than `send`."""
        self._expect(InFlight(gang_seq, lease, lease_seq, self._record(gang_seq)))

    def _record(self, gang_seq: int) -> int:
        place = self.trace.begin()
        self.trace.receive(gang_seq)
        self.trace.flag(FLAG_RELAYED)
        return place

    def _expect(self, frame: InFlight) -> None:
        if not self.in_flight:
            self._head_since = time.monotonic()
        self.in_flight.append(frame)
        self.recent.append(frame)

    def answered(self) -> InFlight | None:
        """The oldest frame has its answer; None if there was none."""
        frame = self.in_flight.popleft() if self.in_flight else None
        self._head_since = time.monotonic() if self.in_flight else 0.0
        if frame is not None:
            self.trace.mark_at(frame.place, DONE)
        return frame

    def receive(self) -> tuple[bytes, bytes]:
        """An answer that is there already: two frames, since it is a rank of ours that sends them. Raises zmq.Again."""
        return self.answers.recv(_NOW), self.answers.recv(_NOW)

    def take(self, frame: bytes) -> tuple[int, InFlight]:
        """The kind of an answer of the output rank, and what it answers. Raises RuntimeError if that was not due."""
        kind, _, epoch, sequence, _ = unseal(frame)
        if kind == Kind.REFUSED and (sent := self._samples.pop(sequence, None)) is not None:
            self._open = sent.step
            return kind, sent.frame
        step = self.answered()
        if step is None or step.gang_seq != sequence or epoch != self._epoch:
            raise RuntimeError(f"the output rank answered {sequence} of epoch {epoch}, outstanding was {step}")
        if self._samples:
            self._samples = {seq: sent for seq, sent in self._samples.items() if sent.step != sequence}
        return kind, step

    def translated(self, body: bytes, step: InFlight) -> bytes:
        """A refusal names its cause by gang sequence; the scheduler knows only its own."""
        refused = cast(Refused, decode_body(Kind.REFUSED, body))
        if refused.cause_seq == step.gang_seq:
            self._keep_primary(step)
        cause = self._primaries.get(refused.cause_seq)
        if cause is None:
            raise RuntimeError(
                f"step {step.gang_seq} is refused because of {refused.cause_seq}; refused were {self._primaries}"
            )
        return encode_body(msgspec.structs.replace(refused, cause_seq=cause))

    def _keep_primary(self, step: InFlight) -> None:
        """Later refusals may name the newest; those before it none but steps in flight behind them, whose answers wait
        for a step's Sample while others, sent later and refused too, are answered.
        """
        self._primaries[step.gang_seq] = step.lease_seq
        last = max((frame.gang_seq for frame in self.in_flight), default=0)
        named = {step.gang_seq, max(self._primaries)}
        self._primaries = {one: seq for one, seq in self._primaries.items() if one < last or one in named}

    def close(self, linger_ms: int) -> None:
        for socket in (self.answers, *self._steps):
            socket.close(linger=linger_ms)


def bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = _bounded(context, kind)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """For schedulers, to be bound."""
    return _bounded(context, zmq.ROUTER)


def _bounded(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = HARD_FRAME_BYTES
    socket.rcvhwm = FRAMES_WAITING  # before bind, or it is not heeded
    return socket
