"""No orphans: a thread that ends this process when a process it depends on is gone, whatever the other threads do."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import threading

from worker.exit_codes import ExitCode
from worker.processes import open_process, started_at
from worker.run_files import RunFiles, sweep

LAST_WORD_S = 0.5

_log = logging.getLogger("rankd.rank")


class ParentWatch:
    """Watches any number of processes; the first end of any of them ends this one, with its files swept up."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._names: dict[int, str] = {}
        self._epoll = select.epoll()
        self._expected = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        threading.Thread(target=self._watch, name="parent watch", daemon=True).start()

    def add(self, pid: int, started: int, name: str) -> None:
        """Ends this process at once if that one is gone already."""
        try:
            fd = open_process(pid, started)
        except ProcessLookupError:
            return self._leave(name)
        self._names[fd] = name
        self._epoll.register(fd, select.EPOLLIN)

    def add_child(self, process: subprocess.Popen[str], name: str) -> None:
        """One that this process has started. If it ends in order, with 0, so does this one: it may have had no time to
        tell us."""
        self._child = process
        self.add(process.pid, started_at(process.pid), name)  # it was not waited for, so the pid is still its own

    def expect_ends(self) -> None:
        """From now on this process is leaving by itself."""
        self._expected.set()

    def sweep_if_alone(self) -> None:
        """The last act of a process that leaves by itself: what it depends on may have gone meanwhile, and have taken
        the other ranks along, whose end is then why this one leaves."""
        if self._epoll.poll(0):
            sweep(self._files)

    def _watch(self) -> None:
        for fd, _ in self._epoll.poll():
            self._leave(self._names.get(fd, "parent"))

    def _leave(self, name: str) -> None:
        if self._expected.is_set():
            return
        if self._child is not None and self._child.poll() == 0:
            os._exit(ExitCode.OK)
        # On a thread of its own: whoever holds a log's lock may be stuck in writing to a reader that is gone too.
        line = f"{name} is gone, so process {os.getpid()} ends too"
        word = threading.Thread(target=_log.error, args=(line,), daemon=True)
        word.start()
        word.join(LAST_WORD_S)
        sweep(self._files)
        os._exit(ExitCode.PARENT_GONE)
