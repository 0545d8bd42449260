"""The ranks as processes: started here, or adopted from torchrun; watched by pidfd either way."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from worker.processes import open_process, started_at
from worker.rank.place import spawn_environment


class Exit(NamedTuple):
    """How a process ended. Both None: it was not our child, so the kernel does not say."""

    code: int | None = None
    signal: str | None = None


class RankProcess:
    """One rank's process. `exited` is done once it is gone (and reaped, if it was ours)."""

    def __init__(self, pid: int, started: int, child: subprocess.Popen[bytes] | None = None) -> None:
        """Raises ProcessLookupError if it is gone already."""
        self.pid = pid
        self._child = child
        self._pidfd = open_process(pid, started)
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._gone)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.exited.set_result(Exit() if self._child is None else _exit_of(self._child.wait()))

    def send_signal(self, number: signal.Signals) -> None:
        """To this very process, or to nobody."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def _exit_of(status: int) -> Exit:
    if status >= 0:
        return Exit(code=status)
    try:
        return Exit(signal=signal.Signals(-status).name)
    except ValueError:
        return Exit(signal=f"signal {-status}")


def spawn(
    world_size: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    epoch: int,
    launch: str,
    output: IO[bytes] | int,
) -> list[RankProcess]:
    """Start all ranks of this host, with torchrun's environment contract. stdout and stderr of all go to `output`.

    Rank 0 inherits a socket for the store that listens on loopback already: no race for a port, nothing beyond the
    host.
    """
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        store.listen(128)
        port, fd = store.getsockname()[1], store.fileno()
        processes = []
        me = os.getpid(), started_at(os.getpid())
        for rank in range(world_size):
            child = subprocess.Popen(
                [sys.executable, "-m", "worker", *arguments],
                env=spawn_environment(environment, rank, world_size, port, epoch, launch, fd, me),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[fd] if rank == 0 else [],
                start_new_session=True,  # Ctrl-C reaches the coordinator alone
            )
            processes.append(RankProcess(child.pid, started_at(child.pid), child))
    return processes
