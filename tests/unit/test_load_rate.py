"""How fast weights load, while they do."""

from __future__ import annotations

from dataclasses import replace

from worker.coordinator.admin import _load_rate
from worker.rank.status_file import SIZE, StatusWriter, read_status


def test_the_rate_is_of_the_load_phase_alone() -> None:
    writer = StatusWriter(1, 1)
    writer.enter("load")
    writer.progress(3_000_000_000, 4_000_000_000)
    status = read_status(bytes(writer._bytes))
    assert status is not None
    assert len(writer._bytes) == SIZE
    assert _load_rate(replace(status, phase_s=2.0)) == 1.5
    assert _load_rate(replace(status, phase_s=0.0)) is None
    assert _load_rate(replace(status, phase="profile")) is None
