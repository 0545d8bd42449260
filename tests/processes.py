"""What tests do to processes, waiting for the fact."""

from __future__ import annotations

import os
import time
from pathlib import Path
from signal import SIGSTOP


def stop(pid: int, limit_s: float = 10) -> None:
    """SIGSTOP, and wait until no thread of the process runs any more.

    The signal is one thread's to take. Until that thread gets a processor the others run on, and on a busy machine
    whatever a test asks of the "stopped" process meanwhile is done.
    """
    os.kill(pid, SIGSTOP)
    deadline = time.monotonic() + limit_s
    while running := [state for state in _states(pid) if state not in "TtZX"]:
        assert time.monotonic() < deadline, f"{len(running)} threads of {pid} still run after {limit_s} s"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """The letters of proc(5)'s stat, one a thread; the name before it may hold anything but its last bracket."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(stat.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # a thread that has ended
            continue
    return states
