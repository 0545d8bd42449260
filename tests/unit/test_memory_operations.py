"""Sleep, wake and updates as operations of one rank: what it refuses, and that nothing has then happened."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.gang.stage_runs import run_workload
from tests.unit.test_sleep import make
from tests.unit.test_spec import section, tables
from tests.unit.test_weight_update import whole_tensors
from worker.execution.model_runner import ModelRunner
from worker.gang_messages import Memory
from worker.memory.simulated_device import SimulatedDevice
from worker.memory.sleep import SleepingMemory
from worker.parallel.suspension import Communicators
from worker.rank.memory_operations import MemoryOperations
from worker.weights.update import digest_of, files_of
from workerproto.messages import RefusalCode
from workerproto.operations import Control, Part, Sleep, UpdateBegin, UpdateChunk, UpdateFinish, Wake, name_of
from workerproto.steps import Refusal

MIB = 1 << 20
NONE_THAT_CAN = Communicators()


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_look_through() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass
class Plan:
    """The part of a `MemoryPlan` that operations use."""

    probe: SimulatedDevice
    headroom: int = 1000
    host_room: int = 1 << 40

    def communicators(self) -> AbstractContextManager[None]:
        return nullcontext()

    def free(self) -> int:
        return self.probe.read().free

    def spared(self) -> int:
        return self.probe.read().spared

    def ledger(self, runner: ModelRunner, released: Set[int] = frozenset()) -> Memory:
        holds = runner.holdings(released)
        return Memory({"weights": holds.weights, "kv_cache": holds.kv_cache, "buffers": holds.buffers}, {})


@dataclass
class House:
    runner: ModelRunner
    memory: SleepingMemory
    plan: Plan
    operations: MemoryOperations
    reports: list[Memory] = field(default_factory=list)

    def do(self, operation: Control) -> dict[str, object]:
        """Its report has what SPEC.md lists for it, whatever the operation."""
        report = self.operations.prepare(operation)()
        (told,) = (row[3] for row in tables(section("22. Operations"))[0] if row[0] == f"`{name_of(operation)}`")
        assert sorted(report) == sorted(re.findall(r"`(\w+)`", told))
        return report

    def refused(self, operation: Control, code: RefusalCode) -> str:
        with pytest.raises(Refusal) as refusal:
            self.operations.prepare(operation)
        assert refusal.value.code is code
        return str(refusal.value)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(torch.float32, tmp_path)


def make_house(dtype: torch.dtype, tmp_path: Path, communicators: Communicators = NONE_THAT_CAN) -> House:
    runner, memory, probe = make(dtype)
    plan, reports = Plan(probe), list[Memory]()
    origin = tmp_path / "model"
    origin.mkdir()
    save_file(whole_tensors(runner.model, 3), origin / "model.safetensors")
    operations = MemoryOperations(runner, memory, plan, (origin, "auto", 0), reports.append, communicators)  # type: ignore[arg-type]  # a part of it
    return House(runner, memory, plan, operations, reports)


def test_bytes_are_told_and_the_ledger_follows(house: House) -> None:
    holds = house.runner.holdings()
    slept = house.do(Sleep(1, [Part.KV_CACHE]))
    assert slept["freed_bytes"] == holds.kv_cache
    assert (slept["asleep"], slept["weights"]) == (["kv_cache"], "awake")
    assert slept["communicators"] == "not supported"
    assert slept["memory"] == {"weights": holds.weights, "kv_cache": 0, "buffers": holds.buffers}
    assert house.do(Sleep(2))["weights"] == "checkpoint"
    told = house.reports[-1]
    assert told.lines == {"weights": 0, "kv_cache": 0, "buffers": 0}
    assert house.do(Wake([Part.WEIGHTS]))["asleep"] == ["kv_cache", "runtime"]
    woken = house.do(Wake())
    assert (woken["taken_bytes"], woken["asleep"]) == (holds.kv_cache + holds.buffers, [])
    assert house.runner.holdings() == holds
    assert house.do(Sleep(1))["weights"] == "host"


def test_a_wake_that_cannot_work_is_refused_before_anything_wakes(house: House) -> None:
    house.do(Sleep())
    needed = house.memory.needed({"weights", "kv_cache", "runtime"})
    others = house.plan.free() - needed - house.plan.headroom
    house.plan.probe.total -= others + 1  # a neighbour has come
    says = house.refused(Wake(), RefusalCode.NOT_POSSIBLE)
    assert f"waking takes {needed} bytes and a step 1000 more, {needed + 999} are free" in says
    assert set(house.memory.asleep) == {"weights", "kv_cache", "runtime"}
    house.plan.probe.total += 1
    house.do(Wake())
    assert not house.memory.asleep


def test_a_host_without_room_for_copies_is_found_out_before_anything_sleeps(house: House) -> None:
    holds = house.runner.holdings()
    house.plan.host_room = copies = holds.weights + holds.buffers
    assert house.memory.host_bytes({"weights", "kv_cache", "runtime"}, 1) == copies
    house.plan.host_room -= 1
    says = house.refused(Sleep(1), RefusalCode.NOT_POSSIBLE)
    assert f"copies {copies} bytes to the host, which has room for {copies - 1} of it" in says
    assert not house.memory.asleep
    house.do(Sleep(2))
    house.do(Wake())
    house.plan.host_room += 1
    house.do(Sleep(1))
    house.do(Wake())
    house.plan.host_room = 1
    house.refused(Sleep(1), RefusalCode.NOT_POSSIBLE)
    house.memory._store.keeps = True  # type: ignore[misc]  # as where copies are pinned
    house.do(Sleep(1, [Part.WEIGHTS]))
    house.do(Sleep(1))


def test_weights_that_have_changed_on_disk_do_not_come_back_in_silence(house: House, tmp_path: Path) -> None:
    house.do(Sleep(2))
    file = tmp_path / "model/model.safetensors"
    kept = file.read_bytes()
    save_file(whole_tensors(house.runner.model, 4), file)
    assert "the weights on disk are" in house.refused(Wake(), RefusalCode.NOT_POSSIBLE)
    file.unlink()
    house.refused(Wake(), RefusalCode.NOT_POSSIBLE)
    file.write_bytes(kept)
    house.do(Wake())


def test_an_update_by_operations(house: House, tmp_path: Path) -> None:
    tokens = run_workload(house.runner).tokens
    new = whole_tensors(house.runner.model, 4)
    names = list(new)
    chunks = []
    for number, part in enumerate((names[:10], names[10:])):
        folder = tmp_path / f"chunk{number}"
        folder.mkdir()
        save_file({name: new[name] for name in part}, folder / "x.safetensors")
        chunks.append(UpdateChunk(str(folder), digest_of(files_of(str(folder)))))
    house.do(UpdateBegin())
    assert house.do(chunks[0])["tensors"] == 10
    assert "has not come" in house.refused(UpdateFinish("new"), RefusalCode.BAD_ARGUMENT)
    assert "was announced" in house.refused(UpdateChunk(chunks[1].source, "sha256:0"), RefusalCode.BAD_ARGUMENT)
    house.do(chunks[1])
    house.do(UpdateFinish("new"))
    assert run_workload(house.runner).tokens != tokens
    house.do(Sleep(1))
    assert house.do(Wake())["weights"] == "awake"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_weights_come_between_sleep_and_wake_again_and_again(dtype: torch.dtype, tmp_path: Path) -> None:
    house = make_house(dtype, tmp_path)
    for turn, whereabouts in ((4, "checkpoint"), (5, "lost")):
        slept = house.do(Sleep(2))
        assert (slept["weights"], house.reports[-1].lines["weights"]) == (whereabouts, 0)
        assert house.do(Wake([Part.WEIGHTS]))["weights"] == "awake"
        folder = tmp_path / str(turn)
        folder.mkdir()
        save_file(whole_tensors(house.runner.model, turn), folder / "x.safetensors")
        house.do(UpdateBegin())
        house.do(UpdateChunk(str(folder), digest_of(files_of(str(folder)))))
        house.do(UpdateFinish(str(turn)))
        assert house.do(Wake())["asleep"] == []
        fresh, _, _ = make(dtype, weights=turn)
        assert run_workload(house.runner).tokens == run_workload(fresh).tokens


class Backend:
    """A communicator with a MiB of its own on the device."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = torch.zeros(MIB, dtype=torch.uint8)

    def suspend(self) -> None:
        assert self.buffer is not None
        self.buffer = None

    def resume(self) -> None:
        assert self.buffer is None
        self.buffer = torch.zeros(MIB, dtype=torch.uint8)


