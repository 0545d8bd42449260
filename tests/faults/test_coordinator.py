"""What befalls the coordinator itself: a pause of its own is nobody's fault, and a host that gives no more ends it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from tests.faults.fake_gangs import FAKE, failure, fake_gang, launched, next_event, prompt_step
from tests.faults.side_by_side import WAIT_S
from tests.gang.gangs import QUICK, WORKERCTL, RunningGang, tiny_model
from tests.processes import stop
from worker.exit_codes import ExitCode
from worker.gang_messages import Hello, Note, Stop, Welcome, decode_to_rank, encode
from worker.processes import started_at
from workerproto.client import LeaseLost
from workerproto.messages import Result
from workerproto.states import Gang


def test_its_own_pause_is_not_the_silence_of_others(run_dir: Path, tmp_path: Path) -> None:
    """Once for little more than the limits and once for much more, with a step done meanwhile."""
    limits = ["--heartbeat-timeout", "0.6", "--step-timeout", "0.6", "--startup-timeout", "60"]
    with fake_gang(run_dir, tmp_path, *limits, RANKD_FAULT="rank=1;at=step;n=2;do=sleep:0.3") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            for request, pause in enumerate((1.0, 2.5)):
                client.submit(prompt_step(request, request))
                stop(running.pid)
                time.sleep(pause)
                os.kill(running.pid, signal.SIGCONT)
                assert isinstance(client.receive(10).message, Result)
                assert running.status()["waiting_for"] == []
        running.process.terminate()
        assert running.wait_exit(10) == 0, running.said
        assert not running.errors()


@pytest.mark.parametrize("denied", ["its folder", "descriptors"])
def test_a_gang_that_cannot_come_back(run_dir: Path, tmp_path: Path, denied: str) -> None:
    with fake_gang(run_dir, tmp_path, "--max-restarts", "3") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            victim = running.rank_pid(1)
            if denied == "descriptors":
                few = psutil.Process(running.pid).num_fds()
                resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (few, few))
            else:
                shutil.rmtree(run_dir / "g")
            os.kill(victim, signal.SIGKILL)
            assert failure(client, WAIT_S)[1].signal == "SIGKILL"
            with pytest.raises(LeaseLost):
                next_event(client, Gang.READY, 10)
        assert running.wait_exit() == 70
        first, last = running.errors()
        assert first == "rank 1, ready: was killed by SIGKILL (exit code 70)"
        assert last.startswith("the gang cannot be started again: ")
        assert "Traceback" not in running.said
        running.wait_nothing_left()


def test_many_connections(run_dir: Path, tmp_path: Path) -> None:
    """Each takes a descriptor, of which a shell gives few; libzmq aborts the process that has none left."""
    up = [*WORKERCTL, "up", "--model", str(tiny_model(tmp_path / "model")), "--name", "g", *QUICK, *FAKE]
    few = ["bash", "-c", 'ulimit -S -n 50 && exec "$@"', "-"]
    running = RunningGang(run_dir, [*few, *up], "g", tmp_path / "log")
    try:
        running.wait_ready()
        with contextlib.ExitStack() as connected:
            for _ in range(60):
                connected.enter_context(running.client(takeover=True))
            assert running.status()["state"] == "READY"
        running.process.terminate()
        assert running.wait_exit() == 0, running.said
    finally:
        running.end()


RAISES_LATER = """
import sys
from worker.coordinator.gang import Gang
from worker.ctl.__main__ import main

