"""Processes by identity: a pid alone may belong to someone else by the time it is used."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_PR_SET_PDEATHSIG = 1
_MOST_DESCRIPTORS = 1 << 16


def started_at(pid: int) -> int:
    """Clock ticks from boot to the start of the process, as in proc(5). Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    return int(stat.rpartition(")")[2].split()[19])  # the command, in parentheses, may hold anything


def state_of(pid: int) -> str:
    """The kernel's letter for what the process does, as in proc(5): R, S, D, T, Z …; empty if it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def parent_identity() -> tuple[int, int] | None:
    """(pid, start tick) of the parent, None if it is gone or outside of what we can see."""
    pid = os.getppid()
    try:
        started = started_at(pid)
    except ProcessLookupError:
        return None
    return (pid, started) if os.getppid() == pid else None


def runs_our_program(pid: int) -> bool:
    """Whether its executable file is ours, as that of a launcher written in Python is and that of init is not."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    except OSError:
        return False


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


def wanted_stop_signals() -> tuple[signal.Signals, ...]:
    """Without those that whoever started this process has had ignored, as nohup does and a script's `&`. To be asked
    before any handler is set."""
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    return tuple(number for number in STOP_SIGNALS if number is signal.SIGTERM or number not in ignored)


def die_when_asked(first: Callable[[], None] = lambda: None) -> None:
    """On any of STOP_SIGNALS do what is to be done `first` and end at once, until an event loop takes over. By the
    signal itself: a launcher takes exit code 0 for a rank that is done, and waits for the others."""

    def leave(number: int, _frame: FrameType | None) -> None:
        first()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)


def allow_descriptors() -> None:
    """As many as this process may have at all, within reason: each connection takes one, and libzmq aborts the process
    if there is none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def refuse_core_dumps() -> None:
    """A dying rank would write gigabytes, and hold its device while it does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends: a second guard, which cannot clean up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
