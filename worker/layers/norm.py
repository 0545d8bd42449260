"""Root-mean-square normalization (arXiv:1910.07467)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.weights.placement import Piece, Placement


class NormOps(Protocol):
    """The part of `worker.layers.ops.Ops` that norms use."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    def __init__(
        self, name: str, size: int, eps: float, ops: NormOps, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.ops = ops
        self.weight = torch.zeros(2, size, dtype=dtype, device=device)  # the same twice: see TorchOps.norm
        self.eps = eps
        self.placements = [Placement(name, (size,), (Piece(self.weight[0]),))]

    def finish_loading(self) -> None:
        self.weight[1] = self.weight[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.eps)

    def added_to_(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `residual` into x; returns the norm of the sum."""
        return self.ops.add_norm_(x, residual, self.weight, self.eps)


class HeadNorm:
    """RMS norm of every query and key head by itself, before the rotary embedding (Qwen3). In place."""

    def __init__(
        self, name: str, heads: int, kv_heads: int, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        # One row a head, so that queries and keys are normalized at once.
        self.weight = torch.zeros(heads + kv_heads, head_dim, dtype=dtype, device=device)
        self.eps = eps
        query, key = self.weight[:heads], self.weight[heads:]
        self.placements = [
            Placement(f"{name}.{norm}.weight", (head_dim,), tuple(Piece(row) for row in rows))
            for norm, rows in (("q_norm", query), ("k_norm", key))
        ]

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, heads + kv heads, head_dim]; returns its argument."""
        return torch.mul(F.rms_norm(heads, self.weight.shape[1:], None, self.eps), self.weight, out=heads)
