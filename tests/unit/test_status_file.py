from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from worker.rank.status_file import PHASES, SIZE, StatusWriter, create_status_file, read_status

READINGS = 100_000
BUSY = """
import sys
from pathlib import Path
from worker.rank.status_file import StatusWriter
writer = StatusWriter(epoch=3, threads=2)
writer.attach(Path(sys.argv[1]))
sequence = 1 << 40
while True:
    writer.begin_step(sequence)
    writer.progress(sequence, sequence)
    writer.end_step(sequence)
    sequence += 1
"""


def test_what_is_written_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "status"
    record = create_status_file(path)
    assert path.stat().st_size == SIZE
    assert read_status(record) is None
    writer = StatusWriter(epoch=3, threads=2)
    writer.enter("load")
    assert read_status(record) is None
    writer.attach(path)
    writer.progress(10, 40)
    status = read_status(record)
    assert status is not None
    assert (status.pid, status.epoch, status.threads, status.phase) == (os.getpid(), 3, 2, "load")
    assert (status.step, status.step_age_s, status.steps_done, status.done, status.total) == (None, None, 0, 10, 40)
    writer.begin_step(17)
    status = read_status(record)
    assert status is not None
    assert (status.phase, status.step) == ("step", 17)
    assert status.step_age_s is not None
    assert 0 <= status.step_age_s < 60
    writer.end_step(5)
    status = read_status(record)
    assert status is not None
    assert (status.phase, status.step, status.steps_done, status.live_requests) == ("ready", 17, 1, 5)
    writer.end_reset()
    status = read_status(record)
    assert status is not None
    assert status.live_requests == 0


def test_no_reading_is_of_half_a_field(tmp_path: Path) -> None:
    """One that was had a step of a gang in the best of health be older than the host, which then was past its limit."""
    record = create_status_file(tmp_path / "status")
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path / "status")]) as writer:
        try:
            while (status := read_status(record)) is None or not status.steps_done:
                assert writer.poll() is None
                assert time.monotonic() - began < 60
            for _ in range(READINGS):
                status = read_status(record)
                assert status is not None
                assert status.phase in ("boot", "ready", "step")
                assert status.phase_s <= time.monotonic() - began, status
                assert status.step_age_s is not None
                assert status.step_age_s <= time.monotonic() - began, status
                assert (status.step or 0) >> 40 == status.live_requests >> 40 == status.done >> 40 == 1, status
        finally:
            writer.kill()


class Watched:
    """A view that has somebody look after every store."""

    def __init__(self, view: memoryview, look: Callable[[], None]) -> None:
        self.view, self.look = view, look

    def __setitem__(self, place: int, value: float) -> None:
        self.view[place] = value
        self.look()


def test_no_age_is_of_what_was_before(tmp_path: Path) -> None:
    """A first step after an hour of idleness is not an hour old in any of the instants in which it is written."""
    record = create_status_file(tmp_path / "status")
    writer = StatusWriter(epoch=3, threads=2)
    writer.attach(tmp_path / "status")
    writer._step_since = time.monotonic() - 3600
    writer.step = 7
    writer._write(PHASES.index("ready"), time.monotonic() - 3600)
    seen = []

    def look() -> None:
        status = read_status(record)
        assert status is not None
        seen.append((status.phase, status.step))
        assert status.phase == "ready" or status.phase_s < 60
        assert status.step == 7 or (status.step_age_s or 0) < 60

    writer._words, writer._times = Watched(writer._words, look), Watched(writer._times, look)
    writer.begin_step(8)
    assert (seen[0], seen[-1]) == (("ready", 7), ("step", 8))


def test_layout_of_the_spec(tmp_path: Path) -> None:
    record = create_status_file(tmp_path / "status")
    writer = StatusWriter(epoch=3, threads=2)
    writer.attach(tmp_path / "status")
    writer.begin_step(9)
    assert struct.unpack_from("<4sIIII", record, 0) == (b"RKST", 1, os.getpid(), 3, 2)
    assert struct.unpack_from("<I", record, 24) == (PHASES.index("step"),)
    assert struct.unpack_from("<Q", record, 40) == (9,)
