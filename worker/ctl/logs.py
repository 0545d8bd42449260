"""`workerctl logs`: what the processes of a gang have logged, also of one that is gone; -f goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from worker.ctl.tail import Tail
from worker.observe_config import log_directory
from worker.options import Parser, whole
from workerproto.rundir import DEFAULT_NAME, gang_directory

_POLL_S = 0.1


def logs(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there are no logs of that name. Raises ValueError: no such rank."""
    parser = Parser(
        "workerctl logs",
        "Print what a gang's processes have logged, torch's and NCCL's own output too; also after its end. "
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="where they are, if the gang is not of this host")
    parser.add_argument("--rank", type=whole(0), help="of this rank alone; without it of all, and of the coordinator")
    parser.add_argument("--lines", "-n", type=whole(0), default=100, help="the last of each file (%(default)s)")
    parser.add_argument("--follow", "-f", action="store_true", help="go on with what comes, until Ctrl-C")
    parser.add_argument("--paths", action="store_true", help="print only where the files are")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    gang_directory(options.name, environment)  # a name that cannot be one
    folder = options.log_dir or log_directory(options.name, environment)
    paths = _files(folder)
    if not paths:
        print(f"rankd: error: no gang {options.name!r} has logged in {folder}; --log-dir if another", file=sys.stderr)
        return 3
    if options.rank is not None:
        of_rank = [path for path in paths if path.name == f"rank{options.rank}.log"]
        if not of_rank:
            raise ValueError(f"--rank is {options.rank}, in {folder} are {', '.join(path.name for path in paths)}")
        paths = of_rank
    if options.paths:
        print("\n".join(map(str, paths)))
        return 0
    tails = {path: Tail(path) for path in paths}
    alone = options.rank is not None
    for path, tail in tails.items():
        _print(path, tail.last(options.lines), alone=alone)
        if not options.follow:
            _print(path, [line.decode(errors="replace") for line in tail.rest()], alone=alone)
    while options.follow:
        found = [_print(path, tail.more(), alone=alone) for path, tail in tails.items()]
        if any(found):
            continue
        time.sleep(_POLL_S)
        for path in () if alone else _files(folder):  # ranks of a gang that is only starting, or has become larger
            if path not in tails:
                with suppress(FileNotFoundError):  # gone again
                    tails[path] = Tail(path)
    return 0


def _files(folder: Path) -> list[Path]:
    there = os.listdir(folder) if folder.exists() else []  # glob would pass over one that cannot be read
    names = sorted((name for name in there if name.endswith(".log")), key=lambda name: (len(name), name))
    return [folder / name for name in names]


def _print(path: Path, lines: list[str], *, alone: bool) -> bool:
    """Unless it is alone with the file's name in front, since some lines do not say of which rank they are, such as
    NCCL's. Whether there were any."""
    name = "" if alone else f"{path.stem} | "
    for line in lines:
        print(name + line, flush=True)
    return bool(lines)
