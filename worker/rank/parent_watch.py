"""No orphans: a thread that ends this process when a process it depends on is gone, whatever the other threads do."""

from __future__ import annotations

import os
import select
import sys
import threading

from worker.exit_codes import ExitCode
from worker.processes import open_process
from worker.run_files import RunFiles, sweep


class ParentWatch:
    """Watches any number of processes; the first end of any of them ends this one, with its files swept up."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._names: dict[int, str] = {}
        self._epoll = select.epoll()
        self._expected = threading.Event()
        threading.Thread(target=self._watch, name="parent watch", daemon=True).start()

    def add(self, pid: int, started: int, name: str) -> None:
        """Ends this process at once if that one is gone already."""
        try:
            fd = open_process(pid, started)
        except ProcessLookupError:
            self._leave(name)
        self._names[fd] = name
        self._epoll.register(fd, select.EPOLLIN)

    def expect_ends(self) -> None:
        """From now on this process is leaving by itself."""
        self._expected.set()

    def _watch(self) -> None:
        for fd, _ in self._epoll.poll():
            self._leave(self._names.get(fd, "parent"))

    def _leave(self, name: str) -> None:
        if self._expected.is_set():
            return
        print(f"rankd: error: {name} is gone, so process {os.getpid()} ends too", file=sys.stderr, flush=True)
        sweep(self._files)
        os._exit(ExitCode.PARENT_GONE)
