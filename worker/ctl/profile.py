"""`workerctl profile start|stop`: torch's profiler on every rank, over the same steps, one file each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, operate
from worker.options import Parser, seconds, whole
from worker.run_files import RunFiles
from workerproto.operations import Profile
from workerproto.rundir import DEFAULT_NAME

_FAILED = 1


def profile(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 1 if a rank could not write its file, 3 if there is no such gang. Raises as `operate`."""
    parser = Parser(
        "workerctl profile",
        "Start torch's profiler on all ranks; it ends after --steps, or by stop, which says where the files are: "
        "beside the logs. While it runs, steps are slower. "
    )
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument(
        "--steps", type=whole(1, 1000), default=50, help="after which it ends by itself, up to 1000 (%(default)s)"
    )
    parser.add_argument("--timeout", type=seconds, default=60, metavar="SECONDS", help="for the ranks (%(default)s)")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    operation = Profile(start=options.action == "start", steps=options.steps if options.action == "start" else 0)
    try:
        answer = operate(RunFiles(options.name, environment), operation, options.timeout)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    reports = answer["done"]["report"]
    if options.action == "start":
        print(f"profiling up to {options.steps} steps; workerctl profile stop says where the files are")
    for rank, report in enumerate(reports):
        if report["error"]:
            print(f"rankd: error: rank {rank}: {report['error']}", file=sys.stderr)
        elif options.action == "stop":
            print(report["path"])
    return _FAILED if any(report["error"] for report in reports) else 0
