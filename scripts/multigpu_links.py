"""What ranks pay for talking: all-reduces by size, a hop between stages as one send and as slice plus all-gather.

One rank a GPU, under torchrun; rank 0 prints one JSON line, in microseconds. NVLink multicast stays as it is: off.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

KIB = (8, 32, 128, 256, 1024, 16384)
REPEATS = 30


def microseconds(work: Callable[[], object]) -> float:
    """Median over repeats, of the slowest rank each time."""
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        slowest = torch.tensor([began.elapsed_time(ended)], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(1000 * float(slowest.item()))
    return round(sorted(times)[REPEATS // 2], 1)


def one_shot(kib: int, group: dist.ProcessGroup) -> float | None:
    """torch's symmetric memory: every rank reads all the others' buffers at once; None where that does not work."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer: Any = symmetric.empty(kib * 512, dtype=torch.bfloat16, device=torch.device("cuda"))
        symmetric.rendezvous(buffer, group)
        return microseconds(lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name))
    except (AttributeError, ImportError, RuntimeError) as error:
        print(f"one-shot all-reduce of {kib} KiB: {error}", flush=True)
        return None


class Hop:
    """Of two stages with half of the ranks each, and what passes from the first to the second."""

    def __init__(self, rank: int, size: int, kib: int, stages: list[dist.ProcessGroup]) -> None:
        half = size // 2
        self.sends, self.other, self.stage = rank < half, (rank + half) % size, stages[rank >= half]
        self.whole = torch.ones(kib * 512, dtype=torch.bfloat16, device="cuda")
        self.piece = self.whole[: len(self.whole) // half].clone()

    def send(self) -> None:
        (dist.send if self.sends else dist.recv)(self.whole, self.other)

    def slice_and_gather(self) -> None:
        (dist.send if self.sends else dist.recv)(self.piece, self.other)
        if not self.sends:
            dist.all_gather_into_tensor(self.whole, self.piece, group=self.stage)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    everyone = dist.new_group(list(range(size)))
    stages = [dist.new_group(list(range(first, first + size // 2))) for first in (0, size // 2)]
    assert everyone is not None
    found: dict[str, dict[int, float | None]] = {}
    for kib in KIB:
        hop = Hop(rank, size, kib, stages)
        found.setdefault("all_reduce", {})[kib] = microseconds(partial(dist.all_reduce, hop.whole))
        found.setdefault("one_shot", {})[kib] = one_shot(kib, everyone) if kib <= 256 else None
        found.setdefault("send", {})[kib] = microseconds(hop.send)
        found.setdefault("slice_and_gather", {})[kib] = microseconds(hop.slice_and_gather)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
