"""What a conformance suite found, rule by rule."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """`passed` is None where the rule could not be tried. `instead`: what came instead, or why it was not tried."""

    rule: str
    passed: bool | None
    instead: str = ""

    def __str__(self) -> str:
        word = {True: "passed", False: "FAILED", None: "not tried"}[self.passed]
        return f"{word:<9}  {self.rule}" + (f": {self.instead}" if self.instead else "")


class Report(NamedTuple):
    """One outcome a rule, in the order of the spec."""

    outcomes: list[Outcome]

    @property
    def passed(self) -> bool:
        """Something was tried, and nothing failed."""
        return any(outcome.passed for outcome in self.outcomes) and not self.failed

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.passed is False]

    @property
    def not_tried(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.passed is None]

    @property
    def summary(self) -> str:
        kept = len(self.outcomes) - len(self.failed) - len(self.not_tried)
        return f"{kept} passed, {len(self.failed)} failed, {len(self.not_tried)} not tried"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.failed), *map(str, self.not_tried), self.summary])
