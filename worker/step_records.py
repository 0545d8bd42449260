"""Reading the rings of `step_trace`, and what can be said of a rank from them."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worker.step_trace import HEADER_BYTES, MAGIC, MARKS, SIZE, SLOTS, VERSION

RECORD = np.dtype(
    [("sequence", "<u8"), *((name, "<u4") for name in ("rows", "tokens", "samples", "graph", "requests", "blocks"))]
    + [(mark, "<u8") for mark in MARKS]
    + [("device_ns", "<u8"), ("flags", "<u8")]
)  # fmt: skip
Records = NDArray[np.void]
"""Structured array of RECORD, oldest first."""

WINDOW_S = 5.0

_NONE: Records = np.empty(0, RECORD)


def read_records(mapped: bytes | mmap.mmap, most: int = SLOTS, since: int = 0) -> tuple[Records, int]:
    """The latest records and the number of the one that would come next; the last of them is under way.

    `since`: only those from this number on. Those that were overwritten while they were read are left out.
    """
    if bytes(mapped[:4]) != MAGIC or int.from_bytes(mapped[4:8], "little") != VERSION:
        return _NONE, 0
    begun = _begun(mapped)
    copy: Records = np.frombuffer(mapped[:SIZE], RECORD, SLOTS, HEADER_BYTES)
    # The slot after the newest may be half written already: it is never read.
    oldest = max(0, since, begun - most, _begun(mapped) - SLOTS + 1)
    if oldest >= begun:
        return _NONE, begun
    records: Records = np.take(copy, np.arange(oldest, begun) % SLOTS)
    return records, begun


def _begun(mapped: bytes | mmap.mmap) -> int:
    return int.from_bytes(mapped[16:24], "little")


def read_trace_file(path: Path, most: int = SLOTS) -> Records:
    return read_records(path.read_bytes(), most)[0]


def finished(records: Records) -> Records:
    """Steps that are done and were carried out."""
    done: Records = records[(records["done"] > 0) & (records["flags"] == 0)]
    return done


def between(records: Records, start: str, end: str) -> NDArray[np.int64]:
    """Nanoseconds of a part, 0 where the step has none of it."""
    first, last = records[start].astype(np.int64), records[end].astype(np.int64)
    return np.where((first > 0) & (last > 0), np.maximum(last - first, 0), 0)


@dataclass(frozen=True, slots=True)
class Recent:
    """What a rank did in the last `window_s` seconds. Shares of that time; `scheduler`: it waited for a step to come;
    `previous_stage`: for hidden states, or on the first stage for the sampled tokens that the last one sends back.
    `compute` is the device's time where that is measured, else the time in a step without waiting. graph_hit_rate:
    share of steps with rows that replayed a captured graph, None without such steps.
    """

    window_s: float
    steps_per_s: float
    tokens_per_s: float
    sampled_per_s: float
    compute: float
    previous_stage: float
    scheduler: float
    graph_hit_rate: float | None
    requests: int
    used_blocks: int


def recent(records: Records, now_ns: int | None = None, window_s: float = WINDOW_S) -> Recent:
    """Of a rank's records, the one under way included."""
    now = time.monotonic_ns() if now_ns is None else now_ns
    done = finished(records)
    held = records[records["done"] > 0][-1:]
    requests, blocks = (int(held["requests"][0]), int(held["blocks"][0])) if len(held) else (0, 0)
    start = max(now - int(window_s * 1e9), int(records["waiting"][0]) if len(records) else now)
    length = max(now - start, 1)
    done = done[done["done"] >= start]

    def share(first: str, last: str) -> float:
        """Clipped to the window; of the record under way, what has passed of the part."""
        begins = records[first].astype(np.int64)
        ends = records[last].astype(np.int64)
        ends = np.where((ends == 0) & (records["done"] == 0), now, ends)  # it is in this part now
        return float(np.where(begins > 0, np.maximum(np.minimum(ends, now) - np.maximum(begins, start), 0), 0).sum())

    scheduler, previous = share("waiting", "received"), share("built", "arrived")
    busy = share("received", "done") - previous - share("forwarded", "sent")
    device = float(done["device_ns"].sum())
    worked = done[done["rows"] > 0]
    seconds = length / 1e9
    return Recent(
        window_s=round(seconds, 3),
        steps_per_s=len(done) / seconds,
        tokens_per_s=float(done["tokens"].sum()) / seconds,
        sampled_per_s=float(done["samples"].sum()) / seconds,
        compute=min(1.0, (device or max(busy, 0.0)) / length),
        previous_stage=previous / length,
        scheduler=scheduler / length,
        graph_hit_rate=float((worked["graph"] > 0).mean()) if len(worked) else None,
        requests=requests,
        used_blocks=blocks,
    )


def doing(records: Records) -> str:
    """The part that a rank is in now, by the marks of the record under way; "" if it is not known."""
    if not len(records):
        return ""
    last = records[-1]
    if last["done"]:
        return ""
    reached = [mark for mark in MARKS if last[mark]]
    return PARTS[reached[-1]] if reached else ""


PARTS = {
    "waiting": "wait for scheduler",
    "received": "validate",
    "validated": "build",
    "built": "wait for previous stage",
    "arrived": "forward",
    "forwarded": "send",
    "sent": "sample",
    "sampled": "copy",
    "copied": "answer",
}
"""What begins at each mark."""
