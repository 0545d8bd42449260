"""Sleep and wake of one rank: what comes back, what does not, and what the device and the process are given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import numpy as np
import psutil
import pytest
import torch

from tests.gang.stage_runs import model_config, run_workload
from tests.gang.workload import LIMITS
from worker.execution.make_runner import make_runner
from worker.execution.model_runner import ModelRunner
from worker.execution.runner import RunnerConfig
from worker.layers.linear import packing_works
from worker.memory.probe import ProbeSettings, Reading
from worker.memory.simulated_device import SimulatedDevice
from worker.memory.sleep import KV_CACHE, PARTS, RUNTIME, WEIGHTS, SleepingMemory
from worker.memory.tensor_store import CpuStore, open_store
from worker.parallel.groups import make_groups
from worker.topology import Topology
from worker.weights import DummyWeights, load_weights

CPU = torch.device("cpu")
ALL = frozenset(PARTS)
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_look_through() -> Iterator[None]:
    """As a rank does when it starts: a reading walks all of Python's objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make(dtype: torch.dtype, hidden: int = 48, weights: int = 3) -> tuple[ModelRunner, SleepingMemory, SimulatedDevice]:
    topology = Topology(0, 1, 1, (7,))
    config = RunnerConfig(
        dtype, CPU, LIMITS.block_size, LIMITS.tokens, LIMITS.rows, LIMITS.live_requests, LIMITS.max_model_len, 3,
        LIMITS.logprobs,
    )  # fmt: skip
    model = replace(model_config(2), hidden=hidden, intermediate=2 * hidden)
    runner = make_runner(model, topology, config, make_groups(topology, None, CPU, timedelta(seconds=1)))
    runner.load(lambda decoder: load_weights(decoder, DummyWeights(weights)))
    runner.allocate(LIMITS.num_blocks)
    probe = SimulatedDevice(ProbeSettings(CPU, 0, 1 << 30))
    store = open_store(CPU, probe)
    assert isinstance(store, CpuStore)
    return runner, SleepingMemory(runner, store, probe, CPU), probe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_has_slept_computes_what_it_did(dtype: torch.dtype, level: int) -> None:
    runner, memory, probe = make(dtype)
    before, tokens = probe.read(), run_workload(runner).tokens
    holds = runner.holdings()
    assert any(cache.any() for cache in runner.caches)
    freed = memory.sleep(ALL, level)
    assert freed == sum((holds.weights, holds.kv_cache, holds.buffers))
    assert runner.holdings(memory.released) == replace(holds, weights=0, kv_cache=0, buffers=0)
    assert memory.needed(ALL) == freed
    assert memory.wake(ALL) == freed
    assert runner.holdings() == holds
    assert probe.read().allocated == before.allocated
    assert not any(cache.any() for cache in runner.caches)
    assert run_workload(runner).tokens == tokens


def test_packed_weights_sleep_too() -> None:
    if not packing_works(torch.bfloat16, CPU):
        pytest.skip("no packed weights on this machine")
    runner, memory, _ = make(torch.bfloat16)
    assert any(part.packed is not None for layer in runner.model.layers for part in (layer.mlp.down,))
    memory.sleep({WEIGHTS}, 2)
    assert runner.model.layers[0].mlp.down.packed is None
    memory.wake({WEIGHTS})
    assert runner.model.layers[0].mlp.down.packed is not None


def test_parts_sleep_and_wake_by_themselves() -> None:
    runner, memory, _ = make(torch.float32)
    holds = runner.holdings()
    assert memory.sleep({KV_CACHE}, 1) == holds.kv_cache
    assert memory.sleep({KV_CACHE, RUNTIME}, 1) == holds.buffers  # the cache sleeps already
    assert memory.sleep(ALL, 2) == holds.weights
    assert memory.needed({RUNTIME}) == holds.buffers
    assert memory.wake({WEIGHTS}) == holds.weights
    assert set(memory.asleep) == {KV_CACHE, RUNTIME}
    assert memory.wake(ALL) == holds.kv_cache + holds.buffers
    assert not memory.asleep


@pytest.mark.parametrize("tells", [True, False])
def test_what_a_neighbour_does_meanwhile_is_not_taken_for_ours(tells: bool) -> None:
    """As a trainer does, for which the memory is given back: by 8 MiB it would be found that a wake needs nothing."""
    runner, memory, device = make(torch.float32)
    others = 0

    class Shared:
        def read(self) -> Reading:
            nonlocal others
            others += 8 * MIB
            seen = device.read()
            return Reading(seen.total, seen.free - others, seen.allocated, others=others if tells else None)

    memory._probe = Shared()  # type: ignore[assignment]  # what sleep asks of it
    holds = runner.holdings()
    everything = holds.weights + holds.kv_cache + holds.buffers
    freed = memory.sleep(ALL, 1)
    assert (freed == everything) if tells else (freed < 0)
    assert memory.needed(ALL) == everything
    taken = memory.wake(ALL)
    assert (taken == everything) if tells else (taken > everything)


@torch.inference_mode()
def test_level_2_keeps_what_no_checkpoint_restores() -> None:
    runner, memory, _ = make(torch.float32)
    runner.model.rotary.frequencies.mul_(2)  # as a table that only this process knows
    kept = runner.model.rotary.frequencies.clone()
    weight = runner.model.layers[0].mlp.down.weight
    value = weight.clone()
    weight.add_(1)  # lost
    memory.sleep({WEIGHTS}, 2)
    memory.wake({WEIGHTS})
    assert torch.equal(runner.model.rotary.frequencies, kept)
    assert torch.equal(runner.model.layers[0].mlp.down.weight, value)


def test_fifty_cycles_leak_nothing_and_level_2_makes_the_process_smaller() -> None:
    runner, memory, probe = make(torch.float32, hidden=384)
    process = psutil.Process()
    memory.sleep(ALL, 2)
    memory.wake(ALL)
    holds, before = runner.holdings(), probe.read()
    awake = process.memory_info().rss
    memory.sleep(ALL, 2)
    asleep = process.memory_info().rss
    assert awake - asleep > 0.8 * holds.weights > 10 * MIB
    memory.wake(ALL)
    resident = []
    for cycle in range(50):
        memory.sleep(ALL, 1 + cycle % 2)
        memory.wake(ALL)
        resident.append(process.memory_info().rss)
    assert probe.read() == before
    assert runner.holdings() == holds
    # A leak of one part a cycle would show as a slope; what an allocator keeps for later does not.
    assert np.median(resident[-10:]) - np.median(resident[5:15]) < holds.weights / 4