def test_communicators_sleep_with_the_runtime_if_that_is_wanted(tmp_path: Path) -> None:
    house = make_house(torch.float32, tmp_path, Communicators([Backend(), Backend()], wanted=True))
    holds = house.runner.holdings()
    assert house.do(Sleep(1, [Part.KV_CACHE]))["communicators"] == "in use"
    slept = house.do(Sleep(1))
    assert (slept["communicators"], slept["freed_bytes"]) == ("suspended", holds.weights + holds.buffers + 2 * MIB)
    assert house.do(Wake([Part.WEIGHTS]))["communicators"] == "suspended"
    needed = house.memory.needed({"runtime"}) + 2 * MIB
    others = house.plan.free() - needed - house.plan.headroom
    house.plan.probe.total -= others + 1
    assert f"waking takes {needed} bytes" in house.refused(Wake([Part.RUNTIME]), RefusalCode.NOT_POSSIBLE)
    house.plan.probe.total += others + 1
    woken = house.do(Wake())
    assert woken["communicators"] == "in use"
    assert woken["taken_bytes"] == holds.kv_cache + holds.buffers + 2 * MIB


def test_communicators_are_kept_unless_that_is_wanted(tmp_path: Path) -> None:
    house = make_house(torch.float32, tmp_path, Communicators([Backend()]))
    assert [house.do(one)["communicators"] for one in (Sleep(), Wake())] == ["kept", "kept"]


def test_memory_that_cannot_sleep_says_what_it_needs() -> None:
    runner, _, probe = make(torch.float32)
    operations = MemoryOperations(runner, None, Plan(probe), (Path(), "dummy", 0), lambda _: None, NONE_THAT_CAN)  # type: ignore[arg-type]  # a part of it
    with pytest.raises(Refusal, match="--enable-sleep-mode"):
        operations.prepare(Sleep())
