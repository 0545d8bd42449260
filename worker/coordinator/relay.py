"""The relay: a plain thread between the scheduler's socket, the ranks' step sockets and the output rank's answers.

It owns the lease, the credit and both sequences. The body of a step is never decoded: one receive, N sends of the same
bytes. What the main thread wants of it comes as a call to run on this thread (`post`); if it cannot go on it says so by
`notify`. It blocks when idle.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import msgspec
import zmq

from worker.config import FRAME_BYTES, HARD_FRAME_BYTES
from worker.coordinator.lease import Lease, judge_hello, judge_sender
from worker.coordinator.recorder import Recorder
from worker.gang_messages import RESET, RESET_DONE, STOP, seal, unseal
from worker.run_files import RunFiles
from worker.step_trace import DONE, FLAG_RELAYED, StepTrace
from workerproto.codec import Header, WireError, decode_body, decode_header, encode_body, read_sequence
from workerproto.messages import (
    ORDERED_KINDS,
    Bye,
    Error,
    ErrorCode,
    Event,
    Facts,
    Fault,
    Hello,
    Kind,
    Message,
    Refused,
    Welcome,
)
from workerproto.states import Gang, LeaseEvent

_log = logging.getLogger("rankd.relay")

Parts = list[bytes]
BATCH = 64
"""Frames read from one socket before the other has its turn: rubbish from a stranger must not hold up a result."""

FRAMES_WAITING = 16
"""Messages that are read ahead of one peer; the rest stays with it, and costs memory of its own, not of ours."""


class _InFlight(NamedTuple):
    gang_seq: int
    lease: Lease | None  # None: a reset
    lease_seq: int
    place: int  # of its record in the trace


class Relay:
    """`notify(error)` is called on the relay thread if it cannot go on."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], files: RunFiles, world_size: int, output_rank: int, credit: int,
        lease_timeout: float, epoch: int, notify: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._credit = credit
        self._lease_timeout = lease_timeout
        self._epoch = epoch
        self._notify = notify
        self._scheduler = _bind(context, zmq.ROUTER, files.scheduler_endpoint)
        self._scheduler.router_mandatory = True
        self._steps = [_bind(context, zmq.DEALER, files.steps_endpoint(rank)) for rank in range(world_size)]
        self._answers = _bind(context, zmq.PULL, files.answers_endpoint(output_rank))
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._running = True
        self._lease: Lease | None = None
        self._ended: deque[int] = deque(maxlen=256)  # leases of late, to tell a latecomer what has become of his
        self._state = Gang.STARTING
        self._facts: Facts | None = None
        self._gang_seq = 0
        self._in_flight: deque[_InFlight] = deque()
        self._recent: deque[_InFlight] = deque(maxlen=64)
        self._dirty = False  # steps were sent since the last reset
        self._resetting = False
        self._dropped = 0  # by resets, since the last Welcome
        self._primary_refusal = (0, 0)  # gang sequence, lease sequence
        self.head_since = 0.0  # since when the oldest frame in flight waits for its answer; 0 if none
        self.steps_done = 0
        self.trace = StepTrace()
        self.recorder: Recorder | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # Any thread.

    def post(self, call: Callable[[], None]) -> None:
        """Run it on the relay thread, soon and in order."""
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def head(self) -> int | None:
        """Gang sequence of the oldest frame in flight."""
        try:
            return self._in_flight[0].gang_seq
        except IndexError:
            return None

    @property
    def holder(self) -> Lease | None:
        return self._lease

    def close(self, timeout: float) -> None:
        """Bye to the holder, then every socket, with what was sent given this long to leave."""
        self.post(self._close)
        self._thread.join(timeout)
        for socket in (self._scheduler, self._answers, *self._steps):
            socket.close(linger=int(timeout * 1000))
        os.close(self._wake)

    # Calls that the main thread posts.

    def enter(self, state: Gang, facts: Facts | None = None, fault: Fault | None = None) -> None:
        """The gang is in a new state: the holder is told. After FAILED what the ranks had sent goes out first."""
        if state is Gang.FAILED:
            self._from_output(sys.maxsize)
        self._state = state
        self._facts = facts or self._facts
        if facts is not None and self.recorder is not None:
            self.recorder.begin(facts)
        if (lease := self._lease) is not None and lease.held:
            fault = fault and msgspec.structs.replace(fault, step=self._lease_step(lease, fault.step))
            self._tell(lease, Kind.EVENT, Event(state, self._epoch, lease.answered, facts, fault))
            if state is Gang.FAILED and lease is self._lease:
                self._end_lease(LeaseEvent.GANG_ENDED, "FAILED", fault.message if fault else "")

    def _lease_step(self, lease: Lease, gang_seq: int | None) -> int | None:
        """A fault names its step by gang sequence; None if it was none of this lease, or one of long ago."""
        return next((s.lease_seq for s in self._recent if s.gang_seq == gang_seq and s.lease is lease), None)

    def stop_ranks(self) -> None:
        """The last frame in the stream of every rank."""
        self._to_ranks(STOP, 0, b"")

    def _close(self) -> None:
        if self._lease is not None:
            self._end_lease(LeaseEvent.GANG_ENDED, "STOPPED", "the gang has stopped")
        self._running = False

    # The thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._scheduler, zmq.POLLIN)
        poller.register(self._answers, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._running:
                for socket, _ in poller.poll(self._patience()):
                    if socket is self._answers:
                        self._from_output(BATCH)
                    elif socket is self._scheduler:
                        self._from_scheduler()
                    else:
                        os.eventfd_read(self._wake)
                        while self._calls:
                            self._calls.popleft()()
                self._watch_lease()
        except BaseException as error:
            self._notify(error)

    def _from_scheduler(self) -> None:
        for parts in _waiting(self._scheduler, BATCH):
            try:
                self._take(parts)
            except WireError as error:
                self._answer_error(parts, error)

    def _take(self, parts: Parts) -> None:
        if len(parts) != 3:
            count = len(parts) - 1
            raise WireError(ErrorCode.BAD_FRAMES, f"{count} frames came, a message has 2", "frames", str(count), "2")
        identity, frame, body = parts
        header = decode_header(frame)
        if len(body) > FRAME_BYTES:
            raise WireError(
                ErrorCode.TOO_LARGE, f"the body has {len(body)} bytes, at most {FRAME_BYTES} are taken", "body",
                str(len(body)), str(FRAME_BYTES),
            )  # fmt: skip
        kind = header.kind
        if kind is Kind.HELLO:
            return self._hello(identity, header, body)
        lease = judge_sender(header, self._lease, identity, self._ended)
        lease.heard = time.monotonic()
        if kind in ORDERED_KINDS:
            lease.judge_step(header, self._epoch, self._credit, "" if self._state is Gang.READY else self._state)
            lease.expected += 1
            lease.in_flight += 1
            self._dirty = True
            if self.recorder is not None:
                self.recorder.frame(frame, body)
            self._to_ranks(kind, header.flags, body, lease, header.seq)
        elif kind is Kind.PING:
            decode_body(kind, body)
            self._send(identity, Header(Kind.PONG, 0, self._epoch, lease.number), b"")
        elif kind is Kind.BYE:
            decode_body(kind, body)
            self._end_lease(LeaseEvent.BYE)
        elif kind is Kind.PONG:
            decode_body(kind, body)
        else:
            raise WireError(ErrorCode.BAD_KIND, f"{kind.name} is not for a coordinator to receive", "kind", kind.name)

    def _to_ranks(self, kind: int, flags: int, body: bytes, lease: Lease | None = None, lease_seq: int = 0) -> None:
        self._gang_seq = sequence = self._gang_seq + 1
        if kind != STOP:
            if not self._in_flight:
                self.head_since = time.monotonic()
            place = self.trace.begin()
            self.trace.receive(sequence)
            self.trace.flag(FLAG_RELAYED)
            self._in_flight.append(_InFlight(sequence, lease, lease_seq, place))
            self._recent.append(self._in_flight[-1])
        frame = seal(kind, flags, self._epoch, sequence)
        for socket in self._steps:
            try:
                socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK)
                socket.send(body, zmq.NOBLOCK)
            except zmq.Again:
                pass  # its process is gone, which the main thread is about to see

    def _from_output(self, most: int) -> None:
        for header, body in _waiting(self._answers, most):
            self._answer(header, body)

    def _answer(self, frame: bytes, body: bytes) -> None:
        kind, _, epoch, sequence = unseal(frame)
        step = self._in_flight.popleft() if self._in_flight else None
        if step is None or step.gang_seq != sequence or epoch != self._epoch:
            raise RuntimeError(f"the output rank answered {sequence} of epoch {epoch}, outstanding was {step}")
        self.head_since = time.monotonic() if self._in_flight else 0.0
        self.trace.mark_at(step.place, DONE)
        if kind == RESET_DONE:
            return self._reset_done(msgspec.msgpack.decode(body, type=int))
        self.steps_done += 1
        lease = step.lease
        assert lease is not None
        if kind == Kind.REFUSED:
            body = self._translate(body, sequence, step.lease_seq)
        if lease is not self._lease:
            return  # its lease has ended
        lease.in_flight -= 1
        lease.answered = step.lease_seq
        header = Header(Kind(kind), 0, self._epoch, lease.number, step.lease_seq)
        if self.recorder is not None:
            self.recorder.frame(header.encode(), body)
        self._deliver(lease, header, body)

    def _translate(self, body: bytes, gang_seq: int, lease_seq: int) -> bytes:
        """A refusal names its cause by gang sequence; the scheduler knows only its own."""
        refused = cast(Refused, decode_body(Kind.REFUSED, body))
        if refused.cause_seq == gang_seq:
            self._primary_refusal = (gang_seq, lease_seq)
        cause, translated = self._primary_refusal
        if refused.cause_seq != cause:
            raise RuntimeError(f"step {gang_seq} is refused because of {refused.cause_seq}; refused last was {cause}")
        return encode_body(msgspec.structs.replace(refused, cause_seq=translated))

    # Leases.

    def _hello(self, identity: bytes, header: Header, body: bytes) -> None:
        hello = cast(Hello, decode_body(Kind.HELLO, body))
        judge_hello(header, self._lease, identity, takeover=hello.takeover)
        if self._lease is not None:
            self._end_lease(LeaseEvent.TAKEOVER, "TAKEOVER", f"client {hello.client!r} took over")
        self._lease = Lease(identity, header.lease, hello.client, time.monotonic())
        _log.info(f"lease {header.lease}: scheduler {hello.client!r} attaches")
        if not self._resetting:
            self._welcome()

    def _welcome(self) -> None:
        assert self._lease is not None
        self._lease.welcome()
        facts = self._facts if self._state is Gang.READY else None
        timeout_ms = int(self._lease_timeout * 1000)
        welcome = Welcome(self._state, timeout_ms, [], self._dropped, facts)
        self._dropped = 0
        self._tell(self._lease, Kind.WELCOME, welcome)

    def _end_lease(self, event: LeaseEvent, code: str = "", message: str = "") -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        _log.info(f"lease {lease.number} of {lease.client!r} ends: {code or event}")
        lease.end(event)
        self._ended.append(lease.number)
        if code:
            self._tell(lease, Kind.BYE, Bye(code, message))
        if self._dirty and not self._resetting and self._state in (Gang.READY, Gang.DRAINING):
            self._dirty, self._resetting = False, True
            self._to_ranks(RESET, 0, b"")

    def _reset_done(self, dropped: int) -> None:
        self._dropped += dropped
        self._resetting = False
        if self._lease is not None and not self._lease.held:
            self._welcome()

    def _patience(self) -> int | None:
        """Milliseconds until the next ping or the end of the lease, None without a lease."""
        lease = self._lease
        if lease is None:
            return None
        third = self._lease_timeout / 3
        wake = min(lease.said + third, lease.heard + self._lease_timeout)
        return max(0, int((wake - time.monotonic()) * 1000) + 1)

    def _watch_lease(self) -> None:
        lease = self._lease
        if lease is None:
            return
        now = time.monotonic()
        if now - lease.heard >= self._lease_timeout:
            seconds = f"{self._lease_timeout:g} s"
            self._end_lease(LeaseEvent.TIMEOUT, "TIMEOUT", f"nothing was heard for {seconds}")
        elif now - lease.said >= self._lease_timeout / 3:
            self._tell(lease, Kind.PING, None)

    # Sending.

    def _tell(self, lease: Lease, kind: Kind, message: Message | None) -> None:
        body = b"" if message is None else encode_body(message)
        self._deliver(lease, Header(kind, 0, self._epoch, lease.number), body)

    def _deliver(self, lease: Lease, header: Header, body: bytes) -> None:
        """To a holder nothing may be lost in silence: one that is gone, or does not read, loses the lease instead."""
        lease.said = time.monotonic()
        if not self._send(lease.identity, header, body) and lease is self._lease:
            self._end_lease(LeaseEvent.TIMEOUT, "NOT_READING", "what was sent here could not be delivered")

    def _answer_error(self, parts: Parts, error: WireError) -> None:
        identity, lease = parts[0], self._lease
        frame = parts[1] if len(parts) > 1 else b""
        own = lease if lease is not None and lease.identity == identity else None
        number = int.from_bytes(frame[12:16], "little") if len(frame) == 24 else 0
        answer = Error(
            error.code, read_sequence(frame), own.expected if own else None, error.field[:256], error.value[:256],
            error.bound[:256], str(error)[:4096],
        )  # fmt: skip
        self._send(identity, Header(Kind.ERROR, 0, self._epoch, number), encode_body(answer))

    def _send(self, identity: bytes, header: Header, body: bytes) -> bool:
        """Whether it could be queued: not if the peer has gone, or its queue is full."""
        try:
            self._scheduler.send_multipart([identity, header.encode(), body], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


def _waiting(socket: zmq.Socket[bytes], most: int) -> Iterator[Parts]:
    """What is there already. Asking costs a fraction of the exception that a receive in vain raises."""
    while most and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield parts
        most -= 1


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = HARD_FRAME_BYTES
    socket.rcvhwm = FRAMES_WAITING  # before bind, or it is not heeded
    socket.bind(endpoint)
    return socket
