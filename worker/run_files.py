"""What lies in a gang's folder, and the lock that says whose it is.

    lock             held by the coordinator for its life (flock: gone with the process, however it ends)
    sched, admin     sockets for schedulers and for workerctl
    <launch>.e<epoch>r<rank>s, …c     sockets for steps and for control, one pair a rank
    <launch>.status<rank>             mapped status files
    <launch>.trace<rank>, .relay      mapped rings of the latest steps, of ranks and of the relay

`launch` keeps ranks of another launch that was given the same name from ever connecting here: a DEALER with two peers
would deal every other step to the stranger. Whoever holds the lock, and only he, unlinks, and only what is of
these names and kinds: a folder that holds anything else is somebody's, and no gang starts in it.
"""

from __future__ import annotations

import copy
import fcntl
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from workerproto.rundir import gang_directory, ipc_endpoint, run_directory

_SOCKET = re.compile(r"sched|admin|[0-9a-f]{8}\.e\d+r\d+[sac]")
_MAPPED = re.compile(r"[0-9a-f]{8}\.((status|trace)\d+|relay)")
_LONGEST_LOCK = 32  # bytes: a pid


class RunFiles:
    """Paths of one gang. Raises ValueError if one of its sockets would have too long a path."""

    def __init__(self, name: str, environment: Mapping[str, str], launch: str = "", epoch: int = 0) -> None:
        self.folder = gang_directory(name, environment)
        self.launch = launch
        self.epoch = epoch
        ipc_endpoint(self.folder / f"{launch or '01234567'}.e99r999s")

    def of_epoch(self, epoch: int) -> RunFiles:
        """The same gang's, in another epoch."""
        other = copy.copy(self)
        other.epoch = epoch
        return other

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def scheduler_endpoint(self) -> str:
        return ipc_endpoint(self.folder / "sched")

    @property
    def admin_endpoint(self) -> str:
        return ipc_endpoint(self.folder / "admin")

    def steps_endpoint(self, rank: int) -> str:
        return ipc_endpoint(self.folder / f"{self.launch}.e{self.epoch}r{rank}s")

    def answers_endpoint(self, rank: int) -> str:
        return ipc_endpoint(self.folder / f"{self.launch}.e{self.epoch}r{rank}a")

    def control_endpoint(self, rank: int) -> str:
        return ipc_endpoint(self.folder / f"{self.launch}.e{self.epoch}r{rank}c")

    def status(self, rank: int) -> Path:
        return self.folder / f"{self.launch}.status{rank}"

    def trace(self, rank: int) -> Path:
        return self.folder / f"{self.launch}.trace{rank}"

    @property
    def relay_trace(self) -> Path:
        return self.folder / f"{self.launch}.relay"


def reports_folder(environment: Mapping[str, str]) -> Path:
    """Of all gangs of a run directory; no gang can have its name."""
    return run_directory(environment) / "_reports"


def reports_of(name: str, environment: Mapping[str, str]) -> list[Path]:
    """Folders, oldest first. What follows the name is of a fixed form, so that no other gang's begins alike."""
    found = reports_folder(environment).glob(f"{name}-????????T??????.??????-e*")
    return sorted(found, key=lambda path: path.stat().st_mtime)


class NameInUse(Exception):
    """Another process holds the lock. `holder` is its pid, where the file says so."""

    def __init__(self, holder: int | None) -> None:
        super().__init__(f"held by process {holder}")
        self.holder = holder


class Claim:
    """The lock of a folder, held from construction until `close`. Raises NameInUse, OSError if it cannot be made, and
    ValueError if the folder holds what is no gang's.

    What an earlier holder left behind is removed, since this process is the only one that may.
    """

    def __init__(self, files: RunFiles, *, create: bool = True) -> None:
        self._folder = files.folder
        self._path = files.lock
        if create:
            self._make_folders()
        self._judge_contents()
        self._fd = self._lock(create)
        self._unlink_contents()

    def _make_folders(self) -> None:
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.getuid():  # in a shared /tmp anybody may have been first
                raise PermissionError(f"run directory {folder} belongs to user {found.st_uid}, not to {os.getuid()}")
            if folder == self._folder:  # whoever can open a socket in it drives the gang, whatever made or umask'd it
                folder.chmod(0o700)
            elif found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:  # they could put another in its place
                raise PermissionError(f"run directory {folder} can be written to by others: chmod o-w {folder}")

    def _judge_contents(self) -> None:
        strange = sorted(path.name for path in self._folder.iterdir() if not self._is_ours(path))
        if strange:
            raise ValueError(
                f"run directory {self._folder} holds {strange[0]!r}, which is no gang's: "
                "give another --name or RANKD_RUN_DIR"
            )

    def _is_ours(self, path: Path) -> bool:
        try:
            found = path.lstat()
        except FileNotFoundError:
            return True  # its holder has just removed it
        if path == self._path:
            return stat.S_ISREG(found.st_mode) and found.st_size <= _LONGEST_LOCK
        if _MAPPED.fullmatch(path.name):
            return stat.S_ISREG(found.st_mode)
        return _SOCKET.fullmatch(path.name) is not None and stat.S_ISSOCK(found.st_mode)

    def _lock(self, create: bool) -> int:
        attempts = 5
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before may have unlinked the file between our open and our lock: then it locks nothing.
                if os.fstat(fd).st_ino == self._path.stat().st_ino:
                    os.ftruncate(fd, 0)
                    os.write(fd, b"%d\n" % os.getpid())
                    return fd
            except BlockingIOError:
                attempts -= 1  # `lock_holder` of somebody else also takes the lock, for microseconds
                if not attempts:
                    holder = _read_pid(fd)
                    os.close(fd)
                    raise NameInUse(holder) from None
                time.sleep(0.02)
            except FileNotFoundError:
                if not create:
                    os.close(fd)
                    raise
                self._make_folders()
            os.close(fd)

    def _unlink_contents(self) -> None:
        for path in self._folder.iterdir():
            if path != self._path and self._is_ours(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything, the folder last; the lock goes with its file. All of it may be gone already."""
        try:
            self._unlink_contents()
            self._path.unlink(missing_ok=True)
            self._folder.rmdir()
        except OSError:
            pass  # somebody waits for the name and has made the next lock, or it was taken away from under us
        os.close(self._fd)


def lock_holder(files: RunFiles) -> int | None:
    """Pid of the living coordinator, None where there is none; disturbs nobody."""
    try:
        fd = os.open(files.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read_pid(fd) or 0
    finally:
        os.close(fd)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def sweep(files: RunFiles) -> None:
    """Remove what a coordinator that was killed has left; nothing happens if the gang has a holder, old or new."""
    try:
        Claim(files, create=False).close()
    except (NameInUse, OSError, ValueError):
        pass
