"""What a step sends to the device and what comes back, through pinned memory that is its own while it is in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.execution.device_step import aligned
from worker.execution.slots import Int32Array
from worker.layers.launch import Launcher, blocks
from worker.layers.triton_kernels import copy_packet

_COPIED = 1024  # int32 elements that a program of `copy_packet` takes


class Packets:
    """A ring of `in_flight` pinned packets, and of as many outboxes. On the device the packet is one, rewritten in the
    order of the stream that is current now, so that captured graphs find it.

    outboxes: int32 [in_flight, 2, rows] in pinned memory, written by the device: tokens, and 1 where the row's logits
    were not finite. By a kernel's own stores, since a copy takes the host several calls a step.
    """

    def __init__(self, in_flight: int, capacity: int, rows: int, device: torch.device) -> None:
        capacity = aligned(capacity)
        self.stream = torch.cuda.current_stream(device)
        self.copy = Launcher(copy_packet, device, _COPIED)
        pinned = torch.empty((in_flight, capacity), dtype=torch.int32, pin_memory=True)
        self.pinned, self.hosts = list(pinned), list(pinned.numpy())
        self.on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.outboxes = torch.zeros((in_flight, 2, rows), dtype=torch.int32, pin_memory=True)
        self.received = self.outboxes.numpy()
        self.began = [torch.cuda.Event(enable_timing=True) for _ in range(in_flight)]
        self.ended = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(in_flight)]
        self.free = [True] * in_flight
        self.turn = 0

    def claim(self) -> int:
        """The turn of a step: its place in the rings. Credit bounds the steps in flight, so it is free."""
        turn = self.turn
        assert self.free[turn], f"more than {len(self.free)} steps in flight"
        self.ended[turn].synchronize()  # of a step that nobody waited for; it is over by now, or nearly
        self.free[turn] = False
        self.turn = (turn + 1) % len(self.free)
        return turn

    def release(self, turn: int) -> None:
        """What was launched with it has been waited for, or `end` tells when it is over."""
        self.free[turn] = True

    def send(self, turn: int, arrays: Sequence[Int32Array]) -> list[Tensor]:
        """Copy to the device, in one piece and in the order of the stream; the arrays there, flat."""
        host, used = self.hosts[turn], 0
        for array, start in zip(arrays, starts := _starts(arrays), strict=True):
            used = start + array.size
            host[start:used] = array.ravel()
        self.send_written(turn, used)
        return [self.on_device[start : start + array.size] for array, start in zip(arrays, starts, strict=True)]

    def send_written(self, turn: int, used: int) -> None:
        """Copy so many elements that were written to `hosts[turn]`."""
        # By a kernel that reads the host's memory, which starts sooner than the copy engine does: between two graphs
        # the device waits for nothing else.
        self.copy((blocks(used, _COPIED), 1, 1), self.pinned[turn], self.on_device, used)

    def end(self, turn: int, stream: torch.cuda.Stream | None = None) -> None:
        """All of the step is launched; with another stream than the packets', what is last on that."""
        self.ended[turn].record(stream or self.stream)

    def outbox(self, turn: int) -> NDArray[np.int32]:
        """[2, rows], after `ended`."""
        box: NDArray[np.int32] = self.received[turn]
        return box


def _starts(arrays: Sequence[Int32Array]) -> list[int]:
    """Where each begins in a packet."""
    starts, used = [], 0
    for array in arrays:
        starts.append(used)
        used += aligned(array.size)
    return starts
