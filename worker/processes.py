"""Processes by identity: a pid alone may belong to someone else by the time it is used."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def started_at(pid: int) -> int:
    """Clock ticks from boot to the start of the process, as in proc(5). Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    return int(stat.rpartition(")")[2].split()[19])  # the command, in parentheses, may hold anything


def open_process(pid: int, started: int) -> int:
    """A pidfd of exactly that process. Raises ProcessLookupError if it is gone, also if the pid is another's now."""
    fd = os.pidfd_open(pid)
    try:
        if started_at(pid) != started:
            raise ProcessLookupError(f"process {pid} is not the one that started at tick {started}")
    except ProcessLookupError:
        os.close(fd)
        raise
    return fd


def refuse_core_dumps() -> None:
    """A dying rank would write gigabytes, and hold its device while it does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends: a second guard, which cannot clean up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
