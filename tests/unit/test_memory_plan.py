"""One rank's memory from the baseline to the ledger, with sizes as a user gives them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gang.gangs import tiny_model
from tests.unit.test_memory_budget import MIB, Device, Notes, alone
from tests.unit.test_memory_budget import Runner as Rehearsing
from worker.config import GangConfig, resolve
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import KvConfig
from worker.memory.ledger import Books, Holdings
from worker.options import add_gang_options
from worker.rank.memory_plan import MemoryPlan
from worker.rank.place import Place

PLACE = Place(0, 1, 0, 1, "127.0.0.1", 1, 1, "test", 1, 1, True)


@dataclass
class Runner(Rehearsing):
    block_bytes: int = MIB

    def holdings(self, released: frozenset[int] = frozenset()) -> Holdings:
        return Holdings(self.device.allocated, 0, 0)


def config(folder: Path, *options: str, **model: int) -> GangConfig:
    parser = argparse.ArgumentParser()
    add_gang_options(parser)
    where = str(tiny_model(folder / "model", **model))
    arguments = ["--model", where, "--device", "cpu", "--max-model-len", "64", "--max-num-seqs", "4", *options]
    return resolve(parser.parse_args(arguments), {"RANKD_CACHE_DIR": str(folder / "cache")})


def planned(folder: Path, *options: str) -> tuple[MemoryPlan, Runner, Notes]:
    device, notes = Device(outside=50 * MIB), Notes()
    plan = MemoryPlan(config(folder, *options), PLACE, Books(device), alone, notes)
    device.allocated = 300 * MIB
    return plan, Runner(device, graphs=11 * MIB), notes


def test_a_share_and_explicit_bytes_both_rehearse_the_largest_step(tmp_path: Path) -> None:
    plan, runner, _ = planned(tmp_path, "--gpu-memory-utilization", "0.8")
    assert plan.profile(runner) == (800 - 300 - 7 - 11) * MIB
    assert runner.rehearsals == 1
    plan, runner, _ = planned(tmp_path, "--kv-cache-memory-bytes", "10MiB")
    assert plan.profile(runner) == 10 * MIB
    assert (runner.rehearsals, runner.captures) == (1, 0)
    labels = plan.reconciled(runner).labels
    assert (labels["headroom"], labels["requested"]) == (7 * MIB, (10 + 300 + 7) * MIB)


@pytest.mark.parametrize(
    ("share", "available", "says"),
    [
        (("--gpu-memory-utilization", "0.9"), 2000, f"of {1000 * MIB} the memory budget has {900 * MIB}: with more"),
        (("--kv-cache-memory-bytes", "1MiB"), 2000, f"of {1000 * MIB} are free {950 * MIB}: with more ranks"),
        (("--cpu-memory-bytes", "1TiB"), 800, f"the host has available {800 * MIB}: with more ranks"),
    ],
)
def test_weights_that_have_no_room_are_not_read(
    share: tuple[str, ...], available: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(tmp_path, *share, vocab_size=5 << 19)  # twice 48 columns of 4 bytes: 960 MiB
    host = SimpleNamespace(available=available * MIB)
    monkeypatch.setattr("worker.memory.host_memory.psutil.virtual_memory", lambda: host)
    device = Device(outside=50 * MIB, total=(1 << 20 if "1TiB" in share else 1000) * MIB)
    with pytest.raises(ValueError, match=r"the weights of this rank take \d{10} bytes, ") as refused:
        MemoryPlan(wanted, PLACE, Books(device), alone, Notes())
    assert says in str(refused.value)


def test_explicit_bytes_need_no_share_to_be_free_but_must_be_there(tmp_path: Path) -> None:
    plan, runner, _ = planned(tmp_path, "--kv-cache-memory-bytes", "643MiB")
    assert plan.profile(runner) == 643 * MIB
    plan, runner, _ = planned(tmp_path, "--kv-cache-memory-bytes", "644MiB")
    with pytest.raises(ValueError, match=f"--kv-cache-memory-bytes is {644 * MIB}, {643 * MIB} can be had"):
        plan.profile(runner)


def test_on_a_cpu_of_no_given_size_no_more_is_taken_than_is_useful(tmp_path: Path) -> None:
    plan, runner, _ = planned(tmp_path)
    assert plan.profile(runner) == (4 * 64 // 16 + 1) * MIB  # four rows of 64 positions, and the padding block


@pytest.mark.parametrize("took", [9, 11, 13])
def test_a_second_start_takes_the_last_good_figure(tmp_path: Path, took: int) -> None:
    share = ("--gpu-memory-utilization", "0.8")
    plan, runner, notes = planned(tmp_path, *share)
    first = plan.profile(runner)
    with plan._books.phase("graphs"):
        runner.device.outside += took * MIB
    plan.reconciled(runner)
    plan, runner, notes = planned(tmp_path, *share)
    assert plan.profile(runner) == first + (11 - took) * MIB  # with graphs as they were, not as they were expected
    assert (runner.rehearsals, runner.captures) == (1, 0)  # verified, not searched
    plan, runner, notes = planned(tmp_path, *share, "--max-num-seqs", "5")  # another gang
    plan.profile(runner)
    assert runner.captures == 1
    assert notes.said == []


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (("--gpu-memory-utilization", "0.8"), [f"graphs took {13 * MIB} bytes, {11 * MIB} were expected"]),
        (("--kv-cache-memory-bytes", "10MiB"), []),
    ],
)
def test_graphs_are_held_against_what_was_expected_and_that_alone(
    tmp_path: Path, size: tuple[str, str], says: list[str]
) -> None:
    plan, runner, notes = planned(tmp_path, *size)
    plan.profile(runner)
    with plan._books.phase("graphs"):
        runner.device.outside += 13 * MIB
    plan.reconciled(runner)
    assert notes.said == says


@pytest.mark.parametrize(
    ("blocks", "layout", "says"),
    [
        (0, "NHD", "0 blocks are asked for, 10 were offered"),
        (11, "NHD", "11 blocks are asked for, 10 were offered"),
        (10, "HND", "layout 'HND' is asked for, NHD is what this rank has"),
    ],
)
def test_a_cache_that_was_not_offered_is_refused(blocks: int, layout: str, says: str) -> None:
    MemoryPlan.check_cache(KvConfig(10, 160, "NHD", 16, 16), 10)
    with pytest.raises(Failure, match=says) as refused:
        MemoryPlan.check_cache(KvConfig(blocks, 160, layout, 16, 16), 10)
    assert refused.value.code is ExitCode.DISAGREEMENT
