"""`workerctl status`: what a gang does now, as JSON or as a table; every --watch seconds if asked."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, ask
from worker.options import Parser
from worker.run_files import RunFiles
from workerproto.rundir import DEFAULT_NAME

READY, NOT_READY, FAILED = 0, 1, 2
COLUMNS = (
    "rank", "node", "pid", "tp", "pp", "device", "state", "phase", "for", "step", "steps", "kv", "blocks", "threads",
)  # fmt: skip


def show(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0: READY, 1: not, 2: failed, 3: no such gang."""
    parser = Parser("workerctl status", "Show a gang. Exit code 0: READY, 1: not, 2: failed, 3: there is none.")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--json", action="store_true", help="one JSON object (a line each with --watch)")
    parser.add_argument("--watch", nargs="?", type=float, const=1.0, metavar="SECONDS", help="again and again (1)")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    files = RunFiles(options.name, environment)
    try:
        while True:
            answer = ask(files, "status")
            _print(answer, as_json=options.json, again=options.watch is not None)
            if options.watch is None:
                break
            time.sleep(max(0.05, options.watch))
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    except KeyboardInterrupt:
        pass
    return READY if answer["state"] == "READY" else FAILED if answer["state"] == "FAILED" else NOT_READY


def _print(answer: dict[str, Any], *, as_json: bool, again: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=None if again else 2), flush=True)
    elif sys.stdout.isatty():
        from worker.ctl.table import draw  # rich, which takes longer than all the rest

        draw(heading(answer), COLUMNS, rows(answer), clear=again)
    else:
        print("\n".join([*heading(answer), *_plain([COLUMNS, *rows(answer)])]), flush=True)


def heading(answer: dict[str, Any]) -> list[str]:
    model, parallel, kv, driver = answer["model"], answer["parallel"], answer["kv"], answer["scheduler"]
    lines = [
        f"{answer['name']}  {answer['state']}  epoch {answer['epoch']}  up {answer['uptime_s']:.0f} s",
        f"{model['path']}  {model['architecture']}  {model['dtype']}  "
        f"tp {parallel['tp']} x pp {parallel['pp']}, layers " + " + ".join(map(str, parallel["partition"])),
    ]
    cache = f"{kv['num_blocks']} blocks of {kv['block_size']} positions ({kv['dtype']})" if kv else "not yet"
    scheduler = f"{driver['client'] or 'without a name'}, {driver['in_flight']} steps in flight" if driver else "none"
    lines.append(f"kv cache: {cache}   scheduler: {scheduler}   requests: {answer['requests_live']}")
    for one in answer["waiting_for"]:
        seconds = "" if one["seconds"] is None else f" for {one['seconds']:.1f} s"
        lines.append(f"waiting for rank {one['rank']}: {one['state']}, {one['phase']}{seconds}")
    if fault := answer["last_fault"]:
        lines.append(f"fault: rank {fault['rank']}, {fault['phase']}: {fault['message']}")
    return lines


def rows(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(_cells(rank)) for rank in answer["ranks"]]


def _cells(rank: dict[str, Any]) -> list[str]:
    def text(value: object) -> str:
        return "-" if value is None else str(value)

    phase = text(rank["phase"])
    if rank["phase"] == "load" and rank["loaded"] is not None:
        phase += f" {rank['loaded']:.0%}"
    seconds = "-" if rank["phase_s"] is None else f"{rank['phase_s']:.1f} s"
    kv = "-" if rank["kv_bytes"] is None else f"{rank['kv_bytes'] / 2**20:.0f} MiB"
    return [
        *(text(rank[name]) for name in ("rank", "node", "pid", "tp", "pp", "device", "state")), phase, seconds,
        text(rank["step"]), text(rank["steps_done"]), kv, text(rank["num_blocks"]), text(rank["threads"]),
    ]  # fmt: skip


def _plain(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
