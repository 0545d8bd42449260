"""Looking into a gang of two stages from another terminal, while it serves and while it hangs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gang.gangs import ROOT, RunningGang, gang, workerctl
from tests.gang.test_gang_serving import decode, prompt, result_of
from workerproto.client import Client


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    run_dir = Path(tempfile.mkdtemp(prefix="rankd-"))
    with gang(run_dir, tmp_path_factory.mktemp("seeing"), pp=2) as running:
        yield running.wait_ready()
    shutil.rmtree(run_dir, ignore_errors=True)


def test_stacks_of_all_and_of_one(serving: RunningGang) -> None:
    began = time.perf_counter()
    answer = workerctl(serving.run_dir, "stacks", "--name", "g")
    assert time.perf_counter() - began < 2, "the promise is a second; two, as others use the machine too"
    assert answer.returncode == 0, answer.stderr + answer.stdout
    sections = answer.stdout.split("== ")[1:]
    assert [section.split(",")[0] for section in sections] == ["rank 0", "rank 1", "coordinator"]
    for section in sections[:2]:
        assert "in _compute" in section
        assert "in _watch" in section
        assert section.count("most recent call first") >= 3
    one = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "1")
    assert one.stdout.startswith("== rank 1,")
    assert "== rank 0" not in one.stdout
    none = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "7")
    assert none.stderr == "rankd: error: --rank is 7, the gang's ranks on this host are 0 to 1\n"
    assert workerctl(serving.run_dir, "stacks", "--name", "nobody").returncode == 3
    assert serving.status()["state"] == "READY", "nobody was hurt by the signal"


@pytest.fixture
def client(serving: RunningGang) -> Iterator[Client]:
    with serving.client(name="a test", timeout=10) as client:
        client.wait_ready(10)
        yield client


def run_steps(client: Client, count: int) -> None:
    """One request: a prompt, and then a step a token."""
    client.submit(prompt(1, [1, 2, 3], [5, 6]))
    for position in range(3, 2 + count):
        result_of(client)
        client.submit(decode(1, position))
    result_of(client)


def test_status_says_what_the_gang_does(serving: RunningGang, client: Client) -> None:
    run_steps(client, 20)
    answer = serving.status()
    assert answer["kv"]["used_blocks"] == 2
    rates = answer["rates"]
    assert rates["steps_per_s"] > 0
    assert rates["tokens_per_s"] == pytest.approx(rates["steps_per_s"] * 22 / 20, rel=0.5)
    assert rates["sampled_per_s"] > 0
    for rank in answer["ranks"]:
        shares = rank["time_shares"]
        assert 0 < sum(shares.values()) <= 1.05, shares
        assert shares["compute"] > 0
        assert (rank["doing"], rank["graph_hit_rate"]) == ("wait for scheduler", None)
        assert rank["host_memory_bytes"] > 1 << 20
    assert answer["ranks"][1]["time_shares"]["previous_stage"] > 0


def test_status_json_is_what_the_documentation_says(serving: RunningGang) -> None:
    """Every key at every level, no more and no fewer."""
    documented = set(re.findall(r"^\| `([\w.\[\]]+)` \|", (ROOT / "docs" / "status.md").read_text(), re.MULTILINE))
    answer = serving.status()
    assert answer["kv"] is not None
    with serving.client(name="a test", timeout=10) as client:
        client.wait_ready(10)
        answer = serving.status()
    more = {"last_fault." + name for name in FAULT} | {"waiting_for[]." + name for name in WAITED}
    assert set(paths(answer)) | more == documented


WAITED = ("rank", "state", "phase", "seconds")
FAULT = ("code", "rank", "phase", "step", "message")
OPEN = ("ranks[].memory", "ranks[].memory_labels")  # their keys are the device's


def paths(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, dict) and where not in OPEN:
        for name, inner in value.items():
            path = f"{where}.{name}" if where else name
            yield path
            yield from paths(inner, path)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from paths(value[0], f"{where}[]")


def test_a_stopped_rank_is_shown_as_stopped(serving: RunningGang) -> None:
    pid = serving.rank_pid(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert serving.status()["ranks"][1]["state"] == "STOPPED"
        table = workerctl(serving.run_dir, "status", "--name", "g")
        assert table.returncode == 1, "a gang with such a rank is not ready, whatever its state"
        assert "STOPPED" in table.stdout
        stopped = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "1")
        assert (stopped.returncode, "it is stopped (SIGSTOP)" in stopped.stdout) == (1, True)
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while workerctl(serving.run_dir, "status", "--name", "g").returncode:
        assert time.monotonic() < deadline, serving.status()


def test_a_stuck_rank_is_shown_as_stuck(run_dir: Path, tmp_path: Path) -> None:
    """Its heartbeats go on; that it makes no progress is in its status file, and where it stands in its trace."""
    fault = "rank=1;at=sample;do=sleep:60"
    with gang(run_dir, tmp_path, "--device", "fake", "--step-timeout", "8", pp=2, RANKD_FAULT=fault) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(prompt(1, [1, 2, 3], [5, 6]))
            deadline = time.monotonic() + 7
            while (seen := running.status()["ranks"][1])["state"] != "STUCK":
                assert time.monotonic() < deadline, seen
                time.sleep(0.1)
            assert (seen["phase"], seen["step"], seen["doing"]) == ("step", 1, "sample")
            table = workerctl(run_dir, "status", "--name", "g")
            assert (table.returncode, "step: sample" in table.stdout) == (1, True)
            assert "in _act" in workerctl(run_dir, "stacks", "--name", "g", "--rank", "1").stdout
