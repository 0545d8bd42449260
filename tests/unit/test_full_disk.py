"""A disk that fills up, and a clock that is put back: neither ends a gang, nor loses what it says of its end."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from worker import step_trace
from worker.coordinator.report import KEPT, forget_oldest
from worker.logs import Stream
from worker.rank import status_file


@pytest.mark.parametrize(
    ("create", "size"),
    [(status_file.create_status_file, status_file.SIZE), (step_trace.create_trace_file, step_trace.SIZE)],
)
def test_what_is_mapped_has_its_place_on_the_disk(tmp_path: Path, create: object, size: int) -> None:
    """A hole in the file would be SIGBUS for whoever writes there once the disk is full."""
    assert callable(create)
    with create(tmp_path / "mapped"):
        found = (tmp_path / "mapped").stat()
        assert found.st_size == size
        assert found.st_blocks * 512 >= size


def test_a_log_that_cannot_be_written(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w", buffering=1) as full:  # as it is closed
        Stream(full).handle(logging.makeLogRecord({"msg": "no space left"}))
    assert capfd.readouterr() == ("", "")


def test_the_newest_report_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    for number in range(KEPT + 2):
        (tmp_path / f"{number}").mkdir()
        os.utime(tmp_path / f"{number}", (time.time() + 3600 + number,) * 2)
    newest = tmp_path / "newest"
    newest.mkdir()
    forget_oldest(tmp_path, newest)
    assert len(list(tmp_path.iterdir())) == KEPT
    assert newest.exists()
    assert not (tmp_path / "2").exists()
    assert (tmp_path / "3").exists()
