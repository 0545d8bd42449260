"""Which memory tensors stand on: bytes of storages, each counted once however many views it has."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

# Objects of these packages are looked into: ours, and those that keep workspaces for us.
_OURS = ("worker.", "flashinfer.")


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """A key that views of one storage share, and the storage's bytes.

    oneDNN's packed weights show no storage: the bytes of their elements count, which leaves out what it pads.
    """
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    return id(tensor), tensor.nbytes


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """`storage_of` each, on a device of this type."""
    return dict(storage_of(one) for one in tensors if one.device.type == device.type)


def storages_by_key(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages themselves; of tensors that show theirs."""
    return {
        key: one.untyped_storage()
        for one in tensors
        if one.device.type == device.type and one.layout is torch.strided and (key := storage_of(one)[0])
    }


def tensors_of(root: object, *, without: Iterable[object] = ()) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object of ours through attributes and containers.

    without: objects that are not looked into.
    """
    seen = {id(one) for one in without}
    stack: list[Any] = [root]
    while stack:
        one = stack.pop()
        if isinstance(one, Tensor):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            stack.extend(_inside(one))


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, list | tuple | set | frozenset | deque):
        return list(one)
    kind = type(one)
    if not kind.__module__.startswith(_OURS):
        owner = getattr(one, "__self__", None)  # a bound method
        return () if owner is None or not type(owner).__module__.startswith(_OURS) else (owner,)
    slots = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name, None) for name in slots)]


def live_tensors() -> Iterator[Tensor]:
    """Every tensor of this process that Python knows, whoever holds it; not those frozen by `gc.freeze`."""
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):  # not isinstance, which asks lazy proxies for their class
            yield one
