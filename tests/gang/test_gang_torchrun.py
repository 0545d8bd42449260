"""The other way in: torchrun starts the ranks, the first of which leaves a coordinator behind that it does not own.

Ranks without torch, but for one gang: what torchrun does to them, and they to it, is the same. In tests/faults real
ones break under it in every phase.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.faults.fake_gangs import FAKE, failure, fake_gang, prompt_step
from tests.faults.side_by_side import WAIT_S, Case, in_time, side_by_side
from tests.gang.gangs import QUICK, ROOT, TORCHRUN, RunningGang, gang, tiny_model
from tests.processes import stop
from worker.coordinator.run import TORCHRUN_DRAIN_S
from workerproto.messages import Result, Step

KILLS_AFTER_S = 30.0
AT_ONCE = 4
CASES: dict[str, Case] = {}


def case(act: Case) -> Case:
    CASES[act.__name__.replace("_", " ")] = act
    return act


def by_torchrun(run_dir: Path, folder: Path, *options: str, **more: str) -> AbstractContextManager[RunningGang]:
    return fake_gang(run_dir, folder, *options, launcher="torchrun", **more)


@case
def serves_and_stops(run_dir: Path, folder: Path) -> None:
    with gang(run_dir, folder, launcher="torchrun", tp=2) as running:
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


@case
def a_drain_ends_well_before_torchrun_kills(run_dir: Path, folder: Path) -> None:
    """However long it was allowed to be: a step that does not end is given up in time, and a rank that is stopped."""
    with by_torchrun(run_dir, folder, "--drain-timeout", "60", RANKD_FAULT="rank=1;at=step;do=sleep:60") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(prompt_step(1, 0))
            while not running.status()["waiting_for"]:
                pass
            stop(running.rank_pid(0))
            began = time.monotonic()
            running.process.terminate()
            running.wait_exit(60)
        assert time.monotonic() - began > TORCHRUN_DRAIN_S
        in_time(began, KILLS_AFTER_S - 5, "the end")
        assert "forcefully exiting via SIGKILL" not in running.said
        assert not running.errors()
        running.wait_nothing_left()


@case
def a_fault_reaches_scheduler_and_torchrun(run_dir: Path, folder: Path) -> None:
    with by_torchrun(run_dir, folder, RANKD_FAULT="rank=1;at=step;do=raise") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(prompt_step(1, 0))
            _, fault = failure(client, WAIT_S)
        assert (fault.code, fault.rank, fault.phase) == (70, 1, "step")
        assert running.wait_exit() == 1
        running.wait_nothing_left()
        assert running.errors()[0].startswith("rank 1, step, step 1: InjectedFault")
        # torchrun's own summary has the cause from the rank's error file
        assert re.search(r"InjectedFault: asked for by RANKD_FAULT at step", running.said.partition("FAILED")[2])


@case
def torchrun_is_killed(run_dir: Path, folder: Path) -> None:
    with adopted(run_dir, folder) as running:
        running.wait_ready()
        first, second = running.rank_pid(0), running.rank_pid(1)
        (coordinator,) = running.processes("worker.coordinator")
        children = psutil.Process(running.pid).children()
        (torchrun,) = [child for child in children if child.pid != coordinator.pid]
        with running.client() as client:
            client.wait_ready(10)
            torchrun.kill()
            _, fault = failure(client, WAIT_S)
        assert (fault.code, fault.message) == (82, "torchrun is gone")
        running.wait_nothing_left()
        ends = dict(re.findall(r"^process (\d+) ended with (\S+)$", running.said, re.MULTILINE))
        assert (ends[str(first)], ends[str(coordinator.pid)]) == ("82", "82")
        assert ends[str(second)] == f"{-signal.SIGKILL}", "by the kernel, see die_with_parent"


@contextmanager
def adopted(run_dir: Path, folder: Path) -> Iterator[RunningGang]:
    """Below somebody who says how each process ended whose parent is gone."""
    arguments = ["--model", str(tiny_model(folder / "model")), "-pp", "2", "--name", "g", *QUICK, *FAKE]
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "worker", *arguments]
    command = [sys.executable, str(ROOT / "tests/faults/reaper.py"), *torchrun]
    running = RunningGang(run_dir, command, "g", folder / "log")
    try:
        yield running
    finally:
        running.end()


@case
def torchrun_is_killed_while_its_ranks_begin(run_dir: Path, folder: Path) -> None:
    with by_torchrun(run_dir, folder) as running:
        running.wait_for_ranks(2)
        running.process.kill()
        running.wait_nothing_left(5)


@case
def the_coordinator_is_killed(run_dir: Path, folder: Path) -> None:
    with by_torchrun(run_dir, folder) as running:
        running.wait_ready()
        (coordinator,) = running.processes("worker.coordinator")
        coordinator.kill()
        assert running.wait_exit() == 1
        running.wait_nothing_left()
        assert "the coordinator is gone" in running.said
        assert re.search(r"exitcode +: 82", running.said), "as torchrun shows it"


@case
def a_rank_is_asked_to_stop_as_it_begins(run_dir: Path, folder: Path) -> None:
    """However early: nobody waits for it until the start-up limit."""
    with by_torchrun(run_dir, folder, "--startup-timeout", "120") as running:
        running.wait_for_ranks(2)
        running.processes("worker")[-1].terminate()
        running.wait_exit(30)
        running.wait_nothing_left(5)


def interrupted(run_dir: Path, folder: Path, moment: str) -> None:
    """Ctrl-C. torchrun passes it on, waits half a minute, and then kills."""
    with by_torchrun(run_dir, folder) as running:
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


for moment in ("its ranks begin", "all ranks run", "READY in"):
    CASES[f"interrupted, {moment}"] = partial(interrupted, moment=moment)


@case
def the_name_is_in_use(run_dir: Path, folder: Path) -> None:
    with fake_gang(run_dir, folder, "--lease-timeout", "60", pp=1) as first:
        first.wait_ready()
        with first.client() as client:
            client.wait_ready(10)
            (folder / "second").mkdir()
            with by_torchrun(run_dir, folder / "second") as second:
                assert second.wait_exit() == 1
                (line,) = second.errors()
                assert line.startswith(
                    f"the name 'g' is in use in {run_dir} by process {first.pid}; give another --name"
                )
                assert "exitcode  : 75" in second.said
            client.submit(Step())
            assert isinstance(client.receive(10).message, Result)


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    with side_by_side(request, CASES, AT_ONCE) as outcome:
        yield outcome


@pytest.mark.parametrize("case", CASES)
def test_torchrun(outcome: Callable[[str], None], case: str) -> None:
    outcome(case)
