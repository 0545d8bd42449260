"""Attention over a paged KV cache: what a step tells it, and the seam where a device's kernels plug in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32 = NDArray[np.int32]

MOST_GATHERED = 1 << 16
"""Positions whose keys and values are copied together at most, where they are not read where they lie; one row may have
more. So what a step takes is bounded by its limits, however many rows share one long prefix."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows on the host; all arrays int32. Row r computes positions[r] … positions[r] + counts[r] - 1."""

    query_start: Int32  # [rows + 1] where each row's tokens begin among the step's T tokens
    positions: Int32  # [rows] first position computed
    counts: Int32  # [rows] tokens computed, at least 1
    block_tables: Int32  # [rows, max blocks]; entries past a row's last block are never read
    block_size: int

    def tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Position and cache slot of each of the T tokens."""
        row_of_token = np.repeat(np.arange(len(self.counts)), self.counts)
        offset = np.arange(len(row_of_token)) - self.query_start[row_of_token]
        positions = self.positions[row_of_token].astype(np.int64) + offset
        blocks = self.block_tables[row_of_token, positions // self.block_size].astype(np.int64)
        return positions, blocks * self.block_size + positions % self.block_size

    def after(self, rows: int) -> Rows:
        """All but the first so many rows."""
        return Rows(
            self.query_start[rows:], self.positions[rows:], self.counts[rows:], self.block_tables[rows:],
            self.block_size,
        )  # fmt: skip

    def slots(self, rows: NDArray[np.intp], length: int) -> NDArray[np.int64]:
        """[len(rows), length] cache slot of every position; what lies past a row's own context repeats its position 0.

        Repeating a position of the same row keeps strangers' values, possibly not finite, out of padded attention.
        """
        position = np.arange(length)
        end = (self.positions[rows] + self.counts[rows])[:, None]
        position = np.where(position < end, position, 0)
        blocks = self.block_tables[rows[:, None], position // self.block_size].astype(np.int64)
        return blocks * self.block_size + position % self.block_size


class AttentionBackend(Protocol):
    """One device's attention, shared by all layers of a stage."""

    name: str  # of the kernels, for people

    def plan(self, rows: Rows) -> Any:
        """What `attend` needs and every layer shares, computed once a step."""

    def attend(self, qkv: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """qkv [T, (heads + 2 kv heads) * head_dim], of which the queries, rotated, are read; cache
        [blocks, block size, 2, kv heads, head_dim], which has the step's own keys and values too. Returns
        [T, heads * head_dim].
        """


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What all layers need to know of one step. Built once a step, on every stage."""

    positions: Tensor  # int64 [T]; int32 on CUDA
    slot_mapping: Tensor  # int64 [T]: block * block_size + offset; int32 on CUDA
    plan: Any  # the backend's own

    @classmethod
    def build(cls, backend: AttentionBackend, rows: Rows, device: torch.device) -> AttentionBatch:
        """From a validated step: nothing is checked here. At least one row."""
        positions, slots = rows.tokens()
        return cls(torch.from_numpy(positions).to(device), torch.from_numpy(slots).to(device), backend.plan(rows))


def make_backend(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> AttentionBackend:
    """The attention of a device; heads are those of one tp rank. ValueError for a device that has none."""
    if device.type in ("cpu", "meta"):  # meta: a model of shapes only
        from worker.layers.sdpa_attention import SdpaAttention

        return SdpaAttention(dtype, heads, kv_heads, head_dim)
    if device.type == "cuda":
        from worker.layers.cuda_attention import CudaAttention

        return CudaAttention(device, dtype, heads, kv_heads, head_dim)
    raise ValueError(f"no attention is built for device {device}; the devices are: cpu, cuda")
