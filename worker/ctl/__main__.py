"""`workerctl SUBCOMMAND`: finds the subcommand and imports nothing for the others."""

from __future__ import annotations

try:
    import os
    import sys
    from collections.abc import Sequence
    from importlib import import_module

    from worker.ctl.commands import COMMANDS
    from worker.exit_codes import ExitCode, Failure
    from worker.os_errors import told
    from worker.standard_streams import open_standard_streams
except KeyboardInterrupt:  # Ctrl-C so early: no traceback of imports
    raise SystemExit(130) from None


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.does}: {command.example}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: workerctl SUBCOMMAND [options]", "", *lines, "", "workerctl SUBCOMMAND --help shows its options."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    try:
        open_standard_streams()
        return _run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our table, or of a help text, has seen enough
        _drop_stdout()
        return ExitCode.OK


def _run(arguments: Sequence[str] | None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if name in ("-h", "--help", "help"):
        print(usage(), flush=True)
        return ExitCode.OK
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(COMMANDS)
        print(f"rankd: error: {name!r} is not a subcommand of workerctl; there are {known}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        function = getattr(import_module(f"worker.ctl.{command.module}"), command.function)
        code = int(function(rest, os.environ))
        sys.stdout.flush()  # what it cannot take is an error of ours, and not of the interpreter's end
        return code
    except SystemExit as end:
        if end.code == 0:  # --help
            print(f"\nexample: {command.example}", flush=True)
        raise
    except (ValueError, Failure) as error:
        if "--traceback" in rest or os.environ.get("RANKD_TRACEBACK") == "1":
            raise
        print(f"rankd: error: {error}", file=sys.stderr)
        return getattr(error, "code", ExitCode.BAD_CONFIG)
    except BrokenPipeError:
        raise
    except OSError as error:  # of files and folders that a command reads or writes, whichever they are
        if "--traceback" in rest or os.environ.get("RANKD_TRACEBACK") == "1":
            raise
        print(f"rankd: error: {told(error)}", file=sys.stderr)
        _drop_stdout()
        return ExitCode.BAD_CONFIG


def _drop_stdout() -> None:
    """If it takes nothing more: what is left for it could only fail again, at the interpreter's end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
