"""Nothing is left behind, whichever of two ends of a rank comes first: its own, or that by its coordinator's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gang.gangs import environment
from worker.processes import started_at
from worker.rank.parent_watch import ParentWatch
from worker.run_files import RunFiles

HOLDER = """
import os, signal
from worker.run_files import Claim, RunFiles
claim = Claim(RunFiles("g", os.environ))
print("held", flush=True)
signal.pause()
"""


def test_a_rank_that_leaves_by_itself_sweeps_up_behind_its_coordinator(tmp_path: Path) -> None:
    around = environment(tmp_path / "run")
    files = RunFiles("g", around)
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=around, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            watch = ParentWatch(files)
            watch.add(holder.pid, started_at(holder.pid), "the coordinator")
            watch.expect_ends()
            watch.sweep_if_alone()
            assert files.lock.exists()  # it is there, and these are its files
        finally:
            holder.kill()
        holder.wait(30)
    assert files.lock.exists()
    watch.sweep_if_alone()
    assert not files.folder.exists()
