"""What the ranks of one stage do together. A stage of one rank never touches torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.lent import Lent


class TensorParallel:
    """This rank's place among the `size` ranks of its stage, and their collectives.

    All ranks of a stage call the same collectives in the same order; a lost peer raises torch's RuntimeError.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"tensor-parallel rank {rank} is not in 0 … {size - 1}")
        if size > 1 and group is None:
            raise ValueError(f"tensor parallel over {size} ranks needs a process group")
        self.rank = rank
        self.size = size
        self.group = group
        self.lent = Lent()

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place; every rank gets the same bits. Returns its argument."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
            self.lent.note(tensor)
        return tensor

    def gather_vocab(self, shard: Tensor) -> Tensor | None:
        """[n, vocab / size] of each rank -> [n, vocab] on rank 0, None on the others. Shards have one shape."""
        if self.size == 1:
            return shard
        shard = shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(shard, shards, group=self.group, group_dst=0)
        self.lent.note(shard, *(shards or ()))
        return None if shards is None else torch.cat(shards, dim=-1)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Rank 0's values on every rank, in place (the sampled tokens: one draw for all ranks). Returns its
        argument."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
            self.lent.note(tensor)
        return tensor

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether it is so on any rank; waits for all of them."""
        return bool(self.all_reduce_(torch.tensor([float(flag)], device=device)).item())

    def exercise(self, device: torch.device, dtype: torch.dtype) -> None:
        """Every collective once, so that communicators allocate now; raises RuntimeError if one computes nonsense."""
        total = self.all_reduce_(torch.ones(1, dtype=dtype, device=device))
        gathered = self.gather_vocab(torch.full((1, 1), float(self.rank), device=device))
        token = self.broadcast_(torch.full((1,), self.rank, dtype=torch.int32, device=device))
        sound = total.item() == self.size and token.item() == 0
        if gathered is not None:
            sound = sound and gathered.tolist() == [[float(r) for r in range(self.size)]]
        if not sound:
            raise RuntimeError(f"collectives of {self.size} tensor-parallel ranks compute nonsense: is the link sound?")
