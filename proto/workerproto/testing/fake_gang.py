"""A gang in one object, without sockets, processes or weights: frames in, frames out.

It answers as a coordinator and its ranks do, with the validator that ranks run, so that a scheduler can be written and
tested against it. What a gang does rarely it does on demand: become ready late, hold answers back, refuse, fail.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container

from msgspec.structs import replace

from workerproto.cache import NHD, configure
from workerproto.codec import Header, WireError, decode_body, decode_header, encode_body, read_lease, read_sequence
from workerproto.messages import (
    ORDERED_KINDS,
    Bye,
    Cache,
    Done,
    Error,
    ErrorCode,
    Event,
    Facts,
    Fault,
    HeaderFlag,
    Hello,
    Kind,
    Limits,
    Message,
    Refused,
    Result,
    Welcome,
)
from workerproto.operations import Control, UpdateFinish, name_of
from workerproto.standing import read_control
from workerproto.states import GANG, TAKEN_IN, WITH_FACTS, Gang
from workerproto.steps import Refusal, StepLimits
from workerproto.testing.fake_lease import Holder, judge_hello, judge_sender
from workerproto.testing.fake_model import FakeModel
from workerproto.testing.fake_operations import FakeOperations
from workerproto.validate import StepValidator

Outgoing = tuple[bytes, bytes, bytes]
"""Peer, header, body."""
_START = (Gang.STARTING, Gang.ROLL_CALL, Gang.LOADING, Gang.PROFILING, Gang.WARMING, Gang.READY)


def fake_facts(
    *,
    num_blocks: int = 256,
    block_size: int = 16,
    vocabulary: int = 1000,
    max_model_len: int = 512,
    pp: int = 1,
    tokens: int = 256,
    rows: int = 16,
    logprobs: int = 20,
) -> Facts:
    """Facts of a gang that is not there. Lengths in tokens; tokens and rows are per step."""
    block_bytes = 4 * block_size
    kv = Cache(
        num_blocks, block_size, "int32", NHD, [block_bytes] * pp, [block_bytes * num_blocks] * pp, block_size,
        block_size,
    )  # fmt: skip
    limits = Limits(pp + 2, tokens, rows, 4 * rows, 16 * 2**20, logprobs)
    return Facts("fake", vocabulary, max_model_len, "fake", True, kv, 1, pp, limits, [{}] * pp)


class FakeGang:
    """Give it every frame that comes (`receive`), let time pass (`tick`), and send what is in `outbox`."""

    def __init__(
        self,
        facts: Facts | None = None,
        *,
        ready: bool = True,
        awaits_kv: bool = False,
        delay_s: float = 0.0,
        lease_timeout_ms: int = 10_000,
        sample_timeout_s: float = 10.0,
        lacks: Container[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """lacks: operations that its ranks have not."""
        self.facts = facts or fake_facts()
        self._on_disk = self.facts.weights_id
        self.state = Gang.AWAITING_KV if awaits_kv else Gang.READY if ready else Gang.LOADING
        self.epoch = 1
        self.outbox: list[Outgoing] = []
        self.held_back = False
        self.steps_done = 0
        self._delay_s = delay_s
        self._lease_timeout_ms = lease_timeout_ms
        self._sample_timeout_s = sample_timeout_s
        self._lacks = lacks
        self._clock = clock
        self._holder: Holder | None = None
        self._ended_leases: set[int] = set()
        self._dropped = 0  # requests, since the last Welcome
        self._answers: deque[tuple[float, int, Kind, Result | Refused]] = deque()
        self._waits: int | None = None  # the step that waits for its Sample
        self._waits_since = 0.0
        self._sample_of_refused = 0  # the sequence of one that may be on its way
        self._refused_samples: set[int] = set()
        self._operation: tuple[int, bytes] | None = None  # sequence and body, until the steps before it are answered
        self._to_refuse = 0
        self._make_ranks()

    def _make_ranks(self) -> None:
        self.validator = StepValidator(StepLimits.from_facts(self.facts))
        self._model = FakeModel(self.validator.limits)
        self._operations = FakeOperations(self._lacks)

    # What a test asks for.

    def become_ready(self) -> None:
        """From wherever it stands in its start."""
        for state in _START[_START.index(self.state) + 1 :]:
            self._enter(state)

    def hold_back(self) -> None:
        """Answer no step until `release`."""
        self.held_back = True

    def release(self) -> None:
        self.held_back = False
        self.tick()

    def operate(self, operation: Control) -> None:
        """What an operator asks for, once the steps in flight are answered; the holder is told by Event."""
        self._operation = (0, encode_body(operation))

    def refuse_next(self, steps: int = 1) -> None:
        """Have the ranks refuse so many steps MALFORMED, whatever they are, from the next one on."""
        self._to_refuse = steps

    def fail(self, message: str = "made to fail", code: int = 70, rank: int = 0, *, restarts: bool = False) -> None:
        """Fail with this first cause; what is unanswered stays so. The lease ends unless it `restarts`."""
        self.state = Gang.FAILED
        fault = Fault(code, rank, "step", self._answers[0][1] if self._answers else None, None, message)
        self._forget_steps()
        self._operation = None
        self._event(Event(self.state, self.epoch, self._last_answered, None, fault))
        if not restarts:
            self._end_lease(Bye("FAILED", message))

    def restart(self, facts: Facts | None = None) -> None:
        """Begin the next epoch, with the same lease, perhaps other facts, and nothing else left of the last one."""
        self.facts = facts or replace(self.facts, weights_id=self._on_disk, weights_valid=True)
        self._make_ranks()
        self.epoch += 1
        self.state = Gang.STARTING
        self._event(Event(self.state, self.epoch, self._last_answered))
        if self._holder:
            self._holder.next_seq = self._last_answered + 1
        self.become_ready()

    # What a socket asks for.

    @property
    def next_due(self) -> float | None:
        """When `tick` has something to do next, on the clock given; None while it has nothing."""
        dues = [] if self.held_back or not self._answers else [self._answers[0][0]]
        if self._holder:
            timeout = self._lease_timeout_ms / 1000
            dues.append(min(self._holder.heard + timeout, self._holder.said + timeout / 3))
            if self._waits is not None:
                dues.append(self._waits_since + self._sample_timeout_s)
        return min(dues, default=None)

    def tick(self) -> None:
        """Send the answers that are due, and Ping for want of another; end a lease whose holder went silent."""
        now = self._clock()
        while self._answers and not self.held_back and self._answers[0][0] <= now:
            _, seq, kind, answer = self._answers.popleft()
            if self._holder:
                if seq not in self._refused_samples:
                    self._holder.last_answered = seq
                self._send(self._holder.peer, kind, answer, self._holder.lease, seq)
        if self._operation is not None and not self._answers and not self.held_back and self._waits is None:
            (seq, body), self._operation = self._operation, None
            self._operate(seq, body)
        if self._holder and now >= self._holder.heard + self._lease_timeout_ms / 1000:
            self._end_lease(Bye("TIMEOUT", f"nothing was heard for {self._lease_timeout_ms} ms"))
        elif self._holder and self._waits is not None and now >= self._waits_since + self._sample_timeout_s:
            self._end_lease(Bye("NO_SAMPLE", f"step {self._waits} had no Sample within {self._sample_timeout_s:g} s"))
        elif self._holder and now >= self._holder.said + self._lease_timeout_ms / 3000:
            self._send(self._holder.peer, Kind.PING, None, self._holder.lease)

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        """Take in one message of a peer. Nothing a peer sends raises."""
        try:
            if len(frames) != 2:
                raise WireError(ErrorCode.BAD_FRAMES, f"{len(frames)} frames, not 2", "frames", str(len(frames)), "2")
            header = decode_header(frames[0])
            self._judge_size(frames[1])
            self._take(peer, header, frames[1])
        except WireError as error:
            ours = self._holder is not None and self._holder.peer == peer
            expected = self._holder.next_seq if ours and self._holder else None
            seq = read_sequence(frames[0]) if frames else 0
            lease = read_lease(frames[0]) if frames else 0
            answer = Error(error.code, seq, expected, error.field, error.value, error.bound, str(error))
            self._send(peer, Kind.ERROR, answer, lease)
        self.tick()

    def _judge_size(self, body: bytes) -> None:
        size, most = len(body), self.facts.limits.frame_bytes
        if size > most:
            raise WireError(ErrorCode.TOO_LARGE, f"body of {size} bytes, at most {most}", "body", str(size), str(most))

    def _take(self, peer: bytes, header: Header, body: bytes) -> None:
        if header.kind is Kind.HELLO:
            message = decode_body(header.kind, body)
            assert isinstance(message, Hello)
            return self._attach(peer, header, message)
        holder = judge_sender(header, self._holder, peer, self._ended_leases)
        holder.heard = self._clock()
        if header.kind in ORDERED_KINDS:
            self._judge_ordered(header, holder)
            holder.next_seq += 1
            if header.kind is Kind.CONTROL:
                self._operation = (header.seq, body)
            elif header.kind is Kind.SAMPLE:
                self._sample(header.seq, body)
            else:
                self._step(header, body)
        elif header.kind is Kind.PING:
            decode_body(header.kind, body)
            self._send(peer, Kind.PONG, None, holder.lease)
        elif header.kind is Kind.BYE:
            decode_body(header.kind, body)
            self._end_lease(None)
        elif header.kind is Kind.PONG:
            decode_body(header.kind, body)
        else:
            kind = header.kind.name
            raise WireError(ErrorCode.BAD_KIND, f"{kind} is not for a gang to receive", "kind", kind)

    def _attach(self, peer: bytes, header: Header, hello: Hello) -> None:
        judge_hello(header, self._holder, peer, takeover=hello.takeover)
        self._end_lease(Bye("TAKEOVER", f"taken over by {hello.client or 'another'}"))
        self._holder = Holder(peer, header.lease, self._clock(), self._clock())
        facts = self.facts if self.state in WITH_FACTS else None
        welcome = Welcome(self.state, self._lease_timeout_ms, [], self._dropped, facts)
        self._dropped = 0
        self._send(peer, Kind.WELCOME, welcome, header.lease)

    def _end_lease(self, bye: Bye | None) -> None:
        if self._holder:
            self._ended_leases.add(self._holder.lease)
            if bye:
                self._send(self._holder.peer, Kind.BYE, bye, self._holder.lease)
        self._holder = None
        if self._operation is not None and self._operation[0]:
            self._operation = None
        self._forget_steps()
        self._dropped += self.validator.reset()
        if self.state is Gang.UPDATING:
            self.state = self.validator.standing.state
            self.facts = replace(self.facts, weights_valid=False)

    def _forget_steps(self) -> None:
        self._answers.clear()
        self._refused_samples.clear()
        self._waits, self._sample_of_refused = None, 0

    def _judge_ordered(self, header: Header, holder: Holder) -> None:
        """First tier: what a coordinator can tell without reading the body."""
        seq, credit = header.seq, self.facts.limits.steps_in_flight
        if header.epoch != self.epoch:
            raise WireError(ErrorCode.BAD_EPOCH, f"epoch is {self.epoch}", "epoch", str(header.epoch), str(self.epoch))
        if self.state not in TAKEN_IN[header.kind]:
            raise WireError(ErrorCode.NOT_READY, f"the gang is {self.state}", "state", self.state, Gang.READY)
        if self._operation is not None and header.kind is not Kind.SAMPLE:
            raise WireError(ErrorCode.BARRIER, f"Control {self._operation[0]} is not answered yet", "kind")
        if seq != holder.next_seq:
            raise WireError(
                ErrorCode.BAD_SEQUENCE, f"{holder.next_seq} comes next", "seq", str(seq), str(holder.next_seq)
            )
        due = self._waits is not None
        if due and header.kind is not Kind.SAMPLE:
            raise WireError(ErrorCode.SAMPLE_DUE, f"step {self._waits} waits", "kind", header.kind.name, "SAMPLE")
        if not due and header.kind is Kind.SAMPLE and seq != self._sample_of_refused:
            raise WireError(ErrorCode.NO_STEP_OPEN, "no step waits for a Sample", "kind", header.kind.name)
        steps = sum(seq not in self._refused_samples for _, seq, *_ in self._answers)
        if header.kind is Kind.STEP and steps >= credit:
            raise WireError(ErrorCode.NO_CREDIT, f"{credit} steps are unanswered", "credit", str(credit), str(credit))

    def _operate(self, seq: int, body: bytes) -> None:
        """The barrier: every step before has been answered. Sequence 0 is an operator's."""
        answer: Done | Refused
        try:
            if self.state is Gang.AWAITING_KV:
                operation, event = read_control(body), None
                self.facts = configure(self.facts, operation)
                self._make_ranks()
                self._enter(Gang.WARMING)
            else:
                operation, event = self.validator.propose(seq, body)[1:]
                self._operations.prepare(operation)
                self.validator.carry_out()
        except Refusal as refusal:
            refusal.cause = seq
            kind, answer = Kind.REFUSED, refusal.as_message()
        else:
            kind, answer = Kind.DONE, Done(name_of(operation), [{}] * (self.facts.tp * self.facts.pp))
            if isinstance(operation, UpdateFinish):
                self.facts = replace(self.facts, weights_id=operation.weights_id)
            self.facts = replace(self.facts, weights_valid=self.validator.standing.weights_valid)
            if event is not None:
                self._enter(GANG[self.state, event])
        if not seq:
            if kind is Kind.REFUSED or event is None:  # no Event has told the holder that it may go on
                self._enter(self.state)
        elif self._holder:
            self._holder.last_answered = seq
            self._send(self._holder.peer, kind, answer, self._holder.lease, seq)
        if self.state is Gang.WARMING and kind is Kind.DONE:
            self._enter(Gang.READY)
        if self.state is Gang.DRAINING:
            self._enter(Gang.STOPPING)
            self._enter(Gang.STOPPED)
            self._end_lease(Bye("STOPPED", "the gang has stopped"))

    def _enter(self, state: Gang) -> None:
        self.state = state
        self._event(Event(state, self.epoch, self._last_answered, self.facts if state in WITH_FACTS else None))

    def _step(self, header: Header, body: bytes) -> None:
        """Second tier: what every rank does."""
        self.steps_done += 1
        if self._to_refuse:
            self._to_refuse, body = self._to_refuse - 1, b"\xc1"  # a byte that msgpack never uses
        kind: Kind
        answer: Result | Refused
        try:
            accepted = self.validator.check(header.seq, header.flags, body)
            if self.validator.open is not None:
                self._waits, self._waits_since = header.seq, self._clock()
                return
            kind, answer = Kind.RESULT, self._model.execute(accepted, self.validator.table)
        except Refusal as refusal:
            kind, answer = Kind.REFUSED, refusal.as_message()
            self._sample_of_refused = header.seq + 1 if header.flags & HeaderFlag.SAMPLE_FOLLOWS else 0
        self._answers.append((self._clock() + self._delay_s, header.seq, kind, answer))

    def _sample(self, seq: int, body: bytes) -> None:
        """The masks of the step that waits; those of one that was refused are let go."""
        waiting, step = self.validator.open, self._waits
        if waiting is None or step is None:
            return
        kind: Kind
        answer: Result | Refused
        try:
            masks = self.validator.check_sample(seq, body, step)
        except Refusal as refusal:
            kind, answer, step = Kind.REFUSED, refusal.as_message(), seq
            self._refused_samples.add(seq)
            self._waits_since = self._clock()
        else:
            kind, answer = Kind.RESULT, self._model.execute(waiting.step, self.validator.table, masks)
            self._waits = None
        self._answers.append((self._clock() + self._delay_s, step, kind, answer))

    @property
    def _last_answered(self) -> int:
        return self._holder.last_answered if self._holder else 0

    def _event(self, event: Event) -> None:
        if self._holder:
            self._send(self._holder.peer, Kind.EVENT, event, self._holder.lease)

    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        if self._holder and self._holder.peer == peer:
            self._holder.said = self._clock()
        header = Header(kind, 0, self.epoch, lease, seq).encode()
        self.outbox.append((peer, header, b"" if body is None else encode_body(body)))
