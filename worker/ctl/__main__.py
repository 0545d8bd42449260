"""`workerctl SUBCOMMAND`: finds the subcommand and imports nothing for the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from worker.exit_codes import ExitCode, Failure

USAGE = """usage: workerctl SUBCOMMAND [options]

  up       start a gang: workerctl up --model DIR [-tp T] [-pp P] [--name N] [--detach]
  status   show a gang:  workerctl status [--name N] [--json] [--watch [SECONDS]]
  down     end a gang:   workerctl down [--name N]
  conformance  hold a gang to the wire's spec, rule by rule: workerctl conformance [--name N]

workerctl SUBCOMMAND --help shows its options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    try:
        match name:
            case "up":
                from worker.ctl.up import up

                return up(rest, os.environ)
            case "status":
                from worker.ctl.status import show

                return show(rest, os.environ)
            case "down":
                from worker.ctl.down import down

                return down(rest, os.environ)
            case "conformance":
                from worker.ctl.conformance import conformance

                return conformance(rest, os.environ)
            case "-h" | "--help" | "help":
                print(USAGE)
                return ExitCode.OK
        known = "up, status, down and conformance are"
        print(f"rankd: error: {name!r} is not a subcommand of workerctl; {known}", file=sys.stderr)
        return ExitCode.USAGE
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
