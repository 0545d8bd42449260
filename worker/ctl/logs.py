"""`workerctl logs`: what the processes of a gang have logged, also of one that is gone; -f goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.observe_config import log_directory
from worker.options import Parser
from workerproto.rundir import DEFAULT_NAME, gang_directory

_POLL_S = 0.1


def logs(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there are no logs of that name. Raises ValueError: no such rank."""
    parser = Parser(
        "workerctl logs",
        "Print what a gang's processes have logged, torch's and NCCL's own output too; also after its end. "
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="as it was given to workerctl up")
    parser.add_argument("--rank", type=int, help="of this rank alone; without it of all, and of the coordinator")
    parser.add_argument("--lines", "-n", type=int, default=100, help="the last of each file (%(default)s)")
    parser.add_argument("--follow", "-f", action="store_true", help="go on with what comes, until Ctrl-C")
    parser.add_argument("--paths", action="store_true", help="print only where the files are")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    gang_directory(options.name, environment)  # a name that cannot be one
    folder = options.log_dir or log_directory(options.name, environment)
    paths = sorted(folder.glob("*.log"), key=lambda path: (len(path.name), path.name))
    if not paths:
        print(f"rankd: error: no gang {options.name!r} has logged in {folder}; --log-dir if another", file=sys.stderr)
        return 3
    if options.rank is not None:
        there = [path for path in paths if path.name == f"rank{options.rank}.log"]
        if not there:
            raise ValueError(f"--rank is {options.rank}, in {folder} are {', '.join(path.name for path in paths)}")
        paths = there
    if options.paths:
        print("\n".join(map(str, paths)))
        return 0
    tails = [_Tail(path, named=len(paths) > 1) for path in paths]
    for tail in tails:
        tail.last(options.lines)
    while options.follow:
        more = [tail.more() for tail in tails]
        if not any(more):
            time.sleep(_POLL_S)
    return 0


class _Tail:
    """A file that grows, and may be started anew under the same name. named: lines that do not say of which rank they
    are, such as NCCL's, get the file's name in front."""

    def __init__(self, path: Path, *, named: bool) -> None:
        self._path = path
        self._name = f"{path.stem} | " if named else ""
        self._open()

    def _open(self) -> None:
        self._file = open(self._path, encoding="utf-8", errors="replace")  # noqa: SIM115 - it stays open, to follow it

    def last(self, count: int) -> None:
        lines = self._file.readlines()
        for line in lines[len(lines) - min(count, len(lines)) :]:
            self._print(line)

    def more(self) -> bool:
        found = False
        while line := self._file.readline():
            self._print(line)
            found = True
        if not found:
            self._start_anew()
        return found

    def _start_anew(self) -> None:
        try:
            now, mine = self._path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:
            return
        if now.st_ino != mine.st_ino or now.st_size < self._file.tell():
            self._file.close()
            self._open()

    def _print(self, line: str) -> None:
        print(self._name + line.rstrip("\n"), flush=True)

