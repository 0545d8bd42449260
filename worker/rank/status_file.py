"""The mapped status file of a rank: what it does now, readable while it is stuck, by anyone on its host.

    magic[4] version:u32 pid:u32 epoch:u32 threads:u32 0:u32                                           offset 0
    phase:u32 0:u32 phase_since:f64 step:u64 step_since:f64 steps_done:u64 live_requests:u64           offset 24
    done:u64 total:u64                                  bytes of weights, while loading                offset 72

Little-endian; times are seconds of the host's monotonic clock; `phase` counts in PHASES; `step` is a gang sequence.
Written without a lock: a reader may see one field a step older than its neighbour, and never waits. Each field is
written and read at once, each time before what it is of, which is read first: so no age is taken from a time that is
older than the phase or the step beside it, on x86-64, which keeps the order of stores and of loads. `struct` would not
do: `pack_into` clears all that it is about to write, and its little-endian formats go byte by byte; a step seen beside
a cleared time is as old as the host, and past every limit.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "boot", "rendezvous", "load", "profile", "kv", "warmup", "ready", "step", "reset", "stopped", "operation", "mask",
)  # fmt: skip
SIZE = 128

_MAGIC = b"RKST"
_VERSION = 1
_FIXED = struct.Struct("<4sIIIII")
_PHASE, _SINCE, _STEP_SEQUENCE, _STEP_SINCE, _STEPS_DONE, _LIVE, _DONE, _TOTAL = range(24 // 8, 24 // 8 + 8)  # in words
_READY, _STEP = PHASES.index("ready"), PHASES.index("step")


class StatusWriter:
    """Before `attach` it keeps the record to itself. Steps are begun by the compute thread, and ended in their order by
    the thread that sees them done; of those under way the oldest is shown.
    """

    def __init__(self, epoch: int, threads: int) -> None:
        self._hold(bytearray(SIZE))
        self.phase = PHASES[0]
        self.step: int | None = None
        self.steps_done = 0
        self._live = 0
        self._step_since = 0.0
        self._under_way: deque[int] = deque()
        self._lock = threading.Lock()
        self._bytes[: _FIXED.size] = _FIXED.pack(_MAGIC, _VERSION, os.getpid(), epoch, threads, 0)
        self.enter(PHASES[0])

    def _hold(self, record: bytearray | mmap.mmap) -> None:
        self._bytes = view = memoryview(record)
        self._words, self._times = view.cast("Q"), view.cast("d")

    def attach(self, path: Path) -> None:
        """Go on in the file, which the coordinator has made (SIZE bytes)."""
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), SIZE)
        with self._lock:
            content = bytes(self._bytes)
            mapped[8:] = content[8:]
            mapped[:8] = content[:8]  # by which a reader knows that the rest is there
            self._hold(mapped)

    def enter(self, phase: str) -> None:
        with self._lock:
            self.phase = phase
            self._write(PHASES.index(phase), time.monotonic())

    def begin_step(self, sequence: int) -> None:
        with self._lock:
            self._under_way.append(sequence)
            if len(self._under_way) == 1:
                self._show_oldest()

    def begin_operation(self, sequence: int) -> None:
        self.step = sequence
        self._step_since = time.monotonic()
        self.enter("operation")

    def end_step(self, live_requests: int) -> None:
        with self._lock:
            self._under_way.popleft()
            self.steps_done += 1
            self._live = live_requests
            if self._under_way:
                self._show_oldest()
            else:
                self.phase = "ready"
                self._write(_READY, time.monotonic())

    def end_reset(self) -> None:
        self._live = 0
        self.enter("ready")

    def progress(self, done: int, total: int) -> None:
        with self._lock:
            self._words[_DONE], self._words[_TOTAL] = done, total

    def _show_oldest(self) -> None:
        self.phase, self.step = "step", self._under_way[0]
        self._step_since = now = time.monotonic()
        self._write(_STEP, now)

    def _write(self, phase: int, since: float) -> None:
        words, times = self._words, self._times
        times[_SINCE] = since
        times[_STEP_SINCE] = self._step_since
        words[_STEP_SEQUENCE] = self.step or 0
        words[_STEPS_DONE] = self.steps_done
        words[_LIVE] = self._live
        words[_PHASE] = phase


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One reading. Ages in seconds; `step` None before the first."""

    pid: int
    epoch: int
    threads: int
    phase: str
    phase_s: float
    step: int | None
    step_age_s: float | None
    steps_done: int
    live_requests: int
    done: int
    total: int

def read_status(record: bytes | mmap.mmap) -> RankStatus | None:
    """None if the rank has not written yet, or writes another version."""
    magic, version, pid, epoch, threads, _ = _FIXED.unpack_from(record, 0)
    if magic != _MAGIC or version != _VERSION:
        return None
    view = memoryview(record)
    words, times = view.cast("Q"), view.cast("d")
    phase, since = PHASES[words[_PHASE]], times[_SINCE]
    step, step_since = words[_STEP_SEQUENCE], times[_STEP_SINCE]
    now = time.monotonic()
    return RankStatus(
        pid, epoch, threads, phase, max(0.0, now - since), step or None,
        max(0.0, now - step_since) if step and step_since else None,
        words[_STEPS_DONE], words[_LIVE], words[_DONE], words[_TOTAL],
    )  # fmt: skip


def create_status_file(path: Path) -> mmap.mmap:
    """By the coordinator, who alone makes and unlinks files; one of an epoch before is replaced, not written to."""
    path.unlink(missing_ok=True)
    with open(path, "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)  # or whoever writes where the disk is full dies of SIGBUS
        return mmap.mmap(file.fileno(), SIZE)
