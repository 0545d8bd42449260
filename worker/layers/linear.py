"""Projections, sharded over the tensor-parallel ranks of a stage.

Column parallel: a rank computes some outputs. Row parallel: a rank has some inputs, and the sum over ranks is the
output (Megatron-LM, arXiv:1909.08053). Projections of the same input are fused into one matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.layers.norm import RMSNorm
from worker.topology import HeadSplit
from worker.weights.placement import Placement, Share


class TensorParallelGroup(Protocol):
    """The part of `worker.parallel.collectives.TensorParallel` that layers use; also how tests stand in for it."""

    rank: int
    size: int

    def all_reduce_(self, tensor: Tensor) -> Tensor: ...

    def gather_vocab(self, shard: Tensor) -> Tensor | None: ...


class SoleRank:
    """A stage of one rank."""

    rank = 0
    size = 1

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_vocab(self, shard: Tensor) -> Tensor | None:
        return shard


SOME_ROWS = 16  # up to here a step is bound by reading weights and by the beginnings of kernels


class Products:
    """The products that a decoder has of one weight [outputs, inputs], by torch; `small_products` has others for few
    rows on CUDA."""

    def fuses(self, rows: int) -> bool:
        """Whether to norm and to add where the product is made is not slower than to do either apart."""
        return rows > SOME_ROWS

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RMSNorm | None = None) -> Tensor:
        """Of x, or of its norm."""
        return F.linear(x if norm is None else norm(x), weight, bias)

    def gated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor],
        norm: RMSNorm | None = None,
    ) -> Tensor:  # fmt: skip
        """What `silu_mul` makes of that."""
        return silu_mul(self.product(x, weight, bias, norm))

    def add_to_(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """Of x, added to out [n, outputs], rounded once."""
        out.addmm_(x, weight.t())


class Linear:
    """y = x W^T + b; x [n, inputs], y [n, outputs] in the dtype of the weight [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.zeros(outputs, inputs, dtype=dtype, device=device)
        self.bias = torch.zeros(outputs, dtype=dtype, device=device) if bias else None
        self.packed: Tensor | None = None
        self.products = Products()
        self._weights: list[tuple[str, tuple[int, ...], list[Share]]] = []
        self._biases: list[tuple[str, tuple[int, ...], list[Share]]] = []

    def place(self, name: str, shape: tuple[int, ...], *shares: Share) -> None:
        """The checkpoint's tensor of this name and shape fills these shares of the weight."""
        self._weights.append((name, shape, list(shares)))

    def place_bias(self, name: str, shape: tuple[int, ...], *shares: Share) -> None:
        self._biases.append((name, shape, [] if self.bias is None else list(shares)))

    @property
    def placements(self) -> list[Placement]:
        """Made anew each time: kept, they would keep the plain weight beside the packed one."""
        weights = [(name, shape, tuple(one.of(self.weight) for one in shares)) for name, shape, shares in self._weights]
        bias = self.bias
        biases = [
            (name, shape, () if bias is None else tuple(one.of(bias) for one in shares))
            for name, shape, shares in self._biases
        ]
        return [Placement(*one) for one in (*weights, *biases)]

    def begin_loading(self) -> None:
        """Bring the plain weight back, so that it can be written; `finish_loading` has to follow."""
        if self.packed is not None:
            self.weight, self.packed = self.packed.to_dense(), None

    def finish_loading(self) -> None:
        """Repack for the CPU's matrix kernels, in place of the plain weight, where that works; choose CUDA's."""
        if packing_works(self.weight.dtype, self.weight.device):
            self.packed = _pack(self.weight)
            self.weight = self.weight.new_empty(0)
        elif self.weight.device.type == "cuda" and type(self.products) is Products and self.weight.itemsize == 2:
            from worker.layers.small_products import SmallProducts

            self.products = SmallProducts(self.weight)

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """y of x, or of its norm."""
        if self.packed is not None:
            return _multiply_packed(x if norm is None else norm(x), self.packed, self.bias)
        return self.products.product(x, self.weight, self.bias, norm)


class RowParallel(Linear):
    """Each rank holds columns of the checkpoint's [outputs, inputs] weight; rank 0 alone adds the bias to the sum."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(inputs // group.size, outputs, bias and group.rank == 0, dtype, device)
        self.group = group
        # Of a sole rank the residual can be added where the product is rounded, which saves many rows two passes over
        # it, and few rows a kernel. (H200, 8B shape, prompts of 8192 tokens: 42.9 -> 43.4 thousand tokens/s.)
        self.accumulates = device.type == "cuda" and group.size == 1 and not bias
        start = group.rank * (inputs // group.size)
        self.place(f"{name}.weight", (outputs, inputs), Share(1, start))
        if bias:
            self.place_bias(f"{name}.bias", (outputs,), Share())

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        return self.group.all_reduce_(super().__call__(x, norm))

    def add_to_(self, residual: Tensor, x: Tensor) -> None:
        """residual [n, outputs] += y, rounded once. Where it accumulates only."""
        self.products.add_to_(residual, x, self.weight)


class GateUp(Linear):
    """The MLP's two input projections: this rank's gate outputs, then as many up outputs."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        local = outputs // group.size
        super().__init__(inputs, 2 * local, bias, dtype, device)
        for part, projection in enumerate(("gate_proj", "up_proj")):
            share = Share(0, group.rank * local, slice(part * local, (part + 1) * local))
            self.place(f"{name}.{projection}.weight", (outputs, inputs), share)
            if bias:
                self.place_bias(f"{name}.{projection}.bias", (outputs,), share)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor], norm: RMSNorm | None = None) -> Tensor:
        """silu of the gates times the ups, of x or of its norm."""
        if self.packed is not None:
            return silu_mul(self(x, norm))
        return self.products.gated(x, self.weight, self.bias, silu_mul, norm)


