"""Random deaths in a row: no event is lost, the next step is right each time, and nothing leaks.

    python -m tests.faults.soak --kills 100 [--seed N] [--device fake|cpu]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from tests.faults.fake_gangs import first_token, next_event, prompt_step
from tests.gang.gangs import RunningGang, gang
from worker.coordinator.report import KEPT
from workerproto.client import Client
from workerproto.codec import unpack
from workerproto.messages import Event, Refused, Result, Step
from workerproto.states import Gang

SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTRAP)
LEAK_BYTES = 16 << 20
READY_LIMIT_S = 60.0


def soak(run_dir: Path, folder: Path, kills: int, seed: int, device: str = "fake") -> list[float]:
    """Seconds from each death to READY. AssertionError if a promise was broken."""
    chance = random.Random(seed)
    options = ["--device", device, "--max-restarts", str(kills), "--restart-delay", "0", "--lease-timeout", "60"]
    with gang(run_dir, folder, *options, pp=2) as running:
        running.wait_ready()
        coordinator = psutil.Process(running.pid)
        with running.client() as client:
            client.wait_ready(READY_LIMIT_S)
            took = [_one_death(running, client, chance, device)]
            before = _held(coordinator)
            took += [_one_death(running, client, chance, device) for _ in range(kills - 1)]
            after = _held(coordinator)
            running.process.terminate()
            assert running.wait_exit(20) == 0, running.said
        running.wait_nothing_left()
    assert after[0] <= before[0], f"{before[0]} descriptors after the first death, {after[0]} after {kills}"
    assert after[1] <= before[1], f"{before[1]} threads after the first death, {after[1]} after {kills}"
    assert after[2] - before[2] < LEAK_BYTES, f"{before[2]} bytes after the first death, {after[2]} after {kills}"
    assert len(list((run_dir / "_reports").iterdir())) == min(kills, KEPT)
    return took


def _held(process: psutil.Process) -> tuple[int, int, int]:
    return process.num_fds(), process.num_threads(), process.memory_info().rss


def _one_death(running: RunningGang, client: Client, chance: random.Random, device: str) -> float:
    epoch, before = client.epoch, client.credit
    victim = running.rank_pid(chance.randrange(2))
    sent = [client.submit(prompt_step(request, request)) for request in range(chance.randrange(before + 1))]
    time.sleep(chance.random() * 0.05)
    killed = time.monotonic()
    os.kill(victim, chance.choice(SIGNALS))
    answered = []
    while True:
        received = client.receive(10)
        if isinstance(received.message, Event):
            break
        assert isinstance(received.message, Result | Refused), received
        answered.append(received.seq)
    event = received.message
    assert (event.state, event.epoch) == (Gang.FAILED, epoch), event
    assert event.fault is not None
    assert event.fault.signal is not None
    assert answered == sent[: len(answered)], "in order, and nothing after the event"
    assert event.last_answered == (answered[-1] if answered else sent[0] - 1 if sent else event.last_answered)
    ready = next_event(client, Gang.READY, READY_LIMIT_S)
    took = time.monotonic() - killed
    assert ready.epoch == epoch + 1
    assert ready.facts is not None
    assert client.credit == before, "what was in flight has given its credit back"
    sequence = client.submit(prompt_step(0, 0))
    assert sequence == event.last_answered + 1
    answer = client.receive(10)
    assert answer.seq == sequence
    assert isinstance(answer.message, Result)
    if device == "fake":
        assert unpack(answer.message.tokens).tolist() == [first_token(ready.facts.vocabulary)]
    client.submit(Step(finished=prompt_step(0, 0).ids))
    client.receive(10)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--device", default="fake", choices=("fake", "cpu"))
    options = parser.parse_args()
    print(f"{options.kills} deaths on {options.device}, seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="rankd-") as folder:
        run_dir = Path(folder, "run")
        run_dir.mkdir()
        took = soak(run_dir, Path(folder), options.kills, options.seed, options.device)
    quantiles = f"median {statistics.median(took):.2f}, longest {max(took):.2f}"
    print(f"{len(took)} deaths, no event lost, nothing leaked; seconds from death to READY: {quantiles}")


if __name__ == "__main__":
    main()
