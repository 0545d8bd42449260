"""A scheduler's side of one lease, without a socket: frames in, frames out, and what may be said when.

Every attachment is a new `Session` with a lease of its own. It counts sequence and credit, follows the epoch, answers
pings, and holds the peer to the spec: `LocalStateError` is this side's mistake, `RemoteStateError` the peer's.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import NamedTuple, cast

from workerproto.codec import Header, WireError, decode_body, decode_header, encode_body
from workerproto.fields import Packed
from workerproto.messages import (
    Bye,
    Done,
    Error,
    ErrorCode,
    Event,
    Facts,
    HeaderFlag,
    Hello,
    Kind,
    Message,
    Refused,
    Result,
    Sample,
    Step,
    Welcome,
)
from workerproto.operations import Control
from workerproto.states import (
    LEASE,
    OPERABLE,
    WITH_FACTS,
    Gang,
    Lease,
    LeaseEvent,
    LocalStateError,
    Machine,
    RemoteStateError,
    may_follow,
)

Frames = tuple[bytes, bytes]
Answer = Welcome | Result | Refused | Done | Error | Event | Bye
_EXPECTED = frozenset(
    {
        Kind.WELCOME, Kind.RESULT, Kind.REFUSED, Kind.DONE, Kind.ERROR, Kind.EVENT, Kind.BYE, Kind.PING, Kind.PONG,
    }
)  # fmt: skip


_HELD, _ENDED = Lease.HELD, Lease.ENDED  # asked for at every turn, and looking up an Enum's member is a call


class Received(NamedTuple):
    """A message and the sequence that it answers; 0 where it answers none."""

    seq: int
    message: Answer


class Session:
    """One lease. Give it every frame that comes (`receive`), and send what it makes (`hello`, `step`, …).

    facts: what a READY gang is; None until then, and after a failure. state: the gang's, as last heard. failure: Event
    FAILED, until the gang is READY again.
    """

    def __init__(self) -> None:
        self.lease = 1 + secrets.randbelow(2**32 - 1)
        self.epoch = 0
        self.state = Gang.STARTING
        self.facts: Facts | None = None
        self.failure: Event | None = None
        self.lease_timeout_s = 0.0
        self._machine: Machine[Lease, LeaseEvent] = Machine(LEASE, Lease.NONE)
        self._next_seq = 1
        self._unanswered: deque[int] = deque()
        self._operation = 0  # sequence of the Control that is unanswered
        self._open = 0  # sequence of the step whose Sample comes next
        self._samples: dict[int, int] = {}  # those sent, and the steps that they are for, until these are answered

    @property
    def held(self) -> bool:
        return self._machine.state is _HELD

    @property
    def ended(self) -> bool:
        return self._machine.state is _ENDED

    @property
    def unanswered(self) -> int:
        """Steps sent whose answer has not come."""
        return len(self._unanswered) - bool(self._operation)

    @property
    def credit(self) -> int:
        """Steps that may be sent before the next answer; 0 while the gang is not READY, or carries out a Control."""
        if not self.held or self.state is not Gang.READY or self.facts is None or self._operation:
            return 0
        return self.facts.limits.steps_in_flight - len(self._unanswered)

    def hello(self, client: str, takeover: bool) -> Frames:
        """Ask for the lease. Raises LocalStateError the second time: a lease is asked for once."""
        self._machine.move(LeaseEvent.HELLO)
        return self._frames(Kind.HELLO, Hello(client, [], takeover))

    def step(self, step: Step, resync: bool = False, sample_follows: bool = False) -> tuple[int, Frames]:
        """The next step and its sequence. Raises LocalStateError without lease, READY gang or credit, and while a step
        waits for its Sample.
        """
        if not self.held:
            raise LocalStateError(f"a step needs the lease, which is {self._machine.state}")
        self._judge_open()
        if self.credit < 1:
            self._judge_barrier()
            raise LocalStateError(
                f"no credit: {self.unanswered} steps are unanswered"
                if self.state is Gang.READY
                else f"a step needs a READY gang, this one is {self.state}"
            )
        flags = resync * int(HeaderFlag.RESYNC) | sample_follows * int(HeaderFlag.SAMPLE_FOLLOWS)
        seq, frames = self._ordered(Kind.STEP, step, flags)
        self._unanswered.append(seq)
        self._open = seq if sample_follows else 0
        return seq, frames

    def sample(self, rows: Packed, masks: Packed) -> tuple[int, Frames]:
        """The masks of the step that waits for them, as in `Sample`. Raises LocalStateError if none does."""
        if not self.held or not self._open:
            raise LocalStateError("no step waits for a Sample")
        self._samples[self._next_seq], step, self._open = self._open, self._open, 0
        return self._ordered(Kind.SAMPLE, Sample(step, rows, masks))

    def _judge_open(self) -> None:
        if self._open:
            raise LocalStateError(f"step {self._open} waits for its Sample: nothing else is taken until then")

    def control(self, operation: Control) -> tuple[int, Frames]:
        """An operation and its sequence; until its answer nothing else is taken. Raises LocalStateError without lease,
        in a state of the gang that takes none, or while another is unanswered.
        """
        if not self.held:
            raise LocalStateError(f"a Control needs the lease, which is {self._machine.state}")
        self._judge_barrier()
        self._judge_open()
        if self.state not in OPERABLE:
            raise LocalStateError(f"the gang takes no Control: it is {self.state}")
        self._operation = self._next_seq
        self._unanswered.append(self._operation)
        return self._ordered(Kind.CONTROL, operation)

    def _judge_barrier(self) -> None:
        if self._operation:
            raise LocalStateError(f"Control {self._operation} is unanswered: nothing is taken until then")

    def _ordered(self, kind: Kind, body: Message, flags: int = 0) -> tuple[int, Frames]:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return seq, (Header(kind, flags, self.epoch, self.lease, seq).encode(), encode_body(body))

    def ping(self) -> Frames:
        return self._frames(Kind.PING)

    def bye(self) -> Frames:
        """Give the lease back. Raises LocalStateError if it is not held or asked for."""
        self._machine.move(LeaseEvent.BYE)
        return self._frames(Kind.BYE, Bye())

    def lapse(self) -> None:
        """The peer has been silent too long."""
        self._machine.move(LeaseEvent.TIMEOUT)

    def receive(self, frames: list[bytes]) -> tuple[Received | None, Frames | None]:
        """Take in one message: (what the scheduler should know, what must be sent back).

        Raises RemoteStateError if the message is not one that the spec allows here.
        """
        if len(frames) != 2:
            raise RemoteStateError(f"a message of {len(frames)} frames came, not of 2")
        try:
            header = decode_header(frames[0])
            message = decode_body(header.kind, frames[1])
        except WireError as error:
            raise RemoteStateError(f"the peer sent what is not on the wire: {error}") from error
        if header.kind not in _EXPECTED:
            raise RemoteStateError(f"{header.kind.name} is not for a scheduler to receive")
        if header.lease != self.lease and header.kind is not Kind.ERROR:
            raise RemoteStateError(f"{header.kind.name} of lease {header.lease} came to lease {self.lease}")
        if message is None:
            return None, self._frames(Kind.PONG) if header.kind is Kind.PING else None
        return self._take(header, cast(Answer, message)), None

    def _take(self, header: Header, message: Answer) -> Received | None:
        if header.lease != self.lease:
            raise RemoteStateError(f"{header.kind.name} came for lease {header.lease}, this one is {self.lease}")
        match message:
            case Welcome():
                self._machine.move(LeaseEvent.WELCOME, RemoteStateError)
                self.epoch, self.state, self.facts = header.epoch, _told(message), message.facts
                self.lease_timeout_s = message.lease_timeout_ms / 1000
                return Received(0, message)
            case Error():
                return self._take_error(message)
            case Bye():
                if self.ended:
                    return None
                self._machine.move(LeaseEvent.GANG_ENDED, RemoteStateError)
                return Received(0, message)
        if not self.held:
            raise RemoteStateError(f"{header.kind.name} came for a lease that is {self._machine.state}")
        if isinstance(message, Event):
            self._take_event(header, message)
            return Received(0, message)
        if header.epoch != self.epoch:
            raise RemoteStateError(f"{header.kind.name} of epoch {header.epoch} came in epoch {self.epoch}")
        if isinstance(message, Refused) and self._reopens(header.seq):
            return Received(header.seq, message)
        if not self._unanswered or header.seq != self._unanswered[0]:
            expected = self._unanswered[0] if self._unanswered else "none"
            raise RemoteStateError(f"the answer to step {header.seq} came, the next to be answered is {expected}")
        operated = header.seq == self._operation
        if isinstance(message, Done) != operated and not isinstance(message, Refused):
            raise RemoteStateError(f"{header.kind.name} {header.seq} came: it answers another kind of frame")
        if operated:
            self._operation = 0
        if header.seq == self._open:
            if isinstance(message, Result):
                raise RemoteStateError(f"Result {header.seq} came: that step waits for its Sample")
            self._open = 0
        if self._samples:
            self._samples = {sample: step for sample, step in self._samples.items() if step != header.seq}
        return Received(self._unanswered.popleft(), message)

    def _reopens(self, sample: int) -> bool:
        """Whether this was a Sample: its step then waits for another. One that was sent behind it meanwhile, and has no
        Sample yet, needs none any more.
        """
        step = self._samples.pop(sample, 0)
        if step not in self._unanswered:
            return False
        self._open = step
        return True

    def _take_error(self, error: Error) -> Received:
        """A frame counts as never sent: its credit returns, and its sequence is used again."""
        if self._machine.state is Lease.ATTACHING:
            self._machine.move(LeaseEvent.REFUSE)
        elif self.held and error.code in (ErrorCode.LEASE_ENDED, ErrorCode.BAD_LEASE):
            self._machine.move(LeaseEvent.TAKEOVER)
        elif error.seq in self._unanswered and error.code is not ErrorCode.BAD_EPOCH:
            # (BAD_EPOCH is of a step that Event FAILED has answered; its sequence may be in use again.)
            self._unanswered.remove(error.seq)
            if error.seq == self._operation:
                self._operation = 0
            if error.seq == self._open:
                self._open = 0
            # Steps sent behind it are in error too, each by an Error of its own: the lowest is the one to go on with.
            self._next_seq = min(self._next_seq, error.seq)
        elif error.seq in self._samples and error.code is not ErrorCode.BAD_EPOCH:
            self._reopens(error.seq)
            self._next_seq = min(self._next_seq, error.seq)
        return Received(error.seq, error)

    def _take_event(self, header: Header, event: Event) -> None:
        if event.epoch < self.epoch:
            raise RemoteStateError(f"an Event of epoch {event.epoch} came in epoch {self.epoch}")
        if event.epoch != header.epoch:
            raise RemoteStateError(f"an Event of epoch {event.epoch} came under a header of epoch {header.epoch}")
        state = _told(event)
        if not may_follow(self.state, state):
            raise RemoteStateError(f"Event {state} came, and the gang was {self.state}: nothing leads from there to it")
        self.epoch, self.state = event.epoch, state
        self.facts = event.facts or self.facts
        if self.state is Gang.READY:
            self.failure = None
        if self.state is Gang.FAILED:
            self.failure = event
            # Answers everything that is open: its effect is lost, and a next epoch goes on behind the last answer.
            self._unanswered.clear()
            self._operation = self._open = 0
            self._samples.clear()
            self._next_seq = event.last_answered + 1
            self.facts = None

    def _frames(self, kind: Kind, body: Message | None = None) -> Frames:
        header = Header(kind, 0, self.epoch, self.lease)
        return header.encode(), b"" if body is None else encode_body(body)


def _told(message: Welcome | Event) -> Gang:
    """The gang's state. Raises RemoteStateError for one that is none, and if facts are missing or come uncalled for."""
    state = next((state for state in Gang if state == message.state), None)
    if state is None:
        raise RemoteStateError(f"{message.state!r} is no state of a gang")
    if (message.facts is not None) != (state in WITH_FACTS):
        raise RemoteStateError(f"{type(message).__name__} {state} came with{'' if message.facts else 'out'} facts")
    return state
