"""Gangs that end a scheduler's lease, in each of the ways there are: it may send no more than was under way."""

from __future__ import annotations

from workerproto.codec import Header, WireError
from workerproto.messages import Bye, ErrorCode, Event, Hello, Kind, Message
from workerproto.states import Gang
from workerproto.testing.conformance_link import NotProvoked, Unmet
from workerproto.testing.scenario import Ended, Scenario


class FailsForGood(Scenario):
    """Event FAILED, then Bye: nothing more is sent on the lease than was under way."""

    rule = "11.failed"
    delay_s = 0.005

    def __init__(self, leases: set[int]) -> None:
        super().__init__(leases)
        self._ended = False
        self._late = 0

    def on_step(self) -> None:
        if self.steps == 2:
            self.later(0, self.end)

    def end(self) -> None:
        self.fail("made to fail")
        self.after_end()

    def after_end(self) -> None:
        self._ended = True
        self.pardoned = frozenset({ErrorCode.LEASE_ENDED})

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        super().receive(peer, frames)
        if self._ended:
            self._late += self._judged is not None and self._judged.kind is Kind.STEP
            self.over = self._judged is not None and self._judged.kind is Kind.HELLO

    def verdict(self, end: Ended) -> None:
        if self.hellos and self.steps < 2 and not end.running:
            raise NotProvoked(f"{self.steps} steps came, it happens at the 2.")
        if not self._ended:
            super().verdict(end)
        if self._late > self.facts.limits.steps_in_flight:
            raise Unmet(f"{self._late} steps came on a lease that had ended")
        if end.running and not self.over:
            raise Unmet(f"it neither ended nor attached anew within {end.waited_s:.1f} s of the end of its lease")


class TakenOver(FailsForGood):
    rule = "9.takeover"

    def end(self) -> None:
        self._end_lease(Bye("TAKEOVER", "taken over by the conformance suite"))
        self.after_end()


class Drains(FailsForGood):
    """Event DRAINING: steps in flight are answered, new ones are not to come; then Bye."""

    rule = "11.drain"

    def end(self) -> None:
        self.state = Gang.DRAINING
        self.pardoned = frozenset({ErrorCode.NOT_READY})
        self._event(Event(self.state, self.epoch, self._last_answered))
        self.ping()

    def on_pong(self) -> None:
        if self.state is Gang.DRAINING:
            self.pardoned = frozenset()
            self.later(0.05, self._stop)

    def _stop(self) -> None:
        self._end_lease(Bye("STOPPED", "the gang has stopped"))
        self.after_end()


class GoesSilent(FailsForGood):
    """From the second step on nothing is answered, as when the host is gone: after the time-out so is the lease."""

    rule = "9.silence"
    lease_timeout_ms = 900
    patience_s = 1.5

    def end(self) -> None:
        self._ended = True

    @property
    def holds(self) -> bool:
        """Nobody hears a Bye."""
        return super().holds and not self._ended

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        if not self._ended:
            super().receive(peer, frames)
        elif len(frames) == 2 and frames[0][5:6] == bytes([Kind.HELLO]):
            self.over = True

    @property
    def next_due(self) -> float | None:
        return None if self._ended else super().next_due

    def tick(self) -> None:
        if not self._ended:
            super().tick()

    def _send(self, peer: bytes, kind: Kind, body: Message | None, lease: int, seq: int = 0) -> None:
        if not self._ended:
            super()._send(peer, kind, body, lease, seq)


class HeldByAnother(Scenario):
    """The first Hello gets LEASE_HELD: nothing more comes from its socket."""

    rule = "9.lease-held"

    def _attach(self, peer: bytes, header: Header, hello: Hello) -> None:
        if self.hellos == 1:
            raise WireError(ErrorCode.LEASE_HELD, "the conformance suite holds the gang", "takeover", "false", "true")
        self.over = True
        super()._attach(peer, header, hello)

    def verdict(self, end: Ended) -> None:
        if not self.hellos:
            super().verdict(end)
        if end.running and not self.over:
            raise Unmet(f"it neither ended nor attached anew within {end.waited_s:.1f} s")


ENDINGS: tuple[type[Scenario], ...] = (FailsForGood, TakenOver, Drains, GoesSilent, HeldByAnother)
