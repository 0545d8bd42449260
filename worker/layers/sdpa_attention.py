"""Attention by torch's own scaled_dot_product_attention over gathered slots. Meant for the CPU.

Grouped heads never repeat keys or values. One query per request: the query heads that share a KV head stand where SDPA
expects positions. Several: KV heads stand where it expects the batch, and K, V are expanded views. (Measured on two
cores, 9 heads, 3 KV heads, 16 requests of 128 tokens: 0.27 ms, with `enable_gqa` 2.4 ms.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from worker.layers.attention import MOST_GATHERED, AttentionBatch, Rows

# One more call costs a layer about as much as gathering and reading this many padding tokens.
PADDING_WORTH_A_CALL = 256
# Queries of one call: bounds the mask, and the keys computed only to be masked. (Measured on two cores, 9 heads of 512
# and 1024 positions: 3.3 and 10.4 ms, with tiles of 256 3.4 and 12.3 ms, in one call with `is_causal` 4.9 and 12.2 ms.)
QUERY_TILE = 64


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each and of similar context, attended in one call."""

    rows: Tensor | None  # int64 [n] their tokens in the step; None: all tokens of the step, in order
    slots: Tensor | slice  # int64 [n * length]; a slice where they follow one another
    length: int
    mask: Tensor | None  # [n, 1, 1, length], additive, model dtype; None if all are of this length


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several tokens."""

    start: int  # its first token in the step
    count: int
    position: int
    slots: Tensor  # int64 [position + count]


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    decode: list[DecodeGroup]
    prefill: list[PrefillRow]
    causal: Tensor | None  # [QUERY_TILE, width]: query i may see column j if j <= i + width - QUERY_TILE


class SdpaAttention:
    """`AttentionBackend` of a tp rank's `heads` query heads and `kv_heads` KV heads."""

    name = "torch's scaled_dot_product_attention"

    def __init__(self, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
        self.dtype = dtype
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.group = heads // kv_heads
        self.query_width = heads * head_dim

    def plan(self, rows: Rows) -> SdpaPlan:
        single = np.flatnonzero(rows.counts == 1)
        several = np.flatnonzero(rows.counts > 1)
        prefill = [
            PrefillRow(
                int(rows.query_start[row]),
                int(rows.counts[row]),
                int(rows.positions[row]),
                torch.from_numpy(rows.slots(several[i : i + 1], int(rows.positions[row] + rows.counts[row]))[0]),
            )
            for i, row in enumerate(several)
        ]
        return SdpaPlan(
            [self._decode_group(rows, group) for group in _similar(single, rows.positions[single] + 1)],
            prefill,
            _causal_mask(max(row.position + row.count for row in prefill), self.dtype) if prefill else None,
        )

    def attend(self, qkv: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        slots = cache.view(-1, 2 * self.kv_heads * self.head_dim)
        query = qkv[:, : self.query_width]
        plan: SdpaPlan = batch.plan
        if plan.decode and plan.decode[0].rows is None:
            return self._decode(query, slots, plan.decode[0])
        out = query.new_empty(query.shape)
        for group in plan.decode:
            assert group.rows is not None
            out.index_copy_(0, group.rows, self._decode(query.index_select(0, group.rows), slots, group))
        for row in plan.prefill:
            tokens = slice(row.start, row.start + row.count)
            assert plan.causal is not None
            self._prefill(query[tokens], slots, row, plan.causal, out[tokens])
        return out

    def _decode_group(self, rows: Rows, group: NDArray[np.intp]) -> DecodeGroup:
        lengths = rows.positions[group] + 1
        longest = int(lengths.max())
        mask = None
        if int(lengths.min()) < longest:
            past_end = np.arange(longest) >= lengths[:, None]
            mask = torch.zeros(past_end.shape, dtype=self.dtype)
            mask.masked_fill_(torch.from_numpy(past_end), -torch.inf)
            mask = mask[:, None, None]
        slots = rows.slots(group, longest).reshape(-1)
        tokens = None
        if len(group) < len(rows.counts):
            tokens = torch.from_numpy(rows.query_start[group].astype(np.int64))
        return DecodeGroup(tokens, _places(slots), longest, mask)

    def _decode(self, query: Tensor, slots: Tensor, group: DecodeGroup) -> Tensor:
        n = query.shape[0]
        kv = slots[group.slots] if isinstance(group.slots, slice) else slots.index_select(0, group.slots)
        kv = kv.view(n, group.length, 2, self.kv_heads, self.head_dim)
        keys, values = kv.permute(2, 0, 3, 1, 4).unbind(0)
        query = query.view(n, self.kv_heads, self.group, self.head_dim)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=group.mask)
        return out.reshape(n, self.query_width)

    def _prefill(self, query: Tensor, slots: Tensor, row: PrefillRow, causal: Tensor, out: Tensor) -> None:
        kv = slots.index_select(0, row.slots).view(-1, 2, self.kv_heads, 1, self.head_dim)
        keys, values = kv.permute(1, 2, 3, 0, 4).expand(-1, -1, self.group, -1, -1).unbind(0)
        heads = (row.count, self.kv_heads, self.group, self.head_dim)
        query, out = query.view(heads).permute(1, 2, 0, 3), out.view(heads).permute(1, 2, 0, 3)
        for first in range(0, row.count, QUERY_TILE):
            tile = slice(first, min(first + QUERY_TILE, row.count))
            seen = row.position + tile.stop
            # torch's is_causal aligns the first query with the first key; here the last ones belong together.
            shift = causal.shape[1] - QUERY_TILE - (row.position + first)
            mask = causal[: tile.stop - first, shift : shift + seen]
            out[:, :, tile] = F.scaled_dot_product_attention(
                query[:, :, tile], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask
            )


def _places(slots: NDArray[np.int64]) -> Tensor | slice:
    """What lies in one piece is read where it lies. (Decode of one row, SmolLM2 on two cores: 10.5 ms, copied 10.8.)"""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 == len(slots) and (slots[1:] > slots[:-1]).all():
        return slice(first, last + 1)
    return torch.from_numpy(slots)


def _similar(rows: NDArray[np.intp], lengths: NDArray[np.int32]) -> list[NDArray[np.intp]]:
    """Groups of rows, longest first, each padded to its longest; one ends where padding would cost more than a call, or
    at `MOST_GATHERED`.

    The rows of a group keep their order in the step.
    """
    groups = []
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        padding = np.cumsum(lengths[order[0]] - lengths[order])
        most = max(1, MOST_GATHERED // int(lengths[order[0]]))
        taken = min(most, int(np.searchsorted(padding, PADDING_WORTH_A_CALL, side="right")))
        groups.append(np.sort(rows[order[:taken]]))
        order = order[taken:]
    return groups


def _causal_mask(longest: int, dtype: torch.dtype) -> Tensor:
    """[QUERY_TILE, longest + QUERY_TILE], additive: the mask of any tile below position `longest` is a window of it."""
    mask = torch.full((QUERY_TILE, longest + QUERY_TILE), -torch.inf, dtype=dtype)
    return mask.triu_(longest + 1)
