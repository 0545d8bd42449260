"""`workerctl replay`: feed a recorded step stream to a gang, and compare what it samples, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.options import Parser
from workerproto.rundir import DEFAULT_NAME


def replay(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0: every token is the same (or none is recorded), 1: not; 2: the gang cannot take it; 3: there is none."""
    parser = Parser(
        "workerctl replay",
        "Feed a recording (workerctl up --record FILE) to a gang of the same model, with any tp and pp, and compare "
        "its tokens; at full speed it is a benchmark. It needs the gang for itself. Exit code 0: the same, 1: not, "
        "2: not possible, 3: no such gang.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--speed", choices=("full", "recorded"), default="full", help="(%(default)s)")
    parser.add_argument("--any-weights", action="store_true", help="also if the weights are not those of the recording")
    parser.add_argument("--json", action="store_true", help="the outcome as one JSON object")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    from worker.ctl.replay_work import run

    return run(options, environment)
