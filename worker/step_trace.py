"""When each part of a rank's latest steps began: a mapped ring, written on the hot path, read by anyone on the host.

    magic[4] version:u32 slots:u32 0:u32 begun:u64 …                                                   offset 0
    slots records of 16 u64                                                                            offset 64

Record number n (from 0) stands in slot n mod slots; `begun` counts them, so the newest is the one under way. Its words:
sequence; rows | tokens << 32; samples | graph << 32 (rows of the captured graph that was replayed, 0: none);
live requests | blocks in use << 32; the marks below; device time in ns (0: not measured); flags (1: refused, 2: a
reset, 4: a record of the coordinator, 8: an operation). A mark is the end of what it is named for and the begin of the
next, in ns of CLOCK_MONOTONIC: one clock for every process of a host. It is 0 if the step has not come so far, or has
no such part.

`done` is the end of the compute thread's part. Where the device runs behind the host, `copied` comes later, from the
completion thread: results are on the host; fewer steps are in flight than slots, so its record is still there.

Written without a lock, each word at once. A mark costs about 0.1 µs. Why one record a step and not one a span: nothing
is formatted, allocated or counted while steps run; shares, rates, histograms and traces are all read off this.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from time import monotonic_ns

MAGIC = b"RKTR"
VERSION = 1
SLOTS = 4096
WORDS = 16
HEADER_BYTES = 64
SIZE = HEADER_BYTES + SLOTS * WORDS * 8

SEQUENCE, _SHAPE, _SAMPLES, _HELD = range(4)
MARKS = (
    "waiting", "received", "validated", "built", "arrived", "forwarded", "sent", "sampled", "copied", "done",
)  # fmt: skip
WAITING, RECEIVED, VALIDATED, BUILT, ARRIVED, FORWARDED, SENT, SAMPLED, COPIED, DONE = range(4, 14)
_DEVICE, _FLAGS = 14, 15
FLAG_REFUSED, FLAG_RESET, FLAG_RELAYED, FLAG_OPERATION = 1, 2, 4, 8

_HEADER = struct.Struct("<4sIII")
_FIRST = HEADER_BYTES // 8
_NOTHING = memoryview(bytes(WORDS * 8)).cast("Q")


class StepTrace:
    """The writer, used by one thread. Before `attach` it writes into memory of its own."""

    __slots__ = ("_base", "_begun", "_slots", "_words")

    def __init__(self) -> None:
        self._slots = 2
        self._words = memoryview(bytearray(HEADER_BYTES + self._slots * WORDS * 8)).cast("Q")
        self._begun = 0
        self._base = _FIRST

    def attach(self, path: Path) -> None:
        """Write into the file from now on, which the coordinator has made (`create_trace_file`)."""
        with open(path, "r+b") as file:
            self.map(mmap.mmap(file.fileno(), SIZE))

    def map(self, mapped: mmap.mmap) -> None:
        self._words = memoryview(mapped).cast("Q")
        self._slots = SLOTS
        self._begun = 0

    def begin(self) -> int:
        """A new record; the one before is complete. Returns its place, for `mark_at`."""
        words = self._words
        self._base = base = _FIRST + self._begun % self._slots * WORDS
        words[base : base + WORDS] = _NOTHING
        words[base + WAITING] = monotonic_ns()
        self._begun += 1
        words[2] = self._begun
        return base

    def receive(self, sequence: int) -> None:
        self._words[self._base + RECEIVED] = monotonic_ns()
        self._words[self._base + SEQUENCE] = sequence

    def mark(self, part: int) -> int:
        """This part ends now. Returns the time, in ns."""
        now = monotonic_ns()
        self._words[self._base + part] = now
        return now

    def mark_at(self, place: int, part: int) -> None:
        self._words[place + part] = monotonic_ns()

    def shape(self, rows: int, tokens: int, samples: int, graph: int = 0) -> None:
        self._words[self._base + _SHAPE] = rows | tokens << 32
        self._words[self._base + _SAMPLES] = samples | graph << 32

    def held(self, requests: int, blocks: int) -> None:
        self._words[self._base + _HELD] = requests | blocks << 32

    def flag(self, flag: int) -> None:
        self._words[self._base + _FLAGS] = flag

    @property
    def place(self) -> int:
        """Of the record under way."""
        return self._base

    def device_time(self, place: int, nanoseconds: int) -> None:
        self._words[place + _DEVICE] = nanoseconds


def create_trace_file(path: Path) -> mmap.mmap:
    """By the coordinator, who alone makes and unlinks files; one of an epoch before is replaced, not written to."""
    path.unlink(missing_ok=True)
    with open(path, "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)  # or whoever writes where the disk is full dies of SIGBUS
        mapped = mmap.mmap(file.fileno(), SIZE)
    _HEADER.pack_into(mapped, 0, MAGIC, VERSION, SLOTS, 0)
    return mapped
