"""The table in docs/behaviour.md of what ends a gang: every row is provoked, and none is without a test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.fake_gangs import FAKE, SLACK, fake_gang, launched, prompt_step
from tests.faults.side_by_side import WAIT_S, Case, Late, in_time, side_by_side
from tests.faults.table import rows_of
from tests.gang.gangs import QUICK, WORKERCTL, RunningGang, gang, tiny_model
from tests.processes import stop
from workerproto.client import Client
from workerproto.messages import Result

GONE_S = 2.0
AT_ONCE = 4


class Row(NamedTuple):
    cause: str
    code: int
    message: str
    bound_s: float


def rows() -> list[Row]:
    cells = rows_of("What ends a gang")
    return [Row(cause, int(code), message.strip("`"), float(bound)) for cause, code, message, bound in cells]


ROWS = rows()


@dataclass
class Scene:
    """`began` is set by whoever provokes, at the cause, or when the limit in question has passed."""

    run_dir: Path
    folder: Path
    row: Row
    began: float = 0.0

    def now(self, limit_s: float = 0.0) -> None:
        self.began = time.monotonic() + limit_s

    def said(self, running: RunningGang, code: int | None = None) -> None:
        """The row's message is the first of its kind, in time; then all end with the row's code. `code`: of the process
        that was started, if that is another."""
        words = "".join(".*" if part == "…" else re.escape(part) for part in re.split("(…)", self.row.message))
        error = "error: " if self.row.code else ""
        wanted = re.compile(rf"^rankd: {error}{words}( \((exit code {self.row.code}|.* epoch \d+)\))?$", re.MULTILINE)
        deadline = time.monotonic() + WAIT_S
        while not (found := wanted.search(running.said)):
            assert time.monotonic() < deadline, f"{self.row.message}\n is not in\n{running.said}"
            time.sleep(0.01)
        told = time.monotonic()
        if self.row.code:
            first = re.search(r"^rankd: error: .*$", running.said, re.MULTILINE)
            assert first is not None
            assert first[0] == found[0], running.said
        assert running.wait_exit(WAIT_S) == (self.row.code if code is None else code)
        running.wait_nothing_left(WAIT_S)
        in_time(told, GONE_S * SLACK, "the end of all its processes")
        if told - self.began > self.row.bound_s * SLACK:
            raise Late(f"the message came {told - self.began:.2f} s after the cause, promised are {self.row.bound_s:g}")

    @contextlib.contextmanager
    def fake(self, *options: str, **more: str) -> Iterator[RunningGang]:
        with fake_gang(self.run_dir, self.folder, *options, **more) as running:
            yield running

    @contextlib.contextmanager
    def ready(self, *options: str, **more: str) -> Iterator[tuple[RunningGang, Client]]:
        with self.fake(*options, **more) as running:
            running.wait_ready()
            with running.client() as client:
                client.wait_ready(10)
                yield running, client

    @contextlib.contextmanager
    def launched(self, *ranks: tuple[int, list[str]], **more: str) -> Iterator[RunningGang]:
        with launched(self.run_dir, self.folder, *ranks, **more) as running:
            yield running


PROVOKE: dict[str, Callable[[Scene], None]] = {}


def provokes(cause: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def note(act: Callable[[Scene], None]) -> Callable[[Scene], None]:
        PROVOKE[cause] = act
        return act

    return note


def fails_to_start(scene: Scene, *options: str, **more: str) -> None:
    scene.now()
    with scene.fake(*options, **more) as running:
        scene.said(running)


def fails_in_a_step(scene: Scene, do: str, *options: str, at: str = "step", after_s: float = 0.0) -> None:
    with scene.ready(*options, RANKD_FAULT=f"rank=1;at={at};do={do}") as (running, client):
        scene.now(after_s)
        client.submit(prompt_step(1, 0))
        if after_s:
            named_by_status(running, stopped="STOP" in do)
        scene.said(running)


def named_by_status(running: RunningGang, *, stopped: bool, phase: str = "step") -> None:
    """In under a second, with seconds, and alone as soon as the others have done their share. The limit that ends the
    gang has to leave the time for it: to ask takes a process each time."""
    began, named = time.monotonic(), (1, phase, "STOPPED" if stopped else "READY")
    while True:
        waiting = running.status()["waiting_for"]
        if [(one["rank"], one["phase"], one["state"]) for one in waiting] == [named]:
            break
        in_time(began, WAIT_S, "naming who is waited for")
    in_time(began, 1.0 * SLACK, "naming who is waited for")
    assert waiting[0]["seconds"] >= 0


@provokes("an option that does not exist, or a bad value")
def _(scene: Scene) -> None:
    fails_to_start(scene, "--seed", "x")


@provokes("a folder, a configuration or a layout that cannot work")
def _(scene: Scene) -> None:
    fails_to_start(scene, "-tp", "5")


@provokes("a fault asked for of a rank that does not exist")
def _(scene: Scene) -> None:
    fails_to_start(scene, RANKD_FAULT="rank=9;at=step;do=raise")


@provokes("a network interface that does not exist")
def _(scene: Scene) -> None:
    fails_to_start(scene, GLOO_SOCKET_IFNAME="nope0")


@provokes("weights that are missing or damaged")
def _(scene: Scene) -> None:
    scene.now()
    with gang(scene.run_dir, scene.folder, "--load-format", "auto") as running:
        scene.said(running)


@provokes("a name in use")
def _(scene: Scene) -> None:
    with scene.ready("--lease-timeout", "60") as (first, client):
        (scene.folder / "second").mkdir()
        scene.now()
        with fake_gang(scene.run_dir, scene.folder / "second") as second:
            assert second.wait_exit(10) == scene.row.code
            line = scene.row.message.replace("…", str(scene.run_dir), 1).replace("…", str(first.pid))
            assert second.errors() == [line]
        client.submit(prompt_step(1, 0))
        assert client.receive(10).seq == 1
        assert first.process.poll() is None


@provokes("a rank raises")
def _(scene: Scene) -> None:
    fails_in_a_step(scene, "raise")


@provokes("memory runs out")
def _(scene: Scene) -> None:
    fails_in_a_step(scene, "raise:MemoryError")


@provokes("a rank exits without a word")
def _(scene: Scene) -> None:
    fails_in_a_step(scene, "exit:9")


@provokes("a rank is killed")
def _(scene: Scene) -> None:
    with scene.ready() as (running, _):
        pid = running.rank_pid(1)
        scene.now()
        os.kill(pid, signal.SIGKILL)
        scene.said(running)


@provokes("a rank hangs in a step")
def _(scene: Scene) -> None:
    fails_in_a_step(scene, "sleep:60", "--step-timeout", "3", after_s=3.0)


@provokes("a rank is stopped in a step")
def _(scene: Scene) -> None:
    fails_in_a_step(scene, "signal:SIGSTOP", "--step-timeout", "3", after_s=3.0)


@provokes("a rank is stopped while it has nothing to do")
def _(scene: Scene) -> None:
    with scene.ready("--heartbeat-timeout", "3") as (running, _):
        pid = running.rank_pid(1)
        scene.now(3.0)
        stop(pid)
        named_by_status(running, stopped=True, phase="ready")
        scene.said(running)


def hangs_while_it_starts(scene: Scene, at: str) -> None:
    scene.now(2)
    with scene.fake("--startup-timeout", "2", RANKD_FAULT=f"rank=1;at={at};do=sleep:60") as running:
        scene.said(running)


@provokes("a rank hangs while it starts")
def _(scene: Scene) -> None:
    hangs_while_it_starts(scene, "load")


@provokes("a rank does not come to the roll-call")
def _(scene: Scene) -> None:
    hangs_while_it_starts(scene, "boot")


@provokes("ranks that run different things")
def _(scene: Scene) -> None:
    with scene.launched((0, []), (1, ["--block-size", "32"])) as running:
        running.wait_said("all ranks run")
        scene.now()
        scene.said(running, code=0)


ONE_DEVICE = """
from worker.rank.seat import Seat

