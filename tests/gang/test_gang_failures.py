"""The promises of an end, on real processes: who is named, the exit code, how soon, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.gang.gangs import QUICK, RunningGang, environment, gang, tiny_model, workerctl
from tests.processes import stop
from workerproto.client import Client
from workerproto.messages import Event, Fault, Step
from workerproto.states import Gang as GangState

EVENT_LIMIT_S = 1.0
GONE_LIMIT_S = 2.0
SLACK = 3.0  # of a loaded machine


def first_fault(client: Client) -> Fault:
    """Of the FAILED event that must come within its limit."""
    deadline = time.monotonic() + EVENT_LIMIT_S * SLACK
    while True:
        received = client.receive(max(0.0, deadline - time.monotonic()))
        if isinstance(received.message, Event) and received.message.state == GangState.FAILED:
            assert received.message.fault is not None
            return received.message.fault


def ended(running: RunningGang, code: int) -> None:
    assert running.wait_exit(GONE_LIMIT_S * SLACK) == code, running.said
    running.wait_nothing_left(GONE_LIMIT_S * SLACK)


def test_rank_that_raises_is_the_first_cause(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, pp=2, RANKD_FAULT="rank=0;at=step;n=2;do=raise") as running:
        running.wait_ready()
        assert "warning: RANKD_FAULT is set" in running.said
        with running.client() as client:
            client.wait_ready(10)
            client.submit(Step())
            client.submit(Step())
            fault = first_fault(client)
        assert (fault.code, fault.rank, fault.phase, fault.step) == (70, 0, "step", 2)
        assert "InjectedFault: asked for by RANKD_FAULT" in fault.message
        assert "step_loop.py" in fault.traceback
        ended(running, 70)
        assert running.errors()[0].startswith("rank 0, step, step 2: InjectedFault")


def test_rank_killed_by_a_signal(run_dir: Path, tmp_path: Path) -> None:
    """SIGABRT, as from a C++ assertion: no Python handler runs, and the kernel would dump core."""
    with gang(run_dir, tmp_path, tp=2) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            os.kill(running.rank_pid(1), signal.SIGABRT)
            fault = first_fault(client)
        assert (fault.code, fault.rank, fault.signal) == (70, 1, "SIGABRT")
        ended(running, 70)
        assert running.errors() == ["rank 1, ready: was killed by SIGABRT (exit code 70)"]
        assert not list(run_dir.glob("core*"))


def test_coordinator_killed_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, pp=2) as running:
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
    with gang(run_dir, tmp_path) as running:
        running.wait_ready()
        for process in [psutil.Process(running.pid), *running.family]:
            stop(process.pid)  # so that none can sweep up
        for process in [psutil.Process(running.pid), *running.family]:
            process.kill()
        psutil.wait_procs(running.family, timeout=5)
        running.process.wait(5)
        assert list((run_dir / "g").iterdir())
        assert workerctl(run_dir, "status", "--name", "g").returncode == 3
    with gang(run_dir, tmp_path) as running:
        running.wait_ready()
        running.process.send_signal(signal.SIGTERM)
        ended(running, 0)


def test_limit_of_a_step(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, "--step-timeout", "0.6", pp=2, RANKD_FAULT="rank=1;at=step;do=sleep:60") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(Step())
            fault = first_fault(client)
        assert (fault.code, fault.rank) == (80, 1)
        assert "waiting for rank 1 (step for" in fault.message
        ended(running, 80)


def test_status_while_a_rank_is_stuck(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, pp=2) as running:
        running.wait_ready()
        stuck = psutil.Process(running.rank_pid(1))
        with running.client() as client:
            client.wait_ready(10)
            stop(stuck.pid)
            client.submit(Step())
            began = time.monotonic()
            answer = running.status()
            assert time.monotonic() - began < 0.3 * SLACK
        assert answer["state"] == "READY"
        assert answer["ranks"][1]["step"] is None
        stuck.resume()
        running.process.send_signal(signal.SIGTERM)
        ended(running, 0)


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("rank=1;at=load;do=raise", 70, "rank 1, load: InjectedFault"),
        ("rank=1;at=rendezvous;do=exit:9", 70, "rank 1, rendezvous: exited with code 9"),
        # rank 1 hangs; rank 0 waits for it in a collective and is not named
        ("rank=1;at=warmup;do=sleep:60", 80, "rank 1, warmup: not ready within 12 s (WARMING); "),
        pytest.param(
            "rank=1;at=boot;do=sleep:60", 69, "rank 1, boot: not ready within 12 s (ROLL_CALL); there: rank 0; ",
            marks=pytest.mark.long,  # ranks without torch show it in tests/faults
        ),
    ],
)
def test_failure_while_starting(run_dir: Path, tmp_path: Path, fault: str, code: int, line: str) -> None:
    limit = "12" if "sleep" in fault else "60"
    with gang(run_dir, tmp_path, "--startup-timeout", limit, tp=2, RANKD_FAULT=fault) as running:
        assert running.wait_exit() == code, running.said
        assert running.errors()[0].startswith(line), running.said
        running.wait_nothing_left()


@pytest.mark.parametrize("to", ["group", "rank"])
def test_asked_to_stop(run_dir: Path, tmp_path: Path, to: str) -> None:
    with gang(run_dir, tmp_path, tp=2) as running:
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
        ended(running, 0)
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
    up = ["up", "--detach", "--model", model, *QUICK, "--log-file", str(tmp_path / "log")]
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
    failed = workerctl(run_dir, "up", "--detach", "--model", model, limit_s=60)  # there are no weights
    assert failed.returncode == 65
    assert "rankd: error: rank 0, load:" in failed.stderr
    assert f"rankd: logs are in {run_dir}/_logs/default" in failed.stderr.splitlines()
    assert sorted(path.name for path in run_dir.iterdir()) == ["_logs", "_reports"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long), signal.SIGKILL]
)
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
