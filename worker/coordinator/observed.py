"""What the ranks' rings add up to over the life of a coordinator: counters, and histograms of every single step.

Nothing is counted while a step runs; what is new in the rings is taken up here, some times a second.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worker.step_records import Records, between, read_records
from worker.step_trace import FLAG_OPERATION, FLAG_REFUSED, FLAG_RESET, SLOTS

SECONDS = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
TOKENS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
PARTS = {
    "wait_scheduler": ("waiting", "received"),
    "validate": ("received", "validated"),
    "build": ("validated", "built"),
    "receive": ("built", "arrived"),
    "forward": ("arrived", "forwarded"),
    "send": ("forwarded", "sent"),
    "sample": ("sent", "sampled"),
    "copy": ("sampled", "copied"),
}


class Histogram:
    """Cumulative buckets in the sense of Prometheus: a value counts in the first bound that it does not pass."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        self._counts += np.bincount(np.searchsorted(self.bounds, values, side="left"), minlength=len(self._counts))
        self.sum += float(values.sum())

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last one +Inf."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, np.cumsum(self._counts).astype(float).tolist(), strict=True))


class RankSteps:
    """Of one rank. `missed`: records that were overwritten before they were taken up."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()  # by outcome: done, refused
        self.tokens = self.sampled = self.graphs = self.missed = 0
        self.whole = Histogram(SECONDS)
        self.device = Histogram(SECONDS)
        self.parts = {name: Histogram(SECONDS) for name in PARTS}
        self.step_tokens = Histogram(TOKENS)
        self._next = 0

    def begin(self) -> None:
        self._next = 0

    def take(self, mapped: mmap.mmap) -> Records:
        """What is new and complete."""
        new, self._next, missed = _new(mapped, self._next)
        self.missed += missed
        self.steps["refused"] += int((new["flags"] == FLAG_REFUSED).sum())
        done: Records = new[new["flags"] == 0]
        self.steps["done"] += len(done)
        self.tokens += int(done["tokens"].sum())
        self.sampled += int(done["samples"].sum())
        self.graphs += int((done["graph"] > 0).sum())
        self.step_tokens.add(done["tokens"].astype(float))
        self.whole.add(between(done, "received", "done") / 1e9)
        self.device.add(done["device_ns"][done["device_ns"] > 0] / 1e9)
        for name, (start, end) in PARTS.items():
            has = done[(done[start] > 0) & (done[end] > 0)]
            self.parts[name].add(between(has, start, end) / 1e9)
        return done


class Observed:
    """Of a gang. latency: from a step's arrival at the coordinator to its answer. queue: to its receipt by rank 0."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [RankSteps() for _ in range(world_size)]
        self.latency = Histogram(SECONDS)
        self.queue = Histogram(SECONDS)
        self._next = 0

    def take(self, ranks: Sequence[mmap.mmap], relay: mmap.mmap) -> None:
        first, *_ = [rank.take(mapped) for rank, mapped in zip(self.ranks, ranks, strict=True)]
        new, self._next, _ = _new(relay, self._next)
        self.latency.add(between(new, "received", "done") / 1e9)
        taken = read_records(relay)[0]
        _, here, there = np.intersect1d(taken["sequence"], first["sequence"], return_indices=True)
        waited = first["received"][there].astype(np.int64) - taken["received"][here].astype(np.int64)
        self.queue.add(np.maximum(waited, 0) / 1e9)

    def begin(self) -> None:
        """With new rings; what was counted stays."""
        self._next = 0
        for rank in self.ranks:
            rank.begin()


def _new(mapped: mmap.mmap, since: int) -> tuple[Records, int, int]:
    """Complete records from number `since` on, where to go on, and how many of them were overwritten before."""
    records, begun = read_records(mapped, since=since)
    missed = max(0, begun - len(records) - since)
    over = (records["copied"] > 0) | (records["flags"] > 0)
    incomplete = np.flatnonzero((records["done"] == 0) | ~over)
    count = int(incomplete[0]) if len(incomplete) else len(records)
    assert len(records) <= SLOTS
    complete: Records = records[:count]
    return complete[(complete["flags"] & (FLAG_RESET | FLAG_OPERATION)) == 0], begun - len(records) + count, missed
