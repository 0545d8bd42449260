"""A CUDA device's memory: the driver's own figure of what is free, torch's allocator, and NVML for the neighbours."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker.memory.neighbours import Neighbours
from worker.memory.probe import Peak, ProbeSettings, Reading

PROFILE_SPLIT_MIB = 21  # the least that every torch takes
"""Larger free blocks are not split while the largest step is rehearsed: a small tensor in what was a workspace of
gigabytes would keep all of it from being given back, and it would be counted as taken."""


class CudaProbe:
    """See `MemoryProbe`. Without `settings.neighbours` to be made before the first CUDA call of the process, so that
    its own part can be told from that of others where NVML lists no processes, as in many containers."""

    def __init__(self, settings: ProbeSettings) -> None:
        self._device = settings.device
        self.tensor_pools: set[tuple[int, int]] = set()  # in which tensors stand; all others are graphs'
        self.released_pools: set[tuple[int, int]] = set()  # which torch still counts, and the device has back
        uuid = str(torch.cuda.get_device_properties(settings.device).uuid)
        self._neighbours = settings.neighbours or Neighbours.open(uuid)
        torch.zeros(1, device=self._device)  # makes the context
        torch.cuda.synchronize(self._device)

    def read(self) -> Reading:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = cached = graphs = 0
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            if segment["device"] != self._device.index or pool in self.released_pools:
                continue
            if pool != (0, 0) and pool not in self.tensor_pools:
                graphs += segment["total_size"]
            else:
                allocated += segment["active_size"]
                cached += segment["total_size"] - segment["active_size"]
        others, holders = self._neighbours.read() if self._neighbours else (None, ())
        return Reading(total, free, allocated, cached, graphs, others, holders)

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        device, peak = self._device, Peak()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        settings = torch.cuda.memory._snapshot(device)["allocator_settings"].get("PYTORCH_CUDA_ALLOC_CONF", "")
        limit = f"max_split_size_mb:{PROFILE_SPLIT_MIB}"
        torch.cuda.memory._set_allocator_settings(f"{settings},{limit}" if settings else limit)
        try:
            yield peak
            torch.cuda.synchronize(device)
        finally:
            torch.cuda.memory._set_allocator_settings(settings)  # before anything is measured
        highest = torch.cuda.max_memory_allocated(device)
        gc.collect()
        peak.bytes = max(0, highest - torch.cuda.memory_allocated(device))


def pools() -> set[tuple[int, int]]:
    """Ids of the memory pools beside the common one that hold anything."""
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} - {(0, 0)}
