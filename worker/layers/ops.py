"""What a layer does between its matrix products: a seam, so that a device can fuse it. Chosen once, as a model is
built."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.layers.attention import AttentionBackend, AttentionBatch
from worker.layers.norm import HeadNorm
from worker.layers.rotary import Rotary, rotate_

DECODE_ROWS = 64
MANY_TOKENS = 512  # from here on it is throughput that counts on CUDA, below it latency


class Heads(NamedTuple):
    """Of one tp rank. A token of the fused projection is queries, keys, values: (query + 2 kv) * dim elements."""

    query: int
    kv: int
    dim: int


class Ops(Protocol):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, size] / rms(x) * weight over the last dimension. weight: [2, size], the same row twice."""

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `residual` into x; returns the norm of the sum."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 width] -> [T, width]: silu of the first half times the second."""

    def rotation(self, rotary: Rotary, positions: Tensor) -> Any:
        """Of a step's positions: what `attend` needs and all layers share."""

    def attend(
        self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, rotation: Any, batch: AttentionBatch, cache: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """Normalize queries and keys where a norm is given, rotate them, write keys and values to the cache, and let
        the backend attend. qkv [T, …] is not read after this.

        The whole batch's keys and values are written before any is read: prefixes that are computed in the same step
        rely on it.
        """


class TorchOps:
    """Torch's own operations, on any device."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # On the CPU torch composes rms_norm of eight operations but has one kernel for layer_norm. The mean of (x, -x)
        # is 0 and its variance the mean of x squared, so its layer norm is (y, -y) with y the RMS norm of x.
        # (Measured on two cores, size 576, bf16: 5.5 against 11.8 µs for one row, 10.2 against 13.8 for 16; with the
        # thousands of rows of a prefill, moving twice the bytes costs more than the operations.)
        size = x.shape[-1]
        if len(x) > DECODE_ROWS:
            return F.rms_norm(x, (size,), weight[0], eps)
        return F.layer_norm(torch.cat((x, -x), -1), (2 * size,), weight.view(-1), None, eps)[:, :size]

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm(x.add_(residual), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        return F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])

    def rotation(self, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions)

    def attend(
        self, qkv: Tensor, heads: Heads, norm: HeadNorm | None, rotation: Any, batch: AttentionBatch, cache: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        rotated = qkv[:, : (heads.query + heads.kv) * heads.dim].view(-1, heads.query + heads.kv, heads.dim)
        if norm is not None:
            norm(rotated)
        rotate_(rotated, rotation)
        slots = cache.view(-1, 2 * heads.kv * heads.dim)
        slots.index_copy_(0, batch.slot_mapping, qkv[:, heads.query * heads.dim :])
        return backend.attend(qkv, cache, batch)


def make_ops(device: torch.device) -> Ops:
    if device.type == "cuda":
        from worker.layers.triton_ops import TritonOps

        return TritonOps(device)
    return TorchOps()
