"""Ends that the table of docs/behaviour.md does not have, or has for another launcher, on real processes; without
torch, unless it is what may be in the way. What befalls ranks is in tests/faults.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.gang.gangs import QUICK, WORKERCTL, RunningGang, environment, gang, tiny_model, workerctl
from tests.processes import stop
from workerproto.messages import Event

FAKE = ("--device", "fake")


def test_coordinator_killed_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, *FAKE, pp=2) as running:
        running.wait_ready()
        running.process.kill()
        assert running.wait_exit() == -signal.SIGKILL
        running.wait_nothing_left()


def test_coordinator_killed_as_its_ranks_begin(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, pp=2) as running:
        running.wait_for_ranks()
        running.process.kill()
        running.wait_nothing_left(5)


def test_name_is_free_after_everything_was_killed(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, *FAKE) as running:
        running.wait_ready()
        for process in [psutil.Process(running.pid), *running.family]:
            stop(process.pid)  # so that none can sweep up
        for process in [psutil.Process(running.pid), *running.family]:
            process.kill()
        psutil.wait_procs(running.family, timeout=5)
        running.process.wait(5)
        assert list((run_dir / "g").iterdir())
        assert workerctl(run_dir, "status", "--name", "g").returncode == 3
    with gang(run_dir, tmp_path, *FAKE) as running:
        running.wait_ready()
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_exit() == 0, running.said
        running.wait_nothing_left()


@pytest.mark.parametrize("to", ["group", "rank"])
def test_asked_to_stop(run_dir: Path, tmp_path: Path, to: str) -> None:
    with gang(run_dir, tmp_path, *FAKE, tp=2) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            if to == "group":
                os.killpg(running.pid, signal.SIGINT)  # Ctrl-C
            else:
                os.kill(running.rank_pid(1), signal.SIGTERM)
            states = []
            for _ in range(2):
                message = client.receive(5).message
                assert isinstance(message, Event)
                states.append(message.state)
            assert states == ["DRAINING", "STOPPING"]
        assert running.wait_exit() == 0, running.said
        running.wait_nothing_left()
        assert not running.errors()


def test_a_rank_is_asked_to_stop_before_it_can_tell(run_dir: Path, tmp_path: Path) -> None:
    """As a service manager does, which signals every process: whichever of them is seen first, nothing has failed."""
    with gang(run_dir, tmp_path, *FAKE, tp=2) as running:
        running.wait_said("started 2 ranks")
        started = re.search(r"processes (\d+), (\d+)", running.said)
        assert started is not None
        os.kill(int(started[2]), signal.SIGTERM)
        assert running.wait_exit() == 0, running.said
        running.wait_nothing_left()
        assert "stopping: rank 1 got SIGTERM" in running.said
        assert not running.errors()


def test_asked_to_stop_while_starting(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, tp=2) as running:
        deadline = time.monotonic() + 30
        while "started 2 ranks" not in running.said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.process.send_signal(signal.SIGINT)
        assert running.wait_exit() == 0
        running.wait_nothing_left()


def test_detached_gang(run_dir: Path, tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "model"))
    up = ["up", "--detach", "--model", model, *QUICK, *FAKE, "--log-file", str(tmp_path / "log")]
    result = workerctl(run_dir, *up, limit_s=60)
    try:
        assert result.returncode == 0, result.stderr
        assert "READY in" in result.stderr
        assert workerctl(run_dir, "status").returncode == 0
        second = workerctl(run_dir, *up)
        assert (second.returncode, len(second.stderr.splitlines())) == (75, 1)
    finally:
        down = workerctl(run_dir, "down")
    assert (down.returncode, down.stdout, down.stderr) == (0, "", "")
    assert not list(run_dir.iterdir())
    assert "stopping: workerctl down" in (tmp_path / "log").read_text()
    failed = workerctl(run_dir, *up[:-2], limit_s=60, RANKD_FAULT="rank=0;at=load;do=raise:MemoryError")
    assert failed.returncode == 71
    assert "rankd: error: rank 0, load: MemoryError" in failed.stderr
    assert f"rankd: logs are in {run_dir}/_logs/default" in failed.stderr.splitlines()
    assert sorted(path.name for path in run_dir.iterdir()) == ["_logs", "_reports"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_detaching_launcher_ends_before_ready(run_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    with gang(run_dir, tmp_path, "--detach", tp=2) as running:
        running.wait_for_ranks()
        running.process.send_signal(number)
        running.wait_exit(5)
        running.wait_nothing_left()
        assert "stopping: its starter is gone" in running.said


ASKED_AT_THE_CLAIM = """
import os, signal, sys
from worker.coordinator import run
from worker.ctl.__main__ import main

claim, number = run.Claim, int(sys.argv.pop(1))

def claim_then_signal(files):
    claimed = claim(files)
    os.kill(os.getpid(), number)
    return claimed

run.Claim = claim_then_signal
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_asked_to_stop_as_the_name_is_claimed(run_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    up = ["up", "--model", str(tiny_model(tmp_path / "model")), *QUICK]
    result = subprocess.run(
        [sys.executable, "-c", ASKED_AT_THE_CLAIM, str(int(number)), *up], env=environment(run_dir), cwd=run_dir,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert f"stopping: {number.name}" in result.stderr
    assert not list(run_dir.iterdir())


def started_by_a_shell(run_dir: Path, folder: Path, script: str) -> RunningGang:
    up = [*WORKERCTL, "up", "--model", str(tiny_model(folder / "model")), "--name", "g", *QUICK, *FAKE]
    return RunningGang(run_dir, ["sh", "-c", script, "-", *up], "g", folder / "log")


def test_what_its_starter_ignores_it_ignores(run_dir: Path, tmp_path: Path) -> None:
    """nohup has it outlive a terminal, and a script's & a Ctrl-C."""
    running = started_by_a_shell(run_dir, tmp_path, 'trap "" HUP INT; exec "$@"')
    try:
        running.wait_ready()
        os.killpg(running.pid, signal.SIGHUP)
        os.killpg(running.pid, signal.SIGINT)
        assert running.status()["state"] == "READY"
        running.process.terminate()
        assert running.wait_exit() == 0, running.said
        assert "stopping: SIGTERM" in running.said
    finally:
        running.end()


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-"])
def test_started_without_standard_streams(run_dir: Path, tmp_path: Path, closed: str) -> None:
    """Nothing that is printed may go into a socket that has the number of a closed one."""
    running = started_by_a_shell(run_dir, tmp_path, f'exec "$@" {closed}')
    try:
        deadline = time.monotonic() + 30
        while workerctl(run_dir, "status", "--name", "g").returncode:
            assert running.process.poll() is None
            assert time.monotonic() < deadline
        running.process.terminate()
        assert running.wait_exit() == 0
        running.wait_nothing_left()
    finally:
        running.end()
