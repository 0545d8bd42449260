"""Giving the memory under tensors back and taking it again, while the tensors, and all views of them, stay.

One store a device, behind one interface: on the CPU storages shrink to nothing and grow again, on CUDA
torch-memory-saver unmaps the pages and keeps the addresses, so that captured graphs stay valid.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from worker.memory.probe import MemoryProbe

Storage = torch.UntypedStorage


class HostCopy(Protocol):
    """What was in a storage, beside the device."""

    def put_back(self, storage: Storage) -> None: ...


class TensorStore(Protocol):
    """Parts are known by name. All methods are called from the compute thread, with nothing under way on the device.

    keeps: whether the host keeps the memory of copies that are put back, for the next.
    """

    @property
    def keeps(self) -> bool: ...

    def region(self, part: str) -> AbstractContextManager[None]:
        """What is allocated in here belongs to the part."""

    def copy(self, storage: Storage) -> HostCopy: ...

    def release(self, part: str, storages: Iterable[Storage]) -> None:
        """Give the part's memory back; `storages` are all that stand on it. Their content is lost."""

    def restore(self, part: str) -> None:
        """Take the memory again, with whatever is in it."""


class CpuStore:
    """See `TensorStore`. Copies are the host's as the device's memory is: kept for a simulated device, they make that
    device freer and the process no smaller."""

    keeps = False

    def __init__(self) -> None:
        self._released: dict[str, list[tuple[Storage, int]]] = {}

    def region(self, part: str) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, storage: Storage) -> HostCopy:
        values = np.empty(storage.nbytes(), np.uint8)
        torch.from_numpy(values).copy_(bytes_in(storage))  # not `.numpy()`, after which a storage cannot be resized
        return _Array(values)

    def release(self, part: str, storages: Iterable[Storage]) -> None:
        self._released[part] = released = [(storage, storage.nbytes()) for storage in storages]
        for storage, _ in released:
            storage.resize_(0)
        _trim()

    def restore(self, part: str) -> None:
        for storage, size in self._released.pop(part):
            storage.resize_(size)


def _trim() -> None:
    """Have the C library return what it has free to the system: it keeps freed memory below a threshold of its own."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class _Array:
    def __init__(self, values: NDArray[np.uint8]) -> None:
        self._values = values

    def put_back(self, storage: Storage) -> None:
        bytes_in(storage).copy_(torch.from_numpy(self._values))


def bytes_in(storage: Storage) -> torch.Tensor:
    """uint8 [bytes], a view of the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class NoStore:
    """Where memory cannot be given back."""

    def region(self, part: str) -> AbstractContextManager[None]:
        return nullcontext()


def open_store(device: torch.device, probe: MemoryProbe) -> TensorStore | NoStore:
    """Raises ValueError on CUDA without torch-memory-saver, which has to be preloaded."""
    if device.type == "cuda":
        from worker.memory.saver_store import SaverStore

        return SaverStore.open(probe)
    return CpuStore()
