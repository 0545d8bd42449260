"""Products with one weight by kernels of our own, where few rows make cuBLAS slower.

H200, bf16, us behind a norm, ours / cuBLAS:
    outputs x inputs      4096x1024   1024x3072   4096x4096   6144x4096   24576x4096   4096x12288
    1 row                 3.5 / 5.3   3.1 / 6.3   11 / 12     16 / 17     54 / 50      31 / 29
    4 rows                5.8 / 5.3   4.6 / 6.5   19 / 12     27 / 17     95 / 50      54 / 29
    8, on matrix units    4.4 / 5.4   7.1 / 6.8   13 / 14     17 / 17     49 / 56      34 / 31
Such figures are a hint; tunings are chosen by whole steps (`scripts/gpu_variants.py`). A step of the 0.6B shape at 8
rows took 1.262 ms with cuBLAS for weights of 1024 outputs, 1.176 with their inputs split over programs; at 32 rows 1.72
with cuBLAS for all, 1.54 with none; a step of the 8B shape at 8 rows 5.27 with cuBLAS, 5.00 without for 24576x4096.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.layers.launch import Launcher, power_of_two, shared_memory
from worker.layers.linear import Products
from worker.layers.norm import RMSNorm
from worker.layers.product_kernels import ADDED, GATED, PLAIN, few_rows_product, some_rows_product

# For each number of rows, the largest weight, in bytes, that the plain kernel is better at.
_FEW_ROWS = {1: 64 << 20, 2: 16 << 20, 4: 7_000_000}


class _SomeRows(NamedTuple):
    """How `some_rows_product` takes a weight: outputs and inputs of a block, parts of the inputs, blocks ahead."""

    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int
    ahead: int = 0


_SOME_ROWS = (16, 32)  # 16 are the fewest that a matrix unit takes

# By rows at most: outputs and inputs of weights that this kernel is better at, and how; splits are the most.
# Tried in steps of the 0.6B shape (8 and 32 rows) and of the 8B shape (8 rows: cuBLAS was better with the down
# projection, and what has 4096 inputs and fewer outputs was not tried by itself); between and around them by guess.
_SOME_TUNINGS = {
    16: (
        (range(4096), range(256, 4097), _SomeRows(32, 256, 8, 4, 2)),
        (range(4096, 6144), range(2049), _SomeRows(16, 256, 1, 4, 3)),
        (range(6144, 16384), range(2049), _SomeRows(32, 128, 1, 4, 4)),
        (range(16384, 1 << 20), range(2049), _SomeRows(64, 128, 1, 4, 3)),
        (range(16384, 1 << 15), range(2049, 4097), _SomeRows(64, 64, 1, 4, 6)),
    ),
    32: (
        (range(2049), range(256, 4097), _SomeRows(64, 128, 4, 4, 4)),
        (range(4096, 16384), range(2049), _SomeRows(64, 128, 1, 4, 4)),
        (range(16384, 1 << 20), range(2049), _SomeRows(64, 128, 1, 4, 3)),
    ),
}


class SmallProducts(Products):
    """`Products` of a weight [outputs, inputs] in a dtype of 16 bits."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.bytes, self.device = weight.nbytes, weight.device
        inputs = self.inputs
        self.block_in = next((b for b in (1024, 512, 256, 128) if inputs % b == 0 and inputs >= 2 * b), 0)
        self.block_out = 2 if self.block_in == 1024 else 4
        room = shared_memory(self.device)
        found = ((most, some_tuning(self.outputs, inputs, most)) for most in _SOME_ROWS)
        fitted = ((most, tuning and _fitted(tuning, most, room)) for most, tuning in found)
        self.tunings = {most: tuning for most, tuning in fitted if tuning is not None}
        if self.tunings:
            blocks = max(self.outputs // tuning.outputs for tuning in self.tunings.values())
            self.arrived = torch.zeros(blocks, dtype=torch.int32, device=self.device)
        self._few, self._some = functools.cache(self._few_launcher), functools.cache(self._some_launcher)

    def fuses(self, rows: int) -> bool:
        return self._takes_few(rows) or (super().fuses(rows) and self._tuning(rows) is None)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RMSNorm | None = None) -> Tensor:
        out = self._small(PLAIN, x, weight, norm) if bias is None else None
        return super().product(x, weight, bias, norm) if out is None else out

    def gated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor],
        norm: RMSNorm | None = None,
    ) -> Tensor:  # fmt: skip
        out = self._small(GATED, x, weight, norm) if bias is None else None
        return super().gated(x, weight, bias, silu_mul, norm) if out is None else out

    def add_to_(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        if self._small(ADDED, x, weight, out=out) is None:
            super().add_to_(out, x, weight)

    def _takes_few(self, rows: int) -> bool:
        divides = bool(self.block_in) and self.outputs % self.block_out == 0
        return divides and rows in _FEW_ROWS and self.bytes <= _FEW_ROWS[rows]

    def _tuning(self, rows: int) -> _SomeRows | None:
        return self.tunings.get(_most(rows)) if rows > max(_FEW_ROWS) else None

    def _small(
        self, kind: Any, x: Tensor, weight: Tensor, norm: RMSNorm | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """None where cuBLAS is better."""
        rows = x.shape[0]
        some = self._tuning(rows) if norm is None and kind is not ADDED else None
        few = self._takes_few(rows)
        if not few and some is None:
            return None
        if out is None:
            out = x.new_empty(rows, self.outputs // 2 if kind is GATED else self.outputs)
        if some is None:
            norm_weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
            launch = self._few(kind, rows, norm is not None)
            launch((self.outputs // self.block_out, 1, 1), x, weight, out, norm_weight, eps)
        else:
            most = _most(rows)
            parts = self.outputs * some.splits * most if some.splits > 1 else 1
            partial = x.new_empty(parts, dtype=torch.float32)
            grid = (self.outputs // some.outputs, some.splits, 1)
            self._some(kind, most)(grid, x, weight, out, partial, self.arrived, rows)
        return out

    def _few_launcher(self, kind: Any, rows: int, norm: bool) -> Launcher:
        sizes = (rows, self.outputs, self.inputs, norm, kind, self.block_out, self.block_in)
        return Launcher(few_rows_product, self.device, *sizes)

    def _some_launcher(self, kind: Any, most_rows: int) -> Launcher:
        how = self.tunings[most_rows]
        sizes = (self.outputs, self.inputs, kind, how.splits, how.outputs, how.inputs, most_rows, how.ahead)
        return Launcher(some_rows_product, self.device, *sizes, num_warps=how.warps, num_stages=how.stages)


def _most(rows: int) -> int:
    return max(_SOME_ROWS[0], power_of_two(rows))


def some_tuning(outputs: int, inputs: int, most_rows: int) -> _SomeRows | None:
    """None where cuBLAS is better."""
    rules = _SOME_TUNINGS[most_rows]
    tuning = next((how for out_range, in_range, how in rules if outputs in out_range and inputs in in_range), None)
    if tuning is None or outputs % tuning.outputs or inputs % tuning.inputs:
        return None
    if tuning.splits > 1:  # few outputs are few programs; as many as give each multiprocessor something to read
        pieces = inputs // tuning.inputs
        tuning = tuning._replace(splits=max(n for n in range(1, tuning.splits + 1) if pieces % n == 0))
    return tuning


def _fitted(tuning: _SomeRows, most_rows: int, room: int) -> _SomeRows | None:
    """With no more stages than fit, of 16 bits a number: Triton keeps at most one block more than there are stages."""
    stages = room // ((tuning.outputs + most_rows) * tuning.inputs * 2) - 1
    return tuning._replace(stages=min(tuning.stages, stages)) if stages > 0 else None
