"""Log lines of real ranks: where each comes from, what C code prints, levels that change while a gang runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang.gangs import WORKERCTL, RunningGang, environment, gang, workerctl
from tests.gang.test_gang_serving import decode, prompt, result_of
from workerproto.messages import Refused

PLACE = r"\S+Z (debug|info|warning|error) +\S+ rank (\d+) pp (\d+) tp (\d+) epoch 1 \w+: "


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    run_dir = Path(tempfile.mkdtemp(prefix="rankd-"))
    fault = "rank=1;at=send;n=99;do=raise"  # never comes to it, but is announced
    with gang(run_dir, tmp_path_factory.mktemp("logs"), "--device", "fake", pp=2, RANKD_FAULT=fault) as running:
        yield running.wait_ready()
    shutil.rmtree(run_dir, ignore_errors=True)


def wait_for(gang: RunningGang, text: str, *arguments: str) -> str:
    deadline = time.monotonic() + 10
    while text not in (said := workerctl(gang.run_dir, "logs", "--name", "g", *arguments).stdout):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    return said


def test_every_line_of_a_rank_says_where_it_comes_from(serving: RunningGang) -> None:
    for rank in (0, 1):
        lines = wait_for(serving, "phase warmup", "--rank", str(rank)).splitlines()
        places = [re.match(PLACE, line) for line in lines]
        assert all(place and place.group(2, 3, 4) == (str(rank), str(rank), "0") for place in places), lines
    assert "RANKD_FAULT is set" in lines[0], "from the first line on"
    node = os.uname().nodename
    warned = "rankd: warning: RANKD_FAULT is set: rank 1 will raise at send (time 99)"
    shown = f"{warned} ({node} rank 1 pp 1 tp 0 epoch 1)"
    assert shown in serving.said.splitlines(), "a rank's warning is shown on the terminal too, with its place"
    assert "coordinator: READY in" in workerctl(serving.run_dir, "logs", "--name", "g").stdout


def test_a_level_changes_while_it_runs_and_logs_are_followed(serving: RunningGang) -> None:
    follow = subprocess.Popen(
        [*WORKERCTL, "logs", "--name", "g", "--rank", "1", "--lines", "0", "-f"], env=environment(serving.run_dir),
        cwd=serving.run_dir, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follow.stdout is not None
    try:
        with serving.client() as client:
            client.wait_ready(10)
            client.submit(prompt(1, [1, 2, 3], [5]))
            result_of(client)
            assert workerctl(serving.run_dir, "log-level", "debug", "--name", "g", "--rank", "1").returncode == 0
            wait_for(serving, "log level: debug", "--rank", "1")
            client.submit(decode(1, 3))
            result_of(client)
            client.submit(decode(77, 3))
            assert isinstance(client.receive(10).message, Refused)
        seen = ""
        while "is refused: UNKNOWN_REQUEST" not in seen:
            seen += follow.stdout.readline()  # the test's own limit ends it
        assert re.search(r"debug +\S+ rank 1 pp 1 tp 0 epoch 1 steps: step \d+: 1 requests, 1 blocks", seen)
    finally:
        follow.send_signal(signal.SIGINT)
        assert follow.wait(10) == 130
        follow.stdout.close()
    assert "debug" not in workerctl(serving.run_dir, "logs", "--name", "g", "--rank", "0").stdout
    wrong = workerctl(serving.run_dir, "log-level", "info", "--name", "g", "--rank", "9")
    assert (wrong.returncode, wrong.stderr) == (78, "rankd: error: rank is '9', the gang's are 0 to 1\n")
    assert workerctl(serving.run_dir, "log-level", "info", "--name", "g").returncode == 0
    assert workerctl(serving.run_dir, "log-level", "info", "--name", "nobody").returncode == 3


def test_ranks_that_come_later_are_followed_too(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "coordinator.log").write_text("first\n")
    follow = subprocess.Popen(
        [*WORKERCTL, "logs", "--name", "g", "--log-dir", str(tmp_path), "-f"], env=environment(run_dir),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follow.stdout is not None
    try:
        assert follow.stdout.readline() == "coordinator | first\n"
        (tmp_path / "rank0.log").write_text("second\n")
        assert follow.stdout.readline() == "rank0 | second\n"  # the test's own limit ends it
    finally:
        follow.kill()
        follow.wait(10)
        follow.stdout.close()


def test_json_on_every_line_and_logs_of_a_failure_stay(run_dir: Path, tmp_path: Path) -> None:
    options = ["--device", "fake", "--log-format", "json", "--metrics-port", "0"]
    with gang(run_dir, tmp_path, *options, pp=2, RANKD_FAULT="rank=1;at=warmup;do=signal:SIGABRT") as running:
        assert running.wait_exit() == 70
        spoken = [json.loads(line) for line in running.said.splitlines()]
    assert {"time", "level", "node", "rank", "pp", "tp", "epoch", "logger", "message"} == set(spoken[0])
    assert ("warning", 1, 1) in [(line["level"], line["rank"], line["pp"]) for line in spoken]
    error = next(line for line in spoken if line["level"] == "error")
    assert (error["rank"], "was killed by SIGABRT" in error["message"]) == (None, True)
    assert spoken[-1]["message"] == f"logs are in {run_dir}/_logs/g"
    (path,) = workerctl(run_dir, "logs", "--name", "g", "--rank", "1", "--paths").stdout.splitlines()
    text = Path(path).read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert {line["rank"] for line in lines} == {1}
    assert lines[-1]["message"] == "phase warmup"
    assert "Fatal Python error: Aborted" in text, "the last words of C are there too, with the stack"
    assert "most recent call first" in text


def test_what_a_ranks_own_stdout_takes_goes_into_its_file(run_dir: Path, tmp_path: Path) -> None:
    """As NCCL's and gloo's lines do, which know nothing of Python's logging; and a given folder is kept."""
    folder = tmp_path / "kept"
    options = ["--device", "fake", "--log-dir", str(folder)]
    with gang(run_dir, tmp_path, *options) as running:
        running.wait_ready()
        pid = running.rank_pid(0)
        assert "READY in" in workerctl(run_dir, "logs", "--name", "g").stdout, "by its name, wherever they are"
        for number in (1, 2):
            assert os.readlink(f"/proc/{pid}/fd/{number}") == str(folder / "rank0.log")
        assert workerctl(run_dir, "down", "--name", "g").returncode == 0
        assert running.wait_exit() == 0
    assert sorted(path.name for path in folder.iterdir()) == ["coordinator.log", "rank0.log"]
    said = workerctl(run_dir, "logs", "--name", "g", "--log-dir", str(folder)).stdout
    assert "stopping: workerctl down" in said
    assert not list(run_dir.iterdir())
