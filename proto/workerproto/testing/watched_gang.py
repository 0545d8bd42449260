"""A fake gang that watches the scheduler which drives it: what that does wrong is a breach of a rule, by name.

Most rules need no trap: a step that breaks one is refused by the validator that ranks run, a frame by the first tier,
and a right scheduler is never refused. Beyond that are the rules that no worker checks, since only the scheduler
can keep them: what stands in a prefix that it shares, and which tokens it resumes with.

Whether a scheduler has read something yet is not for a clock to say. A Ping is sent behind it; what comes after the
Pong was sent by a scheduler that has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Set
from typing import NamedTuple

from workerproto.codec import Header, WireError, decode_body, decode_header
from workerproto.messages import (
    Bye,
    Error,
    ErrorCode,
    Facts,
    HeaderFlag,
    Hello,
    Kind,
    Message,
    RefusalCode,
    Refused,
    Result,
    Step,
)
from workerproto.testing.fake_gang import FakeGang
from workerproto.testing.scheduler_texts import PREFIX, RESUMED, Texts

BY_ERROR: dict[ErrorCode, str] = {
    ErrorCode.BAD_FRAMES: "2.two-frames",
    ErrorCode.BAD_HEADER: "3.header",
    ErrorCode.BAD_VERSION: "3.header",
    ErrorCode.BAD_FLAGS: "3.header",
    ErrorCode.BAD_KIND: "5.kinds",
    ErrorCode.BAD_BODY: "4.bodies",
    ErrorCode.TOO_LARGE: "16.size",
    ErrorCode.BAD_LEASE: "9.lease",
    ErrorCode.LEASE_ENDED: "9.lease",
    ErrorCode.BAD_EPOCH: "11.epoch",
    ErrorCode.BAD_SEQUENCE: "8.sequence",
    ErrorCode.NO_CREDIT: "8.credit",
    ErrorCode.NOT_READY: "9.ready",
    ErrorCode.BARRIER: "22.operations",
    ErrorCode.SAMPLE_DUE: "8.sample",
    ErrorCode.NO_STEP_OPEN: "8.sample",
}
BY_REFUSAL: dict[RefusalCode, str] = {
    RefusalCode.MALFORMED: "4.bodies",
    RefusalCode.UNEXPECTED_RESYNC: "15.resync",
    **dict.fromkeys((RefusalCode.SAMPLE_DUE, RefusalCode.BAD_STEP, RefusalCode.BAD_MASK), "8.sample"),
    RefusalCode.BAD_SAMPLING: "13.sampling",
    **dict.fromkeys(
        (RefusalCode.UNKNOWN_REQUEST, RefusalCode.DUPLICATE_REQUEST, RefusalCode.NOT_PREEMPTED,
         RefusalCode.EMPTY_PROMPT, RefusalCode.TOKENS_DISAGREE),
        "12.requests",
    ),
    **dict.fromkeys(
        (RefusalCode.BAD_COMPUTED, RefusalCode.BAD_POSITION, RefusalCode.BAD_COUNT, RefusalCode.BAD_ROW_FLAGS,
         RefusalCode.BAD_SAMPLE),
        "12.positions",
    ),
    **dict.fromkeys(
        (RefusalCode.BLOCK_OUT_OF_RANGE, RefusalCode.BLOCK_OWNED, RefusalCode.BLOCK_UNWRITTEN,
         RefusalCode.BLOCKS_MISSING, RefusalCode.TOO_MANY_BLOCKS),
        "12.blocks",
    ),
    **dict.fromkeys(
        (RefusalCode.TOO_LONG, RefusalCode.TOKEN_OUT_OF_VOCABULARY, RefusalCode.TOO_MANY_TOKENS,
         RefusalCode.TOO_MANY_ROWS, RefusalCode.TOO_MANY_REQUESTS),
        "12.limits",
    ),
    **dict.fromkeys(
        (RefusalCode.REQUESTS_LIVE, RefusalCode.ASLEEP, RefusalCode.NOT_ASLEEP, RefusalCode.UPDATING,
         RefusalCode.NOT_UPDATING, RefusalCode.WEIGHTS_INVALID, RefusalCode.AWAITING_KV, RefusalCode.KV_CONFIGURED,
         RefusalCode.BAD_ARGUMENT),
        "22.operations",
    ),
}  # fmt: skip
"""AFTER_REFUSAL is no breach: steps sent behind a refused one cannot know."""
WATCHED = sorted(
    {
        *BY_ERROR.values(), *BY_REFUSAL.values(),
        "2.new-socket", "9.bye", "9.new-lease", "9.pong", "9.speaks", PREFIX, RESUMED,
    },
    key=lambda rule: (int(rule.partition(".")[0]), rule),
)  # fmt: skip
"""Rules that are watched whatever the scenario."""
PONG_S = 2.0


class _Ping(NamedTuple):
    at: float
    steps: int


class WatchedGang(FakeGang):
    """`breaches`: the first of each rule. `tried`: rules that there was an occasion for. `leases`, `peers`: those used
    so far, here and by runs before.
    """

    def __init__(
        self, facts: Facts, leases: set[int], *, ready: bool = True, delay_s: float = 0.0,
        lease_timeout_ms: int = 10_000,
    ) -> None:  # fmt: skip
        super().__init__(facts, ready=ready, delay_s=delay_s, lease_timeout_ms=lease_timeout_ms)
        self._texts = Texts()
        self.breaches: dict[str, str] = {}
        self.tried: set[str] = set()
        self.pardoned: Set[ErrorCode] = frozenset()  # errors that something under way explains
        self.hellos = 0
        self.steps = 0  # taken, by the first tier
        self.tokens = 0  # drawn
        self.resyncs = 0  # accepted
        self.said_bye = False
        self.heard_at = time.monotonic()  # anything but Ping, Pong and mistakes
        self.asked: set[int] = set()  # sequences that are refused because a scenario wants it
        self.flags = 0  # of the last step
        self._masked = b""  # the step that waits for its Sample
        self._leases = leases
        self._peers: set[bytes] = set()
        self._pings: deque[_Ping] = deque()
        self._agenda: list[tuple[float, Callable[[], None]]] = []

    @property
    def holds(self) -> bool:
        """Somebody holds the lease."""
        return self._holder is not None

    def breach(self, rule: str, what: str) -> None:
        self.breaches.setdefault(rule, what)

    def ping(self) -> None:
        """What has been read of what was sent before shows when the Pong is there: `on_pong` with no ping left."""
        if self._holder:
            self._send(self._holder.peer, Kind.PING, None, self._holder.lease)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._agenda.append((self._clock() + seconds, call))

    # For scenarios to fill.

    def on_hello(self) -> None:
        """A Hello was answered."""

    def on_step(self) -> None:
        """A step was taken; its answer may still be held back."""

    def on_refused(self) -> None:
        """A refusal that was asked for was sent."""

    def on_pong(self) -> None:
        """Everything sent so far has been read."""

    # What comes.

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        self._judged = header = _header(frames)
        held = self._holder is not None and self._holder.peer == peer
        if header is not None and header.kind is Kind.HELLO:
            self._watch_hello(peer, header)
        if held:
            self._watch_gap()
        if header is not None and header.kind not in (Kind.PING, Kind.PONG, Kind.STEP, Kind.SAMPLE):
            self.heard_at = time.monotonic()
        if header is not None and header.kind is Kind.PONG and self._pings:
            self._pings.popleft()
        super().receive(peer, frames)
        if header is None:
            return
        if header.kind is Kind.PONG and not self._pings:
            self.on_pong()
        elif header.kind is Kind.BYE and held and self._holder is None:
            self.said_bye = True

    def _watch_hello(self, peer: bytes, header: Header) -> None:
        self.hellos += 1
        self.tried |= {"2.new-socket", "9.new-lease"}
        if peer in self._peers:
            self.breach("2.new-socket", "a second Hello came from one socket")
        if header.lease in self._leases:
            self.breach("9.new-lease", f"lease {header.lease} was used before: it must be random")
        self._peers.add(peer)
        self._leases.add(header.lease)

    def _watch_gap(self) -> None:
        assert self._holder is not None
        silent, third = self._clock() - self._holder.heard, self._lease_timeout_ms / 3000
        if silent > 2 * third:
            self.breach("9.speaks", f"nothing was heard for {silent:.2f} s, a third of the time-out is {third:.2f} s")

    def _attach(self, peer: bytes, header: Header, hello: Hello) -> None:
        super()._attach(peer, header, hello)
        self._pings.clear()
        self.on_hello()

    def _judge_ordered(self, header: Header, holder: object) -> None:
        super()._judge_ordered(header, holder)  # type: ignore[arg-type]  # the holder is the base's own affair
        self.tried |= set(BY_ERROR.values()) | set(BY_REFUSAL.values()) - {"15.resync"} | {"9.pong", "9.speaks"}
        self.steps += 1
        # So many steps can only be sent by one who has read answers that came behind the Ping.
        if self._pings and self.steps - self._pings[0].steps > 2 * self.facts.limits.steps_in_flight + 2:
            self.breach("9.pong", f"Ping has no Pong, {self.steps - self._pings[0].steps} steps later")

    def _step(self, header: Header, body: bytes) -> None:
        self.flags = header.flags
        if self._to_refuse:
            self.asked.add(header.seq)
        super()._step(header, body)
        waits = self._waits == header.seq
        answer = None if waits else self._answers[-1][3]
        if waits or isinstance(answer, Result):
            self.heard_at = time.monotonic()
            self.resyncs += bool(header.flags & HeaderFlag.RESYNC)
        if waits:
            self._masked = body
        elif isinstance(answer, Result):
            self._follow(body, answer)
        self.on_step()

    def _sample(self, seq: int, body: bytes) -> None:
        waited = self._waits is not None
        super()._sample(seq, body)
        if waited and self._waits is None:
            self.heard_at = time.monotonic()
            result = self._answers[-1][3]
            assert isinstance(result, Result)
            self._follow(self._masked, result)

    def _follow(self, body: bytes, result: Result) -> None:
        step = decode_body(Kind.STEP, body)
        assert isinstance(step, Step)
        for rule, what in self._texts.follow(step, result, self._model):
            self.tried.add(rule)
            if what:
                self.breach(rule, what)

    def _end_lease(self, bye: Bye | None) -> None:
        super()._end_lease(bye)
        self._texts = Texts()

    def restart(self, facts: Facts | None = None) -> None:
        super().restart(facts)
        self._texts = Texts()

    # What goes.

    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        if isinstance(body, Error):
            self._watch_error(body)
        elif isinstance(body, Refused) and body.cause_seq == seq and seq not in self.asked:
            self.breach(BY_REFUSAL[body.code], f"step {seq}, {body.code}: {body.message}")
        elif isinstance(body, Refused):
            self.tried.add("15.resync")
        elif isinstance(body, Bye) and body.code == "TIMEOUT":
            self.breach("9.speaks", body.message)
        elif isinstance(body, Result):
            self.tokens += len(body.tokens) // 4
        if kind is Kind.PING:
            self._pings.append(_Ping(time.monotonic(), self.steps))
        super()._send(peer, kind, body, lease, seq)
        if isinstance(body, Refused) and seq in self.asked:
            self.on_refused()

    def _watch_error(self, error: Error) -> None:
        """That its lease is held or has ended a scheduler learns in no other way: from Hello, and from Ping."""
        asks = self._judged is not None and self._judged.kind in (Kind.PING, Kind.PONG)
        over = error.code in (ErrorCode.LEASE_ENDED, ErrorCode.BAD_LEASE)
        if error.code is not ErrorCode.LEASE_HELD and error.code not in self.pardoned and not (asks and over):
            self.breach(BY_ERROR[error.code], f"{error.code}: {error.message}")

    @property
    def next_due(self) -> float | None:
        dues = [super().next_due, *(due for due, _ in self._agenda)]
        return min((due for due in dues if due is not None), default=None)

    def tick(self) -> None:
        super().tick()
        now = self._clock()
        due, self._agenda = [c for t, c in self._agenda if t <= now], [(t, c) for t, c in self._agenda if t > now]
        for call in due:
            call()
        if self._holder and self._pings and time.monotonic() - self._pings[0].at > PONG_S:
            self.breach("9.pong", f"Ping has no Pong after {PONG_S:g} s")


def _header(frames: list[bytes]) -> Header | None:
    try:
        return decode_header(frames[0]) if frames else None
    except WireError:
        return None
