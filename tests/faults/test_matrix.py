"""Every phase of a rank's life by every way to die in it: who is named, with which code, phase and step, how soon, and
that the gang is back with nothing of before. No torch: a gang of two ranks that dies once an epoch."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.fake_gangs import SLACK, early_client, failure, fake_gang, first_token, next_event, prompt_step
from workerproto.codec import unpack
from workerproto.messages import Done, Result, Step
from workerproto.operations import Sleep, Wake
from workerproto.states import Gang

STARTING = ("boot", "rendezvous", "load", "profile", "kv", "warmup")
# what is done, the code, and what is said of it
CAUSES = {
    "raise": (70, "InjectedFault: asked for by RANKD_FAULT at {place}"),
    "raise:MemoryError": (71, "MemoryError: asked for by RANKD_FAULT at {place}"),
    "exit:9": (70, "exited with code 9 and left no word why"),
    "exit:0": (70, "exited with code 0 and left no word why"),
    "signal:SIGKILL": (70, "was killed by SIGKILL"),
    "signal:SIGABRT": (70, "was killed by SIGABRT"),
    "signal:SIGSEGV": (70, "was killed by SIGSEGV"),
}


DEATHS = {
    1: [(0, place) for place in (*STARTING, "step", "sample", "send", "sleep", "wake")],
    2: [(1, "recv"), (1, "send"), (0, "step"), (0, "send")],
}
"""By number of stages: who dies where, an epoch each. One process starts sooner than two."""
QUICK = [("raise", 1), ("raise", 2), ("exit:9", 1), ("signal:SIGKILL", 1)]


@pytest.mark.parametrize(
    ("do", "pp"),
    [pytest.param(do, pp, marks=() if (do, pp) in QUICK else pytest.mark.long) for do in CAUSES for pp in DEATHS],
)
def test_death_in_every_phase(run_dir: Path, tmp_path: Path, do: str, pp: int) -> None:
    deaths = DEATHS[pp]
    faults = ",".join(f"epoch={epoch};rank={rank};at={at};do={do}" for epoch, (rank, at) in enumerate(deaths, 1))
    code, line = CAUSES[do]
    with fake_gang(run_dir, tmp_path, "--max-restarts", str(len(deaths)), pp=pp, RANKD_FAULT=faults) as running:
        with early_client(running) as client:
            for epoch, (rank, place) in enumerate(deaths, 1):
                sequence, phase = None, place
                if place not in STARTING:
                    client.wait_ready(20)
                    began = time.monotonic()
                if place in ("sleep", "wake"):
                    phase = "operation"
                    client.control(Sleep(1))
                    if place == "wake":
                        while not isinstance(client.receive(10).message, Done):
                            pass
                        client.control(Wake())
                elif place not in STARTING:
                    phase = "step"
                    sequence = client.submit(prompt_step(1, 0))
                seen, fault = failure(client, 20)
                assert (seen, fault.code, fault.rank, fault.phase) == (epoch, code, rank, phase), running.said
                assert place in STARTING or time.monotonic() - began < 1.0 * SLACK
                assert fault.step == sequence
                assert fault.message == line.format(place=place)
                assert bool(fault.traceback) == (do == "raise")
                assert fault.signal == (do.partition(":")[2] if do.startswith("signal") else None)
            next_event(client, Gang.READY, 20)
            assert client.facts is not None
            client.submit(prompt_step(1, 0))  # the same request and block: nothing of before is left
            answer = client.receive(10).message
            assert isinstance(answer, Result)
            assert unpack(answer.tokens).tolist() == [first_token(client.facts.vocabulary)]
            running.process.terminate()
            assert running.wait_exit(10) == 0, running.said
        running.wait_nothing_left()


def test_the_last_failure_ends_it(run_dir: Path, tmp_path: Path) -> None:
    fault = "rank=0;at=step;do=exit:3"
    with fake_gang(run_dir, tmp_path, "--max-restarts", "1", RANKD_FAULT=fault) as running:
        with early_client(running) as client:
            for epoch in (1, 2):
                client.wait_ready(20)
                client.submit(Step())
                assert failure(client, 10)[0] == epoch
        assert running.wait_exit(2 * SLACK) == 70
        running.wait_nothing_left()
        assert "restart 1 of 1" in running.said


def test_what_would_fail_again_is_not_restarted(run_dir: Path, tmp_path: Path) -> None:
    with fake_gang(run_dir, tmp_path, "--max-restarts", "3", RANKD_FAULT="rank=1;at=load;do=exit:65") as running:
        assert running.wait_exit(20) == 65
        assert "restart" not in running.said


def test_asked_to_stop_before_it_is_back(run_dir: Path, tmp_path: Path) -> None:
    options = ["--max-restarts", "3", "--restart-delay", "60"]
    with fake_gang(run_dir, tmp_path, *options, RANKD_FAULT="rank=1;at=load;do=raise") as running:
        running.wait_said("restart 1 of 3 in 60 s")
        running.process.terminate()
        assert running.wait_exit(2 * SLACK) == 0
        running.wait_nothing_left()
