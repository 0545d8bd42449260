"""What a scheduler is held to by one run against one gang."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from workerproto.messages import Facts
from workerproto.testing.conformance_link import Unmet
from workerproto.testing.fake_gang import fake_facts
from workerproto.testing.watched_gang import WatchedGang


class Ended(NamedTuple):
    """How a run ended. `running`: it had to be stopped, nothing right having come for `waited_s`. `failure`: exit code
    and last words, or exception, of one that ended by itself and not well. `endless`: it did not come to an end.
    """

    running: bool
    waited_s: float
    failure: str = ""
    endless: bool = False


class Scenario(WatchedGang):
    """`rule` begins with the section of the spec. `over`: nothing more is to be learnt, the scheduler can be stopped.
    `patience_s`: how much longer than others it may stay silent.
    """

    rule: ClassVar[str]
    facts_: ClassVar[Facts] = fake_facts()
    ready: ClassVar[bool] = True
    delay_s: ClassVar[float] = 0.0
    lease_timeout_ms: ClassVar[int] = 10_000
    patience_s: ClassVar[float] = 0.0

    def __init__(self, leases: set[int]) -> None:
        super().__init__(
            self.facts_, leases, ready=self.ready, delay_s=self.delay_s, lease_timeout_ms=self.lease_timeout_ms
        )
        self.over = False

    def verdict(self, end: Ended) -> None:
        """Raises Unmet or NotProvoked."""
        if not self.hellos:
            raise Unmet(f"no Hello came{_because(end)}")
        if not self.steps:
            raise Unmet(f"no step came{_because(end)}")
        if end.running:
            waited = f"{end.waited_s:.1f} s"
            raise Unmet(f"it stopped half-way: {self.steps} steps came, and then nothing right for {waited}")
        if end.failure:
            raise Unmet(f"it failed: {end.failure}")
        if not self.tokens:
            raise Unmet(f"it ended after {self.steps} steps, none of which drew a token")


def _because(end: Ended) -> str:
    return f": {end.failure}" if end.failure else f" within {end.waited_s:.1f} s" if end.running else ""
