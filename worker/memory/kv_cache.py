"""The paged KV cache of one rank: its shape, its bytes, its allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """What one rank stores. A block is `block_size` positions, over all layers of the stage.

    Keys and values of a position lie beside each other (layout "NHD", [block, position, 2, kv head, element]), so one
    indexed copy writes both and one gather reads both.
    """

    layers: int  # of this stage
    block_size: int  # positions
    kv_heads: int  # of this tp rank, a head held twice counted twice
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        return (self.block_size, 2, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over the stage's layers, from a real tensor's dtype and shape."""
        return self.layers * torch.empty(self.block_shape, dtype=self.dtype, device="meta").nbytes

    def blocks_in(self, budget: int) -> int:
        """Usable blocks that fit in `budget` bytes beside the padding block. ValueError if there is none."""
        blocks = budget // self.block_bytes - 1
        if blocks < 1:
            raise ValueError(
                f"{budget} bytes of KV cache hold no block: two are needed, one of them for padding, and a block of "
                f"{self.block_size} positions takes {self.block_bytes} bytes over {self.layers} layers"
            )
        return blocks

    def allocate(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """One tensor a layer, [num_blocks + 1, block_size, 2, kv_heads, head_dim], zeroed.

        Blocks 0 … num_blocks - 1 belong to the scheduler; block num_blocks takes what padding writes.
        """
        shape = (num_blocks + 1, *self.block_shape)
        # Filled, not asked for as zeros: on the CPU the latter only reserves, and a cache that does not fit would be
        # found out in the middle of a step.
        return [torch.empty(shape, dtype=self.dtype, device=device).zero_() for _ in range(self.layers)]
