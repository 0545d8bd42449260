"""Times at which this process itself did nothing, stopped or starved: nobody else is to be blamed for them."""

from __future__ import annotations

import time
from collections import deque

USUAL_S = 0.1
"""By which a busy host may be late without more."""


class Pauses:
    """Of something that is done every `interval` seconds. `unread`: what has come meanwhile may not be read yet, so
    nobody is to be judged this time; never twice in a row, or on a host that is always late nobody ever would be."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._looked = time.monotonic()
        self._lost: deque[tuple[float, float]] = deque(maxlen=256)  # until when, and how many seconds of it
        self.unread = False

    def look(self) -> float:
        """Each time. Returns the seconds that were lost since the time before."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        lost = max(0.0, now - before - self._interval)
        self.unread = lost > USUAL_S and not self.unread
        if lost > USUAL_S:
            self._lost.append((now, lost))
        return lost

    def since(self, moment: float) -> float:
        """Seconds that were lost since then (monotonic)."""
        return sum(min(lost, until - moment) for until, lost in self._lost if until > moment)
