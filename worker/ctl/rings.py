"""The rings of the latest steps of a gang, read off its folder: no process of it is asked, or noticed. Those of a gang
that has failed are in the report of it.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from worker.ctl.admin_client import NoSuchGang
from worker.run_files import RunFiles, lock_holder, reports_folder, reports_of
from worker.step_records import Records, read_records, read_trace_file
from worker.step_trace import FLAG_REFUSED, FLAG_RESET, MARKS


class Part(NamedTuple):
    """`step`, or what it consists of. start, end: ns of CLOCK_MONOTONIC. row: 0 the compute thread, 1 beside it."""

    name: str
    step: int
    start: int
    end: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class Rings:
    """One clock for all of them: that of the host, so a gang over several hosts is refused by whoever starts it.

    ranks: by rank. relay: the coordinator's, from taking a step until its answer. now: when they were read, in ns.
    """

    ranks: dict[int, Records]
    relay: Records
    now: int


def read_rings(files: RunFiles, steps: int) -> Rings:
    """The last `steps` steps, those under way included. Raises NoSuchGang; ValueError if there has been no step."""
    if lock_holder(files) is None:
        raise NoSuchGang(f"there is no gang {files.folder.name!r} in {files.folder.parent}")
    ranks = {int(path.name.rpartition("trace")[2]): read_trace_file(path) for path in files.folder.glob("*.trace*")}
    relay = next((read_trace_file(path) for path in files.folder.glob("*.relay")), None)
    if relay is not None and (rings := _last(ranks, relay, time.monotonic_ns(), steps)) is not None:
        return rings
    raise ValueError(
        f"gang {files.folder.name!r} has done no step yet: there is nothing to see; --failed shows the last failure's"
    )


def failed_rings(name: str, environment: Mapping[str, str], steps: int) -> Rings:
    """Likewise of its last failure after a step, whether it came back or is gone. Raises NoSuchGang: there is none;
    ValueError: the report is damaged.
    """
    for folder in reversed(reports_of(name, environment)):
        if (rings := _kept_rings(folder, steps)) is not None:
            return rings
    raise NoSuchGang(f"no report in {reports_folder(environment)} is of a gang {name!r} that failed after a step")


def _kept_rings(folder: Path, steps: int) -> Rings | None:
    try:
        now = int(json.loads((folder / "report.json").read_text(encoding="utf-8"))["monotonic_ns"])
        ranks = {int(path.stem.removeprefix("trace")): _unpacked(path) for path in folder.glob("trace*.gz")}
        return _last(ranks, _unpacked(folder / "relay.gz"), now, steps)
    except FileNotFoundError:  # one that has just been replaced by a newer
        return None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"report {folder} cannot be read: {error}") from None


def _unpacked(path: Path) -> Records:
    return read_records(gzip.decompress(path.read_bytes()))[0]


def _last(ranks: dict[int, Records], relay: Records, now: int, steps: int) -> Rings | None:
    """None if there has been no step."""
    steps_of = [records["sequence"][records["sequence"] > 0] for records in ranks.values()]
    known = np.unique(np.concatenate(steps_of)) if steps_of else np.empty(0)
    if not len(known):
        return None
    first = known[-steps:][0]
    kept = {rank: records[records["sequence"] >= first] for rank, records in sorted(ranks.items())}
    return Rings(kept, relay[relay["sequence"] >= first], now)


NAMES = {
    "waiting": "wait for scheduler",
    "received": "validate",
    "validated": "build",
    "built": "receive",  # that is: wait for it
    "arrived": "forward",
    "forwarded": "send",
    "sent": "sample",
    "sampled": "copy",
    "copied": "answer",
}
"""Of the part that begins at a mark."""


def parts_of(records: Records, now: int) -> list[Part]:
    """What a rank did, in order: each step, then its parts. A step under way goes on until `now`."""
    found = []
    for record in records:
        step = int(record["sequence"])
        marks = [(mark, int(record[mark])) for mark in MARKS if record[mark]]
        done, copied = int(record["done"]), int(record["copied"])
        if copied > done > 0:  # by the completion thread, while the next step was being launched
            marks = [mark for mark in marks if mark[0] != "copied"]
            found.append(Part("copy", step, done, copied, 1))
        if record["device_ns"]:  # the length was measured by the device; that it ended just before the copy is assumed
            found.append(Part("device", step, copied - int(record["device_ns"]), copied, 1))
        kind = int(record["flags"])
        name = "refused step" if kind & FLAG_REFUSED else "reset" if kind & FLAG_RESET else "step"
        found.append(Part(name, step, int(record["received"]), done or now))
        if not done:
            marks.append(("done", now))
        for (mark, start), (_, end) in pairwise(marks):
            found.append(Part(NAMES[mark], step, start, end))
    return found
