"""Gangs on simulated devices: where every byte went, and how the KV cache was sized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang.gangs import WORKERCTL, RunningGang, environment, tiny_model, workerctl
from tests.gang.probes import LEAK, MIB, NEIGHBOUR, ROOM
from worker.ctl.memory import LETTERS
from worker.memory.ledger import LINES

SMALL = [
    "--load-format", "dummy", "--max-num-batched-tokens", "128", "--max-num-seqs", "8", "--cpu-threads", "1",
    "--heartbeat-interval", "0.2",
]  # fmt: skip
LAYERS = (2, 5)
# Of the tiny model in float32: elements of a layer, of an embedding or head, of a norm (kept twice).
NORM = 2 * 48
LAYER = 48 * 48 + 2 * 24 * 48 + 48 * 48 + 3 * 96 * 48 + 2 * NORM
FREQUENCIES = 2
BLOCK = 16 * 2 * 6 * 4 * 4  # positions, keys and values, heads, elements, bytes; of one layer


def started(folder: Path, *options: str, name: str = "m") -> RunningGang:
    model = tiny_model(folder / "model")
    command = [*WORKERCTL, "up", "--model", str(model), "--name", name, *SMALL, *options]
    return RunningGang(folder, command, name, folder / f"{name}.log", **environment(folder))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    """Two stages of 2 and 5 layers on devices of 64 MiB."""
    folder = tmp_path_factory.mktemp("uneven")
    running = started(folder, "-pp", "2", "--pipeline-partition", "2,5", "--cpu-memory-bytes", "64MiB")
    try:
        yield running.wait_ready()
    finally:
        running.end()


def test_the_ledger_has_every_byte(uneven: RunningGang) -> None:
    status = uneven.status()
    blocks = status["kv"]["num_blocks"]
    for rank, layers in zip(status["ranks"], LAYERS, strict=True):
        lines = rank["memory"]
        assert lines["total"] == 64 * MIB
        assert sum(lines[name] for name in LINES) == lines["total"]
        ends = 128 * 48 + (NORM if rank["pp"] else 0)
        assert lines["weights"] == 4 * (layers * LAYER + ends + FREQUENCIES)
        assert lines["kv_cache"] == rank["kv_bytes"] == (blocks + 1) * layers * BLOCK
        assert lines["unexplained"] == 0
        assert lines["free"] == rank["memory_labels"]["headroom"] + rank["memory_labels"]["not_requested"]


def test_the_cache_is_what_the_budget_leaves_and_the_smallest_number_of_blocks_wins(uneven: RunningGang) -> None:
    status = uneven.status()
    requested = int(64 * MIB * 0.9)
    expected = [
        requested - rank["memory"]["weights"] - rank["memory"]["buffers"] - rank["memory_labels"]["headroom"]
        for rank in status["ranks"]
    ]
    with uneven.client() as client:
        kv = client.wait_ready().kv
    assert kv.available_bytes == expected
    assert kv.block_bytes == [layers * BLOCK for layers in LAYERS]
    offered = [available // size - 1 for available, size in zip(expected, kv.block_bytes, strict=True)]
    assert offered[1] < offered[0]
    assert kv.num_blocks == status["kv"]["num_blocks"] == offered[1]
    kept = [json.loads(path.read_text()) for path in (uneven.run_dir / ".cache/memory").glob("*.json")]
    assert sorted(figure["kv"] for figure in kept) == sorted(expected)


def test_workerctl_shows_it(uneven: RunningGang) -> None:
    shown = workerctl(uneven.run_dir, "memory", "--name", "m")
    assert shown.returncode == 0
    bars = [line for line in shown.stdout.splitlines() if line.startswith("[")]
    assert len(bars) == 2
    assert all(len(bar) == 62 and LETTERS["kv_cache"] in bar and LETTERS["free"] in bar for bar in bars)
    assert f"{64 * MIB:,}".replace(",", " ") in shown.stdout
    told = json.loads(workerctl(uneven.run_dir, "memory", "--name", "m", "--json").stdout)
    assert [rank["memory"] for rank in told["ranks"]] == [rank["memory"] for rank in uneven.status()["ranks"]]
    assert workerctl(uneven.run_dir, "memory", "--name", "nobody").returncode == 3


def test_unequal_ranks_a_busy_neighbour_and_64_mib_of_nobody(tmp_path: Path) -> None:
    running = started(tmp_path, "-pp", "2", "--memory-probe", "tests.gang.probes:Troubled")
    try:
        status = running.wait_ready().status()
        assert "rank 0: another process took" in running.said
    finally:
        running.end()
    busy, leaking = status["ranks"]
    assert [rank["memory"]["total"] for rank in status["ranks"]] == [ROOM[0], ROOM[1]]
    assert busy["memory"]["other_processes"] == NEIGHBOUR
    assert busy["memory"]["unexplained"] == 0
    assert leaking["memory"]["unexplained"] == LEAK
    # The leak came before the profile, so the cache has been sized around it; rank 0, though smaller, has more room.
    for rank in status["ranks"]:
        assert rank["num_blocks"] == status["kv"]["num_blocks"]
        lines, labels = rank["memory"], rank["memory_labels"]
        assert sum(lines[name] for name in LINES) == lines["total"]
        taken = lines["weights"] + lines["buffers"] + lines["unexplained"] + labels["headroom"]
        layer_blocks = (int(lines["total"] * 0.9) - taken) // ((4, 3)[rank["rank"]] * BLOCK) - 1
        assert status["kv"]["num_blocks"] <= layer_blocks


def test_too_small_a_device_says_where_it_goes(tmp_path: Path) -> None:
    running = started(tmp_path, "--cpu-memory-bytes", "1MiB")
    try:
        assert running.wait_exit() == 78
        (line,) = running.errors()
        assert "the memory budget of 943718 bytes leaves 0 for the KV cache, and two blocks take" in line
        assert "for weights and buffers" in line
        assert "for the largest step" in line
    finally:
        running.end()
