"""Devices for gangs, by `--memory-probe`: what the simulated one shows, and a trouble of their own."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from worker.memory.probe import ProbeSettings, Reading
from worker.memory.simulated_device import SimulatedDevice

MIB = 1 << 20
LEAK = 64 * MIB
ROOM = {0: 48 * MIB, 1: 160 * MIB}
NEIGHBOUR = 5 * MIB


class Troubled(SimulatedDevice):
    """Unequal ranks. Rank 0 has a neighbour that takes memory at every look. On rank 1 somebody takes 64 MiB that
    nobody tracks, once the model is there."""

    def __init__(self, settings: ProbeSettings) -> None:
        super().__init__(settings)
        self.rank, self.total, self.looks = settings.rank, ROOM[settings.rank], 0
        self.leak: list[torch.Tensor] = []

    def read(self) -> Reading:
        self.looks += 1
        if self.rank == 1 and not self.leak and super().read().allocated > MIB // 2:
            self.leak.append(torch.zeros(LEAK, dtype=torch.uint8))
        seen = super().read()
        others = min(self.looks, 10) * NEIGHBOUR // 10 if self.rank == 0 else 0
        told = (f"process 77: {others} bytes",) if others else ()
        return Reading(seen.total, seen.free - others, seen.allocated, others=others, holders=told)


class Crowded(SimulatedDevice):
    """On rank 1 a neighbour has all but 1 MiB of what is free for as long as the file "crowd" is in the run
    directory."""

    def __init__(self, settings: ProbeSettings) -> None:
        super().__init__(settings)
        self.crowd = Path(os.environ["RANKD_RUN_DIR"]) / "crowd"
        self.rank = settings.rank

    def read(self) -> Reading:
        seen = super().read()
        if self.rank != 1 or not self.crowd.exists():
            return seen
        return Reading(seen.total, MIB, seen.allocated, others=seen.free - MIB)
