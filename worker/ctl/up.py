"""`workerctl up`: run the coordinator here, or with --detach leave one behind and return at READY."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence

from worker.config import resolve
from worker.exit_codes import ExitCode, Failure
from worker.options import Parser, add_gang_options


def up(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0 after an orderly end (with --detach, at READY), else the code of the first cause, which has been said.

    Raises ValueError and Failure before anything is spawned.
    """
    parser = Parser("workerctl up", "Start a gang on this host, and end it with Ctrl-C or `workerctl down`.")
    parser.add_argument("--detach", action="store_true", help="return when it is READY, and leave it running")
    said = "with --detach: what its processes print"
    parser.add_argument("--log-file", metavar="FILE", default=os.devnull, help=said)
    add_gang_options(parser)
    options = parser.parse_args(arguments)
    config = resolve(options, environment)
    launch_name = secrets.token_hex(4)
    own = Parser("workerctl up", "")  # what is for us and not for the ranks
    own.add_argument("--detach", action="store_true")
    own.add_argument("--log-file")
    gang_arguments = own.parse_known_args(arguments)[1]
    if options.detach:
        return _detach(launch_name, options.log_file, gang_arguments)

    from worker.coordinator.incarnation import Launch
    from worker.coordinator.run import run
    from worker.processes import refuse_core_dumps

    refuse_core_dumps()
    return run(config, Launch(gang_arguments, dict(environment), launch_name))


def _detach(launch_name: str, log_file: str, arguments: Sequence[str]) -> int:
    command = [
        sys.executable, "-m", "worker.coordinator", "--launch", launch_name, "--log-file", log_file, "--", *arguments,
    ]  # fmt: skip
    # Nothing is ever written to its stdin: that ends when this process does, however it does.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.strip() == "ready":
                return ExitCode.OK
    except KeyboardInterrupt:
        process.terminate()  # in order: the gang is not wanted any more
    code = process.wait()
    if code and code not in set(ExitCode):
        raise Failure(ExitCode.STEP, f"the coordinator ended with code {code}")
    return code
