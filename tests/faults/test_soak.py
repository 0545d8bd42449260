from __future__ import annotations

from pathlib import Path

from tests.faults.soak import soak


def test_deaths_in_a_row(run_dir: Path, tmp_path: Path) -> None:
    """`./scripts/soak` does the same for longer."""
    assert len(soak(run_dir, tmp_path, kills=6, seed=1)) == 6
