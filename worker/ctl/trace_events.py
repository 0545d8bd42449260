"""A gang's rings in the Trace Event Format (JSON object, complete and async events, times in microseconds)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from worker.ctl.rings import Rings, parts_of

_ROWS = ("compute thread", "completion, device")


def whole_trace(name: str, rings: Rings) -> dict[str, Any]:
    return {
        "traceEvents": list(events(rings)),
        "displayTimeUnit": "ms",
        "otherData": {"gang": name, "host": os.uname().nodename, "clock": "CLOCK_MONOTONIC of that host"},
    }


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
