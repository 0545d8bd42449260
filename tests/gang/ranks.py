"""Runs one function in a process per rank, with a store between them, a limit, and nobody left behind.

The function gets a `Member` and must be importable (spawn, as with real ranks). What ranks find out they write into
`member.folder`, or assert; a rank that raises fails the test with its traceback.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from worker.parallel.groups import Groups, leave_groups, make_groups
from worker.topology import Topology

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Member:
    """One rank of a test's gang."""

    rank: int
    world: int
    folder: Path
    timeout_s: float

    def store(self) -> dist.Store:
        store = dist.FileStore(str(self.folder / "store"))
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store

    def groups(self, topology: Topology) -> Groups:
        return make_groups(topology, self.store(), CPU, timedelta(seconds=self.timeout_s), interface="lo")


def run_ranks(
    world: int,
    function: Callable[..., None],
    folder: Path,
    *args: Any,
    limit_s: float = 60,
    timeout_s: float = 30,
    expect: dict[int, int] | None = None,
) -> None:
    """Run `function(member, *args)` on ranks 0 … world - 1. `expect`: exit codes other than 0, by rank."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(function, Member(rank, world, folder, timeout_s), args))
        for rank in range(world)
    ]
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            process.start()
        waiting = set(range(world))
        while waiting and (left := deadline - time.monotonic()) > 0:
            multiprocessing.connection.wait([processes[rank].sentinel for rank in waiting], left)
            waiting -= {rank for rank in waiting if processes[rank].exitcode is not None}
        errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
        assert not errors, "\n".join(errors)
        assert not waiting, f"ranks {sorted(waiting)} were still running after {limit_s} s"
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        assert codes == {rank: (expect or {}).get(rank, 0) for rank in range(world)}
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _rank(function: Callable[..., None], member: Member, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        function(member, *args)
    except BaseException:
        (member.folder / f"error-{member.rank}").write_text(f"rank {member.rank}:\n{traceback.format_exc()}")
        raise
    finally:
        leave_groups()
