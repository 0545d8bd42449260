"""How a rank looks at its device's memory: a seam, so that everything built on it is tested without a device.

`--memory-probe module:Class` puts another probe in place; the class is called with one `ProbeSettings`.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.memory.neighbours import Neighbours


@dataclass(frozen=True, slots=True)
class Reading:
    """A device at one moment, in bytes. Of what this process has torch knows `allocated`, `cached` and `graphs`."""

    total: int
    free: int
    allocated: int  # under live tensors
    cached: int = 0  # kept by torch's allocator for later
    graphs: int = 0  # in the pools of captured graphs, used or not
    others: int | None = 0  # held by other processes; None where the platform does not tell
    holders: tuple[str, ...] = ()  # they, for people

    @property
    def spared(self) -> int:
        """What this process does not hold: by how much it grows is what the process has given back, whatever others
        did meanwhile, where the platform tells of them."""
        return self.free + (self.others or 0)

    @property
    def outside(self) -> int:
        """What this process holds beside torch: the context, loaded kernels, communicators."""
        return self.total - self.free - (self.others or 0) - self.allocated - self.cached - self.graphs


@dataclass(slots=True)
class Peak:
    """bytes: most that live tensors took at once, beyond what they take when the block is left. At least 0."""

    bytes: int = 0


class MemoryProbe(Protocol):
    """One device. All methods are called from the compute thread."""

    def read(self) -> Reading:
        """Without what is garbage already: collected, and the allocator's cache given back."""

    def peak(self) -> AbstractContextManager[Peak]:
        """Watch live tensors for as long as the block runs. The peak is there once it is left."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """device_bytes: what a simulated device has. neighbours: a CUDA device's, as they were before this process used it,
    where that was looked at."""

    device: torch.device
    rank: int
    device_bytes: int
    neighbours: Neighbours | None = None


def open_probe(name: str | None, settings: ProbeSettings) -> MemoryProbe:
    """The device's own, or the one of that name, "module:Class". Raises ValueError where there is none such, and what
    its constructor raises."""
    if name is not None:
        module, _, attribute = name.partition(":")
        try:
            make = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--memory-probe is {name!r}, which cannot be had: {error}") from None
        probe: MemoryProbe = make(settings)
        return probe
    if settings.device.type == "cuda":
        from worker.memory.cuda_probe import CudaProbe

        return CudaProbe(settings)
    from worker.memory.simulated_device import SimulatedDevice

    return SimulatedDevice(settings)

