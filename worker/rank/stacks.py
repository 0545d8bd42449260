"""Python stacks of a process from the outside, by the standard library alone, whatever its threads are doing.

`offer` has faulthandler write all stacks on SIGUSR1 into a memory file of the process. Its handler is C: it runs while
every thread is inside torch, and asks for no lock. `collect` signals, waits until the handlers are done, and reads
the file under /proc; there is nothing to clean up, and a process that never called `offer` is never signalled.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

SIGNAL = signal.SIGUSR1
LIMIT_S = 0.8

_NAME = "rankd-stacks"
_BIT = 1 << (SIGNAL - 1)
_KEPT = 1 << 20  # bytes of earlier answers; then the file starts anew


def offer() -> None:
    """Once, as early as can be: before it, SIGUSR1 would end the process."""
    faulthandler.enable()  # so that a crash in C leaves its Python stack where stderr goes, which is the rank's log
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, file=fd, all_threads=True)


def collect(pids: Iterable[int], limit_s: float = LIMIT_S) -> dict[int, str]:
    """The stacks by pid, most recent call first; for a process that cannot tell them, one line that says why."""
    asked = {pid: _Asked(pid) for pid in pids}
    deadline = time.monotonic() + limit_s
    while not all(one.done() for one in asked.values()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return {pid: one.answer(limit_s) for pid, one in asked.items()}


class _Asked:
    """One process that was signalled. A thread blocks the signal while it is in the handler: so its end can be seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = -1
        self._text = ""
        self._refusal = ""
        try:
            self._fd = _open_offer(pid)
            if self._fd < 0 or not _masks(Path(f"/proc/{pid}"))["SigCgt"] & _BIT:
                self._refusal = f"process {pid} does not offer its stacks: it is starting, or not a process of rankd"
                return
            if os.fstat(self._fd).st_size > _KEPT:
                os.ftruncate(self._fd, 0)
            self._start = os.fstat(self._fd).st_size
            self._blocking = _blocking(pid)
            os.kill(pid, SIGNAL)
        except (OSError, ValueError) as error:
            gone = isinstance(error, FileNotFoundError | ProcessLookupError)
            self._refusal = f"process {pid} " + ("is gone" if gone else f"cannot be asked: {error}")

    def done(self) -> bool:
        if self._refusal or self._text:
            return True
        try:
            pending = _masks(Path(f"/proc/{self._pid}"))["ShdPnd"] & _BIT
            if pending or os.fstat(self._fd).st_size == self._start or _blocking(self._pid) - self._blocking:
                return False
            self._text = self._read()
        except OSError:
            self._refusal = f"process {self._pid} is gone"
        return True

    def _read(self) -> str:
        return os.pread(self._fd, _KEPT, self._start).decode(errors="replace")

    def answer(self, limit_s: float) -> str:
        if self._fd < 0:
            return self._refusal
        text = self._text or self._read()
        os.close(self._fd)
        return text or self._refusal or f"process {self._pid} did not answer in {limit_s:g} s: {_why(self._pid)}"


def _open_offer(pid: int) -> int:
    """The memory file of `offer`, -1 if there is none."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith(f"/memfd:{_NAME}"):
                return os.open(link, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # closed since
    return -1


def _masks(folder: Path) -> dict[str, int]:
    lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = [line.split(":\t") for line in lines if line.startswith(("Sig", "Shd"))]
    return {name: int(value, 16) for name, value in pairs if name != "SigQ"}


def _blocking(pid: int) -> set[str]:
    """Threads that block the signal, as those of libraries do all the time."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if _masks(task)["SigBlk"] & _BIT:
                found.add(task.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that ended
    return found


def _why(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8")
    except OSError:
        return "it is gone"
    kinds = {
        "T": "it is stopped (SIGSTOP), and tells them once it is continued",
        "t": "a debugger holds it",
        "D": f"the kernel does not let go of it, in {where}",
        "Z": "it has ended and waits for its parent",
    }
    return kinds.get(state, f"its state is {state}, in {where}")
