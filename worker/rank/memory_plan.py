"""A rank's memory from the baseline to the ledger, in the order of its bring-up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Set
from contextlib import AbstractContextManager

import torch

from worker.config import GangConfig
from worker.execution.runner import Runner
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import KvConfig, Memory
from worker.memory import budget
from worker.memory.host_memory import available_bytes
from worker.memory.last_good import Figure, LastGood
from worker.memory.ledger import Books
from worker.memory.profile import measure, size_cache
from worker.rank.place import Place
from worker.sizing import weight_bytes
from workerproto.cache import NHD


class MemoryPlan:
    """Made when everything that belongs to the baseline is there, and nothing of the model."""

    def __init__(
        self, config: GangConfig, place: Place, books: Books, any_rank: Callable[[bool], bool],
        note: Callable[[str], None], held_outside: int = 0,
    ) -> None:  # fmt: skip
        """any_rank, note: see `measure`. held_outside: see `requested_bytes`. Raises ValueError for a budget that is
        not free, or has no room for the rank's weights."""
        self._config, self._books, self._ranks_of_host = config, books, place.local_world_size
        self._any_rank, self._note = any_rank, note
        self._baseline = baseline = books.baseline()
        memory = config.memory
        self._requested = 0
        if memory.kv_bytes is None:
            self._requested = budget.requested_bytes(baseline, memory.utilization, held_outside)
        weights = weight_bytes(config.model_config, config.topology(place.rank), config.dtype) - held_outside
        if memory.kv_bytes is None:
            budget.check_weights(weights, self._requested, f"of {baseline.total} the memory budget has")
        budget.check_weights(weights, baseline.free, f"of {baseline.total} are free")
        if config.device == "cpu":  # --cpu-memory-bytes may give its device more than there is
            budget.check_weights(weights, available_bytes(), "the host has available")
        self._last_good = LastGood(memory.cache, _facts(config, place, baseline.total))
        self._budget: budget.Budget

    def profile(self, runner: Runner) -> int:
        """Bytes that this rank offers for its KV cache. Raises ValueError, with the breakdown, if they hold no
        block."""
        memory = self._config.memory
        profile = measure(self._books.probe, self._baseline, runner, self._note, self._any_rank)
        if memory.kv_bytes is not None:
            self._budget = budget.explicit(memory.kv_bytes, profile)
            return memory.kv_bytes
        found = size_cache(
            profile, self._requested, runner, runner.block_bytes, self._last_good.read(), self._any_rank,
            graphs=memory.graphs,
        )  # fmt: skip
        self._budget = found
        return found.kv if memory.most is None else min(found.kv, memory.most, self._useful(runner))

    def _useful(self, runner: Runner) -> int:
        """With so much every row of a step can be as long as may be."""
        config = self._config
        return runner.block_bytes * (config.max_rows * -(-config.max_model_len // config.block_size) + 1)

    @staticmethod
    def check_cache(asked: KvConfig, offered: int) -> None:
        """Raises Failure: a rank never allocates more than it has offered, or what it has not, whoever asks."""
        if not 1 <= asked.num_blocks <= offered:
            raise Failure(ExitCode.DISAGREEMENT, f"{asked.num_blocks} blocks are asked for, {offered} were offered")
        if asked.layout != NHD:
            raise Failure(ExitCode.DISAGREEMENT, f"layout {asked.layout!r} is asked for, {NHD} is what this rank has")

    @property
    def headroom(self) -> int:
        """Bytes that the largest step takes at its height."""
        return self._budget.profile.headroom

    def communicators(self) -> AbstractContextManager[None]:
        """What they give back or take while the block runs is booked on their line."""
        return self._books.phase("communicators")

    def free(self) -> int:
        """Bytes of the device, now."""
        return self._books.probe.read().free

    @property
    def host_room(self) -> int:
        """Bytes of the host's memory that this rank may take, as all others there may at the same time."""
        return available_bytes() // self._ranks_of_host

    def spared(self) -> int:
        """See `Reading.spared`."""
        return self._books.probe.read().spared

    def reconciled(self, runner: Runner) -> Memory:
        """The ledger once everything is there, and what graphs really took kept for the next start."""
        told, expected = self.ledger(runner), self._budget.profile.graphs
        took = told.lines["graphs"]
        if self._config.memory.kv_bytes is None:  # else nothing was expected of graphs
            beyond = max(0, took - expected) if self._config.memory.graphs else 0
            self._last_good.write(Figure(max(1, self._budget.kv - beyond), max(0, took)))
            if took > expected and self._config.memory.graphs:
                self._note(f"graphs took {took} bytes, {expected} were expected")
        return told

    def ledger(self, runner: Runner, released: Set[int] = frozenset()) -> Memory:
        """released: see `Runner.holdings`."""
        found, lines = self._budget, self._books.ledger(runner.holdings(released))
        profile = found.profile
        labels = {
            "requested": found.requested,
            "headroom": profile.headroom,
            "not_requested": max(0, lines["free"] - profile.headroom),
            "graphs_expected": profile.graphs,
            "neighbours_moved": profile.drift,
        }
        return Memory(lines, labels)


def _facts(config: GangConfig, place: Place, total: int) -> dict[str, str]:
    device = torch.cuda.get_device_name() if config.device == "cuda" else "cpu"
    return {
        "model": hashlib.sha256((config.model / "config.json").read_bytes()).hexdigest(),
        "rank": f"{place.rank} of {config.tp} x {config.pp}, {config.partition}",
        "device": f"{device}, {total} bytes, torch {torch.__version__}",
        "dtype": config.dtype,
        "sizes": f"{config.max_rows}, {config.max_tokens}, {config.max_model_len}, {config.block_size}",
        "budget": f"{config.memory.utilization}, graphs {config.memory.graphs}, eager {config.enforce_eager}",
    }
