"""Attention of rows of several queries by FlashInfer's paged prefill (github.com/flashinfer-ai/flashinfer).

Planned on host arrays, once a step. A plan's pinned and device workspaces are written by the host while earlier steps
are still under way, so each of the steps in flight has a wrapper of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.layers.attention import Rows
from worker.layers.cuda_attention import MOST_STEPS_IN_FLIGHT

_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    wrapper: Any

    def attend(self, query: Tensor, cache: Tensor, out: Tensor) -> None:
        self.wrapper.run(query, (cache[:, :, 0], cache[:, :, 1]), out=out)


class FlashInferPrefill:
    def __init__(self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
        self.dtype, self.heads, self.kv_heads, self.head_dim = dtype, heads, kv_heads, head_dim
        kernel = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        self.name = f"FlashInfer {flashinfer.__version__} ({kernel})"
        # Scratch of the kernels themselves, which the stream keeps apart.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
            for _ in range(MOST_STEPS_IN_FLIGHT)
        ]
        self.planned = 0

    def plan(self, rows: Rows) -> FlashInferPlan:
        wrapper = self.wrappers[self.planned % MOST_STEPS_IN_FLIGHT]
        self.planned += 1
        ends = rows.positions + rows.counts
        blocks = -(-ends // rows.block_size)
        used = np.arange(rows.block_tables.shape[1]) < blocks[:, None]
        wrapper.plan(
            _pinned(rows.query_start - rows.query_start[0]), _pinned(np.concatenate(([0], blocks.cumsum()))),
            _pinned(rows.block_tables[used]), _pinned((ends - 1) % rows.block_size + 1),
            self.heads, self.kv_heads, self.head_dim, rows.block_size,
            causal=True, q_data_type=self.dtype, kv_data_type=self.dtype,
            seq_lens=_pinned(ends), max_token_per_sequence=int(rows.counts.max()),
        )  # fmt: skip
        return FlashInferPlan(wrapper)


def _pinned(values: NDArray[np.integer[Any]]) -> Tensor:
    """int32; torch keeps the memory until copies from it are done."""
    return torch.from_numpy(values.astype(np.int32)).pin_memory()
