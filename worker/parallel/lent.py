"""Tensors that communicators were given, until they have let go of them.

A thread of gloo drops what it was given a moment after its caller has the result. Measured by then, on a device on
which live tensors are what takes memory, four bytes would count as there for ever.
"""

from __future__ import annotations

import time
import weakref
from collections import deque

from torch import Tensor

LIMIT_S = 0.5
_MOST = 64  # more than any two works of a group have; those before them are done


class Lent:
    """On the CPU; where the device runs behind nobody waits, and its memory is measured otherwise."""

    def __init__(self) -> None:
        self._tensors: deque[weakref.ref[Tensor]] = deque(maxlen=_MOST)

    def note(self, *tensors: Tensor) -> None:
        self._tensors.extend(weakref.ref(one) for one in tensors if one.device.type == "cpu")

    def wait(self) -> None:
        """Until none of them lives, which whoever calls has no use for any more; LIMIT_S at most."""
        deadline = time.monotonic() + LIMIT_S
        while self._tensors and time.monotonic() < deadline:
            if self._tensors[0]() is None:
                self._tensors.popleft()
            else:
                time.sleep(0.0005)
        self._tensors.clear()
