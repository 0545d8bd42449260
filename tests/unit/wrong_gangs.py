"""Fake gangs whose coordinators are wrong in one way each (`wrong_ranks` has those whose ranks are)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Container
from typing import Any

import msgspec

from workerproto.codec import Header, decode_body
from workerproto.messages import (
    Bye,
    Done,
    Error,
    ErrorCode,
    Facts,
    Hello,
    Kind,
    Message,
    Refused,
)
from workerproto.testing.fake_gang import FakeGang, fake_facts

LEASE_TIMEOUT_MS = 900


def small_facts() -> Facts:
    """A request fills a step, so that no rule is beyond it."""
    return fake_facts(num_blocks=40, block_size=4, max_model_len=60)


class Honest(FakeGang):
    """Right, and slow enough for credit to run out."""

    facts_: Callable[[], Facts] = staticmethod(small_facts)
    delay_s = 0.001
    awaits_kv = False
    lacks: Container[str] = ()

    def __init__(self) -> None:
        super().__init__(
            self.facts_(), lease_timeout_ms=LEASE_TIMEOUT_MS, delay_s=self.delay_s, awaits_kv=self.awaits_kv,
            lacks=self.lacks,
        )  # fmt: skip
        self.told: set[str] = set()
        """Codes of errors and refusals so far."""

    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        if isinstance(body, Error | Refused):
            self.told.add(type(body).__name__ + " " + body.code)
        super()._send(peer, kind, body, lease, seq)


class Untouched(Honest):
    """Nobody has configured its cache yet."""

    facts_ = staticmethod(lambda: msgspec.structs.replace(small_facts(), model="/models/fake"))
    awaits_kv = True


class HasNoSleep(Honest):
    lacks = ("sleep",)


def set_header(frames: list[bytes], **changes: Any) -> list[bytes]:
    """Frames with fields of the header overwritten, where there is one."""
    if not frames or len(frames[0]) != 24:
        return frames
    names = ("magic", "version", "kind", "flags", "epoch", "lease", "seq")
    fields = dict(zip(names, struct.unpack("<4sBBHIIQ", frames[0]), strict=True))
    for name, value in changes.items():
        fields[name] = value(fields[name]) if callable(value) else value
    return [struct.pack("<4sBBHIIQ", *fields.values()), *frames[1:]]


class AnyFrames(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, [*frames, b"", b""][:2])


class AnyHeaderLength(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, [(frames[0] + bytes(24))[:24], *frames[1:]])


class AnyMagic(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, set_header(frames, magic=b"RNKD"))


class AnyVersion(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, set_header(frames, version=1))


class AnyFlags(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, set_header(frames, flags=lambda flags: flags & 3))


class FlagsOfAnyKind(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, frames if frames[0][5:6] == b"\x10" else set_header(frames, flags=0))


class AnyKind(Honest):
    """What it does not know is a step to it."""

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, set_header(frames, kind=lambda kind: kind if kind in (1, 4, 5, 6, 16) else 16))


class AnyEpoch(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, set_header(frames, epoch=0 if frames[0][5:6] == b"\x01" else 1))


class AnyHello(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        if frames[0][5:6] == b"\x01":
            frames = set_header(frames, seq=0, lease=lambda lease: lease or 1, flags=0)
        super().receive(peer, frames)


class AnyBody(Honest):
    """Of Hello and Bye."""

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        if frames[0][5:6] in (b"\x01", b"\x06"):
            try:
                decode_body(Kind(frames[0][5]), frames[1])
            except ValueError:
                frames = [frames[0], b"\x80"]
        super().receive(peer, frames)


class PingsWithBodies(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, [frames[0], b""] if frames[0][5:6] in (b"\x04", b"\x05") else frames)


class WholeHello(Honest):
    """Every field of Hello must be there."""

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        whole = frames[0][5:6] != b"\x01" or b"features" in frames[1]
        super().receive(peer, frames if whole else [frames[0], b"\xc1"])


class AnySequence(Honest):
    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        if self._holder and len(frames[0]) == 24:
            self._holder.next_seq = min(struct.unpack("<Q", frames[0][16:])[0], 2**53 - 1)
        super().receive(peer, frames)


class TakesTheSequenceOfAnError(Honest):
    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        super()._send(peer, kind, body, lease, seq)
        if kind is Kind.ERROR and self._holder and self._holder.peer == peer:
            self._holder.next_seq += 1


class NoCredit(Honest):
    delay_s = 0.3

    def _judge_ordered(self, header: Header, holder: Any) -> None:
        answers, self._answers = self._answers, type(self._answers)()
        try:
            super()._judge_ordered(header, holder)
        finally:
            self._answers = answers


class LessCredit(Honest):
    delay_s = 0.05

    def _judge_ordered(self, header: Header, holder: Any) -> None:
        promised = self.facts
        limits = msgspec.structs.replace(promised.limits, steps_in_flight=1)
        self.facts = msgspec.structs.replace(promised, limits=limits)
        try:
            super()._judge_ordered(header, holder)
        finally:
            self.facts = promised


class CarriesOutAnything(Honest):
    def _operate(self, seq: int, body: bytes) -> None:
        assert self._holder
        self._send(self._holder.peer, Kind.DONE, Done("done"), self._holder.lease, seq)


class ConfiguresAnything(CarriesOutAnything):
    awaits_kv = True


class ResyncBehindOperations(Honest):
    """A refused operation counts as a refusal of steps."""

    def _operate(self, seq: int, body: bytes) -> None:
        super()._operate(seq, body)
        self.validator._refused_by = seq


class EndsRefusals(Honest):
    def _operate(self, seq: int, body: bytes) -> None:
        super()._operate(seq, body)
        self.validator._refused_by = 0


class OperationsOvertake(Honest):
    """It does not wait for the answers to the steps before."""

    delay_s = 0.05

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, frames)
        if self._operation is not None:
            (seq, body), self._operation = self._operation, None
            self._operate(seq, body)


class AnySize(Honest):
    def _judge_size(self, body: bytes) -> None:
        pass


class SmallSize(Honest):
    def _judge_size(self, body: bytes) -> None:
        super()._judge_size(body + b"x" * 100)


class _Says(Honest):
    """Answers, but for those that end a lease, pass through `say`, which changes them; None is silence."""

    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any] | None:
        raise NotImplementedError

    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        said = self.say(kind, body)
        if said is not None:
            super()._send(peer, *said, lease, seq)


class OtherError(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any]:
        if kind is Kind.ERROR and body.code not in (ErrorCode.LEASE_ENDED, ErrorCode.BAD_LEASE):
            other = ErrorCode.NOT_READY if body.code is not ErrorCode.NOT_READY else ErrorCode.BAD_HEADER
            body = msgspec.structs.replace(body, code=other)
        return kind, body


class OtherErrorWhileAwaiting(OtherError):
    awaits_kv = True


class OtherLeaseError(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any]:
        if kind is Kind.ERROR and body.code is ErrorCode.BAD_LEASE:
            body = msgspec.structs.replace(body, code=ErrorCode.LEASE_ENDED)
        return kind, body


class NoExpectation(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any]:
        return kind, msgspec.structs.replace(body, expected_seq=None) if kind is Kind.ERROR else body


class NoBound(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any]:
        return kind, msgspec.structs.replace(body, bound="") if kind is Kind.ERROR else body


class NoPing(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any] | None:
        return None if kind is Kind.PING else (kind, body)


class NoPong(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any] | None:
        return None if kind is Kind.PONG else (kind, body)


class NoTimeout(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any] | None:
        return None if kind is Kind.BYE and body.code == "TIMEOUT" else (kind, body)


class OtherWelcome(_Says):
    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any]:
        if kind is Kind.WELCOME:
            self.welcomed = getattr(self, "welcomed", 0) + 1
            facts = msgspec.structs.replace(body.facts, model=f"model {self.welcomed}")
            body = msgspec.structs.replace(body, facts=facts, requests_dropped=1)
        return kind, body


class WelcomesWith(_Says):
    """Not fit to attach to."""

    def __init__(self, changes: dict[str, Any]) -> None:
        super().__init__()
        self._changes = changes

    def say(self, kind: Kind, body: Any) -> tuple[Kind, Any]:
        return kind, msgspec.structs.replace(body, **self._changes) if kind is Kind.WELCOME else body


class ErrorOfNoLease(Honest):
    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        super()._send(peer, kind, body, 0 if kind is Kind.ERROR else lease, seq)


class OtherFacts(Honest):
    facts_ = staticmethod(lambda: msgspec.structs.replace(small_facts(), tp=2))


class NeverHeld(Honest):
    def _attach(self, peer: bytes, header: Header, hello: Hello) -> None:
        super()._attach(peer, header, msgspec.structs.replace(hello, takeover=True))


class NeverTakenOver(Honest):
    def _attach(self, peer: bytes, header: Header, hello: Hello) -> None:
        super()._attach(peer, header, msgspec.structs.replace(hello, takeover=False))


class AttachesTwice(Honest):
    def _attach(self, peer: bytes, header: Header, hello: Hello) -> None:
        if self._holder and self._holder.peer == peer:
            self._end_lease(None)
        super()._attach(peer, header, hello)


class AnswersBye(Honest):
    def _end_lease(self, bye: Bye | None) -> None:
        super()._end_lease(bye or Bye("STOPPED"))


class KeepsRequests(Honest):
    def _end_lease(self, bye: Bye | None) -> None:
        reset, self.validator.reset = self.validator.reset, lambda: 0  # type: ignore[method-assign]  # wrong on purpose
        super()._end_lease(bye)
        self.validator.reset = reset  # type: ignore[method-assign]  # as it was


class KeepsAnswers(Honest):
    """Until the next lease."""

    def __init__(self) -> None:
        super().__init__()
        self.held_back = True

    def _end_lease(self, bye: Bye | None) -> None:
        answers = list(self._answers)
        super()._end_lease(bye)
        self._answers.extend(answers)
        self.held_back = not answers


class AnySocket(Honest):
    """Whoever knows the lease has it."""

    def _take(self, peer: bytes, header: Header, body: bytes) -> None:
        held = self._holder and self._holder.lease == header.lease and header.kind is not Kind.HELLO
        super()._take(self._holder.peer if held and self._holder else peer, header, body)


class CutOffByAGiant(Honest):
    """Stands in for a worker that a giant frame has brought down: it answers nothing more."""

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        self.steps_done += 1
        if self.steps_done < 4:
            super().receive(peer, frames)


class OutOfOrder(Honest):
    delay_s = 0.02

    def tick(self) -> None:
        if len(self._answers) > 1:
            first, second, *rest = self._answers
            self._answers = type(self._answers)([(first[0], *second[1:]), (second[0], *first[1:]), *rest])
        super().tick()
