"""The other way in: torchrun starts the ranks, the first of which leaves a coordinator behind that it does not own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.gang.gangs import gang
from tests.gang.test_gang_failures import first_fault
from workerproto.messages import Result, Step


def test_serves_and_stops(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, launcher="torchrun", tp=2) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(Step())
            assert isinstance(client.receive(10).message, Result)
        answer = running.status()
        assert [rank["threads"] for rank in answer["ranks"]] == [1, 1]
        assert _listening_beyond_loopback([rank["pid"] for rank in answer["ranks"]]) == []
        running.process.send_signal(signal.SIGTERM)
        running.wait_exit()
        running.wait_nothing_left()
        assert not running.errors()


def _listening_beyond_loopback(pids: list[int]) -> list[object]:
    listening = [c for c in psutil.net_connections("tcp") if c.pid in pids and c.status == psutil.CONN_LISTEN]
    return [connection.laddr for connection in listening if connection.laddr.ip not in ("127.0.0.1", "::1")]


def test_fault_reaches_scheduler_and_torchrun(run_dir: Path, tmp_path: Path) -> None:
    fault_text = "rank=1;at=step;do=raise"
    with gang(run_dir, tmp_path, launcher="torchrun", pp=2, RANKD_FAULT=fault_text) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(Step())
            fault = first_fault(client)
        assert (fault.code, fault.rank, fault.phase) == (70, 1, "step")
        assert running.wait_exit() == 1
        running.wait_nothing_left()
        assert running.errors()[0].startswith("rank 1, step, step 1: InjectedFault")
        # torchrun's own summary has the cause from the rank's error file
        assert re.search(r"InjectedFault: asked for by RANKD_FAULT at step", running.said.partition("FAILED")[2])


def test_torchrun_killed_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, launcher="torchrun", tp=2) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            running.process.kill()
            fault = first_fault(client)
        assert (fault.code, fault.message) == (82, "torchrun is gone")
        running.wait_nothing_left()


@pytest.mark.parametrize("moment", ["its ranks begin", "all ranks run", "READY in"])
def test_interrupted(run_dir: Path, tmp_path: Path, moment: str) -> None:
    """Ctrl-C. torchrun passes it on, waits half a minute, and then kills."""
    with gang(run_dir, tmp_path, launcher="torchrun", tp=2) as running:
        running.wait_for_ranks(2)
        if moment != "its ranks begin":
            running.wait_said(moment)
        os.killpg(running.pid, signal.SIGINT)
        running.wait_exit(10)
        running.wait_nothing_left(5)
        assert "forcefully exiting via SIGKILL" not in running.said
        # At the very first, torchrun may not know its ranks yet: it leaves, and they find it gone.
        alone = {"torchrun is gone (exit code 82)"} if moment == "its ranks begin" else set()
        assert {error for error in running.errors() if not error.startswith("the launcher is gone")} <= alone


def test_torchrun_killed_while_its_ranks_begin(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, launcher="torchrun", tp=2) as running:
        running.wait_for_ranks(2)
        running.process.kill()
        running.wait_nothing_left(5)


def test_coordinator_killed_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, launcher="torchrun", tp=2) as running:
        running.wait_ready()
        (coordinator,) = [process for process in running.family if "worker.coordinator" in process.cmdline()]
        os.kill(coordinator.pid, signal.SIGKILL)
        assert running.wait_exit() == 1
        running.wait_nothing_left()
        assert "the coordinator is gone" in running.said


def test_name_in_use(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, "--lease-timeout", "60") as first:
        first.wait_ready()
        with first.client() as client:
            client.wait_ready(10)
            (tmp_path / "second").mkdir()
            with gang(run_dir, tmp_path / "second", launcher="torchrun", tp=2) as second:
                assert second.wait_exit() == 1
                (line,) = second.errors()
                assert line.startswith(
                    f"the name 'g' is in use in {run_dir} by process {first.pid}; give another --name"
                )
                assert "exitcode  : 75" in second.said
            client.submit(Step())
            assert isinstance(client.receive(10).message, Result)
