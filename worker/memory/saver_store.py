"""`TensorStore` on CUDA, by torch-memory-saver: pages are unmapped and mapped again under the same addresses.

The library hooks cudaMalloc, so its shared object must have been in LD_PRELOAD when the process started: whoever spawns
ranks sees to that (`worker.coordinator.saver_environment`). Host copies are ours and not the library's, since which
storages keep theirs is known only when they go to sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from worker.memory.cuda_probe import CudaProbe, pools
from worker.memory.probe import MemoryProbe
from worker.memory.tensor_store import HostCopy, Storage, bytes_in


class SaverStore:
    keeps = True  # pinned blocks, by torch

    def __init__(self, saver: Any, probe: MemoryProbe) -> None:
        self._saver = saver
        self._probe = probe if isinstance(probe, CudaProbe) else None
        self._pools: dict[str, set[tuple[int, int]]] = {}

    @classmethod
    def open(cls, probe: MemoryProbe) -> SaverStore:
        """Raises ValueError without the library, or where it was not preloaded."""
        try:
            from torch_memory_saver import torch_memory_saver

            with torch_memory_saver.region(tag="trial"):
                pass
        except (ImportError, AssertionError, OSError, RuntimeError) as error:  # it has no exception of its own
            raise ValueError(
                f"--enable-sleep-mode: torch-memory-saver cannot be used ({error}); under torchrun its hook has to be "
                "in LD_PRELOAD already"
            ) from None
        return cls(torch_memory_saver, probe)

    @contextmanager
    def region(self, part: str) -> Iterator[None]:
        before = pools()
        with self._saver.region(tag=part):
            yield
        found = self._pools.setdefault(part, set())
        found |= pools() - before
        if self._probe is not None:
            self._probe.tensor_pools |= found

    def copy(self, storage: Storage) -> HostCopy:
        return _Pinned(storage)

    def release(self, part: str, storages: Iterable[Storage]) -> None:
        torch.cuda.synchronize()
        self._saver.pause(part)
        if self._probe is not None:
            self._probe.released_pools |= self._pools.get(part, set())

    def restore(self, part: str) -> None:
        self._saver.resume(part)
        torch.cuda.synchronize()
        if self._probe is not None:
            self._probe.released_pools -= self._pools.get(part, set())


class _Pinned:
    """torch keeps pinned blocks for the next copy: pinning gigabytes takes longer than copying them."""

    def __init__(self, storage: Storage) -> None:
        self._values = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._values.copy_(bytes_in(storage), non_blocking=True)

    def put_back(self, storage: Storage) -> None:
        bytes_in(storage).copy_(self._values, non_blocking=True)
