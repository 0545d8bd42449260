from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from worker.run_files import Claim, NameInUse, RunFiles, lock_holder, sweep
from workerproto.rundir import LONGEST_IPC_PATH, endpoint_of, gang_directory, ipc_endpoint, run_directory


@pytest.fixture
def files(run_dir: Path) -> RunFiles:
    return RunFiles("g", {"RANKD_RUN_DIR": str(run_dir)}, "01234567", 1)


def test_folder_is_private_and_goes_with_the_claim(files: RunFiles) -> None:
    claim = Claim(files)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert lock_holder(files) == os.getpid()
    (files.folder / "sched").touch()
    claim.close()
    assert not files.folder.exists()
    assert lock_holder(files) is None


def test_second_claim_is_refused_and_touches_nothing(files: RunFiles) -> None:
    claim = Claim(files)
    (files.folder / "sched").touch()
    with pytest.raises(NameInUse) as refused:
        Claim(files)
    assert refused.value.holder == os.getpid()
    sweep(files)
    assert (files.folder / "sched").exists()
    claim.close()


def test_what_a_killed_holder_left_is_removed(files: RunFiles) -> None:
    files.folder.mkdir()
    for name in ("lock", "sched", "00000000.e1r0s"):
        (files.folder / name).touch()
    claim = Claim(files)
    assert [path.name for path in files.folder.iterdir()] == ["lock"]
    claim.close()


def test_sweep_of_a_dead_gang(files: RunFiles) -> None:
    sweep(files)  # nothing there
    files.folder.mkdir()
    for name in ("lock", "sched"):
        (files.folder / name).touch()
    sweep(files)
    assert not files.folder.exists()


def test_lock_goes_with_its_process(files: RunFiles, run_dir: Path) -> None:
    hold = (
        "import sys; from worker.run_files import *\n"
        "claim = Claim(RunFiles('g', {'RANKD_RUN_DIR': sys.argv[1]})); print('held', flush=True); sys.stdin.read()"
    )
    path = os.pathsep.join(sys.path)
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert lock_holder(files) == holder.pid
    finally:
        holder.kill()
        holder.wait(10)
        for pipe in (holder.stdin, holder.stdout):
            assert pipe is not None
            pipe.close()
    assert lock_holder(files) is None
    Claim(files).close()


def test_run_directory_by_environment() -> None:
    assert run_directory({"RANKD_RUN_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}) == Path("/a")
    assert run_directory({"XDG_RUNTIME_DIR": "/b"}) == Path("/b/rankd")
    assert run_directory({}).name == f"rankd-{os.getuid()}"
    assert endpoint_of("n", {"RANKD_RUN_DIR": "/a"}) == "ipc:///a/n/sched"


@pytest.mark.parametrize("name", ["", ".", "..", "-x", "a/b", "a b", "ä", "x" * 33])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="gang name"):
        gang_directory(name, {})


def test_longest_socket_path() -> None:
    assert ipc_endpoint(Path("/" + "x" * (LONGEST_IPC_PATH - 1)))
    with pytest.raises(ValueError, match="has 108 bytes, at most 107"):
        ipc_endpoint(Path("/" + "x" * LONGEST_IPC_PATH))
