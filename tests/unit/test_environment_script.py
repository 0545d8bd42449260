"""scripts/environment, as far as it can be tried without making an environment: what it must leave alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("linked", "complaint"), [(True, "is a link"), (False, "not made by these scripts")])
def test_what_others_made_is_not_emptied(tmp_path: Path, linked: bool, complaint: str) -> None:
    clone, theirs = tmp_path / "clone", tmp_path / "theirs"
    (clone / "scripts").mkdir(parents=True)
    for name in ("scripts/environment", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone / name)
    venv = clone / ".venv"
    place = theirs if linked else venv
    place.mkdir()
    (place / "kept").touch()
    if linked:
        venv.symlink_to(theirs)
    done = subprocess.run(
        ["bash", "-c", "source scripts/environment"], cwd=clone, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {venv} ")
    assert complaint in last
    assert (place / "kept").exists()
