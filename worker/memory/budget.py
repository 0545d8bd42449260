"""How many bytes the KV cache may have: the one place where the budget is defined.

    requested = total * utilization                     of the device, for what is taken from the baseline on
    kv        = requested - consumed - headroom - graphs

The baseline is what stands before the model comes: the process's context, communicators, library handles, and whatever
other processes have. It is not part of the budget, so `requested` must be free at that time. `consumed` is what the
device says it has less of once the largest step was rehearsed; `headroom` what that step took at its height and gave
back; `graphs` what capturing is expected to take. Explicit bytes take the place of all of this, and must be free.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.memory.probe import Reading


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes that everything but the KV cache takes, measured. `drift`: by how much neighbours moved meanwhile."""

    consumed: int
    headroom: int
    graphs: int
    free: int  # afterwards
    drift: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """kv: bytes offered for the cache."""

    requested: int
    kv: int
    profile: Profile


def requested_bytes(baseline: Reading, utilization: float, held_outside: int = 0) -> int:
    """What may be taken from the baseline on. held_outside: bytes that a loader of weights holds for this rank on the
    device already, which are of the budget and not of what is free.

    Raises ValueError, naming who holds the rest, if so much is not free; or if the loader holds more than the share.
    """
    requested = int(baseline.total * utilization) - held_outside
    if requested < 0:
        raise ValueError(
            f"--gpu-memory-utilization {utilization:g} of {baseline.total} bytes is less than the {held_outside} that "
            "the loader of weights holds"
        )
    if requested > baseline.free:
        told = "".join(f"; {holder}" for holder in baseline.holders)
        raise ValueError(
            f"--gpu-memory-utilization {utilization:g} of {baseline.total} bytes asks for {requested}, "
            f"{baseline.free} are free: this process has {baseline.total - baseline.free - (baseline.others or 0)}, "
            f"others have {'what cannot be told' if baseline.others is None else baseline.others}{told}; "
            "give a smaller share, or free the device"
        )
    return requested


def check_weights(weights: int, room: int, whose: str) -> None:
    """Before they are read, for minutes and then in vain. Raises ValueError."""
    if weights > room:
        raise ValueError(
            f"the weights of this rank take {weights} bytes, {whose} {room}: with more ranks (-tp, -pp) each takes less"
        )


def divide(requested: int, profile: Profile, block_bytes: int) -> Budget:
    """Never negative: raises ValueError with the breakdown if not even one block and the padding block fit."""
    kv = requested - profile.consumed - profile.headroom - profile.graphs
    room = profile.free - profile.headroom - profile.graphs  # a neighbour may have come since the baseline
    if min(kv, room) < 2 * block_bytes:
        short = "" if room >= kv else f", and only {profile.free} are free now"
        raise ValueError(
            f"the memory budget of {requested} bytes leaves {max(0, min(kv, room))} for the KV cache, and two blocks "
            f"take {2 * block_bytes}: {breakdown(profile)}{short}; raise --gpu-memory-utilization, or lower "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    return Budget(requested, min(kv, room), profile)


def explicit(kv_bytes: int, profile: Profile) -> Budget:
    """Raises ValueError with the breakdown if so much is not free."""
    room = profile.free - profile.headroom - profile.graphs
    if kv_bytes > room:
        raise ValueError(
            f"--kv-cache-memory-bytes is {kv_bytes}, {max(0, room)} can be had: {breakdown(profile)}, "
            f"{profile.free} free"
        )
    return Budget(kv_bytes + profile.consumed + profile.headroom + profile.graphs, kv_bytes, profile)


def breakdown(profile: Profile) -> str:
    return (
        f"{profile.consumed} for weights and buffers, {profile.headroom} for the largest step, {profile.graphs} for "
        "graphs"
    )
