"""The relay: a plain thread between the scheduler's socket, the ranks' step sockets and the output rank's answers.

It owns the lease, the credit and both sequences. The body of a step is never decoded: one receive, N sends of the same
bytes. An operation (Control) waits until every step before it is answered; nothing is taken until its own answer. What
the main thread wants of it comes as a call to run on this thread (`post`). It blocks when idle.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import cast

import msgspec
import zmq

from worker.coordinator.barrier import Barrier, Operation
from worker.coordinator.lease import Lease, judge_hello, judge_sender
from worker.coordinator.listener import Listener
from worker.coordinator.poll_thread import PollThread
from worker.coordinator.recorder import Recorder
from worker.coordinator.schedulers import Schedulers, read
from worker.coordinator.stream import Stream, bind
from worker.gang_messages import PERFORM, RESET, RESET_DONE, STOP
from worker.run_files import RunFiles
from workerproto.codec import Header, WireError, decode_body, encode_body
from workerproto.messages import (
    ORDERED_KINDS,
    Bye,
    Error,
    ErrorCode,
    Event,
    Facts,
    Fault,
    HeaderFlag,
    Hello,
    Kind,
    Message,
    Refused,
    Welcome,
)
from workerproto.states import OPERABLE, WITH_FACTS, Gang, LeaseEvent

_log = logging.getLogger("rankd.relay")

Parts = list[bytes]
_SAMPLE_FOLLOWS = int(HeaderFlag.SAMPLE_FOLLOWS)
_ANSWERS = {int(kind): kind for kind in (Kind.RESULT, Kind.REFUSED)}
_RESETTABLE = (Gang.READY, Gang.ASLEEP, Gang.UPDATING, Gang.DRAINING)


class Relay:
    """Lives from `start` to `close`. `stream`: that of the present epoch, whose figures any thread may read."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], files: RunFiles, world_size: int, output_rank: int, credit: int,
        lease_timeout: float, sample_timeout: float, listener: Listener,
        tcp: zmq.Socket[bytes] | None = None,
    ) -> None:  # fmt: skip
        """`files`: of the first epoch. `tcp`: a ROUTER for schedulers that is bound already."""
        self._make_stream = partial(Stream, context, world_size=world_size, output_rank=output_rank)
        self._credit = credit
        self._lease_timeout = lease_timeout
        self._sample_timeout = sample_timeout
        self._listener = listener
        beyond = [] if tcp is None else [tcp]
        self._schedulers = Schedulers([bind(context, zmq.ROUTER, files.scheduler_endpoint), *beyond])
        self._thread = PollThread("relay", self._due, self._watch_lease, self._trouble)
        for place, socket in enumerate(self._schedulers.sockets):
            self._thread.hear(socket, partial(self._from_scheduler, place))
        self.post = self._thread.post  # from any thread
        self._lease: Lease | None = None
        self._ended: deque[int] = deque(maxlen=256)  # leases of late, to tell a latecomer what has become of his
        self._state = Gang.STARTING
        self._dropped = 0  # by resets, since the last Welcome
        self.steps_done = 0
        self.recorder: Recorder | None = None
        self._begin(files)

    def _begin(self, files: RunFiles) -> None:
        """An epoch: of the one before only the lease is left."""
        self._epoch = self._schedulers.epoch = files.epoch
        self.stream = self._make_stream(files)
        self._thread.hear(self.stream.answers, self._from_output)
        self._facts: Facts | None = None
        self._dirty = False  # steps were sent since the last reset
        self._resetting = False
        self._barrier = Barrier(self.stream, self._listener.configure_kv)
        self._met = False  # the ranks are connected
        self._thread.troubles = 0

    def start(self) -> None:
        self._thread.start()

    # Any thread.

    @property
    def broken(self) -> bool:
        """It can drive no further epoch."""
        return self._thread.broken

    def restart(self, files: RunFiles, trace: mmap.mmap) -> Future[None]:
        """Go on with the ranks of the next epoch; done when they may connect, ZMQError if they cannot."""
        done: Future[None] = Future()

        def begin() -> None:
            self._thread.deafen(self.stream.answers)
            self.stream.close(0)
            try:
                self._begin(files)
            except zmq.ZMQError as error:
                return done.set_exception(error)
            self.stream.trace.map(trace)
            done.set_result(None)

        self.post(begin)
        return done

    @property
    def holder(self) -> Lease | None:
        return self._lease

    def close(self, timeout: float) -> None:
        """Bye to the holder, then every socket, with what was sent given this long to leave."""
        self.post(self._close)
        self._thread.join(timeout)
        for socket in self._schedulers.sockets:
            socket.close(linger=int(timeout * 1000))
        self.stream.close(int(timeout * 1000))

    # Calls that the main thread posts.

    def enter(
        self, state: Gang, facts: Facts | None = None, fault: Fault | None = None, *, goes_on: bool = False
    ) -> None:
        """The gang is in a new state: the holder is told. Before FAILED what the ranks had sent goes out, and the lease
        ends with it unless the gang `goes_on` in a next epoch."""
        if state is Gang.FAILED:
            while self._from_output():
                pass
            self._barrier = Barrier(self.stream, self._listener.configure_kv)  # whoever asked hears of the failure
        if state is Gang.READY and not self._met:
            self.stream.meet()
            self._met = True
        self._state = state
        self._facts = facts or self._facts
        if facts is not None and self.recorder is not None:
            self.recorder.begin(facts)
        if (lease := self._lease) is None:
            return
        if state is Gang.STARTING and not lease.held:  # it waited for a reset, which has come about with the epoch
            return self._welcome()
        if lease.held:
            fault = fault and msgspec.structs.replace(fault, step=self._lease_step(lease, fault.step))
            self._tell(lease, Kind.EVENT, Event(state, self._epoch, lease.answered, facts, fault))
        if state is Gang.FAILED and lease is self._lease:
            if goes_on:
                return lease.lose_in_flight()
            self._end_lease(LeaseEvent.GANG_ENDED, "FAILED", fault.message if fault else "")

    def _lease_step(self, lease: Lease, gang_seq: int | None) -> int | None:
        """A fault names its step by gang sequence; None if it was none of this lease, or one of long ago."""
        recent = self.stream.recent
        return next((s.lease_seq for s in recent if s.gang_seq == gang_seq and s.lease is lease), None)

    def stop_ranks(self) -> None:
        self.stream.send(STOP)

    def _close(self) -> None:
        if self._lease is not None:
            self._end_lease(LeaseEvent.GANG_ENDED, "STOPPED", "the gang has stopped")
        self._thread.stop()

    # The thread.

    def _trouble(self, error: Exception) -> None:
        """A rank's doing, as a rule. The gang ends, and its holder must still be told; ranks are heard no more."""
        self._listener.relay_failed(error)
        self._thread.deafen(self.stream.answers)

    def _from_scheduler(self, place: int) -> None:
        try:
            parts = self._schedulers.receive(place)
        except zmq.Again:
            return
        try:
            self._take(parts)
        except WireError as error:
            told, lease = self._schedulers.answer_error(parts, error, self._lease), self._lease
            if not told and lease is not None and lease.identity == parts[0]:
                self._not_reading()

    def _take(self, parts: Parts) -> None:
        identity, header, frame, body = read(parts)
        kind = header.kind
        if kind is Kind.HELLO:
            return self._hello(identity, header, body)
        lease = judge_sender(header, self._lease, identity, self._ended)
        lease.heard = time.monotonic()
        if kind in ORDERED_KINDS:
            barrier = self._barrier.operation is not None
            lease.judge_ordered(header, self._epoch, self._credit, self._state, barrier=barrier)
            lease.expected += 1
            self._dirty = True
            self._take_ordered(lease, header, frame, body)
        elif kind is Kind.PING:
            decode_body(kind, body)
            self._schedulers.send(identity, Header(Kind.PONG, 0, self._epoch, lease.number), b"")
        elif kind is Kind.BYE:
            decode_body(kind, body)
            self._end_lease(LeaseEvent.BYE)
        elif kind is Kind.PONG:
            decode_body(kind, body)
        else:
            raise WireError(ErrorCode.BAD_KIND, f"{kind.name} is not for a coordinator to receive", "kind", kind.name)

    def _take_ordered(self, lease: Lease, header: Header, frame: bytes, body: bytes) -> None:
        seq, sampling = header.seq, lease.sampling
        if header.kind is Kind.SAMPLE and (sampling.is_of_refused(seq) or sampling.is_of_passed_over(body)):
            return
        if self.recorder is not None:
            self.recorder.frame(frame, body)
        if header.kind is Kind.CONTROL:
            return self._barrier.put_up(Operation(body, lease, seq), self._state)
        if header.kind is Kind.SAMPLE:
            self.stream.send_sample(body, lease, seq, sampling.due)
            sampling.sent(seq)
        else:
            lease.in_flight += 1
            if header.flags & _SAMPLE_FOLLOWS:
                sampling.opened(seq)
            self.stream.send(header.kind, header.flags, body, lease, seq)

    def _from_output(self) -> bool:
        """Whether there was an answer."""
        try:
            header, body = self.stream.receive()
        except zmq.Again:
            return False
        if self._state is not Gang.FAILED:  # what comes after that belongs to an epoch that is over
            self._answer(header, body)
        return True

    def _answer(self, frame: bytes, body: bytes) -> None:
        kind, step = self.stream.take(frame)
        if kind == RESET_DONE:
            return self._reset_done(msgspec.msgpack.decode(body, type=int))
        self.steps_done, lease = self.steps_done + 1, step.lease
        assert lease is not None
        if refused := kind == Kind.REFUSED:
            body = self.stream.translated(body, step)
        if lease is self._lease:  # else it has ended
            if not lease.sampling.answered(step.lease_seq, refused=refused):
                lease.in_flight -= 1
                lease.answered = step.lease_seq
            self._deliver_answer(lease, _ANSWERS[kind], step.lease_seq, body)
        self._barrier.begin(self._state)

    def _deliver_answer(self, lease: Lease, kind: Kind, seq: int, body: bytes) -> None:
        header = Header(kind, 0, self._epoch, lease.number, seq)
        self._deliver(lease, header, body)
        if self.recorder is not None:
            self.recorder.frame(header.encode(), body)

    # Operations.

    def operate(self, body: bytes, settled: Callable[[Kind, bytes], None]) -> None:
        """Carry out an operator's operation, in the gang's order. Posted by the main thread; `settled` is called on
        this one, with the kind and body of the answer: Done, Refused or Error.
        """
        busy = self._barrier.operation is not None
        if busy or self._state not in OPERABLE:
            code = ErrorCode.BARRIER if busy else ErrorCode.NOT_READY
            why = "another operation is being carried out" if busy else f"it is {self._state}"
            return settled(Kind.ERROR, encode_body(Error(code, message=f"the gang takes no operation: {why}")))
        self._barrier.put_up(Operation(body, settled=settled), self._state)

    def perform(self) -> None:
        """All ranks have agreed to the operation."""
        self.stream.send(PERFORM)

    def settle(self, kind: Kind, body: bytes, *, moved: bool) -> None:
        """The operation is answered. `moved`: the gang's state has, of which the holder is told already."""
        operation = self._barrier.take_down()
        if operation.settled is not None:
            operation.settled(kind, body)
            if not moved and (lease := self._lease) is not None and lease.held:  # it was told to wait, and may go on
                self._tell(lease, Kind.EVENT, Event(self._state, self._epoch, lease.answered, self._facts_now))
        elif operation.lease is self._lease and self._lease is not None:
            if kind is Kind.REFUSED:
                refused = cast(Refused, decode_body(kind, body))
                body = encode_body(msgspec.structs.replace(refused, cause_seq=operation.lease_seq))
            self._lease.answered = operation.lease_seq
            self._deliver_answer(self._lease, kind, operation.lease_seq, body)
        self._reset()

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
        timeout_ms = int(self._lease_timeout * 1000)
        welcome = Welcome(self._state, timeout_ms, [], self._dropped, self._facts_now)
        self._dropped = 0
        self._tell(self._lease, Kind.WELCOME, welcome)

    @property
    def _facts_now(self) -> Facts | None:
        return self._facts if self._state in WITH_FACTS else None

    def _end_lease(self, event: LeaseEvent, code: str = "", message: str = "") -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        _log.info(f"lease {lease.number} of {lease.client!r} ends: {code or event}")
        lease.end(event)
        self._ended.append(lease.number)
        if code:
            self._tell(lease, Kind.BYE, Bye(code, message))
        if self._dirty and not self._resetting and self._state in _RESETTABLE:
            self._resetting = True
            self._reset()

    def _reset(self) -> None:
        """Have the ranks forget the lease, once an operation that they carry out is done."""
        if self._resetting and self._dirty and not self._barrier.begun:
            self._dirty = False
            self._barrier.leave()
            self.stream.send(RESET)

    def _reset_done(self, dropped: int) -> None:
        self._dropped += dropped
        self._resetting = False
        if self._state is Gang.UPDATING:
            self._listener.update_lost()
        if self._lease is not None and not self._lease.held:
            self._welcome()
        self._barrier.begin(self._state)

    def _due(self) -> float | None:
        """When the next ping is due, or the lease ends; None without a lease."""
        return None if self._lease is None else self._lease.due(self._lease_timeout, self._sample_timeout)

    def _watch_lease(self) -> None:
        lease = self._lease
        if lease is None:
            return
        now = time.monotonic()
        if now - lease.heard >= self._lease_timeout:
            seconds = f"{self._lease_timeout:g} s"
            self._end_lease(LeaseEvent.TIMEOUT, "TIMEOUT", f"nothing was heard for {seconds}")
        elif lease.sampling.due and now - lease.sampling.due_since >= self._sample_timeout:
            limit = f"{self._sample_timeout:g} s"
            self._end_lease(LeaseEvent.TIMEOUT, "NO_SAMPLE", f"step {lease.sampling.due} had no Sample within {limit}")
        elif now - lease.said >= self._lease_timeout / 3:
            self._tell(lease, Kind.PING, None)

    # Sending.

    def _tell(self, lease: Lease, kind: Kind, message: Message | None) -> None:
        body = b"" if message is None else encode_body(message)
        self._deliver(lease, Header(kind, 0, self._epoch, lease.number), body)

    def _deliver(self, lease: Lease, header: Header, body: bytes) -> None:
        """To a holder nothing may be lost in silence: one that is gone, or does not read, loses the lease instead."""
        lease.said = time.monotonic()
        if not self._schedulers.send(lease.identity, header, body) and lease is self._lease:
            self._not_reading()

    def _not_reading(self) -> None:
        self._end_lease(LeaseEvent.TIMEOUT, "NOT_READING", "what was sent here could not be delivered")
