"""With torch, by both launchers: what the matrix shows without it holds in every phase of a real gang."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.faults.fake_gangs import SLACK, early_client, failure, next_event, prompt_step
from tests.faults.phases import OPERATING, STARTING, STEPPING, bring, phase_at
from tests.faults.side_by_side import WAIT_S, Case, in_time, side_by_side
from tests.gang.gangs import QUICK, TORCHRUN, WORKERCTL, RunningGang, gang, tiny_model, workerctl
from workerproto.client import Client, ClientError
from workerproto.messages import Fault, Result
from workerproto.states import Gang

LAUNCHERS = ("workerctl", "torchrun")
START_S, DRAIN_S = 60.0, 0.3
AT_ONCE = 3


DEATHS = {
    1: ("boot", "load", "profile", "kv", "step", "sample", *OPERATING),
    2: ("rendezvous", "warmup", "recv", "send"),
}
"""By number of stages. torch is what takes long to start, so where nobody waits for a rank there is none but that."""


def dies(run_dir: Path, folder: Path, launcher: str, pp: int) -> None:
    """The last rank in one place after the other, an epoch each, by exceptions and by aborts in turn. Then a step is
    right."""
    places = DEATHS[pp]
    ways = {place: "signal:SIGABRT" if number % 2 else "raise" for number, place in enumerate(places)}
    faults = [f"epoch={epoch};rank={pp - 1};at={place};do={ways[place]}" for epoch, place in enumerate(places, 1)]
    running = restarting(run_dir, folder, launcher, pp, len(places), RANKD_FAULT=",".join(faults))
    try:
        if launcher == "workerctl":
            with early_client(running) as client:
                for epoch, place in enumerate(places, 1):
                    sequence = bring(client, place)
                    seen, fault = failure(client, START_S)
                    assert seen == epoch
                    assert told_truly(fault, (pp - 1, place), sequence, ways[place], launcher), running.said
                next_event(client, Gang.READY, START_S)
                serves(client)
        else:  # restarting is its own: schedulers attach anew
            for epoch, place in enumerate(places, 1):
                with closing(client_of(running, epoch)) as client:
                    sequence = bring(client, place)
                    _, fault = failure(client, START_S)
                    assert told_truly(fault, (pp - 1, place), sequence, ways[place], launcher), running.said
            with closing(client_of(running, len(places) + 1)) as client:
                client.wait_ready(START_S)
                serves(client)
        running.process.terminate()
        running.wait_exit(WAIT_S)
        running.wait_nothing_left()
        causes = [line for line in running.errors() if line.startswith("rank ")]
        wanted = [[f"rank {pp - 1}", f" {phase_at(place)}"] for place in places]
        assert [re.split("[:,]", line)[:2] for line in causes] == wanted
    finally:
        running.end()


def restarting(run_dir: Path, folder: Path, launcher: str, pp: int, restarts: int, **more: str) -> RunningGang:
    arguments = ["--model", str(tiny_model(folder / "model")), "-pp", f"{pp}", "--name", "g", *QUICK]
    often = ["--max-restarts", f"{restarts}"]
    if launcher == "torchrun":
        command = [*TORCHRUN, "--standalone", *often, "--nproc-per-node", f"{pp}", "-m", "worker", *arguments]
    else:
        command = [*WORKERCTL, "up", *arguments, *often, "--restart-delay", "0"]
    return RunningGang(run_dir, command, "g", folder / "log", **more)


def client_of(running: RunningGang, epoch: int) -> Client:
    """Of this epoch's coordinator; that of the one before may still say its last words."""
    deadline = time.monotonic() + START_S
    while True:
        assert time.monotonic() < deadline, running.said
        try:
            client = running.client()
            client.attach()
        except ClientError:
            client.close()
        else:
            if client.epoch == epoch:
                return client
            client.close()
        time.sleep(0.02)


def told_truly(fault: Fault, where: tuple[int, str], sequence: int | None, way: str, launcher: str) -> bool:
    """torchrun's children are not ours to reap: of a signal it hides nothing is invented."""
    rank, place = where
    if way == "raise":
        said = [f"InjectedFault: asked for by RANKD_FAULT at {place}"]
    else:
        said = ["was killed by SIGABRT"]
        said += ["its process is gone, and it left no word why"] if launcher == "torchrun" else []
    found = (fault.code, fault.rank, fault.phase, fault.step, bool(fault.traceback))
    return found == (70, rank, phase_at(place), sequence, way == "raise") and fault.message in said


def serves(client: Client) -> None:
    client.submit(prompt_step(1, 0))
    assert isinstance(client.receive(WAIT_S).message, Result)


def hangs(run_dir: Path, folder: Path) -> None:
    """Rank 1 hangs; rank 0 waits for it in a collective and is not named."""
    limit = ["--startup-timeout", "12"]
    with gang(run_dir, folder, *limit, tp=2, RANKD_FAULT="rank=1;at=warmup;do=sleep:60") as running:
        assert running.wait_exit(START_S) == 80, running.said
        assert running.errors()[0].startswith("rank 1, warmup: not ready within 12 s (WARMING); "), running.said
        running.wait_nothing_left()


@contextmanager
def in_a_collective(run_dir: Path, folder: Path, launcher: str) -> Iterator[RunningGang]:
    """Rank 1 hangs, and rank 0 waits for it inside torch, where no signal handler of Python runs."""
    drain, fault = ["--drain-timeout", f"{DRAIN_S}"], "rank=1;at=step;do=sleep:60"
    with gang(run_dir, folder, *drain, launcher=launcher, tp=2, RANKD_FAULT=fault) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(WAIT_S)
            client.submit(prompt_step(1, 0))
            deadline = time.monotonic() + WAIT_S
            while "all_reduce" not in workerctl(run_dir, "stacks", "--name", "g", "--rank", "0").stdout:
                assert time.monotonic() < deadline, running.said
            yield running


def parent_is_killed(run_dir: Path, folder: Path, launcher: str) -> None:
    with in_a_collective(run_dir, folder, launcher) as running:
        running.process.kill()
        running.wait_nothing_left(5)


def asked_to_stop(run_dir: Path, folder: Path) -> None:
    with in_a_collective(run_dir, folder, "workerctl") as running:
        began = time.monotonic()
        running.process.terminate()
        assert running.wait_exit(WAIT_S) == 0, running.said
        running.wait_nothing_left()
        in_time(began, DRAIN_S + 2 * SLACK, "the end")
        assert not running.errors()


CASES: dict[str, Case] = {
    "a hang while it starts": hangs,
    **{
        f"deaths in {', '.join(places)} by {launcher}": partial(dies, launcher=launcher, pp=pp)
        for launcher in LAUNCHERS
        for pp, places in DEATHS.items()
    },
    **{
        f"{launcher} is killed while a rank is in a collective": partial(parent_is_killed, launcher=launcher)
        for launcher in LAUNCHERS
    },
    "workerctl is asked to stop while a rank is in a collective": asked_to_stop,
}


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    with side_by_side(request, CASES, AT_ONCE) as outcome:
        yield outcome


@pytest.mark.parametrize("case", CASES)
def test_with_torch(outcome: Callable[[str], None], case: str) -> None:
    outcome(case)


def test_every_phase_is_there() -> None:
    assert sorted(DEATHS[1] + DEATHS[2]) == sorted(STARTING + STEPPING + OPERATING)
