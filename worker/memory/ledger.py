"""Where a device's memory went: lines that were each measured by themselves, and what none of them explains.

Three sources that know nothing of each other: the device's own figure of what is free; torch's allocator; and the
tensors that can be reached from the runner. What the process holds beside torch shows as growth over the phase of
bring-up that took it. So a tensor that nobody tracks, or a library that takes memory in a phase that is not its own,
is left over as `unexplained`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from worker.memory.probe import MemoryProbe, Reading

LINES = (
    "free", "other_processes", "context", "communicators", "weights", "buffers", "graphs", "kv_cache", "torch_cache",
    "unexplained",
)  # fmt: skip
"""Of a ledger, which sum to its `total`."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes under a runner's tensors. weights: all of the model's, tables included. buffers: all others."""

    weights: int
    kv_cache: int
    buffers: int


class Books:
    """One rank's, from its first reading on."""

    def __init__(self, probe: MemoryProbe) -> None:
        self.probe = probe
        first = probe.read()
        self._outside = {"context": first.outside, "communicators": 0, "graphs": 0}
        self.workspaces = 0  # of the math libraries, under tensors that nobody of ours holds

    @contextmanager
    def phase(self, line: str) -> Iterator[None]:
        """Book on `line` what the process comes to hold beside torch while the block runs."""
        before = self.probe.read()
        yield
        after = self.probe.read()
        self._outside[line] += after.outside - before.outside

    def baseline(self) -> Reading:
        """What is there before anything of the model. Tensors that live by now are the libraries' workspaces."""
        reading = self.probe.read()
        self.workspaces = reading.allocated
        return reading

    def took(self, line: str) -> int:
        """Bytes booked on it so far."""
        return self._outside[line]

    def ledger(self, holdings: Holdings) -> dict[str, int]:
        """`total` and `LINES`, in bytes. `unexplained` may be negative: then something was counted twice."""
        now = self.probe.read()
        lines = {
            "free": now.free,
            "other_processes": now.others or 0,
            "context": self._outside["context"],
            "communicators": self._outside["communicators"],
            "weights": holdings.weights,
            "buffers": holdings.buffers + self.workspaces,
            "graphs": now.graphs + self._outside["graphs"],
            "kv_cache": holdings.kv_cache,
            "torch_cache": now.cached,
        }
        lines["unexplained"] = now.total - sum(lines.values())
        assert tuple(lines) == LINES
        return {"total": now.total, **lines}
