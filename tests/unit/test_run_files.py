from __future__ import annotations

import os
import socket
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


def leave(files: RunFiles, name: str) -> None:
    """What a gang that was killed leaves under this name."""
    if name == "lock" or "status" in name:
        (files.folder / name).write_text("7\n")
        return
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(files.folder / name))


def test_folder_is_private_and_goes_with_the_claim(files: RunFiles) -> None:
    claim = Claim(files)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert lock_holder(files) == os.getpid()
    leave(files, "sched")
    claim.close()
    assert not files.folder.exists()
    assert lock_holder(files) is None


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_folder_is_private_whatever_the_umask_or_who_made_it(files: RunFiles, umask: int) -> None:
    if umask != 0o777:
        files.folder.mkdir(mode=0o777, parents=True)
    before = os.umask(umask)
    try:
        claim = Claim(files)
    finally:
        os.umask(before)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    claim.close()


def test_run_directory_that_others_may_write(files: RunFiles, run_dir: Path) -> None:
    run_dir.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written to by others: chmod o-w"):
        Claim(files)
    run_dir.chmod(0o1777)  # as /tmp, where nobody can take another's folder away
    Claim(files).close()


def test_second_claim_is_refused_and_touches_nothing(files: RunFiles) -> None:
    claim = Claim(files)
    leave(files, "sched")
    with pytest.raises(NameInUse) as refused:
        Claim(files)
    assert refused.value.holder == os.getpid()
    sweep(files)
    assert (files.folder / "sched").exists()
    claim.close()


def test_what_a_killed_holder_left_is_removed(files: RunFiles) -> None:
    files.folder.mkdir()
    for name in ("lock", "sched", "00000000.e1r0s", "00000000.status0"):
        leave(files, name)
    claim = Claim(files)
    assert [path.name for path in files.folder.iterdir()] == ["lock"]
    claim.close()


@pytest.mark.parametrize("name", ["thesis.txt", "sched", "00000000.e1r0s", "lock", "folder/", ".hidden"])
def test_a_folder_that_is_somebody_s_is_left_alone(files: RunFiles, name: str) -> None:
    """Also where a name is one of ours and the thing is not: a socket's name on a file, a lock with a text in it."""
    path = files.folder / name
    files.folder.mkdir()
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text("precious, and longer than any pid is")
    with pytest.raises(ValueError, match=f"holds '{path.name}', which is no gang's"):
        Claim(files)
    sweep(files)
    assert [found.name for found in files.folder.iterdir()] == [path.name]
    assert path.is_dir() or path.read_text().startswith("precious")


def test_sweep_of_a_dead_gang(files: RunFiles) -> None:
    sweep(files)  # nothing there
    files.folder.mkdir()
    for name in ("lock", "sched"):
        leave(files, name)
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
    assert run_directory({"RANKD_RUN_DIR": "a"}) == Path.cwd() / "a"
    assert endpoint_of("n", {"RANKD_RUN_DIR": "/a"}) == "ipc:///a/n/sched"


@pytest.mark.parametrize("name", ["", ".", "..", "-x", "a/b", "a b", "ä", "x" * 33])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="gang name"):
        gang_directory(name, {})


def test_longest_socket_path() -> None:
    assert ipc_endpoint(Path("/" + "x" * (LONGEST_IPC_PATH - 1)))
    with pytest.raises(ValueError, match="has 108 bytes, at most 107"):
        ipc_endpoint(Path("/" + "x" * LONGEST_IPC_PATH))
