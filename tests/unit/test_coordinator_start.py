from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from worker.exit_codes import ExitCode, Failure
from worker.processes import started_at
from worker.rank import coordinator_start
from worker.rank.place import Place


@pytest.mark.parametrize("what", ["says nothing", "does not end"])
def test_coordinator_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{'exec >&-' if what == 'does not end' else ''}\nexec sleep 60\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(coordinator_start, "START_LIMIT_S", 0.3)
    monkeypatch.setattr(coordinator_start, "END_LIMIT_S", 0.3)
    monkeypatch.setattr(coordinator_start, "die_when_asked", lambda first: None)  # pytest is not a rank
    before = set(psutil.Process().children())
    place = Place(0, 1, 0, 1, "localhost", 29500, 1, "abcdef01", os.getpid(), started_at(os.getpid()), spawned=False)
    with pytest.raises(Failure, match=r"the coordinator neither took connections within 0.3 s nor ended") as raised:
        coordinator_start.start_coordinator(place, [])
    assert raised.value.code == ExitCode.LIMIT
    assert not psutil.wait_procs(set(psutil.Process().children()) - before, timeout=5)[1]
