"""The one factory that makes every process group of a rank, each with its time-out.

Who talks to whom:

    tensor-parallel group   the ranks of one stage
    hidden hop              (stage s, tp t) -> (stage s+1, tp t), a two-rank group of its own
    token hop               (last stage, tp t) -> (stage 0, tp t), another two-rank group

A hop has a group of its own because a backend runs the operations of one group in order: on a shared group what comes
in would stand behind what goes out (NCCL in eager initialisation puts even unbatched sends and receives in that one
order).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from worker.parallel.collectives import TensorParallel
from worker.topology import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, which is not exported for type checkers


@dataclass(frozen=True, slots=True)
class Hop:
    """One direction between two ranks, on a group that carries nothing else. `peer` is the other end's global rank."""

    name: str
    peer: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Groups:
    """Every channel of this rank; a hop that it has no part in is None."""

    tensor_parallel: TensorParallel
    hidden_in: Hop | None = None
    hidden_out: Hop | None = None
    tokens_in: Hop | None = None
    tokens_out: Hop | None = None

    def exercise(self, device: torch.device, dtype: torch.dtype) -> None:
        """Use every collective and every hop once: communicators and their buffers are allocated on first use, and
        belong into the memory baseline. The order (in, then out; tokens last) is the same chain on all ranks, so it
        cannot lock."""
        self.tensor_parallel.exercise(device, dtype)
        self._receive(self.hidden_in, device, dtype)
        self._send(self.hidden_out, device, dtype)
        self._send(self.tokens_out, device, torch.int32)
        self._receive(self.tokens_in, device, torch.int32)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _send(self, hop: Hop | None, device: torch.device, dtype: torch.dtype) -> None:
        if hop is not None:
            sent = torch.ones(1, dtype=dtype, device=device)
            self.tensor_parallel.lent.note(sent)
            dist.send(sent, hop.peer, group=hop.group)

    def _receive(self, hop: Hop | None, device: torch.device, dtype: torch.dtype) -> None:
        if hop is not None:
            arrived = torch.zeros(1, dtype=dtype, device=device)
            self.tensor_parallel.lent.note(arrived)
            dist.recv(arrived, hop.peer, group=hop.group)
            if arrived.item() != 1:
                raise RuntimeError(f"{hop.name}: a test message arrived damaged: {arrived.item()} instead of 1")


def make_groups(
    topology: Topology, store: Store | None, device: torch.device, timeout: timedelta, interface: str | None = None
) -> Groups:
    """Join the gang's process groups; collective over all its ranks, which must come here with the same topology.

    store: made by the caller; may be None for a gang of one, which never touches torch.distributed. timeout: of every
    operation on every group. interface: network interface for gloo's sockets ("lo" on one host), None for the host's
    own name.
    """
    if topology.world_size == 1:
        return Groups(TensorParallel())
    if store is None:
        raise ValueError(f"a gang of {topology.world_size} ranks needs a store to meet in")
    backend = "nccl" if device.type == "cuda" else "gloo"
    with _gloo_interface(interface):
        dist.init_process_group(
            backend, store=store, rank=topology.rank, world_size=topology.world_size, timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        return _Factory(topology, backend, timeout).make()


def leave_groups(*, failed: bool = False) -> None:
    """Leave every group. After a failure they are aborted and not destroyed, which could wait for a peer that is
    gone."""
    if dist.is_initialized():
        (dist.distributed_c10d._abort_process_group if failed else dist.destroy_process_group)()


class _Factory:
    """Makes all groups on all ranks in one order, as torch requires; keeps those that this rank is in."""

    def __init__(self, topology: Topology, backend: str, timeout: timedelta) -> None:
        self.topology = topology
        self.backend = backend
        self.timeout = timeout

    def make(self) -> Groups:
        here = self.topology
        tensor_parallel = TensorParallel()
        hops: dict[str, Hop] = {}
        if here.tp > 1:
            for stage in range(here.pp):
                ranks = [self._rank(stage, t) for t in range(here.tp)]
                group = self._group(ranks, f"tp of stage {stage}")
                if group is not None:
                    tensor_parallel = TensorParallel(here.tp_rank, here.tp, group)
        last = here.pp - 1
        wires = [("hidden", s, s + 1) for s in range(last)] + ([("tokens", last, 0)] if last else [])
        for kind, source, target in wires:
            for t in range(here.tp):
                sender, receiver = self._rank(source, t), self._rank(target, t)
                name = f"{kind} from stage {source} to stage {target} (tp {t})"
                group = self._group([sender, receiver], name)
                if group is not None and here.rank == sender:
                    hops[f"{kind}_out"] = Hop(name, receiver, group)
                elif group is not None:
                    hops[f"{kind}_in"] = Hop(name, sender, group)
        return Groups(tensor_parallel, **hops)

    def _rank(self, stage: int, tp_rank: int) -> int:
        return stage * self.topology.tp + tp_rank

    def _group(self, ranks: list[int], name: str) -> dist.ProcessGroup | None:
        group = dist.new_group(ranks, timeout=self.timeout, backend=self.backend, group_desc=name)
        return group if self.topology.rank in ranks else None


@contextmanager
def _gloo_interface(interface: str | None) -> Iterator[None]:
    """gloo has no argument for its interface; left alone it listens wherever the host's name resolves to."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        if interface is not None:
            if before is None:
                del os.environ["GLOO_SOCKET_IFNAME"]
            else:
                os.environ["GLOO_SOCKET_IFNAME"] = before
