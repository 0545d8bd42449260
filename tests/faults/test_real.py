"""One real gang for each phase and launcher: what the matrix shows without torch holds with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.fake_gangs import prompt_step
from tests.gang.gangs import QUICK, TORCHRUN, RunningGang, gang, tiny_model, workerctl
from workerproto.messages import Result
from workerproto.states import Gang

PLACES = ("boot", "rendezvous", "load", "profile", "kv", "warmup", "step", "recv", "sample", "send")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["workerctl", "torchrun"])
@pytest.mark.parametrize("place", PLACES)
def test_death_with_torch(run_dir: Path, tmp_path: Path, place: str, launcher: str) -> None:
    do = "raise" if PLACES.index(place) % 2 else "signal:SIGABRT"
    fault = f"rank=1;at={place};do={do}"
    with gang(run_dir, tmp_path, launcher=launcher, pp=2, RANKD_FAULT=fault) as running:
        if place in PLACES[6:]:
            running.wait_ready()
            with running.client() as client:
                client.wait_ready(10)
                client.submit(prompt_step(1, 0))
                code = running.wait_exit(30)
        else:
            code = running.wait_exit(60)
        assert code == (1 if launcher == "torchrun" else 70), running.said
        phase = "step, step 1" if place in PLACES[6:] else place
        lines = [line for line in running.errors() if line.startswith(f"rank 1, {phase}: ")]
        assert lines, running.said
        said = f"InjectedFault: asked for by RANKD_FAULT at {place}" if do == "raise" else "was killed by SIGABRT"
        unknown = "its process is gone, and it left no word why"  # torchrun's children are not ours to reap
        assert said in lines[0] or (launcher == "torchrun" and do != "raise" and unknown in lines[0])
        running.wait_nothing_left()


@pytest.mark.parametrize("launcher", ["workerctl", pytest.param("torchrun", marks=pytest.mark.long)])
def test_nothing_survives_a_killed_parent_even_in_a_collective(run_dir: Path, tmp_path: Path, launcher: str) -> None:
    """Rank 1 hangs, and rank 0 waits for it inside torch, where no signal handler of Python runs."""
    with gang(run_dir, tmp_path, launcher=launcher, tp=2, RANKD_FAULT="rank=1;at=step;do=sleep:60") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(prompt_step(1, 0))
            deadline = time.monotonic() + 10
            while "all_reduce" not in workerctl(run_dir, "stacks", "--name", "g", "--rank", "0").stdout:
                assert time.monotonic() < deadline, running.said
            running.process.kill()
        running.wait_nothing_left(5)


@pytest.mark.long
def test_torchrun_starts_it_again(run_dir: Path, tmp_path: Path) -> None:
    """Restarting is torchrun's there: the scheduler attaches anew, to the next epoch."""
    arguments = ["--model", str(tiny_model(tmp_path / "model")), "-pp", "2", "--name", "g", *QUICK]
    command = [*TORCHRUN, "--standalone", "--max-restarts", "1", "--nproc-per-node", "2", "-m", "worker", *arguments]
    running = RunningGang(run_dir, command, "g", tmp_path / "log", RANKD_FAULT="epoch=1;rank=1;at=step;do=raise")
    try:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            assert client.epoch == 1
            client.submit(prompt_step(1, 0))
            while client.state is not Gang.FAILED:
                client.receive(10)
        deadline = time.monotonic() + 60
        while running.said.count("READY in") < 2:
            assert time.monotonic() < deadline, running.said
            time.sleep(0.05)
        with running.client() as client:
            client.wait_ready(10)
            assert client.epoch == 2
            client.submit(prompt_step(1, 0))
            assert isinstance(client.receive(10).message, Result)
        running.process.terminate()
        running.wait_exit(20)
        running.wait_nothing_left()
    finally:
        running.end()
