"""Attention on CUDA: rows of one query by a kernel that reads block tables on the device, longer rows by a library.

One query a row is what captured graphs hold, so that part plans nothing on the host: grid and addresses depend on the
number of rows alone. In a step the rows of one query come first, so that either part is a slice. (H200, 256 rows of 576
tokens, 8 KV heads: 148 us; FlashInfer 0.6.12 154 with 16 query heads, 172 with 32, and 0.2 to 1.5 ms of plan.)
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.layers.attention import AttentionBatch, Rows
from worker.layers.attention_kernels import decode_attention
from worker.layers.launch import Launcher, power_of_two
from worker.layers.norm import HeadNorm

MOST_STEPS_IN_FLIGHT = 8  # plans that keep their memory at a time; see `Prefill`


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Rows of one query each, the first of the step; all on the device.

    independent: no row reads what another row of the step writes, and there are no others.
    """

    rows: int
    tables: Tensor  # int32 [rows * header[0]]
    header: Tensor  # int32, of which the first is the width of the tables, in blocks
    independent: bool


class PrefillPlan(Protocol):
    def attend(self, query: Tensor, cache: Tensor, out: Tensor) -> None:
        """query, out [tokens of the planned rows, heads, head_dim]; cache as in `AttentionBackend`."""


class Prefill(Protocol):
    """Attention of rows of several queries. A plan is good until MOST_STEPS_IN_FLIGHT further ones were made."""

    name: str

    def plan(self, rows: Rows) -> PrefillPlan: ...


@dataclass(frozen=True, slots=True)
class CudaPlan:
    decode: DecodePlan | None
    prefill: PrefillPlan | None


class _Tuning(NamedTuple):
    """early: blocks read early where rows are independent, see the kernel; 0 where it pays to place heads apart, and
    so many positions are brought ahead."""

    splits: int
    block: int
    warps: int
    stages: int
    early: int
    ahead: int = 0


# By programs without splits (rows * KV heads), at most; measured on one H200.
_TUNINGS = (
    (16, _Tuning(8, 128, 4, 1, 1)),
    (32, _Tuning(16, 64, 2, 2, 1)),
    (64, _Tuning(8, 32, 2, 3, 2)),
    (128, _Tuning(4, 64, 2, 2, 1)),
    (256, _Tuning(1, 128, 4, 2, 0)),
    (512, _Tuning(1, 64, 2, 3, 0)),
)
_FULL = _Tuning(1, 32, 1, 4, 0)
_MOST_SPLIT = max(programs * tuning.splits for programs, tuning in _TUNINGS if tuning.splits > 1)


