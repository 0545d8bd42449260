"""`workerctl log-level`: how much the processes of a gang log from now on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, ask
from worker.observe_config import LOG_LEVELS
from worker.options import Parser, whole
from worker.run_files import RunFiles
from workerproto.rundir import DEFAULT_NAME


def log_level(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there is no such gang. Raises ValueError: no such rank."""
    parser = Parser(
        "workerctl log-level",
        "Change how much a gang logs, while it runs. debug has a line for each step. "
    )
    parser.add_argument("level", choices=LOG_LEVELS)
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--rank", type=whole(0), help="of this rank alone; without it of all, and of the coordinator")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    rank = "" if options.rank is None else str(options.rank)
    try:
        ask(RunFiles(options.name, environment), "log-level", level=options.level, rank=rank)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    return 0
