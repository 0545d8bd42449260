"""What a step sends to the device and what comes back, through pinned memory that is its own while it is in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.execution.slots import Int32Array
from worker.layers.launch import Launcher, blocks
from worker.layers.triton_kernels import copy_packet

_ALIGNED = 4  # int32 elements: 16 bytes, so that kernels see the same alignment in every step
_COPIED = 1024  # int32 elements that a program of `copy_packet` takes


class Packets:
    """A ring of `in_flight` pinned packets, and of as many outboxes. On the device the packet is one, rewritten in the
    order of the stream that is current now, so that captured graphs find it.

    outboxes: int32 [in_flight, 2, rows], written by the device: tokens, and 1 where the row's logits were not finite.
    """

    def __init__(self, in_flight: int, capacity: int, rows: int, device: torch.device) -> None:
        capacity = -(-capacity // _ALIGNED) * _ALIGNED
        self.stream = torch.cuda.current_stream(device)
        self.copy = Launcher(copy_packet, device, _COPIED)
        self.pinned = torch.empty((in_flight, capacity), dtype=torch.int32, pin_memory=True)
        self.hosts = list(self.pinned.numpy())
        self.on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.outboxes = torch.zeros((in_flight, 2, rows), dtype=torch.int32, device=device)
        self.received = torch.zeros((in_flight, 2, rows), dtype=torch.int32, pin_memory=True)
        self.copied = [torch.cuda.Event() for _ in range(in_flight)]
        self.began = [torch.cuda.Event(enable_timing=True) for _ in range(in_flight)]
        self.ended = [torch.cuda.Event(enable_timing=True) for _ in range(in_flight)]
        # Whoever waits for this one sleeps; the others are never waited for long.
        self.ready = [torch.cuda.Event(blocking=True) for _ in range(in_flight)]
        self.free = [True] * in_flight
        self.turn = 0

    def claim(self) -> int:
        """The turn of a step: its place in the rings. Credit bounds the steps in flight, so it is free."""
        turn = self.turn
        assert self.free[turn], f"more than {len(self.free)} steps in flight"
        self.copied[turn].synchronize()
        self.free[turn] = False
        self.turn = (turn + 1) % len(self.free)
        return turn

    def release(self, turn: int) -> None:
        self.free[turn] = True

    def send(self, turn: int, arrays: Sequence[Int32Array]) -> list[Tensor]:
        """Copy to the device, in one piece and in the order of the stream; the arrays there, flat."""
        host, places, used = self.hosts[turn], [], 0
        for array in arrays:
            host[used : used + array.size] = array.ravel()
            places.append((used, array.size))
            used += -(-array.size // _ALIGNED) * _ALIGNED
        # By a kernel that reads the host's memory, which starts sooner than the copy engine does: between two graphs
        # the device waits for nothing else.
        self.copy((blocks(used, _COPIED), 1, 1), self.pinned[turn], self.on_device, used)
        self.copied[turn].record(self.stream)
        return [self.on_device[start : start + size] for start, size in places]

    def end(self, turn: int, side: torch.cuda.Stream) -> None:
        """The step is launched; what `side` is given next comes after it."""
        self.ended[turn].record(self.stream)
        side.wait_event(self.ended[turn])

    def fetch(self, turn: int, side: torch.cuda.Stream) -> None:
        """Start the outbox's way to the host on `side`, the current stream."""
        self.received[turn].copy_(self.outboxes[turn], non_blocking=True)
        self.ready[turn].record(side)

    def outbox(self, turn: int) -> NDArray[np.int32]:
        """[2, rows] on the host, after `ready`."""
        values: NDArray[np.int32] = self.received[turn].numpy()
        return values
