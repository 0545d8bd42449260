"""Who drives the gang, and which frames are taken: the first tier of the wire, by header alone, without a socket."""

from __future__ import annotations

from collections.abc import Container

from worker.coordinator.sampling import Sampling
from workerproto.codec import Header, WireError
from workerproto.messages import ErrorCode, Kind
from workerproto.states import LEASE, TAKEN_IN, LeaseEvent, Machine, RemoteStateError
from workerproto.states import Gang as GangState
from workerproto.states import Lease as LeaseState


class Lease:
    """One attachment of a scheduler. Times are seconds of the monotonic clock."""

    __slots__ = (
        "_machine", "answered", "client", "expected", "heard", "identity", "in_flight", "number", "said", "sampling",
    )  # fmt: skip

    def __init__(self, identity: bytes, number: int, client: str, now: float) -> None:
        self.identity = identity
        self.number = number
        self.client = printable(client)
        self.expected = 1  # sequence of the next ordered frame
        self.answered = 0  # last sequence answered
        self.in_flight = 0
        self.sampling = Sampling()
        self.heard = self.said = now
        self._machine = Machine(LEASE, LeaseState.NONE)
        self._machine.move(LeaseEvent.HELLO)

    @property
    def held(self) -> bool:
        return self._machine.state is LeaseState.HELD

    def welcome(self) -> None:
        self._machine.move(LeaseEvent.WELCOME)

    def lose_in_flight(self) -> None:
        """The gang failed, and goes on behind the last answer."""
        self.expected = self.answered + 1
        self.in_flight = 0
        self.sampling = Sampling()

    def due(self, timeout: float, sample_timeout: float) -> float:
        """When the next ping is due, or the lease ends. timeout: the lease's, and a Sample's, in seconds."""
        due = min(self.said + timeout / 3, self.heard + timeout)
        return min(due, self.sampling.due_since + sample_timeout) if self.sampling.due else due

    def end(self, event: LeaseEvent) -> None:
        self._machine.move(event, RemoteStateError)

    def judge_ordered(self, header: Header, epoch: int, credit: int, state: GangState, *, barrier: bool) -> None:
        """Raises WireError: the frame counts as never sent. `barrier`: an operation is being carried out."""
        if header.epoch != epoch:
            raise WireError(
                ErrorCode.BAD_EPOCH,
                f"epoch {header.epoch} is not the gang's, {epoch} is",
                "epoch",
                str(header.epoch),
                str(epoch),
            )
        if state not in TAKEN_IN[header.kind] or not self.held:
            told, what = (state if self.held else "not attached yet"), header.kind.name
            raise WireError(ErrorCode.NOT_READY, f"the gang takes no {what}: it is {told}", "state", told, "READY")
        if barrier and header.kind is not Kind.SAMPLE:  # an operation waits for the step that waits for this
            raise WireError(ErrorCode.BARRIER, "an operation is being carried out: nothing is taken until then", "kind")
        if header.seq != self.expected:
            raise WireError(
                ErrorCode.BAD_SEQUENCE, f"sequence {header.seq} came, {self.expected} is next", "seq", str(header.seq),
                str(self.expected),
            )  # fmt: skip
        self.sampling.judge(header)
        if header.kind is Kind.STEP and self.in_flight >= credit:
            raise WireError(
                ErrorCode.NO_CREDIT, f"{self.in_flight} steps are in flight, {credit} may be", "credit",
                str(self.in_flight), str(credit),
            )  # fmt: skip


def printable(text: str) -> str:
    """What a scheduler calls itself is shown in terminals: control characters in it are shown, and control nothing."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def judge_hello(header: Header, holder: Lease | None, identity: bytes, *, takeover: bool) -> None:
    """Raises WireError if this Hello does not attach."""
    if not header.lease or header.seq or header.epoch or header.flags:
        raise WireError(
            ErrorCode.BAD_HEADER,
            "Hello names a lease other than 0, and 0 as epoch, sequence and flags",
            "header",
            str(header),
        )
    if holder is None:
        return
    if holder.identity == identity or holder.number == header.lease:
        raise WireError(
            ErrorCode.BAD_LEASE, f"lease {header.lease} or its socket is attached: each attachment takes new ones",
            "lease", str(header.lease),
        )  # fmt: skip
    if not takeover:
        raise WireError(
            ErrorCode.LEASE_HELD,
            f"client {holder.client!r} holds the gang",
            "takeover",
            "false",
            "true, to end its lease",
        )


def judge_sender(header: Header, holder: Lease | None, identity: bytes, ended: Container[int]) -> Lease:
    """The lease that the frame belongs to. Raises WireError for one that is not held by its sender."""
    if holder is not None and holder.identity == identity and holder.number == header.lease:
        return holder
    code = ErrorCode.LEASE_ENDED if header.lease in ended else ErrorCode.BAD_LEASE
    raise WireError(code, f"lease {header.lease} does not hold the gang", "lease", str(header.lease))
