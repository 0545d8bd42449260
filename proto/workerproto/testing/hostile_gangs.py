"""Gangs that break the spec: a scheduler must end its lease (section 10), for it cannot know what is lost.

Each answers the second step wrongly, and from then on no step at all; pings it answers, so that time ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from workerproto.codec import Header, encode_body
from workerproto.messages import Done, Event, Kind, Message, Result, Welcome
from workerproto.states import Gang
from workerproto.testing.ending_gangs import FailsForGood
from workerproto.testing.scenario import Scenario

Frames = tuple[bytes, ...]
RESULT = encode_body(Result())


class Wrong(FailsForGood):
    """`frames(gang, lease, sequence, body of the right answer)` are sent instead of Result 2."""

    def frames(self, lease: int, seq: int, body: bytes) -> Frames:
        raise NotImplementedError

    def on_step(self) -> None:
        """It is the answer that is wrong."""

    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        if kind is not Kind.RESULT or seq < 2 or body is None:
            return super()._send(peer, kind, body, lease, seq)
        if not self._ended:
            self._ended = True
            self.outbox.append((peer, *self.frames(lease, seq, encode_body(body))))  # type: ignore[arg-type]  # any number


def _wrong(rule: str, frames: Callable[[Wrong, int, int, bytes], Frames]) -> type[Scenario]:
    return type("Wrong", (Wrong,), {"rule": rule, "frames": frames})


def _header(gang: Wrong, lease: int, seq: int, kind: Kind = Kind.RESULT, epoch: int | None = None) -> bytes:
    return Header(kind, 0, gang.epoch if epoch is None else epoch, lease, seq).encode()


HOSTILE: tuple[type[Scenario], ...] = (
    _wrong("10.one-frame", lambda gang, lease, seq, body: (_header(gang, lease, seq),)),
    _wrong("10.magic", lambda gang, lease, seq, body: (b"RNKE" + _header(gang, lease, seq)[4:], body)),
    _wrong("10.version", lambda gang, lease, seq, body: (b"RNKD\2" + _header(gang, lease, seq)[5:], body)),
    _wrong("10.kind", lambda gang, lease, seq, body: (_header(gang, lease, seq, Kind.STEP), body)),
    _wrong("10.body", lambda gang, lease, seq, body: (_header(gang, lease, seq), b"\xc1")),
    _wrong("10.body-cut-short", lambda gang, lease, seq, body: (_header(gang, lease, seq), body[:-1])),
    _wrong("10.one-more-member", lambda gang, lease, seq, body: (_header(gang, lease, seq), b"\x97" + body[1:] + b"0")),
    _wrong("10.other-lease", lambda gang, lease, seq, body: (_header(gang, lease ^ 1, seq), body)),
    _wrong("10.other-epoch", lambda gang, lease, seq, body: (_header(gang, lease, seq, epoch=gang.epoch + 1), body)),
    _wrong("10.out-of-order", lambda gang, lease, seq, body: (_header(gang, lease, seq + 1), body)),
    _wrong("10.answered-before", lambda gang, lease, seq, body: (_header(gang, lease, seq - 1), body)),
    _wrong(
        "10.second-welcome",
        lambda gang, lease, seq, body: (
            _header(gang, lease, 0, Kind.WELCOME), encode_body(Welcome(Gang.READY, 10_000, [], 0, gang.facts))
        ),
    ),
    _wrong(
        "10.old-event",
        lambda gang, lease, seq, body: (
            _header(gang, lease, 0, Kind.EVENT), encode_body(Event(Gang.READY, gang.epoch - 1, seq, gang.facts))
        ),
    ),
    _wrong(
        "10.event-of-two-epochs",
        lambda gang, lease, seq, body: (
            _header(gang, lease, 0, Kind.EVENT), encode_body(Event(Gang.FAILED, gang.epoch + 1, seq))
        ),
    ),
    _wrong(
        "10.unlisted-event",
        lambda gang, lease, seq, body: (
            _header(gang, lease, 0, Kind.EVENT), encode_body(Event(Gang.LOADING, gang.epoch, seq - 1))
        ),
    ),
    _wrong(
        "10.unknown-state",
        lambda gang, lease, seq, body: (
            _header(gang, lease, 0, Kind.EVENT), encode_body(Event("NAPPING", gang.epoch, seq - 1))
        ),
    ),
    _wrong(
        "10.done-for-a-step",
        lambda gang, lease, seq, body: (_header(gang, lease, seq, Kind.DONE), encode_body(Done("wake"))),
    ),
)  # fmt: skip