class QKV(Linear):
    """Query, key and value projections: this rank's query heads, its KV heads' keys, then their values."""

    def __init__(
        self,
        name: str,
        inputs: int,
        split: HeadSplit,
        total_heads: tuple[int, int],
        head_dim: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`total_heads`: query and KV heads over all ranks."""
        queries = [*split.heads]
        keys = [*split.kv_heads]
        super().__init__(inputs, (len(queries) + 2 * len(keys)) * head_dim, bias, dtype, device)
        local = 0
        for projection, heads, total in (
            ("q_proj", queries, total_heads[0]),
            ("k_proj", keys, total_heads[1]),
            ("v_proj", keys, total_heads[1]),
        ):
            shares = [
                Share(0, head * head_dim, slice(i * head_dim, (i + 1) * head_dim))
                for i, head in enumerate(heads, local)
            ]
            local += len(heads)
            self.place(f"{name}.{projection}.weight", (total * head_dim, inputs), *shares)
            if bias:
                self.place_bias(f"{name}.{projection}.bias", (total * head_dim,), *shares)


def _pack(weight: Tensor) -> Tensor:
    # The second argument, the number of rows to expect, changed nothing measurable between 1 and 2048.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return packed


def _multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return y


@functools.cache
def packing_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies bf16 by weights packed beforehand here. The operators are torch's own (its compiler
    emits them) but not promised to users, so they are tried, and their result is compared, before they are relied on.

    Measured on two cores, all projections and the head of SmolLM2-135M: 7.6 ms at batch 1, F.linear 11.2 ms.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return False
    weight = torch.arange(64 * 32, dtype=torch.float32).remainder_(13).view(64, 32).to(dtype)
    x = torch.arange(3 * 32, dtype=torch.float32).remainder_(7).view(3, 32).to(dtype)
    try:
        y = _multiply_packed(x, _pack(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(y.float(), F.linear(x.float(), weight.float()), rtol=0.01)
