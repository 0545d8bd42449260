"""Attention of rows of several queries by torch, where FlashInfer is missing or has no such dtype.

A module of its own because `torch.nn.attention.bias` brings all of torch's compiler with it, which takes as long to
import as torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from worker.layers.attention import Rows


class _SdpaRow(NamedTuple):
    start: int
    tokens: int
    length: int
    slots: Tensor  # int64 [length]


class SdpaPrefill:
    """Torch's attention over gathered keys and values, a call a row: right everywhere, and slow for many short rows."""

    name = "torch's scaled_dot_product_attention"

    def __init__(self, device: torch.device, heads: int, kv_heads: int, head_dim: int) -> None:
        self.device, self.heads, self.kv_heads, self.head_dim = device, heads, kv_heads, head_dim

    def plan(self, rows: Rows) -> SdpaPrefillPlan:
        planned = []
        for row in range(len(rows.counts)):
            length = int(rows.positions[row] + rows.counts[row])
            slots = torch.from_numpy(rows.slots(np.array([row]), length)[0]).pin_memory()
            start = int(rows.query_start[row] - rows.query_start[0])
            planned.append(_SdpaRow(start, int(rows.counts[row]), length, slots.to(self.device, non_blocking=True)))
        return SdpaPrefillPlan(planned, self.heads != self.kv_heads)


@dataclass(frozen=True, slots=True)
class SdpaPrefillPlan:
    rows: list[_SdpaRow]
    grouped: bool

    def attend(self, query: Tensor, cache: Tensor, out: Tensor) -> None:
        slots = cache.view(-1, *cache.shape[2:])
        for start, count, length, places in self.rows:
            keys, values = slots.index_select(0, places).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
            tokens = slice(start, start + count)
            out[tokens] = F.scaled_dot_product_attention(
                query[tokens].transpose(0, 1)[None], keys, values,
                attn_mask=causal_lower_right(count, length), enable_gqa=self.grouped,
            )[0].transpose(0, 1)  # fmt: skip
