"""`scripts/bench wire` runs, and its last line is JSON with both sides of every comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.gang.gangs import ROOT, environment


def test_it_measures_both_sides_in_one_run(run_dir: Path) -> None:
    script = str(ROOT / "scripts" / "bench_wire.py")
    done = subprocess.run(
        [sys.executable, script, "--ranks", "2", "--rounds", "1", "--steps", "20"], env=environment(run_dir),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["ranks"]["2"]) == {"bare empty", "empty", "bare decode", "decode"}
    assert all(0 < times["p50_us"] <= times["p99_us"] for times in found["ranks"]["2"].values())
    assert 0 < found["codec"]["wire_us"] < found["codec"]["pickle_us"]
