"""The CPU as a device of a given size, on which live tensors are what takes memory: exact to the byte, and repeatable.

The host's own figures are neither: its kernel counts pages, shares them, and gives them back when it likes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.memory.probe import Peak, ProbeSettings, Reading
from worker.memory.storages import live_tensors, storages

_CPU = torch.device("cpu")


class SimulatedDevice:
    """See `MemoryProbe`. What is free is what all live tensors of the process leave of the size, tracked or not."""

    def __init__(self, settings: ProbeSettings) -> None:
        self.total = settings.device_bytes
        self.settle: Callable[[], None] = lambda: None  # wait for what is about to go

    def read(self) -> Reading:
        self.settle()
        gc.collect()
        allocated = sum(storages(live_tensors(), _CPU).values())
        return Reading(self.total, self.total - allocated, allocated)

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        peak = Peak()
        self.settle()
        gc.collect()
        with _Watch(set(storages(live_tensors(), _CPU))) as watch:
            yield peak
        self.settle()
        gc.collect()
        peak.bytes = max(0, watch.most - watch.live)


class _Watch(TorchDispatchMode):
    """Counts the storages that operations make, from the operation to their end. What a kernel takes and gives back
    within one operation is not seen."""

    def __init__(self, there: set[int]) -> None:
        """there: addresses of storages that exist, of which operations may return views."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not
        self.live = self.most = 0
        self._seen = there

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks. To skip its compiler it would import it, which takes a second and leaves objects by the hundred
        thousand for every later reading to walk; nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.layout is torch.strided and one.device == _CPU:
                storage = one.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                if size and address not in self._seen:
                    self._seen.add(address)
                    self.live += size
                    self.most = max(self.most, self.live)
                    weakref.finalize(storage, self._gone, address, size)
        return result

    def _gone(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live -= size
