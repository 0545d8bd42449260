"""`workerctl stacks`: where every thread of every rank is, blocked ranks included."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG
from worker.options import Parser, whole
from worker.rank.stacks import collect
from worker.rank.status_file import read_status
from worker.run_files import RunFiles, lock_holder
from workerproto.rundir import DEFAULT_NAME

_TOLD = "most recent call first"


def stacks(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 1 if a rank could not tell its stacks, 3 if there is no such gang. Raises ValueError: no such rank."""
    parser = Parser(
        "workerctl stacks",
        "Python stacks of every thread of every rank, and of the coordinator, most recent call first. "
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--rank", type=whole(0), help="of this rank alone")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    files = RunFiles(options.name, environment)
    holder = lock_holder(files)
    if holder is None:
        where = files.folder.parent
        print(f"rankd: error: there is no gang {options.name!r} in {where}", file=sys.stderr)
        return NO_SUCH_GANG
    pids = _pids(files)
    if options.rank is None:
        asked = pids
    elif options.rank in pids:
        asked = {options.rank: pids[options.rank]}
    else:
        raise ValueError(f"--rank is {options.rank}, the gang's ranks on this host are 0 to {len(pids) - 1}")
    who = {f"rank {rank}": pid for rank, pid in asked.items()}
    if options.rank is None:
        who["coordinator"] = holder
    found = collect(filter(None, who.values()))
    for name, pid in who.items():
        text = found[pid].strip() if pid else "has not started, or has not found the coordinator yet"
        print(f"== {name}, process {pid or '?'}\n{text}\n")
    told = [text for text in found.values() if _TOLD in text]
    return 0 if len(told) == len(who) else 1


def _pids(files: RunFiles) -> dict[int, int | None]:
    """By rank, from the mapped status files: no coordinator is needed. None for one that has not written yet."""
    found: dict[int, int | None] = {}
    for path in files.folder.glob("*.status*"):
        status = read_status(path.read_bytes())
        found[int(path.name.rpartition("status")[2])] = status.pid if status else None
    return dict(sorted(found.items()))
