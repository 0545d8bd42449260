"""`workerctl top`: a gang, live, in the terminal; the only subcommand that needs textual."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, ask
from worker.observe_config import log_directory
from worker.options import Parser, seconds
from worker.run_files import RunFiles
from workerproto.rundir import DEFAULT_NAME


def top(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there is no such gang. Raises ValueError if textual is not installed."""
    parser = Parser(
        "workerctl top",
        "Watch a gang in the terminal: ranks, the pipeline of the last steps, memory, events and logs. q ends it.",
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    files = RunFiles(options.name, environment)
    if not sys.stdout.isatty():
        raise ValueError("stdout is no terminal, which top draws in; workerctl status --watch writes into a pipe too")
    try:
        ask(files, "status")
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    try:
        from worker.ctl.top_app import TopApp
    except ImportError as error:
        raise ValueError(f"workerctl top needs textual ({error}): pip install 'rankd[top]'") from None
    TopApp(files, log_directory(options.name, environment), max(0.1, options.interval)).run()
    return 0
