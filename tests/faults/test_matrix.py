"""Every phase of a rank's life by every way to die, to hang and to be stopped in it, and by being asked to stop there:
who is named, with which code, phase and step, how soon, and that nothing of before is left. No torch: gangs that fail
once an epoch, several side by side."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.fake_gangs import SLACK, early_client, failure, fake_gang, first_token, next_event, prompt_step
from tests.faults.phases import OPERATING, STARTING, STEPPING, bring, phase_at
from tests.faults.side_by_side import WAIT_S, Case, Late, in_time, side_by_side
from tests.faults.soak import soak
from tests.gang.gangs import RunningGang, tiny_model
from worker.ctl.admin_client import ask
from worker.run_files import RunFiles
from workerproto.client import Client, TimedOut
from workerproto.codec import unpack
from workerproto.messages import Event, Result, Step
from workerproto.states import Gang

CAUSES = {
    "raise": (70, "InjectedFault: asked for by RANKD_FAULT at {place}"),
    "raise:MemoryError": (71, "MemoryError: asked for by RANKD_FAULT at {place}"),
    "exit:9": (70, "exited with code 9 and left no word why"),
    "exit:0": (70, "exited with code 0 and left no word why"),
    "signal:SIGKILL": (70, "was killed by SIGKILL"),
    "signal:SIGABRT": (70, "was killed by SIGABRT"),
    "signal:SIGSEGV": (70, "was killed by SIGSEGV"),
}
"""What is done, the code, and what is said of it."""
DEATHS = {
    1: [(0, place) for place in (*STARTING, "step", "sample", "send", *OPERATING)],
    2: [(1, "recv"), (0, "send")],
}
"""By number of stages: who dies where, an epoch each. One process starts sooner than two; with two, one receives what
the other sends."""
STARTUP_S, STEP_S, SILENCE_S, DRAIN_S = 6, 1.5, 1.5, 0.3
LIMITS = ["--startup-timeout", f"{STARTUP_S}", "--step-timeout", f"{STEP_S}", "--heartbeat-timeout", f"{SILENCE_S}"]
AT_ONCE = 6


def dies(run_dir: Path, folder: Path, do: str, pp: int) -> None:
    deaths = DEATHS[pp]
    faults = ",".join(f"epoch={epoch};rank={rank};at={at};do={do}" for epoch, (rank, at) in enumerate(deaths, 1))
    code, line = CAUSES[do]
    options = ["--max-restarts", str(len(deaths))]
    with fake_gang(run_dir, folder, *options, pp=pp, RANKD_FAULT=faults) as running, early_client(running) as client:
        late = False
        for epoch, (rank, place) in enumerate(deaths, 1):
            sequence = bring(client, place)
            began = time.monotonic()
            seen, fault = failure(client, 30)
            assert (seen, fault.code, fault.rank, fault.phase) == (epoch, code, rank, phase_at(place)), running.said
            late = late or (place not in STARTING and time.monotonic() - began > 1.0 * SLACK)
            assert fault.step == sequence
            assert fault.message == line.format(place=place)
            assert bool(fault.traceback) == (do == "raise")
            assert fault.signal == (do.partition(":")[2] if do.startswith("signal") else None)
        serves_as_if_new(running, client)
        assert "warning: RANKD_FAULT is set" in running.said
    assert not list(run_dir.rglob("core*"))
    if late:
        raise Late("an event came later than a second after the cause")


def serves_as_if_new(running: RunningGang, client: Client) -> None:
    """The same request and block as before the failure, and then an end in order."""
    next_event(client, Gang.READY, 30)
    assert client.facts is not None
    client.submit(prompt_step(1, 0))
    answer = client.receive(10).message
    assert isinstance(answer, Result)
    assert unpack(answer.tokens).tolist() == [first_token(client.facts.vocabulary)]
    running.process.terminate()
    assert running.wait_exit(10) == 0, running.said
    running.wait_nothing_left()


def hangs(run_dir: Path, folder: Path, do: str, places: tuple[str, ...]) -> None:
    """Rank 1 of 2: it is named by status as soon as it hangs and until the limit ends it, and by the event then."""
    faults = ",".join(f"epoch={epoch};rank=1;at={place};do={do}" for epoch, place in enumerate(places, 1))
    options = [*LIMITS, "--max-restarts", str(len(places))]
    with fake_gang(run_dir, folder, *options, RANKD_FAULT=faults) as running, early_client(running) as client:
        for epoch, place in enumerate(places, 1):
            bring(client, place)
            event = named_until_it_fails(running, client, epoch, place, stopped=do != "sleep:60")
            fault, phase = event.fault, phase_at(place)
            assert fault is not None
            code = 69 if do == "sleep:60" and place in ("boot", "rendezvous") else 80
            assert (event.epoch, fault.code, fault.rank, fault.phase) == (epoch, code, 1, phase), running.said
            who = f"rank 1 ({'stopped, ' if do != 'sleep:60' else ''}{phase} for "
            assert f"waiting for {who}" in fault.message
        serves_as_if_new(running, client)


def named_until_it_fails(running: RunningGang, client: Client, epoch: int, place: str, *, stopped: bool) -> Event:
    files = RunFiles(running.name, running.environment)
    named, deadline = False, time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline, running.said
        try:
            message = client.receive(0.1).message
        except TimedOut:
            message = None
        if isinstance(message, Event) and message.state == Gang.FAILED:
            if not named:
                raise Late("it was not named before the limit")
            return message
        answer = ask(files, "status")
        waited = [one for one in answer["waiting_for"] if (one["state"] == "STOPPED") == stopped]
        if answer["epoch"] != epoch or answer["state"] in ("STARTING", "FAILED"):  # first they are all waited for
            continue
        # Also another one, for as long as a busy machine keeps it from answering.
        seconds = [one["seconds"] for one in waited if (one["rank"], one["phase"]) == (1, phase_at(place))]
        assert seconds or not named, (answer["state"], answer["waiting_for"])
        if seconds and not named:
            named = True
            if seconds[0] > 1.0 * SLACK:
                raise Late(f"named only after {seconds[0]:.2f} s")


def asked_to_stop(run_dir: Path, folder: Path, do: str, place: str) -> None:
    """While a rank does not come out of there, and hears nothing."""
    pp = 2 if place == "recv" else 1
    fault = f"rank={pp - 1};at={place};do={do}"
    with fake_gang(run_dir, folder, "--drain-timeout", f"{DRAIN_S}", pp=pp, RANKD_FAULT=fault) as running:
        files = RunFiles(running.name, running.environment)
        with early_client(running) as client:
            bring(client, place)
            deadline = time.monotonic() + 30
            while not (there := ask(files, "status")["waiting_for"]) or there[0]["phase"] != phase_at(place):
                assert time.monotonic() < deadline, running.said
                time.sleep(0.02)
            running.process.terminate()
            asked = time.monotonic()
            assert running.wait_exit(WAIT_S) == 0, running.said
            in_time(asked, DRAIN_S + 2.0 * SLACK, "the end")
        assert not running.errors()
        running.wait_nothing_left()


HANGS = [("sleep:60", places) for places in (STARTING[:2], STARTING[2:4], STARTING[4:])]
HANGS += [(do, (*STEPPING, *OPERATING)) for do in ("sleep:60", "signal:SIGSTOP")] + [("signal:SIGSTOP", STARTING)]
def last_failure_ends_it(run_dir: Path, folder: Path) -> None:
    with fake_gang(run_dir, folder, "--max-restarts", "1", RANKD_FAULT="rank=0;at=step;do=exit:3") as running:
        with early_client(running) as client:
            for epoch in (1, 2):
                client.wait_ready(20)
                client.submit(Step())
                assert failure(client, 10)[0] == epoch
        assert running.wait_exit(WAIT_S) == 70
        running.wait_nothing_left()
        assert "restart 1 of 1" in running.said


def not_restarted_if_it_would_fail_again(run_dir: Path, folder: Path) -> None:
    with fake_gang(run_dir, folder, "--max-restarts", "3", RANKD_FAULT="rank=1;at=load;do=exit:65") as running:
        assert running.wait_exit(WAIT_S) == 65
        assert "restart" not in running.said


def asked_to_stop_before_it_is_back(run_dir: Path, folder: Path) -> None:
    options = ["--max-restarts", "3", "--restart-delay", "60"]
    with fake_gang(run_dir, folder, *options, RANKD_FAULT="rank=1;at=load;do=raise") as running:
        running.wait_said("restart 1 of 3 in 60 s")
        running.process.terminate()
        assert running.wait_exit(WAIT_S) == 0
        running.wait_nothing_left()


def restarted_without_its_model(run_dir: Path, folder: Path, changed: bool) -> None:
    """What ranks then find they tell, and the scheduler hears it."""
    with fake_gang(run_dir, folder, "--max-restarts", "1") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            victim = running.rank_pid(1)
            config = folder / "model" / "config.json"
            if changed:
                tiny_model(folder / "model", vocab_size=256)
            else:
                config.unlink()
            os.kill(victim, signal.SIGKILL)
            assert failure(client, WAIT_S)[0] == 1
            _, fault = failure(client, WAIT_S)
        if changed:
            wanted = (69, "roll-call: model config vocab is 128 on the coordinator and 256 on rank 0")
        else:
            wanted = (78, f"{config} does not exist: a Hugging Face model folder has one")
        assert (fault.code, fault.message) == wanted
        assert running.wait_exit(WAIT_S) == fault.code
        assert len(running.errors()) == 2, "each said once"
        running.wait_nothing_left()


def killed_at_random(run_dir: Path, folder: Path) -> None:
    """`./scripts/soak` does the same for longer."""
    assert len(soak(run_dir, folder, kills=6, seed=1)) == 6


CASES: dict[str, Case] = {
    **{f"{do} in {', '.join(places)}": partial(hangs, do=do, places=places) for do, places in HANGS},
    **{f"{do} with {pp} stages": partial(dies, do=do, pp=pp) for do in CAUSES for pp in DEATHS},
    **{
        f"SIGTERM while {do} in {place}": partial(asked_to_stop, do=do, place=place)
        for do, places in {"sleep:60": (*STARTING, *STEPPING, *OPERATING), "signal:SIGSTOP": ("load", "step")}.items()
        for place in places
    },
    "restarted on another model": partial(restarted_without_its_model, changed=True),
    "restarted without a model": partial(restarted_without_its_model, changed=False),
    **{
        case.__name__.replace("_", " "): case
        for case in (
            last_failure_ends_it, not_restarted_if_it_would_fail_again, asked_to_stop_before_it_is_back,
            killed_at_random,
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    with side_by_side(request, CASES, AT_ONCE) as outcome:
        yield outcome


@pytest.mark.parametrize("case", CASES)
def test_every_phase(outcome: Callable[[str], None], case: str) -> None:
    outcome(case)
