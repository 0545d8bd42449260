"""Gangs of real processes without torch. One that comes back after every failure shows many in a few seconds."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gang.gangs import QUICK, ROOT, RunningGang, gang, tiny_model
from workerproto.client import Client
from workerproto.codec import pack
from workerproto.messages import Event, Fault, New, RowFlag, Sampling, Step
from workerproto.states import Gang
from workerproto.testing.fake_model import continuation

FAKE = ["--device", "fake", "--restart-delay", "0", "--lease-timeout", "30"]
SLACK = 2.0  # of bounds in seconds, for machines slower than any that would run a gang; see `side_by_side.Late` too
PROMPT = [5, 6, 7]


@contextlib.contextmanager
def fake_gang(
    run_dir: Path, folder: Path, *options: str, tp: int = 1, pp: int = 2, **more: str
) -> Iterator[RunningGang]:
    with gang(run_dir, folder, *FAKE, *options, tp=tp, pp=pp, **more) as running:
        yield running


@contextlib.contextmanager
def launched(run_dir: Path, folder: Path, *ranks: tuple[int, list[str]], **more: str) -> Iterator[RunningGang]:
    """Ranks as torchrun starts them: two stages, each with its own options."""
    same = ["--model", str(tiny_model(folder / "model")), "-pp", "2", "--name", "g", *QUICK, *FAKE]
    wanted = json.dumps([[rank, [*same, *options]] for rank, options in ranks])
    command = [sys.executable, str(ROOT / "tests/faults/plain_launcher.py"), wanted]
    running = RunningGang(run_dir, command, "g", folder / "log", **more)
    try:
        yield running
    finally:
        running.end()


def early_client(running: RunningGang) -> Client:
    """As soon as there is somebody to attach to, in whatever state."""
    deadline = time.monotonic() + 20
    while not (running.run_dir / running.name / "sched").exists():
        assert time.monotonic() < deadline, running.said
        time.sleep(0.005)
    return running.client()


def next_event(client: Client, state: Gang, limit_s: float) -> Event:
    """The next of this state; whatever else comes before it is passed over, another failure is not."""
    deadline = time.monotonic() + limit_s
    while True:
        message = client.receive(max(0.0, deadline - time.monotonic())).message
        if isinstance(message, Event) and (message.state == state or message.state == Gang.FAILED):
            assert message.state == state, message
            return message


def failure(client: Client, limit_s: float) -> tuple[int, Fault]:
    """Epoch and fault of the next failure."""
    event = next_event(client, Gang.FAILED, limit_s)
    assert event.fault is not None
    return event.epoch, event.fault


def prompt_step(request: int, block: int) -> Step:
    """A new request of PROMPT that samples its first token."""
    new = [New(request, pack(PROMPT), pack([block]), 0, Sampling())]
    row = {"ids": request, "positions": 0, "counts": len(PROMPT), "row_flags": RowFlag.SAMPLE, "grant_counts": 0}
    return Step(new, **{name: pack([value]) for name, value in row.items()})


def first_token(vocabulary: int) -> int:
    return continuation(PROMPT, 1, vocabulary)[0]
