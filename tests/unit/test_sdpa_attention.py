"""Where blocks lie changes nothing, to the bit: what lies in one piece is read in place, the rest is gathered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.layers.attention import MOST_GATHERED, AttentionBatch, Rows
from worker.layers.sdpa_attention import SdpaAttention

BLOCK, HEADS, KV_HEADS, DIM = 16, 6, 2, 32
# Blocks of each row; those of the first two cases lie in one piece, in the last one rows do so together.
PLACES = {
    "from the start": [[0, 1, 2]],
    "in the middle": [[5, 6, 7]],
    "backwards": [[7, 6, 5]],
    "with a hole": [[1, 2, 9]],
    "rows in turn": [[3, 4, 5], [6, 7, 8]],
    "rows that cross": [[8, 2, 5], [1, 9, 0]],
}


@pytest.mark.parametrize("blocks", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("position", [0, 20, 47])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_places_of_blocks_change_nothing(blocks: list[list[int]], position: int, dtype: torch.dtype) -> None:
    rows, length = len(blocks), 3 * BLOCK
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).to(dtype)
    content = torch.randn(rows, length, 2, KV_HEADS, DIM, generator=generator).to(dtype)
    backend = SdpaAttention(dtype, HEADS, KV_HEADS, DIM)

    def attended(tables: list[list[int]]) -> torch.Tensor:
        cache = torch.full((11, BLOCK, 2, KV_HEADS, DIM), torch.nan, dtype=dtype)  # strangers' blocks
        for row, table in enumerate(tables):
            cache[table] = content[row].view(3, BLOCK, 2, KV_HEADS, DIM)
        ones = np.ones(rows, np.int32)
        start = np.arange(rows + 1, dtype=np.int32)
        step = Rows(start, ones * position, ones, np.array(tables, np.int32), BLOCK)
        return backend.attend(qkv, cache, AttentionBatch.build(backend, step, torch.device("cpu")))

    scattered = [[4, 0, 2], [9, 7, 10]][:rows]
    assert torch.equal(attended(blocks), attended(scattered))


def test_rows_that_share_a_long_prefix_are_not_gathered_at_once() -> None:
    backend, rows, length = SdpaAttention(torch.float32, HEADS, KV_HEADS, DIM), 5, MOST_GATHERED // 2
    ones, tables = np.ones(rows, np.int32), np.tile(np.arange(length // BLOCK, dtype=np.int32), (rows, 1))
    plan = backend.plan(Rows(np.arange(rows + 1, dtype=np.int32), ones * (length - 1), ones, tables, BLOCK))
    assert [group.length for group in plan.decode] == [length] * 3
    assert [len(group.rows) for group in plan.decode if group.rows is not None] == [2, 2, 1]


def test_what_lies_in_one_piece_is_not_copied() -> None:
    backend = SdpaAttention(torch.float32, HEADS, KV_HEADS, DIM)
    one, start = np.ones(1, np.int32), np.arange(2, dtype=np.int32)
    for table, in_place in (([4, 5, 6], True), ([4, 6, 5], False)):
        plan = backend.plan(Rows(start, one * 40, one, np.array([table], np.int32), BLOCK))
        assert isinstance(plan.decode[0].slots, slice) is in_place
