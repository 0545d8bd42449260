"""`Ops` by the kernels of `triton_kernels`; Triton comes with torch wherever torch has CUDA."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from worker.layers import triton_kernels as kernels
from worker.layers.attention import AttentionBackend, AttentionBatch
from worker.layers.cuda_attention import CudaAttention
from worker.layers.launch import Launcher, blocks, power_of_two
from worker.layers.norm import HeadNorm
from worker.layers.ops import MANY_TOKENS, Heads
from worker.layers.rotary import Rotary

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
