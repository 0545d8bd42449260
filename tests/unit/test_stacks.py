"""Stacks of other processes: of one that is blocked in C, of one that is stopped, and of one that is not ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.processes import stop
from worker.rank.stacks import LIMIT_S, SIGNAL, collect

BLOCKED = """
import ctypes, threading
from worker.rank.stacks import offer
offer()
def blocked_thread():
    ctypes.PyDLL(None).sleep(60)  # holds the GIL: no Python runs anywhere in this process
threading.Thread(target=blocked_thread, daemon=True).start()
def waiting_main():
    import time
    print("here", flush=True)
    time.sleep(60)
waiting_main()
"""


@pytest.fixture
def blocked() -> Iterator[subprocess.Popen[str]]:
    script = BLOCKED.replace("threading.Thread", "print('here', flush=True); threading.Thread", 1)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.wait(5)
        assert process.stdout is not None
        process.stdout.close()


def test_a_process_that_holds_the_gil_in_c(blocked: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 10
    while "blocked_thread" not in (text := collect([blocked.pid])[blocked.pid]):
        assert time.monotonic() < deadline, text
    text = collect([blocked.pid])[blocked.pid]
    assert "most recent call first" in text
    assert text.count("blocked_thread") == 1, "one answer, not those before"
    assert blocked.poll() is None


def test_a_stopped_process_says_why_it_cannot(blocked: subprocess.Popen[str]) -> None:
    stop(blocked.pid)
    assert LIMIT_S < 1, "of all ranks together: workerctl stacks is to answer within a second"
    assert f"did not answer in {LIMIT_S:g} s: it is stopped (SIGSTOP)" in collect([blocked.pid])[blocked.pid]
    os.kill(blocked.pid, signal.SIGCONT)


def test_nobody_else_is_signalled() -> None:
    """SIGUSR1 ends a process that does not expect it."""
    before = signal.getsignal(SIGNAL)
    got: list[int] = []
    signal.signal(SIGNAL, lambda number, _: got.append(number))
    try:
        assert "does not offer" in collect([os.getpid()])[os.getpid()]
    finally:
        signal.signal(SIGNAL, before)
    assert not got


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(10)
    assert collect([process.pid]) == {process.pid: f"process {process.pid} is gone"}
