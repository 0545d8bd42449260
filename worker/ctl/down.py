"""`workerctl down` and `workerctl drain`: the gang ends in order; they return once nothing of it is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, ask, operate
from worker.exit_codes import ExitCode, Failure
from worker.options import Parser, seconds
from worker.run_files import RunFiles, lock_holder
from workerproto.operations import Drain
from workerproto.rundir import DEFAULT_NAME


def down(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0 once it is gone, 3 if there is none. Raises Failure(LIMIT)."""
    return _end("down", "End a gang: steps in flight first, within its --drain-timeout.", arguments, environment)


def drain(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0 once it is gone, 3 if there is none. Raises as `operate`."""
    about = "End a gang by an operation in its ordered stream: every step before it is answered first."
    return _end(Drain(), about, arguments, environment)


def _end(how: str | Drain, about: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parser = Parser(f"workerctl {how if isinstance(how, str) else 'drain'}", about)
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument(
        "--timeout", type=seconds, default=60, metavar="SECONDS", help="to wait for its end (%(default)s)"
    )
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    files = RunFiles(options.name, environment)
    deadline = time.monotonic() + options.timeout
    try:
        answer = ask(files, how) if isinstance(how, str) else operate(files, how, options.timeout)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    pid = answer["pid"]
    while lock_holder(files) == pid:
        if time.monotonic() > deadline:
            limit = f"{options.timeout:g} s"
            raise Failure(ExitCode.LIMIT, f"gang {options.name!r} (process {pid}) has not ended within {limit}")
        time.sleep(0.02)
    return ExitCode.OK
