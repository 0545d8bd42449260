"""`workerctl trace`: the last steps of all ranks on one clock, for Perfetto or chrome://tracing.

The form is the Trace Event Format (JSON object, complete and async events, times in microseconds).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang
from worker.ctl.rings import Rings, parts_of, read_rings
from worker.options import Parser
from worker.run_files import RunFiles
from worker.step_trace import SLOTS
from workerproto.rundir import DEFAULT_NAME

_ROWS = ("compute thread", "completion, device")


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
    try:
        rings = read_rings(RunFiles(options.name, environment), options.steps)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    whole = {
        "traceEvents": list(events(rings)),
        "displayTimeUnit": "ms",
        "otherData": {"gang": options.name, "host": os.uname().nodename, "clock": "CLOCK_MONOTONIC of that host"},
    }
    if options.output is None:
        print(json.dumps(whole))
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(whole, file)
    return 0


def events(rings: Rings) -> Iterator[dict[str, Any]]:
    """Processes are ranks, the last one is the coordinator. Every event has its step in `args`."""
    zero = min(int(records["waiting"].min()) for records in rings.ranks.values() if len(records))
    coordinator = len(rings.ranks)
    for pid in range(coordinator + 1):
        name = f"rank {pid}" if pid < coordinator else "coordinator"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for rank, records in rings.ranks.items():
        for row, name in enumerate(_ROWS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        of_step = {int(record["sequence"]): record for record in records}
        for part in parts_of(records, rings.now):
            facts: dict[str, Any] = {"step": part.step}
            if part.name == "step":
                record = of_step[part.step]
                facts |= {name: int(record[name]) for name in ("rows", "tokens", "samples", "graph")}
            yield {
                "ph": "X", "name": part.name, "cat": "rankd", "pid": rank, "tid": part.row,
                "ts": (part.start - zero) / 1e3, "dur": max(0, part.end - part.start) / 1e3, "args": facts,
            }  # fmt: skip
    for record in rings.relay:
        step = int(record["sequence"])
        common = {"name": f"step {step} in flight", "cat": "rankd", "pid": coordinator, "tid": 0, "id": step}
        yield common | {"ph": "b", "ts": (int(record["received"]) - zero) / 1e3, "args": {"step": step}}
        yield common | {"ph": "e", "ts": (int(record["done"] or rings.now) - zero) / 1e3, "args": {"step": step}}
