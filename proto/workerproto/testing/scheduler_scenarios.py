"""Gangs that a scheduler may meet: one that is small, slow or not there yet, that refuses, or restarts.

Each is a scenario: the scheduler drives it once, from Hello to its end, and `verdict` says whether it did as the spec
asks. What a scheduler may decline, such as going on after a refusal, is then "not tried".
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from workerproto.codec import Header
from workerproto.messages import ErrorCode, HeaderFlag, Kind, Message
from workerproto.states import Gang
from workerproto.testing.conformance_link import NotProvoked, Unmet
from workerproto.testing.fake_gang import fake_facts
from workerproto.testing.scenario import Ended, Scenario
from workerproto.testing.scheduler_texts import PREFIX

SMALL = fake_facts(num_blocks=24, block_size=4, max_model_len=96, tokens=8, rows=2, logprobs=0)
SMALL = msgspec.structs.replace(SMALL, limits=msgspec.structs.replace(SMALL.limits, steps_in_flight=1))
ALIGNED = fake_facts(block_size=4)
ALIGNED = msgspec.structs.replace(ALIGNED, kv=msgspec.structs.replace(ALIGNED.kv, hash_block_size=6, alignment=12))
OTHER = fake_facts(num_blocks=200, tokens=100, rows=12)
OTHER = msgspec.structs.replace(OTHER, limits=msgspec.structs.replace(OTHER.limits, steps_in_flight=2))


class WholeRun(Scenario):
    rule = "9.whole-run"

    def on_hello(self) -> None:
        self.ping()

    def on_step(self) -> None:
        if self.steps == 1:
            self.ping()


class NotReadyYet(WholeRun):
    """Welcome without facts; they come by Event."""

    rule = "9.not-ready-yet"
    ready = False

    def on_pong(self) -> None:
        if self.state is Gang.LOADING:
            self._enter(Gang.PROFILING)
            self.later(0.1, self.become_ready)


class PingsOfItsOwn(WholeRun):
    """The gang only answers, and takes longer than the time-out for its first result."""

    rule = "9.pings-of-its-own"
    lease_timeout_ms = 1800
    patience_s = 3.0

    def on_step(self) -> None:
        if self.steps == 1:
            self.hold_back()
            self.later(2.4, self.release)

    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        if kind is not Kind.PING:
            super()._send(peer, kind, body, lease, seq)
        elif self._holder:
            self._holder.said = self._clock()


class SlowAnswers(WholeRun):
    """With all credit in use before the first answer."""

    rule = "8.slow-answers"
    facts_ = fake_facts(pp=2)
    delay_s = 0.005


class SmallGang(WholeRun):
    """One step in flight, two rows, eight tokens a step, and blocks for two short requests."""

    rule = "12.small-gang"
    facts_ = SMALL

    def verdict(self, end: Ended) -> None:
        if self.hellos and not self.steps and not end.running:
            raise NotProvoked("it starts nothing on a gang so small")
        super().verdict(end)


class AlignedPrefixes(WholeRun):
    """A prefix may end at every third block alone."""

    rule = "12.aligned-prefixes"
    facts_ = ALIGNED

    def verdict(self, end: Ended) -> None:
        if wrong := self.breaches.get("12.positions"):
            raise Unmet(wrong)
        super().verdict(end)
        if PREFIX not in self.tried:
            raise NotProvoked("it shares no prefix")


class RefusesStart(Scenario):
    """The first step is refused, those behind it AFTER_REFUSAL: it goes on with RESYNC, or ends the lease."""

    rule = "15.refused-start"
    delay_s = 0.005
    at: ClassVar[int] = 1

    def __init__(self, leases: set[int]) -> None:
        super().__init__(leases)
        self._read = False
        self._blind = 0
        self._tokens_before = 0

    def on_hello(self) -> None:
        if self.at == 1:
            self.refuse_next()

    def on_step(self) -> None:
        self._blind += self._read and not self.resyncs and not self.flags & HeaderFlag.RESYNC
        if self.steps == self.at - 1:
            self.refuse_next()

    def on_refused(self) -> None:
        self._tokens_before = self.tokens
        self.ping()

    def on_pong(self) -> None:
        self._read = bool(self.asked)

    def verdict(self, end: Ended) -> None:
        if self.hellos and not self.asked and not end.running:
            raise NotProvoked(f"{self.steps} steps came, it was the {self.at}. that is refused")
        if self._blind > self.facts.limits.steps_in_flight:
            raise Unmet(f"{self._blind} steps without RESYNC came from one that had read the refusal")
        if self.asked and not self.resyncs:
            if end.running:
                raise Unmet(f"neither a step with RESYNC nor Bye came within {end.waited_s:.1f} s of a refusal")
            raise NotProvoked("it ends its lease at a refusal, as it may")
        super().verdict(end)
        if self.tokens == self._tokens_before:
            raise Unmet("no token was drawn after the refusal")


class RefusesLater(RefusesStart):
    rule = "15.refused-later"
    at = 4


class RefusesAgain(RefusesStart):
    """The step with RESYNC is refused too: the next try needs it again."""

    rule = "15.refused-again"

    def _step(self, header: Header, body: bytes) -> None:
        if header.flags & HeaderFlag.RESYNC and len(self.asked) == 1:
            self.refuse_next()
        super()._step(header, body)


class Restarts(Scenario):
    """The gang fails with steps in flight, and is back in the next epoch, with other facts, under the same lease."""

    rule = "11.restart"
    delay_s = 0.005
    pardons: ClassVar[frozenset[ErrorCode]] = frozenset({ErrorCode.NOT_READY})

    def __init__(self, leases: set[int]) -> None:
        super().__init__(leases)
        self._steps_before = self._tokens_before = 0

    def on_step(self) -> None:
        if self.steps == 3:
            self.later(0, self._fail)

    def _fail(self) -> None:
        self.pardoned = self.pardons
        self._steps_before, self._tokens_before = self.steps, self.tokens
        self.fail("made to fail", restarts=True)
        self.ping()

    def on_pong(self) -> None:
        if self.state is Gang.FAILED:
            self.pardoned = frozenset()
            self.later(0.05, lambda: self.restart(OTHER))

    def verdict(self, end: Ended) -> None:
        if self.hellos and not self._steps_before and not end.running:
            raise NotProvoked(f"{self.steps} steps came, the gang fails at the 3.")
        if self._steps_before and self.steps == self._steps_before:
            if end.running:
                raise Unmet(f"neither a step in the new epoch nor Bye came within {end.waited_s:.1f} s")
            raise NotProvoked("it ends its lease when the gang fails, as it may")
        super().verdict(end)
        if self.tokens == self._tokens_before:
            raise Unmet("no token was drawn in the new epoch")


class RestartsAtOnce(Restarts):
    """The new epoch is there before a step of the old one, which is in error and takes nothing back."""

    rule = "11.old-epoch-in-flight"
    pardons = frozenset({ErrorCode.BAD_EPOCH})

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        if self.steps == 2 and self.epoch == 1 and len(frames) == 2 and frames[0][5:6] == bytes([Kind.STEP]):
            self._fail()
            self.restart(OTHER)
            self.ping()
        super().receive(peer, frames)

    def on_step(self) -> None:
        """It is before a step that it fails."""

    def on_pong(self) -> None:
        if self.epoch > 1:
            self.pardoned = frozenset()


SCENARIOS: tuple[type[Scenario], ...] = (
    WholeRun, NotReadyYet, PingsOfItsOwn, SlowAnswers, SmallGang, AlignedPrefixes, RefusesStart, RefusesLater,
    RefusesAgain, Restarts, RestartsAtOnce,
)  # fmt: skip
