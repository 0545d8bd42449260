"""Where a rank stands, from the environment that torchrun or our coordinator gave it: one contract for both."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from worker.config import GangConfig
from worker.exit_codes import ExitCode, Failure
from worker.logs import Origin
from worker.processes import runs_our_program


@dataclass(frozen=True, slots=True)
class Place:
    """`launch` names this start of a gang, alike on all its ranks (see run_files).

    `store_fd`: rank 0 serves the store on this listening socket. `agent_store`: torchrun's agent serves it already.
    `error_file`: where torchrun looks for a cause.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store_host: str
    store_port: int
    epoch: int
    launch: str
    parent: int
    parent_started: int  # clock ticks since boot
    spawned: bool  # by our coordinator
    store_fd: int | None = None
    agent_store: bool = False
    error_file: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], parent: tuple[int, int] | None) -> Place:
        """`parent`: `processes.parent_identity()`, read as early as can be.

        Raises ValueError: a variable is missing (not started by a launcher) or is not a number. Raises Failure: the
        launcher is gone.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        missing = [name for name in (*names, "MASTER_ADDR") if not environment.get(name)]
        if missing:
            raise ValueError(
                f"python -m worker is one rank and needs a launcher, which sets {', '.join(missing)}; start a gang by "
                "`workerctl up --model DIR` or `torchrun --nproc-per-node N -m worker --model DIR`"
            )
        rank, world, local, local_world, port = (_integer(environment, name) for name in names)
        if not 0 <= rank < world:
            raise ValueError(f"RANK is {rank}, it must be from 0 to WORLD_SIZE - 1 = {world - 1}")
        launch = environment.get("RANKD_LAUNCH")
        pid, started = _launcher(environment, parent)
        restarts = _integer(environment, "TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            rank=rank,
            world_size=world,
            local_rank=local,
            local_world_size=local_world,
            store_host=environment["MASTER_ADDR"],
            store_port=port,
            epoch=_integer(environment, "RANKD_EPOCH", str(restarts + 1)),
            # All ranks that share a host's sockets have one torchrun agent as their parent.
            launch=launch or f"{pid:08x}",
            parent=pid,
            parent_started=started,
            spawned=launch is not None,
            store_fd=_integer(environment, "RANKD_STORE_FD") if "RANKD_STORE_FD" in environment else None,
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            error_file=environment.get("TORCHELASTIC_ERROR_FILE"),
        )

    @property
    def on_loopback(self) -> bool:
        return self.store_host in ("localhost", "::1") or self.store_host.startswith("127.")


def origin_of(config: GangConfig, place: Place) -> Origin:
    """For log lines."""
    topology = config.topology(place.rank)
    return Origin(socket.gethostname(), place.rank, topology.pp_rank, topology.tp_rank, place.epoch)


def spawn_environment(
    base: Mapping[str, str], rank: int, world_size: int, port: int, epoch: int, launch: str, store_fd: int,
    parent: tuple[int, int],
) -> dict[str, str]:  # fmt: skip
    """The environment of a rank on this host, read back by `Place.from_environment`. `parent`: (pid, start tick)."""
    environment = dict(base)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANKD_EPOCH": str(epoch),
        "RANKD_LAUNCH": launch,
        "RANKD_PARENT": "{}:{}".format(*parent),
    }
    for name in [name for name in environment if name.startswith("TORCHELASTIC_")]:
        del environment[name]
    environment.pop("RANKD_STORE_FD", None)
    if rank == 0:
        environment["RANKD_STORE_FD"] = str(store_fd)
    return environment


def _launcher(environment: Mapping[str, str], parent: tuple[int, int] | None) -> tuple[int, int]:
    """Our coordinator says who it is. Under torchrun it is the parent, unless that is only the reaper of orphans."""
    if "RANKD_PARENT" in environment:
        pid, _, started = environment["RANKD_PARENT"].partition(":")
        if not (pid.isdigit() and started.isdigit()):
            raise ValueError(f"RANKD_PARENT is {environment['RANKD_PARENT']!r}, it must be PID:START")
        return int(pid), int(started)
    # Where torchrun is a container's first process, it is also its reaper; so pid 1 alone proves nothing.
    by_python = parent is not None and runs_our_program(parent[0])
    if parent is None or (not by_python and (parent[0] == 1 or "TORCHELASTIC_RUN_ID" in environment)):
        raise Failure(ExitCode.PARENT_GONE, "the launcher is gone, so its rank does not start")
    return parent


def _integer(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"{name} is {text!r}, it must be a whole number") from None


def limit_threads(threads: int) -> None:
    """Before torch is imported; torchrun has set 1, which is right for nobody.

    OpenMP's threads spin at the end of every operation. For as long as libgomp lets them by default, one busy
    neighbour on the core that the other thread needs makes a decode step twenty times slower; much shorter, and they
    sleep inside a step.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
