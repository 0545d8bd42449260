"""One real gang for each phase and launcher: what the matrix shows without torch holds with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fake_gangs import prompt_step
from tests.gang.gangs import gang

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
