"""Where a rank stands, from the environment that torchrun or our coordinator gave it: one contract for both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


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
    spawned: bool  # by our coordinator
    store_fd: int | None = None
    agent_store: bool = False
    error_file: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], parent: int) -> Place:
        """Raises ValueError: a variable is missing (not started by a launcher) or is not a number."""
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
            launch=launch or f"{parent:08x}",
            parent=parent,
            spawned=launch is not None,
            store_fd=_integer(environment, "RANKD_STORE_FD") if "RANKD_STORE_FD" in environment else None,
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            error_file=environment.get("TORCHELASTIC_ERROR_FILE"),
        )

    @property
    def on_loopback(self) -> bool:
        return self.store_host in ("localhost", "::1") or self.store_host.startswith("127.")


def spawn_environment(
    base: Mapping[str, str], rank: int, world_size: int, port: int, epoch: int, launch: str, store_fd: int
) -> dict[str, str]:
    """The environment of a rank on this host, read back by `Place.from_environment`."""
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
    }
    for name in [name for name in environment if name.startswith("TORCHELASTIC_")]:
        del environment[name]
    environment.pop("RANKD_STORE_FD", None)
    if rank == 0:
        environment["RANKD_STORE_FD"] = str(store_fd)
    return environment


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