class CudaAttention:
    """`AttentionBackend` of a tp rank's heads."""

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
        if heads // kv_heads > 16:
            raise ValueError(f"{heads // kv_heads} query heads share a KV head; the CUDA kernel takes at most 16")
        if head_dim & (head_dim - 1) or head_dim < 16:
            raise ValueError(f"head_dim is {head_dim}; the CUDA kernel takes powers of two from 16")
        self.device, self.heads, self.kv_heads, self.head_dim = device, heads, kv_heads, head_dim
        self.tunings = tuple((most, _fitted(tuning, head_dim * dtype.itemsize)) for most, tuning in _TUNINGS)
        self.full = _fitted(_FULL, head_dim * dtype.itemsize)
        self.launchers: dict[tuple[_Tuning, int, bool], Launcher] = {}
        self.scale = math.log2(math.e) / math.sqrt(head_dim)  # of the kernel's powers of two
        self.partial = torch.empty(_MOST_SPLIT * 16 * head_dim, device=device)
        self.sums = torch.empty(_MOST_SPLIT * 32, device=device)
        self.arrived = torch.zeros(_MOST_SPLIT, dtype=torch.int32, device=device)
        self.prefill = _make_prefill(device, dtype, heads, kv_heads, head_dim)
        self.name = f"Triton for one query a row, {self.prefill.name} for more"

    def plan(self, rows: Rows) -> CudaPlan:
        """Of rows of several queries alone."""
        return CudaPlan(None, self.prefill.plan(rows))

    def attend(self, qkv: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        plan: CudaPlan = batch.plan
        out = qkv.new_empty(len(qkv), self.heads * self.head_dim)
        done = 0
        if plan.decode is not None:
            done = plan.decode.rows
            launch = self._launcher(self._tuning(done)._replace(early=0), cache.shape[1], False)
            unread = self.sums  # norm weight and frequencies, of heads that are placed
            self._decode(launch, qkv, cache, out, batch, plan.decode, unread, unread, 0.0)
        if plan.prefill is not None:
            shape = (-1, self.heads, self.head_dim)
            query = qkv[done:, : self.heads * self.head_dim].unflatten(1, shape[1:])
            plan.prefill.attend(query, cache, out[done:].view(shape))
        return out

    def places(self, batch: AttentionBatch) -> bool:
        """Whether `place_and_attend` takes this step, and is the faster way."""
        decode: DecodePlan | None = batch.plan.decode
        return decode is not None and decode.independent and self._tuning(decode.rows).early > 0

    def place_and_attend(
        self, qkv: Tensor, cache: Tensor, batch: AttentionBatch, norm: HeadNorm | None, frequencies: Tensor
    ) -> Tensor:
        """`place_heads` and `attend` in one kernel; qkv stays as it is."""
        out, decode = qkv.new_empty(len(qkv), self.heads * self.head_dim), batch.plan.decode
        launch = self._launcher(self._tuning(decode.rows), cache.shape[1], norm is not None)
        weight, eps = (frequencies, 0.0) if norm is None else (norm.weight, norm.eps)
        self._decode(launch, qkv, cache, out, batch, decode, weight, frequencies, eps)
        return out

    def _decode(
        self, launch: Launcher, qkv: Tensor, cache: Tensor, out: Tensor, batch: AttentionBatch, plan: DecodePlan,
        norm_weight: Tensor, frequencies: Tensor, eps: float,
    ) -> None:  # fmt: skip
        launch(
            (self._tuning(plan.rows).splits, self.kv_heads, plan.rows), qkv, cache, out, self.partial, self.sums,
            self.arrived, batch.positions, plan.tables, plan.header, batch.slot_mapping, norm_weight, frequencies,
            self.scale, eps,
        )  # fmt: skip

    def _tuning(self, rows: int) -> _Tuning:
        return next((tuning for most, tuning in self.tunings if rows * self.kv_heads <= most), self.full)

    def _launcher(self, tuning: _Tuning, block_size: int, norm: bool) -> Launcher:
        key = (tuning, block_size, norm)
        if key not in self.launchers:
            self.launchers[key] = Launcher(
                decode_attention, self.device, self.heads, self.kv_heads, self.head_dim, block_size, tuning.splits,
                tuning.block, power_of_two(self.heads // self.kv_heads), tuning.early, norm, tuning.ahead,
                num_warps=tuning.warps, num_stages=tuning.stages,
            )  # fmt: skip
        return self.launchers[key]


def _fitted(tuning: _Tuning, key_bytes: int) -> _Tuning:
    """For keys of so many bytes: blocks of as many bytes as those that were measured, of 256 bytes a key, have at most;
    larger ones can exceed a multiprocessor's shared memory."""
    return tuning._replace(block=max(16, tuning.block * 256 // max(key_bytes, 256)))


def _make_prefill(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Prefill:
    if importlib.util.find_spec("flashinfer") is not None and dtype in (torch.bfloat16, torch.float16):
        from worker.layers.flashinfer_attention import FlashInferPrefill

        return FlashInferPrefill(device, dtype, heads, kv_heads, head_dim)
    from worker.layers.sdpa_prefill import SdpaPrefill

    return SdpaPrefill(device, heads, kv_heads, head_dim)