ticks = iter(range(10))
tick = Gang.tick
Gang.tick = lambda gang: tick(gang) if not gang.ready.done() or next(ticks) < 3 else 1 // 0
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("where", "code", "line"),
    [
        ("its own code", 70, "coordinator: ZeroDivisionError: integer division or modulo by zero"),
        ("from a rank", 76, "coordinator: ValidationError: "),
        ("an answer", 76, "relay: "),
    ],
)
def test_what_it_stumbles_over_ends_the_gang(run_dir: Path, tmp_path: Path, where: str, code: int, line: str) -> None:
    """In order, with the cause: never a coordinator that is there and does nothing."""
    up = ["up", "--model", str(tiny_model(tmp_path / "model")), "-pp", "2", "--name", "g", *QUICK, *FAKE]
    program = ["-c", RAISES_LATER] if where == "its own code" else ["-m", "worker.ctl"]
    running = RunningGang(run_dir, [sys.executable, *program, *up], "g", tmp_path / "log")
    try:
        running.wait_ready()
        with running.client() as client, zmq.Context() as context:
            client.wait_ready(10)
            if where != "its own code":
                kind, pattern = (zmq.DEALER, "*.e1r0c") if where == "from a rank" else (zmq.PUSH, "*.e1r1a")
                (path,) = (run_dir / "g").glob(pattern)
                stranger = context.socket(kind)
                stranger.linger = 0
                stranger.connect(f"ipc://{path}")
                stranger.send_multipart([b"\x80", b"rubbish"] if kind == zmq.PUSH else [b"\x80"])
            _, fault = failure(client, WAIT_S)
            if where != "its own code":
                stranger.close()
        assert fault.message.startswith(line), fault
        assert (fault.code, fault.rank) == (code, None)
        assert running.wait_exit() == code
        assert running.errors()[0].startswith(line)
        running.wait_nothing_left()
    finally:
        running.end()


ENDS_UNHEARD = """
import os, signal
from worker.rank import coordinator_start

real = coordinator_start.start_coordinator

def start(place, arguments):
    coordinator = real(place, arguments)
    os.kill(coordinator.pid, signal.HOW)
    os.waitid(os.P_PID, coordinator.pid, os.WEXITED | os.WNOWAIT)
    return coordinator

coordinator_start.start_coordinator = start
"""


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", ExitCode.PARENT_GONE), ("SIGTERM", ExitCode.OK)])
def test_a_rank_that_comes_after_the_coordinator_that_it_started_has_ended(
    run_dir: Path, tmp_path: Path, how: str, code: ExitCode
) -> None:
    """Others may have come and gone by then; who said no Hello gets no Welcome, and is told of no end."""
    patch = ENDS_UNHEARD.replace("HOW", how)
    with launched(run_dir, tmp_path, (0, ["-pp", "1"]), BEFORE_MAIN=patch) as running:
        assert running.wait_exit(WAIT_S) == 0
        assert ("the coordinator is gone" in running.said) == (code != ExitCode.OK)
        assert f"rank 0 ended with {code:d}" in running.said
        running.wait_nothing_left()


@pytest.mark.parametrize(
    ("end", "line"),
    [
        ("kill -KILL $$", "the coordinator was killed by signal 9 before it took connections"),
        ("exit 3", "the coordinator ended with 3 before it took connections"),
    ],
)
def test_a_coordinator_that_ends_before_it_takes_connections(
    run_dir: Path, tmp_path: Path, end: str, line: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{end}\n")
    program.chmod(0o755)
    patch = f"import sys\nsys.executable = {str(program)!r}"
    with launched(run_dir, tmp_path, (0, ["-pp", "1"]), BEFORE_MAIN=patch) as running:
        assert running.wait_exit(WAIT_S) == 0
        assert running.errors() == [line]
        assert f"rank 0 ended with {ExitCode.STEP:d}" in running.said
        running.wait_nothing_left()


def test_each_of_those_that_come_as_one_rank_is_told_the_end(run_dir: Path, tmp_path: Path) -> None:
    """Whoever came last may be the one that would otherwise wait: the coordinator knows the process of the first."""
    with fake_gang(run_dir, tmp_path) as running, zmq.Context() as context:
        running.wait_ready()
        (path,) = (run_dir / "g").glob("*.e1r1c")
        came = [context.socket(zmq.DEALER) for _ in range(3)]
        for number, one in enumerate(came):
            one.linger, one.rcvtimeo = 0, round(WAIT_S * 1000)
            one.connect(f"ipc://{path}")
            one.send(encode(Note(f"{number} is connected")))
            running.wait_said(f"{number} is connected")
        for one in came:  # the first of these begins the end
            one.send(encode(Hello(1, 2, "here", os.getpid(), started_at(os.getpid()), os.getppid())))
        for one in came:
            assert isinstance(decode_to_rank(one.recv()), Welcome)
            ended = decode_to_rank(one.recv())
            assert isinstance(ended, Stop)
            assert ended.code == ExitCode.OTHER_RANK
            one.close()
        assert running.wait_exit() == ExitCode.ROLL_CALL
        assert "rank 1 came twice" in running.errors()[0]
        running.wait_nothing_left()
