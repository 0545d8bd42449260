"""What ranks pay for talking: all-reduces by size, a hop between stages as one send and as slice plus all-gather (which
takes four ranks: of two a stage has one, which gathers from nobody).

One rank a GPU, under torchrun; rank 0 prints one JSON line, in microseconds. NVLink multicast stays as it is: off.
Without a GPU, over gloo, and with --shared-device it shows that it works, and nothing of links.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

KIB = "8,32,128,256,1024,16384"
ONE_SHOT_KIB = 256  # the most that is tried


class Timer:
    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def microseconds(self, work: Callable[[], object]) -> float:
        """Median over repeats, of the slowest rank each time."""
        work()  # communicators are made on first use
        times = []
        for _ in range(self.repeats):
            dist.barrier()
            slowest = torch.tensor([self._milliseconds(work)], device=self.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(1000 * float(slowest.item()))
        return round(sorted(times)[self.repeats // 2], 1)

    def _milliseconds(self, work: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            work()
            return 1000 * (time.perf_counter() - start)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))


def one_shot(kib: int, group: dist.ProcessGroup, timer: Timer) -> float | None:
    """torch's symmetric memory: every rank reads all the others' buffers at once; None where that does not work."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer: Any = symmetric.empty(kib * 512, dtype=torch.bfloat16, device=timer.device)
        symmetric.rendezvous(buffer, group)
        buffer.fill_(1)
        dist.barrier()
        reduced = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name)
        if not bool((reduced == group.size()).all()):
            raise RuntimeError(f"the sum of ones over {group.size()} ranks is not {group.size()}")
        return timer.microseconds(lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name))
    except (AttributeError, ImportError, RuntimeError) as error:
        print(f"one-shot all-reduce of {kib} KiB: {error}", flush=True)
        return None


class Hop:
    """Of two stages with half of the ranks each, and what passes from the first to the second."""

    def __init__(self, kib: int, device: torch.device, stages: list[Any]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        half = size // 2
        self.sends, self.other, self.stage = rank < half, (rank + half) % size, stages[rank >= half]
        self.whole = torch.ones(kib * 512, dtype=torch.bfloat16, device=device)
        self.piece = self.whole[: len(self.whole) // half].clone()

    def send(self) -> None:
        (dist.send if self.sends else dist.recv)(self.whole, self.other)

    def slice_and_gather(self) -> None:
        (dist.send if self.sends else dist.recv)(self.piece, self.other)
        if not self.sends:
            dist.all_gather_into_tensor(self.whole, self.piece, group=self.stage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--kib", default=KIB, help=f"sizes (default: {KIB})")
    parser.add_argument("--shared-device", action="store_true", help="all ranks on the first GPU")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", 0 if args.shared_device else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    size = dist.get_world_size()
    everyone = dist.new_group(list(range(size)))
    stages = [dist.new_group(list(range(first, first + size // 2))) for first in (0, size // 2)]
    assert everyone is not None
    timer = Timer(device, args.repeats)
    found: dict[str, dict[int, float | None]] = {}
    for kib in map(int, args.kib.split(",")):
        hop = Hop(kib, device, stages)
        alone = device.type == "cuda" and not args.shared_device and kib <= ONE_SHOT_KIB
        found.setdefault("all_reduce", {})[kib] = timer.microseconds(partial(dist.all_reduce, hop.whole))
        found.setdefault("one_shot", {})[kib] = one_shot(kib, everyone, timer) if alone else None
        found.setdefault("send", {})[kib] = timer.microseconds(hop.send)
        found.setdefault("slice_and_gather", {})[kib] = timer.microseconds(hop.slice_and_gather)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
