"""`workerctl trace`: the last steps of all ranks on one clock, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang
from worker.options import Parser, whole
from worker.run_files import RunFiles
from worker.step_trace import SLOTS
from workerproto.rundir import DEFAULT_NAME

if TYPE_CHECKING:
    from worker.ctl.rings import Rings


def add_ring_options(parser: Parser) -> None:
    parser.add_argument("--name", default=DEFAULT_NAME)
    most = SLOTS - 1
    parser.add_argument(
        "--steps", type=whole(1, most), default=200, metavar="N", help=f"the last N, up to {most} (%(default)s)"
    )
    parser.add_argument("--failed", action="store_true", help="of its last failure, from the report; it may be gone")
    parser.add_argument("--traceback", action="store_true")


def rings_for(options: Namespace, environment: Mapping[str, str]) -> Rings:
    """Raises NoSuchGang; ValueError: no steps yet, or a number of steps that is not kept."""
    from worker.ctl.rings import failed_rings, read_rings

    files = RunFiles(options.name, environment)  # raises ValueError for a name that cannot be one
    if options.failed:
        return failed_rings(options.name, environment, options.steps)
    return read_rings(files, options.steps)


def trace(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there is no such gang. Raises ValueError: no steps yet, or a number of steps that is not kept."""
    parser = Parser(
        "workerctl trace",
        "Write what every rank did in the last steps as a trace for https://ui.perfetto.dev. They are kept all the "
        "time, so nothing has to be started.",
    )
    add_ring_options(parser)
    parser.add_argument("--output", metavar="FILE", help="instead of stdout")
    options = parser.parse_args(arguments)
    try:
        rings = rings_for(options, environment)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    from worker.ctl.trace_events import whole_trace

    events = whole_trace(options.name, rings)
    if options.output is None:
        print(json.dumps(events))
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(events, file)
    return 0
