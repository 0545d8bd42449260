"""`Ops` and small products by the kernels of `triton_kernels`; Triton comes with torch wherever torch has CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from worker.layers import triton_kernels as kernels
from worker.layers.attention import AttentionBatch
from worker.layers.norm import HeadNorm
from worker.layers.ops import Heads
from worker.layers.rotary import Rotary

# Up to this many rows a product is bound by reading the weight, which the plain kernel does better than cuBLAS.
# (H200, a layer of Qwen3-0.6B at one row: 12.8 us for the four products, cuBLAS 31.9; of Qwen3-8B 96 and 113.)
FEW_ROWS = 4
_HEADS_A_PROGRAM = 8


def overlaps(device: torch.device) -> bool:
    """Whether kernels may start while the one before ends: from Hopper on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


class TritonOps:
    def __init__(self, device: torch.device) -> None:
        self.overlap = overlaps(device)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), x.shape[-1]
        kernels.rms_norm[(len(x),)](
            x, weight, out, eps, size, triton.next_power_of_2(size), self.overlap, launch_pdl=self.overlap
        )
        return out

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), x.shape[-1]
        kernels.add_rms_norm[(len(x),)](
            x, residual, weight, out, eps, size, triton.next_power_of_2(size), self.overlap, launch_pdl=self.overlap
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out, block = gate_up.new_empty(tokens, width), 1024
        kernels.silu_mul[(tokens, triton.cdiv(width, block))](
            gate_up, out, width, block, self.overlap, launch_pdl=self.overlap
        )
        return out

    def rotation(self, rotary: Rotary, positions: Tensor) -> Tensor:
        return rotary.frequencies  # the angles are computed where they are used: that costs less than reading them

    def place_heads(
        self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, rotation: Any, batch: AttentionBatch, cache: Tensor
    ) -> None:
        programs = triton.cdiv(heads.query + 2 * heads.kv, _HEADS_A_PROGRAM)
        kernels.place_heads[(len(qkv), programs)](
            qkv, rotation if norm is None else norm.weight, rotation, batch.positions, batch.slot_mapping, cache,
            0.0 if norm is None else norm.eps, heads.query, heads.kv, heads.dim // 2, norm is not None,
            _HEADS_A_PROGRAM, self.overlap, launch_pdl=self.overlap,
        )  # fmt: skip


class SmallProduct:
    """F.linear for a weight [outputs, inputs] that takes a kernel of its own for a few rows."""

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        self.block_in = next((b for b in (1024, 512, 256, 128) if inputs % b == 0 and inputs >= 2 * b), 0)
        self.block_out = 2 if self.block_in == 1024 else 4
        self.fits = self.block_in > 0 and outputs % self.block_out == 0 and weight.dtype != torch.float32
        self.overlap = overlaps(weight.device)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = len(x)
        if not self.fits or bias is not None or rows > FEW_ROWS or rows == 3:
            return F.linear(x, weight, bias)
        outputs, inputs = weight.shape
        out = x.new_empty(rows, outputs)
        kernels.few_rows_product[(outputs // self.block_out,)](
            x, weight, out, rows, outputs, inputs, self.block_out, self.block_in, self.overlap, launch_pdl=self.overlap
        )
        return out
