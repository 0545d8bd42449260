"""`Ops` and small products by the kernels of `triton_kernels`; Triton comes with torch wherever torch has CUDA."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.layers import triton_kernels as kernels
from worker.layers.attention import AttentionBatch
from worker.layers.launch import Launcher, blocks, power_of_two
from worker.layers.norm import HeadNorm
from worker.layers.ops import Heads
from worker.layers.rotary import Rotary

# See SmallProduct. For each number of rows, the largest weight, in bytes, that the plain kernel is better at.
_FEW_ROWS = {1: 64 << 20, 2: 16 << 20, 4: 7_000_000}
_SOME_ROWS = 16
_MANY_TOKENS = 512  # from here on it is throughput that counts, below it latency
_HEADS_A_PROGRAM = {False: 8, True: 16}
_COLUMNS = 1024  # that a program of `silu_mul` takes


class TritonOps:
    def __init__(self, device: torch.device) -> None:
        # A launcher for each kind of call: a model has one size of hidden state, of MLP, of heads, and one dtype.
        self._launcher = functools.cache(functools.partial(_launcher, device))
        self._norm_launcher = functools.cache(functools.partial(_norm_launcher, device))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), x.shape[1]
        launch = self._norm_launcher(kernels.rms_norm, x.dtype, size, len(x) >= _MANY_TOKENS)
        launch((len(x), 1, 1), x, weight, out, eps)
        return out

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), x.shape[1]
        launch = self._norm_launcher(kernels.add_rms_norm, x.dtype, size, len(x) >= _MANY_TOKENS)
        launch((len(x), 1, 1), x, residual, weight, out, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        launch = self._launcher(kernels.silu_mul, gate_up.dtype, width, _COLUMNS)
        launch((tokens, blocks(width, _COLUMNS), 1), gate_up, out)
        return out

    def rotation(self, rotary: Rotary, positions: Tensor) -> Tensor:
        if len(positions) < _MANY_TOKENS:
            return rotary.frequencies  # the angles are computed where they are used: that costs less than reading them
        angles = positions[:, None].float() * rotary.frequencies
        return torch.stack((angles.cos(), angles.sin()), 1)

    def place_heads(
        self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, rotation: Any, batch: AttentionBatch, cache: Tensor
    ) -> None:
        table = rotation.dim() > 1
        block = _HEADS_A_PROGRAM[table]
        launch = self._launcher(
            kernels.place_heads, qkv.dtype, heads.query, heads.kv, heads.dim // 2, norm is not None, table, block
        )
        weight, eps = (rotation, 0.0) if norm is None else (norm.weight, norm.eps)
        grid = (len(qkv), blocks(heads.query + 2 * heads.kv, block), 1)
        launch(grid, qkv, weight, rotation, batch.positions, batch.slot_mapping, cache, eps)


def _launcher(device: torch.device, kernel: Any, dtype: torch.dtype, *constants: Any) -> Launcher:
    return Launcher(kernel, device, *constants)


def _norm_launcher(device: torch.device, kernel: Any, dtype: torch.dtype, size: int, many: bool) -> Launcher:
    # One program a row. Of few rows its latency is seen; of many, how much each thread has under way.
    block = power_of_two(size)
    warps = min(max(block // 1024, 1), 8) if many else min(max(block // 256, 4), 16)
    return Launcher(kernel, device, size, block, num_warps=warps)


class SmallProduct:
    """F.linear for one weight [outputs, inputs], by kernels of our own where few rows make cuBLAS slower.

    H200, bf16, us behind a norm, ours / cuBLAS:
        outputs x inputs      4096x1024   1024x3072   4096x4096   6144x4096   24576x4096   4096x12288
        1 row                 3.5 / 5.3   3.1 / 6.3   11 / 12     16 / 17     54 / 50      31 / 29
        4 rows                5.8 / 5.3   4.6 / 6.5   19 / 12     27 / 17     95 / 50      54 / 29
        8, on matrix units    4.4 / 5.4   7.1 / 6.8   13 / 14     17 / 17     49 / 56      34 / 31
    """

    def __init__(self, weight: Tensor) -> None:
        self.outputs, inputs = weight.shape
        self.few: dict[int, Launcher] = {}
        self.some: Launcher | None = None
        if weight.dtype == torch.float32:
            return
        sizes = (self.outputs, inputs)
        block_in = next((block for block in (1024, 512, 256, 128) if inputs % block == 0 and inputs >= 2 * block), 0)
        self.few_out = 2 if block_in == 1024 else 4
        if block_in and self.outputs % self.few_out == 0:
            few = kernels.few_rows_product
            self.few = {
                rows: Launcher(few, weight.device, rows, *sizes, self.few_out, block_in)
                for rows, most in _FEW_ROWS.items() if weight.nbytes <= most
            }  # fmt: skip
        self.some_out, stages = (64, 3) if self.outputs >= 16384 else (32, 4)
        # With fewer outputs there are fewer programs than multiprocessors. With more inputs cuBLAS wins in a step: with
        # this kernel the 8B shape took 5.34 ms at 8 rows, without 5.08, whatever the table says.
        fills = self.outputs >= 4096 and inputs <= 2048
        if fills and self.outputs % self.some_out == 0 and inputs % 128 == 0:
            some = kernels.some_rows_product
            self.some = Launcher(some, weight.device, *sizes, self.some_out, 128, num_stages=stages)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows > _SOME_ROWS or bias is not None:
            return F.linear(x, weight, bias)
        if (few := self.few.get(rows)) is not None:
            out = x.new_empty(rows, self.outputs)
            few((self.outputs // self.few_out, 1, 1), x, weight, out)
            return out
        if self.some is not None and rows > max(_FEW_ROWS):
            out = x.new_empty(rows, self.outputs)
            self.some((self.outputs // self.some_out, 1, 1), x, weight, out, rows)
            return out
        return F.linear(x, weight, bias)
