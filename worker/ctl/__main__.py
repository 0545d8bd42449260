"""`workerctl SUBCOMMAND`: finds the subcommand and imports nothing for the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from worker.ctl.commands import COMMANDS
from worker.exit_codes import ExitCode, Failure


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.does}: {command.example}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: workerctl SUBCOMMAND [options]", "", *lines, "", "workerctl SUBCOMMAND --help shows its options."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if name in ("-h", "--help", "help"):
        print(usage())
        return ExitCode.OK
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(COMMANDS)
        print(f"rankd: error: {name!r} is not a subcommand of workerctl; there are {known}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        function = getattr(import_module(f"worker.ctl.{command.module}"), command.function)
        return int(function(rest, os.environ))
    except SystemExit as end:
        if end.code == 0:  # --help
            print(f"\nexample: {command.example}")
        raise
    except (ValueError, Failure) as error:
        if "--traceback" in rest or os.environ.get("RANKD_TRACEBACK") == "1":
            raise
        print(f"rankd: error: {error}", file=sys.stderr)
        return getattr(error, "code", ExitCode.BAD_CONFIG)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our table has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
