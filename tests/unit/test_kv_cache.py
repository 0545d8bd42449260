"""The cache's bytes are those of its tensors."""

import pytest
import torch

from worker.memory.kv_cache import KVCacheShape

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes_are_real(dtype: torch.dtype) -> None:
    shape = KVCacheShape(layers=3, block_size=16, kv_heads=2, head_dim=24, dtype=dtype)
    caches = shape.allocate(5, CPU)
    assert len(caches) == 3
    assert all(cache.shape == (6, 16, 2, 2, 24) and cache.dtype == dtype and not cache.any() for cache in caches)
    assert sum(cache.nbytes for cache in caches) == 6 * shape.block_bytes


def test_blocks_in_a_budget() -> None:
    shape = KVCacheShape(layers=3, block_size=16, kv_heads=2, head_dim=24, dtype=torch.float32)
    assert shape.blocks_in(7 * shape.block_bytes) == 6
    assert shape.blocks_in(7 * shape.block_bytes - 1) == 5
    for budget in (2 * shape.block_bytes - 1, 0, -5):
        with pytest.raises(ValueError, match=f"{budget} bytes of KV cache hold no block"):
            shape.blocks_in(budget)
