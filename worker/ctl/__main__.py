"""`workerctl SUBCOMMAND`: finds the subcommand and imports nothing for the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from worker.exit_codes import ExitCode, Failure


class Command(NamedTuple):
    """`worker.ctl.<module>.<function>(arguments, environment)` returns the exit code."""

    module: str
    function: str
    does: str
    example: str


COMMANDS = {
    "doctor": Command("doctor", "doctor", "check before a start", "workerctl doctor --model DIR -tp 2"),
    "plan": Command("plan", "plan", "would a model fit", "workerctl plan --model DIR --gpu-memory 141GB"),
    "up": Command("up", "up", "start a gang", "workerctl up --model DIR -tp 1 -pp 2 --name demo --detach"),
    "status": Command("status", "show", "show a gang", "workerctl status --name demo --watch"),
    "memory": Command("memory", "memory", "where each rank's memory went", "workerctl memory --name demo"),
    "stacks": Command("stacks", "stacks", "stacks of every thread of every rank", "workerctl stacks --name demo"),
    "trace": Command("trace", "trace", "the last steps for Perfetto", "workerctl trace --output trace.json"),
    "timeline": Command(
        "timeline", "timeline", "the last steps as a page, bubbles summed", "workerctl timeline --steps 50"
    ),
    "profile": Command("profile", "profile", "torch's profiler on every rank", "workerctl profile start --steps 20"),
    "replay": Command("replay", "replay", "feed a recording to a gang", "workerctl replay steps.rec --name demo"),
    "logs": Command("logs", "logs", "what its processes log", "workerctl logs --name demo --rank 1 -f"),
    "log-level": Command("log_level", "log_level", "log more, or less", "workerctl log-level debug --name demo"),
    "sleep": Command("sleep", "sleep", "give device memory back", "workerctl sleep --name demo --level 1"),
    "wake": Command("sleep", "wake", "take device memory again", "workerctl wake --name demo"),
    "down": Command("down", "down", "end a gang", "workerctl down --name demo"),
    "drain": Command("down", "drain", "end a gang in its step stream", "workerctl drain --name demo"),
    "conformance": Command(
        "conformance", "conformance", "hold a gang, or a scheduler, to the wire's spec",
        "workerctl conformance --name demo",
    ),
}


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
