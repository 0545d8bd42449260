"""`workerctl status`: what a gang does now, as JSON or as a table; every --watch seconds if asked."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, ask
from worker.exit_codes import Failure
from worker.health import FAILED, health
from worker.options import Parser, seconds
from worker.run_files import RunFiles
from workerproto.rundir import DEFAULT_NAME

_DUMB = ("dumb", "unknown")  # terminals in which nothing can be redrawn: rich would show nothing at all
COLUMNS = (
    "rank", "tp", "pp", "state", "phase", "for", "step", "age", "steps", "compute", "prev", "sched", "graphs", "kv",
    "host", "device", "threads", "pid", "node",
)  # fmt: skip
"""What is asked first comes first: a narrow terminal shows it in the first of several tables."""


def show(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0: READY, 1: not, 2: failed, 3: no such gang."""
    parser = Parser(
        "workerctl status",
        "Show a gang. Exit code 0: READY, 1: not (or a rank is stuck), 2: failed, 3: there is none. "
        "compute, prev and sched are shares of the last 5 s: at work, waiting for the previous stage, waiting for the "
        "scheduler.",
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--json", action="store_true", help="one object (with --watch one a line), see docs/status.md")
    parser.add_argument("--watch", nargs="?", type=seconds, const=1.0, metavar="SECONDS", help="again and again (1)")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    files = RunFiles(options.name, environment)
    again = options.watch is not None
    dumb = environment.get("TERM", "").lower() in _DUMB
    with ExitStack() as stack:
        show = _printer(as_json=options.json, again=again, dumb=dumb, stack=stack)
        try:
            while True:
                answer = ask(files, "status")
                show(answer)
                if not again:
                    break
                time.sleep(max(0.05, options.watch))
        except NoSuchGang as error:
            stack.close()
            print(f"rankd: error: {error}", file=sys.stderr)
            return NO_SUCH_GANG
        except Failure as error:  # a coordinator that lives and does not answer
            stack.close()
            print(f"rankd: error: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            pass
    return health(answer)[0]


def _printer(*, as_json: bool, again: bool, dumb: bool, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    if as_json:
        return lambda answer: print(json.dumps(answer, indent=None if again else 2), flush=True)
    if not sys.stdout.isatty() or dumb:
        return lambda answer: print("\n".join([*heading(answer), *plain([COLUMNS, *rows(answer)])]), flush=True)
    from worker.ctl import table  # rich, which takes longer than all the rest

    draw = stack.enter_context(table.redrawn()) if again else table.draw
    return lambda answer: draw(heading(answer), COLUMNS, rows(answer))


def heading(answer: dict[str, Any]) -> list[str]:
    model, parallel, kv, driver = answer["model"], answer["parallel"], answer["kv"], answer["scheduler"]
    lines = [
        f"{answer['name']}  {answer['state']}  epoch {answer['epoch']}  up {answer['uptime_s']:.0f} s",
        f"{model['path']}  {model['architecture']}  {model['dtype']}  "
        f"tp {parallel['tp']} x pp {parallel['pp']}, layers " + " + ".join(map(str, parallel["partition"])),
    ]
    cache = "not yet"
    if kv:
        used = kv["used_blocks"] / max(1, kv["num_blocks"])
        cache = f"{kv['used_blocks']} of {kv['num_blocks']} blocks ({used:.0%}) of {kv['block_size']}, {kv['dtype']}"
    scheduler = (driver["client"] or "without a name") if driver else "none"
    lines.append(f"kv cache: {cache}   scheduler: {scheduler}   requests: {answer['requests_live']}")
    rates = answer["rates"]
    lines.append(
        f"{rates['steps_per_s']:.1f} steps/s   {rates['tokens_per_s']:.1f} tokens/s, of them "
        f"{rates['sampled_per_s']:.1f} sampled   {answer['steps_in_flight']} steps in flight"
    )
    for one in answer["waiting_for"]:
        seconds = "" if one["seconds"] is None else f" for {one['seconds']:.1f} s"
        lines.append(f"waiting for rank {one['rank']}: {one['state']}, {one['phase']}{seconds}")
    if fault := answer["last_fault"]:
        who = "" if fault["rank"] is None else f"rank {fault['rank']}, "
        lines.append(f"fault: {who}{fault['phase']}: {fault['message']}")
    return lines


def rows(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(_cells(rank)) for rank in answer["ranks"]]


def _cells(rank: dict[str, Any]) -> list[str]:
    def text(value: object) -> str:
        return "-" if value is None else str(value)

    phase = text(rank["phase"])
    if rank["phase"] == "load" and rank["loaded"] is not None:
        phase += f" {rank['loaded']:.0%}, {rank['load_gb_s'] or 0:.2f} GB/s"
    if rank["phase"] == "step" and rank["doing"]:
        phase += f": {rank['doing']}"
    shares = rank["time_shares"]
    return [
        *(text(rank[name]) for name in ("rank", "tp", "pp", "state")), phase,
        _seconds(rank["phase_s"]), text(rank["step"]), _seconds(rank["step_age_s"]), text(rank["steps_done"]),
        *(f"{shares[name]:.0%}" for name in ("compute", "previous_stage", "scheduler")),
        "-" if rank["graph_hit_rate"] is None else f"{rank['graph_hit_rate']:.0%}", _mebibytes(rank["kv_bytes"]),
        _mebibytes(rank["host_memory_bytes"]), *(text(rank[name]) for name in ("device", "threads", "pid", "node")),
    ]  # fmt: skip


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f} MiB"


def plain(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