real = Seat.roll_call
Seat.roll_call = lambda seat, device, *more: real(seat, "cuda:0 GPU-5f1c", *more)
"""


@provokes("a device that two ranks have")
def _(scene: Scene) -> None:
    with scene.launched((0, []), (1, []), BEFORE_MAIN=ONE_DEVICE) as running:
        running.wait_said("all ranks run")
        scene.now()
        scene.said(running, code=0)


@provokes("a rank comes twice")
def _(scene: Scene) -> None:
    with scene.launched((0, []), (1, []), (1, [])) as running:
        running.wait_said("error")
        scene.now()
        scene.said(running, code=0)


@provokes("ranks that judge a step differently")
def _(scene: Scene) -> None:
    fails_in_a_step(scene, "corrupt")


@provokes("what arrives from another stage is not what was sent")
def _(scene: Scene) -> None:
    fault = "rank=0;at=send;do=corrupt"
    with gang(scene.run_dir, scene.folder, "--checksum-hops", pp=2, RANKD_FAULT=fault) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            scene.now()
            client.submit(prompt_step(1, 0))
            scene.said(running)


@provokes("the host gives the coordinator too little")
def _(scene: Scene) -> None:
    up = [*WORKERCTL, "up", "--model", str(tiny_model(scene.folder / "model")), "--name", "g", *QUICK, *FAKE]
    scene.now()
    few = ["bash", "-c", 'ulimit -n 30 && exec "$@"', "-"]
    running = RunningGang(scene.run_dir, [*few, *up], "g", scene.folder / "log")
    try:
        scene.said(running)
        assert "Traceback" not in running.said
    finally:
        running.end()


@provokes("the coordinator is killed")
def _(scene: Scene) -> None:
    with scene.launched((0, []), (1, [])) as running:
        running.wait_ready()
        (coordinator,) = running.processes("worker.coordinator")
        scene.now()
        coordinator.kill()
        scene.said(running, code=0)
        assert {f"rank {rank} ended with {scene.row.code}" for rank in (0, 1)} <= set(running.said.splitlines())


@provokes("torchrun is killed")
def _(scene: Scene) -> None:
    with scene.launched((0, []), (1, [])) as running:
        running.wait_ready()
        scene.now()
        running.process.kill()
        running.wait_said(f"{scene.row.message} (exit code {scene.row.code})")
        in_time(scene.began, scene.row.bound_s * SLACK, "the message")
        running.wait_nothing_left(WAIT_S)
        in_time(scene.began, (scene.row.bound_s + GONE_S) * SLACK, "the end of all its processes")


@provokes("Ctrl-C, SIGTERM or SIGHUP")
def _(scene: Scene) -> None:
    with scene.ready(RANKD_FAULT="rank=1;at=step;do=sleep:3") as (running, client):
        client.submit(prompt_step(1, 0))
        named_by_status(running, stopped=False)  # so it is in flight, and not just sent
        scene.now(3)
        running.process.send_signal(signal.SIGTERM)
        answer = client.receive(10)
        while not isinstance(answer.message, Result):
            answer = client.receive(10)
        assert answer.seq == 1, "what is in flight is answered"
        scene.said(running)


def asked_while_stuck(scene: Scene, drain_s: float, act: Callable[[RunningGang], Any]) -> None:
    with scene.ready("--drain-timeout", f"{drain_s}", RANKD_FAULT="rank=1;at=step;do=sleep:60") as (running, client):
        client.submit(prompt_step(1, 0))
        named_by_status(running, stopped=False)
        scene.now()
        running.process.send_signal(signal.SIGTERM)
        act(running)
        scene.said(running)


@provokes("the same while a step does not end")
def _(scene: Scene) -> None:
    asked_while_stuck(scene, 0.2, lambda running: None)


@provokes("the same a second time")
def _(scene: Scene) -> None:
    def again(running: RunningGang) -> None:
        running.wait_said("stopping: SIGTERM")
        time.sleep(0.2)  # sooner, it would count as the same wish
        scene.now()
        running.process.send_signal(signal.SIGTERM)

    asked_while_stuck(scene, 60, again)


@provokes("`workerctl up --detach` ends before READY")
def _(scene: Scene) -> None:
    with scene.fake("--detach", RANKD_FAULT="rank=1;at=load;do=sleep:60") as running:
        running.wait_said("all ranks are present")
        scene.now()
        running.process.kill()
        scene.said(running, code=-signal.SIGKILL)


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    assert {row.cause for row in ROWS} == set(PROVOKE)
    assert len(ROWS) == len(PROVOKE)


def provoked(run_dir: Path, folder: Path, row: Row) -> None:
    PROVOKE[row.cause](Scene(run_dir, folder, row))


CASES: dict[str, Case] = {row.cause: partial(provoked, row=row) for row in ROWS if row.cause in PROVOKE}


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    with side_by_side(request, CASES, AT_ONCE) as outcome:
        yield outcome


@pytest.mark.parametrize("case", CASES)
def test_what_ends_a_gang(outcome: Callable[[str], None], case: str) -> None:
    outcome(case)
