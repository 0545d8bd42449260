"""`Ops` and small products by the kernels of `triton_kernels`; Triton comes with torch wherever torch has CUDA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.layers import triton_kernels as kernels
from worker.layers.attention import AttentionBackend, AttentionBatch
from worker.layers.cuda_attention import CudaAttention
from worker.layers.launch import Launcher, blocks, power_of_two
from worker.layers.norm import HeadNorm
from worker.layers.ops import MANY_TOKENS, Heads
from worker.layers.rotary import Rotary

# See SmallProduct. For each number of rows, the largest weight, in bytes, that the plain kernel is better at.
_FEW_ROWS = {1: 64 << 20, 2: 16 << 20, 4: 7_000_000}
_SOME_ROWS = 16
_HEADS_A_PROGRAM = {False: 8, True: 16}
_COLUMNS = 1024  # that a program of `silu_mul` takes


class TritonOps:
    def __init__(self, device: torch.device) -> None:
        # A launcher for each kind of call: a model has one size of hidden state, of MLP, of heads, and one dtype.
        self._launcher = functools.cache(functools.partial(_launcher, device))
        self._norm_launcher = functools.cache(functools.partial(_norm_launcher, device))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), x.shape[1]
        launch = self._norm_launcher(kernels.rms_norm, x.dtype, size, len(x) >= MANY_TOKENS)
        launch((len(x), 1, 1), x, weight, out, eps)
        return out

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), x.shape[1]
        launch = self._norm_launcher(kernels.add_rms_norm, x.dtype, size, len(x) >= MANY_TOKENS)
        launch((len(x), 1, 1), x, residual, weight, out, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        launch = self._launcher(kernels.silu_mul, gate_up.dtype, width, _COLUMNS)
        launch((tokens, blocks(width, _COLUMNS), 1), gate_up, out)
        return out

    def rotation(self, rotary: Rotary, positions: Tensor) -> Tensor:
        if len(positions) < MANY_TOKENS:
            return rotary.frequencies  # the angles are computed where they are used: that costs less than reading them
        angles = positions[:, None].float() * rotary.frequencies
        return torch.stack((angles.cos(), angles.sin()), 1)

    def attend(
        self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, rotation: Any, batch: AttentionBatch, cache: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        table = rotation.dim() > 1
        if not table and isinstance(backend, CudaAttention) and backend.places(batch):
            return backend.place_and_attend(qkv, cache, batch, norm, rotation)
        block = _HEADS_A_PROGRAM[table]
        launch = self._launcher(
            kernels.place_heads, qkv.dtype, heads.query, heads.kv, heads.dim // 2, norm is not None, table, block
        )
        weight, eps = (rotation, 0.0) if norm is None else (norm.weight, norm.eps)
        grid = (len(qkv), blocks(heads.query + 2 * heads.kv, block), 1)
        launch(grid, qkv, weight, rotation, batch.positions, batch.slot_mapping, cache, eps)
        return backend.attend(qkv, cache, batch)


def _launcher(device: torch.device, kernel: Any, dtype: torch.dtype, *constants: Any) -> Launcher:
    return Launcher(kernel, device, *constants)


def _norm_launcher(device: torch.device, kernel: Any, dtype: torch.dtype, size: int, many: bool) -> Launcher:
    # One program a row. Of few rows its latency is seen; of many, how much each thread has under way.
    block = power_of_two(size)
    warps = min(max(block // 1024, 1), 8) if many else min(max(block // 256, 4), 16)
    return Launcher(kernel, device, size, block, num_warps=warps)


class _SomeRows(NamedTuple):
    """How `some_rows_product` takes a weight: outputs and inputs of a block, parts of the inputs."""

    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int


class SmallProduct:
    """F.linear for one weight [outputs, inputs], by kernels of our own where few rows make cuBLAS slower; if `gated`
    with `silu_mul` behind it, which cuBLAS has not.

    H200, bf16, us behind a norm, ours / cuBLAS:
        outputs x inputs      4096x1024   1024x3072   4096x4096   6144x4096   24576x4096   4096x12288
        1 row                 3.5 / 5.3   3.1 / 6.3   11 / 12     16 / 17     54 / 50      31 / 29
        4 rows                5.8 / 5.3   4.6 / 6.5   19 / 12     27 / 17     95 / 50      54 / 29
        8, on matrix units    4.4 / 5.4   7.1 / 6.8   13 / 14     17 / 17     49 / 56      34 / 31
    A step of the 0.6B shape at 8 rows took 1.262 ms with cuBLAS for the weights of 1024 outputs, and 1.176 with their
    inputs split over programs.
    """

    def __init__(self, weight: Tensor, *, gated: bool = False) -> None:
        self.outputs, inputs = weight.shape
        self.width = self.outputs // 2 if gated else self.outputs  # of the result
        self.few: dict[int, Launcher] = {}
        self.some: Launcher | None = None
        if weight.dtype == torch.float32:
            return
        sizes = (self.outputs, inputs, gated)
        block_in = next((block for block in (1024, 512, 256, 128) if inputs % block == 0 and inputs >= 2 * block), 0)
        self.few_out = 2 if block_in == 1024 else 4
        if block_in and self.outputs % self.few_out == 0:
            few = kernels.few_rows_product
            self.few = {
                rows: Launcher(few, weight.device, rows, *sizes, self.few_out, block_in)
                for rows, most in _FEW_ROWS.items() if weight.nbytes <= most
            }  # fmt: skip
        self.tuning = some_tuning(self.outputs, inputs)
        if self.tuning is not None:
            block, block_in, splits, warps, stages = self.tuning
            self.arrived = torch.zeros(self.outputs // block, dtype=torch.int32, device=weight.device)
            self.some = Launcher(
                kernels.some_rows_product, weight.device, *sizes, splits, block, block_in,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self.small(x, weight) if bias is None else None
        return F.linear(x, weight, bias) if out is None else out

    def small(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """[n, width], or None where there are too many rows."""
        rows = x.shape[0]
        if (few := self.few.get(rows)) is not None:
            out = x.new_empty(rows, self.width)
            few((self.outputs // self.few_out, 1, 1), x, weight, out)
            return out
        if self.some is not None and self.tuning is not None and max(_FEW_ROWS) < rows <= _SOME_ROWS:
            out, splits = x.new_empty(rows, self.width), self.tuning.splits
            partial = x.new_empty(self.outputs * splits * 16, dtype=torch.float32)
            grid = (self.outputs // self.tuning.outputs, splits, 1)
            self.some(grid, x, weight, out, partial, self.arrived, rows)
            return out
        return None


def some_tuning(outputs: int, inputs: int) -> _SomeRows | None:
    """For a weight of these sizes, as tried in steps of the 0.6B shape at 8 rows; None where cuBLAS is better, as for
    the 8B shape: with this kernel it took 5.34 ms a step, without 5.08, whatever the table above says."""
    if outputs >= 4096 and inputs <= 2048:
        tuning = _SomeRows(16, 256, 1, 4, 3)
        if outputs >= 6144:
            tuning = _SomeRows(64, 128, 1, 4, 3) if outputs >= 16384 else _SomeRows(32, 128, 1, 4, 4)
    elif outputs < 4096 and 256 <= inputs <= 4096:
        # Few outputs are few programs: the inputs are split, so that each multiprocessor has something to read.
        pieces = inputs // 256
        tuning = _SomeRows(32, 256, max(splits for splits in range(1, 9) if pieces % splits == 0), 4, 2)
    else:
        return None
    divides = outputs % tuning.outputs == 0 and inputs % (tuning.splits * tuning.inputs) == 0
    return tuning if divides else None
