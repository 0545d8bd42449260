"""`workerctl trace`: the last steps of all ranks on one clock, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang
from worker.options import Parser
from worker.run_files import RunFiles
from worker.step_trace import SLOTS
from workerproto.rundir import DEFAULT_NAME


def step_count(parser: Parser) -> None:
    parser.add_argument("--name", default=DEFAULT_NAME)
    most = SLOTS - 1
    parser.add_argument("--steps", type=int, default=200, metavar="N", help=f"the last N, up to {most} (%(default)s)")
    parser.add_argument("--traceback", action="store_true")


def check_steps(steps: int) -> None:
    if not 1 <= steps < SLOTS:
        raise ValueError(f"--steps is {steps}, it must be from 1 to {SLOTS - 1}: so many are kept")


def trace(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there is no such gang. Raises ValueError: no steps yet, or a number of steps that is not kept."""
    parser = Parser(
        "workerctl trace",
        "Write what every rank did in the last steps as a trace for https://ui.perfetto.dev. They are kept all the "
        "time, so nothing has to be started.",
    )
    step_count(parser)
    parser.add_argument("--output", metavar="FILE", help="instead of stdout")
    options = parser.parse_args(arguments)
    check_steps(options.steps)
    from worker.ctl.rings import read_rings
    from worker.ctl.trace_events import whole_trace

    try:
        rings = read_rings(RunFiles(options.name, environment), options.steps)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    whole = whole_trace(options.name, rings)
    if options.output is None:
        print(json.dumps(whole))
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(whole, file)
    return 0
