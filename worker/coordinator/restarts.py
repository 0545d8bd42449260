"""Whether a gang that failed comes back, and when."""

from __future__ import annotations

from worker.exit_codes import ExitCode

LONGEST_DELAY_S = 30.0

_WORTHWHILE = frozenset(
    {
        ExitCode.ROLL_CALL, ExitCode.STEP, ExitCode.OUT_OF_MEMORY, ExitCode.DISAGREEMENT, ExitCode.LIMIT,
        ExitCode.OTHER_RANK,
    }
)  # fmt: skip
"""What may pass. A configuration or weights that were wrong are wrong the next time too."""


class Restarts:
    """`most` over the coordinator's life, each after a delay (seconds) that doubles as long as the gang fails before
    READY."""

    def __init__(self, most: int, delay: float) -> None:
        self._left = most
        self._delay = delay
        self._fruitless = 0
        self.done = 0

    def allow(self, code: int) -> bool:
        """Whether a gang that failed so would come back."""
        return self._left > 0 and code in _WORTHWHILE

    def take(self, *, was_ready: bool) -> float:
        """Use one up. Returns seconds to wait before it."""
        self._left -= 1
        self.done += 1
        self._fruitless = 0 if was_ready else self._fruitless + 1
        doubled = self._delay * 2.0 ** max(0, self._fruitless - 1)
        return max(self._delay, min(LONGEST_DELAY_S, doubled))
