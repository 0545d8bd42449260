"""A scheduler's socket that says what it is told to, right or wrong, and says what came instead of what should have."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
from msgspec import Struct

from workerproto.client import connect
from workerproto.codec import Header, WireError, decode_body, decode_header, encode_body
from workerproto.curve import CurveKeys
from workerproto.messages import (
    Bye,
    Error,
    ErrorCode,
    HeaderFlag,
    Hello,
    Kind,
    Message,
    RefusalCode,
    Refused,
    Result,
    Step,
    Welcome,
)
from workerproto.testing.report import Outcome

MAX_FRAME_BYTES = 64 * 2**20
M = TypeVar("M", bound=Struct)


class Unmet(Exception):
    """A rule is not kept; the message says what came instead."""


class NotProvoked(Exception):
    """Nothing can be said about the rule with this worker; the message says why."""


def outcome_of(rule: str, judge: Callable[[], object]) -> Outcome:
    """What `judge` says of the rule by returning or by what it raises."""
    try:
        judge()
    except Unmet as unmet:
        return Outcome(rule, False, str(unmet))
    except NotProvoked as reason:
        return Outcome(rule, None, str(reason))
    return Outcome(rule, True)


def require(holds: object, instead: str) -> None:
    """Raises Unmet, with what is there instead, unless it holds."""
    if not holds:
        raise Unmet(instead)


def told(header: Header | None, message: Struct | None) -> str:
    """What came, in a few words."""
    if header is None:
        return "nothing"
    what = f"{header.kind.name.capitalize()} {header.seq}" if header.seq else header.kind.name.capitalize()
    if isinstance(message, Error | Refused):
        return f"{what} {message.code} ({message.message[:200]})"
    return f"{what} {message.code}" if isinstance(message, Bye) else what


class Link:
    """A new DEALER and a new lease. `next_seq` is of the next step; a frame in error does not move it."""

    def __init__(self, endpoint: str, limit_s: float, keys: CurveKeys | None = None) -> None:
        self.lease = 1 + secrets.randbelow(2**32 - 1)
        self.epoch = 0
        self.next_seq = 1
        self._limit_s = limit_s
        self._attached = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if keys is not None:
            keys.apply(self._socket)
        connect(self._socket, endpoint)

    # To the worker.

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def send(
        self, kind: int, body: Message | bytes = b"", *, seq: int = 0, flags: int = 0, epoch: int | None = None,
        lease: int | None = None,
    ) -> None:  # fmt: skip
        """A frame with this link's lease and epoch unless others are given; `kind` may be one that does not exist."""
        header = bytearray(
            Header(
                Kind.STEP, flags, self.epoch if epoch is None else epoch, self.lease if lease is None else lease, seq
            ).encode()
        )
        header[5] = kind
        self.send_frames(bytes(header), body if isinstance(body, bytes) else encode_body(body))

    def hello(self, *, takeover: bool = False) -> None:
        self.send(Kind.HELLO, Hello("conformance suite", [], takeover), epoch=0)

    def step(self, step: Step | bytes, *, resync: bool = False) -> int:
        """Send it and return its sequence."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.send(Kind.STEP, step, seq=seq, flags=HeaderFlag.RESYNC if resync else 0)
        return seq

    # From the worker.

    def receive(self, limit_s: float | None = None) -> tuple[Header | None, Struct | None]:
        """The next message but Ping, which is answered; (None, None) if none comes within the limit."""
        deadline = time.monotonic() + (self._limit_s if limit_s is None else limit_s)
        while True:
            header, message = self.receive_any(deadline - time.monotonic())
            if header is None or header.kind is not Kind.PING:
                return header, message
            self.send(Kind.PONG)

    def receive_any(self, limit_s: float) -> tuple[Header | None, Struct | None]:
        """The next message, Ping too. Raises Unmet if it is none of the wire, or of another lease."""
        if not self._socket.poll(max(0, int(limit_s * 1000 + 0.999))):
            return None, None
        frames = self._socket.recv_multipart()
        require(len(frames) == 2, f"a message of {len(frames)} frames came")
        try:
            header = decode_header(frames[0])
            message = decode_body(header.kind, frames[1])
        except WireError as error:
            raise Unmet(f"what came is not on the wire: {error}") from None
        strange = header.lease != self.lease and header.kind is not Kind.ERROR
        require(not strange, f"{told(header, message)} of lease {header.lease} came to lease {self.lease}")
        if header.kind is Kind.WELCOME:  # expected or not, there is a lease to give back
            self.epoch, self._attached = header.epoch, True
        if header.kind in (Kind.RESULT, Kind.REFUSED):
            require(header.epoch == self.epoch, f"{told(header, message)} came in epoch {header.epoch}")
        return header, message

    def expect(self, kind: type[M], what: str = "") -> tuple[Header, M]:
        """The next message must be of this type. Raises Unmet."""
        header, message = self.receive()
        if header is None or not isinstance(message, kind):
            raise Unmet(f"{told(header, message)} came, not {what or kind.__name__}")
        return header, message

    def expect_result(self, seq: int, tokens: int | None = None) -> Result:
        """The answer to an accepted step, with so many tokens."""
        header, result = self.expect(Result, f"Result {seq}")
        require(header.seq == seq, f"Result {header.seq} came, not {seq}")
        drawn = len(result.tokens) / 4
        require(tokens is None or drawn == tokens, f"Result {seq} has {drawn:g} tokens, not {tokens}")
        return result

    def expect_refused(self, code: RefusalCode, seq: int, cause: int | None = None) -> Refused:
        """Without `cause` a primary refusal."""
        header, refused = self.expect(Refused, f"Refused {seq} {code}")
        right = header.seq == seq and refused.code is code
        require(right, f"{told(header, refused)} came, not Refused {seq} {code}")
        expected = seq if cause is None else cause
        require(refused.cause_seq == expected, f"cause_seq is {refused.cause_seq}, not {expected}")
        return refused

    def expect_error(self, *codes: ErrorCode, seq: int | None = None, expected_seq: int | None = None) -> Error:
        """`seq` is the one in error, None where it may not be legible; `expected_seq` must be as given."""
        wanted = " or ".join(codes)
        header, error = self.expect(Error, f"Error {wanted}")
        require(error.code in codes, f"{told(header, error)} came, not {wanted}")
        require(seq is None or error.seq == seq, f"{error.code} names seq {error.seq}, not {seq}")
        expected = error.expected_seq
        require(expected == expected_seq, f"{error.code} has expected_seq {expected}, not {expected_seq}")
        return error

    def expect_silence(self, limit_s: float = 0.05) -> None:
        header, message = self.receive(limit_s)
        require(header is None, f"{told(header, message)} came, and nothing should have")

    # The lease.

    def attach(self, *, takeover: bool = False) -> Welcome:
        """Raises Unmet if the answer is not Welcome."""
        self.hello(takeover=takeover)
        return self.welcomed()

    def welcomed(self) -> Welcome:
        return self.expect(Welcome)[1]

    def works(self) -> None:
        """An empty step in order is answered as such."""
        self.expect_result(self.step(Step()), 0)

    def bye(self) -> None:
        """End the lease, and return once it has: a Ping of an ended lease is answered by Error. Raises Unmet."""
        self._attached = False
        self.send(Kind.BYE, Bye())
        self.send(Kind.PING)
        deadline = time.monotonic() + self._limit_s
        while (left := deadline - time.monotonic()) > 0:
            _, message = self.receive(left)
            if isinstance(message, Error) and message.code in (ErrorCode.LEASE_ENDED, ErrorCode.BAD_LEASE):
                return
        raise Unmet("nothing said that the lease had ended after Bye: no LEASE_ENDED came for a Ping")

    def close(self) -> None:
        """Leave the worker free for the next lease, whatever state this one is in."""
        try:
            if self._attached:
                self.bye()
        except Unmet:
            pass  # the next attachment will show what it has come to
        finally:
            self._socket.close(0)
