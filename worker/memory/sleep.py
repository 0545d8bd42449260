"""Sleep and wake of one rank's memory, part by part.

    part        level 1               level 2                                      on waking
    weights     copied to the host    dropped, but for what no checkpoint holds    copied back, or read again
    kv_cache    dropped               dropped                                      zeroed
    runtime     copied to the host    copied to the host                           copied back

Tensors and all views of them stay what they are. Which operation is allowed when is not judged here.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from worker.memory.probe import MemoryProbe
from worker.memory.storages import storages, storages_by_key
from worker.memory.tensor_store import HostCopy, Storage, TensorStore, bytes_in

Whereabouts = Literal["awake", "host", "checkpoint", "lost"]
"""Where weights are: on the device, on the host, to be read again from where they came first, or nowhere."""

WEIGHTS, KV_CACHE, RUNTIME = PARTS = ("weights", "kv_cache", "runtime")


class Sleeper(Protocol):
    """The part of a runner that sleeps. All calls come with nothing under way."""

    def settle(self) -> None:
        """Let what was sent arrive."""

    def unpack(self) -> None:
        """Bring the weights into the tensors that can be given back."""

    def repack(self) -> None:
        """The weights are in place again."""

    def reload(self) -> None:
        """Read the weights from where they came first, and repack."""

    def parts(self) -> Mapping[str, list[Tensor]]:
        """Every tensor of a part."""

    def restorable(self) -> list[Tensor]:
        """Those that `reload` fills, wholly."""


@dataclass(frozen=True, slots=True)
class _Asleep:
    level: int
    storages: Mapping[int, Storage]
    bytes: int  # that the device has back, and will be asked for
    copies: Mapping[int, HostCopy]
    copied: int  # bytes of them
    restorable: bool  # what was dropped can be read again


class SleepingMemory:
    """One rank's. `asleep`: by part."""

    def __init__(self, sleeper: Sleeper, store: TensorStore, probe: MemoryProbe, device: torch.device) -> None:
        self._sleeper, self._store, self._probe, self._device = sleeper, store, probe, device
        self.asleep: dict[str, _Asleep] = {}
        self._most_copied = 0  # bytes of host copies at once, so far

    @torch.inference_mode()
    def sleep(self, parts: Set[str], level: int, *, restorable: bool = True) -> int:
        """Returns the bytes that the device has back. Parts that sleep already are let sleep as they do. restorable:
        whether `reload` brings back the weights that level 2 drops; where not they come back as zeros."""
        self._sleeper.settle()
        before = self._probe.read().spared
        for part in PARTS:
            if part in parts and part not in self.asleep:
                self._sleep(part, level, restorable)
        return self._probe.read().spared - before

    def _sleep(self, part: str, level: int, restorable: bool) -> None:
        sleeper, before = self._sleeper, self._probe.read().spared
        if part == WEIGHTS:
            sleeper.unpack()
        held = storages_by_key(sleeper.parts()[part], self._device)
        dropped: Set[int] = set()
        if part == KV_CACHE:
            dropped = held.keys()
        elif part == WEIGHTS and level == 2:
            dropped = storages_by_key(sleeper.restorable(), self._device).keys()
        copies = {key: self._store.copy(storage) for key, storage in held.items() if key not in dropped}
        sizes = {key: storage.nbytes() for key, storage in held.items()}
        self._store.release(part, held.values())
        # Never less than what stood on it: a neighbour that nobody tells of may have taken some.
        freed = max(self._probe.read().spared - before, sum(sizes.values()))
        copied = sum(sizes[key] for key in copies)
        self.asleep[part] = _Asleep(level, held, freed, copies, copied, restorable)
        self._most_copied = max(self._most_copied, self._copied)

    def host_bytes(self, parts: Set[str], level: int) -> int:
        """Of the host, that copies take when they are put to sleep; those of tables that level 2 keeps not counted."""
        dropped = {KV_CACHE} if level == 1 else {KV_CACHE, WEIGHTS}
        tensors = self._sleeper.parts()
        new = (storages(tensors[part], self._device) for part in parts - dropped - self.asleep.keys())
        kept = self._most_copied - self._copied if self._store.keeps else 0
        return max(0, sum(sum(part.values()) for part in new) - kept)

    @property
    def _copied(self) -> int:
        return sum(asleep.copied for asleep in self.asleep.values())

    def needed(self, parts: Set[str]) -> int:
        """Bytes that waking them takes."""
        return sum(asleep.bytes for part, asleep in self.asleep.items() if part in parts)

    @torch.inference_mode()
    def wake(self, parts: Set[str]) -> int:
        """Returns the bytes taken from the device."""
        before = self._probe.read().spared
        for part in PARTS:
            if part in parts and part in self.asleep:
                self._wake(part, self.asleep.pop(part))
        return before - self._probe.read().spared

    def _wake(self, part: str, asleep: _Asleep) -> None:
        self._store.restore(part)
        for key, storage in asleep.storages.items():
            copy = asleep.copies.get(key)
            if copy is not None:
                copy.put_back(storage)
            else:
                bytes_in(storage).zero_()
        if part == WEIGHTS and asleep.level == 2 and asleep.restorable:
            self._sleeper.reload()
        elif part == WEIGHTS:
            self._sleeper.repack()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # host copies are read until then

    def whereabouts(self) -> Whereabouts:
        """Of the weights."""
        asleep = self.asleep.get(WEIGHTS)
        if asleep is None:
            return "awake"
        return "host" if asleep.level == 1 else "checkpoint" if asleep.restorable else "lost"

    @property
    def released(self) -> Set[int]:
        """Keys of the storages that have no memory now."""
        return {key for asleep in self.asleep.values() for key in asleep.storages}
