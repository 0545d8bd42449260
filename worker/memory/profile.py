"""Sizing a rank's KV cache: what everything else takes is measured, beside neighbours that may move meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from worker.memory.budget import Budget, Profile, divide
from worker.memory.last_good import Figure
from worker.memory.probe import MemoryProbe, Reading

TRIES = 3


class Rehearsal(Protocol):
    """The part of a runner that is measured."""

    def profile(self) -> None: ...

    def graph_bytes(self) -> int: ...


def measure(
    probe: MemoryProbe, baseline: Reading, runner: Rehearsal, say: Callable[[str], None],
    any_rank: Callable[[bool], bool],
) -> Profile:  # fmt: skip
    """Rehearse the largest step, again if a neighbour took or freed memory meanwhile, at most `TRIES` times.

    A neighbour's moves are taken out of the figures and told by `say`, and are never an error. any_rank: whether it is
    so on any rank of the stage: all of them must rehearse equally often. Graphs are not in it yet.
    """
    for attempt in range(1, TRIES + 1):
        before = probe.read()
        with probe.peak() as peak:
            runner.profile()
        after = probe.read()
        moved = _moved(before, after)
        if moved:
            again = "measuring again" if attempt < TRIES else "taken out of the figures"
            say(f"another process {'took' if moved > 0 else 'freed'} {abs(moved)} bytes during profiling: {again}")
        if not any_rank(moved != 0):
            break
    drift = _moved(baseline, after)
    own = after.allocated + after.cached - baseline.allocated - baseline.cached
    # Less than our own tensors cannot be right: a neighbour that NVML does not show has freed some.
    consumed = max(baseline.free - after.free - drift, own, 0)
    return Profile(consumed, peak.bytes, 0, after.free, drift)


def _moved(before: Reading, after: Reading) -> int:
    """Bytes that other processes hold more than before; 0 where the platform does not tell."""
    return 0 if before.others is None or after.others is None else after.others - before.others


def size_cache(
    profile: Profile, requested: int, runner: Rehearsal, block_bytes: int, last: Figure | None,
    any_rank: Callable[[bool], bool], *, graphs: bool,
) -> Budget:  # fmt: skip
    """The budget, with graphs as they were at the last start if what that had still fits on all ranks of the stage,
    else as measured. Not with its bytes: a neighbour that had some of them then may be gone.

    Raises ValueError as `divide` does.
    """
    if not any_rank(last is None):
        assert last is not None
        known = replace(profile, graphs=last.graphs if graphs else 0)
        room = min(requested - known.consumed, known.free) - known.headroom - known.graphs
        if not any_rank(last.kv > room):
            return divide(requested, known, block_bytes)
    if graphs:
        profile = replace(profile, graphs=runner.graph_bytes())
    return divide(requested, profile, block_bytes)
