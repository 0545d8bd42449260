"""What CUDA kernels of few rows do at once is what is done one after the other. Without a GPU they run in Triton's
interpreter, where Triton is installed."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
pytest.importorskip("triton")

from worker.layers import small_products  # noqa: E402 - imports Triton
from worker.layers.attention import AttentionBatch  # noqa: E402 - behind what is read as Triton is imported
from worker.layers.cuda_attention import CudaAttention, CudaPlan, DecodePlan  # noqa: E402 - imports Triton
from worker.layers.linear import Linear  # noqa: E402 - after Triton
from worker.layers.norm import HeadNorm, RMSNorm  # noqa: E402 - behind what is read as Triton is imported
from worker.layers.ops import Heads  # noqa: E402 - behind what is read as Triton is imported
from worker.layers.small_products import SmallProducts  # noqa: E402 - imports Triton
from worker.layers.triton_ops import TritonOps  # noqa: E402 - imports Triton
from worker.memory.storages import tensors_of  # noqa: E402 - after Triton

DEVICE = torch.device("cuda" if CUDA else "cpu")
HALF = torch.float16  # which the interpreter knows
EPS = 1e-6
CONTEXTS = [1, 2, 16, 17, 33, 77, 128, 200, 385]  # positions in a row's context, its new token included


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "page"),
    [(1, 4, 2, 32, 16), (9, 4, 1, 16, 16), (6, 6, 2, 64, 8), (9, 3, 3, 32, 1), (32, 4, 2, 16, 32), (50, 4, 2, 16, 16)],
)
def test_attention_that_places_its_heads_gives_what_both_give(
    rows: int, heads: int, kv_heads: int, dim: int, page: int, norm: bool
) -> None:
    torch.manual_seed(rows)
    lengths = torch.tensor([CONTEXTS[row % len(CONTEXTS)] for row in range(rows)])
    width = -(-int(lengths.max()) // page)
    tables = torch.randperm(rows * width).view(rows, width)
    at = lengths - 1
    slots = tables[torch.arange(rows), at // page] * page + at % page
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(DEVICE, HALF)
    cache = torch.randn(rows * width + 1, page, 2, kv_heads, dim).to(DEVICE, HALF)
    head_norm = HeadNorm("n", heads, kv_heads, dim, EPS, HALF, DEVICE) if norm else None
    if head_norm is not None:  # one weight for all queries, one for all keys
        head_norm.weight[:heads] = torch.rand(dim) + 0.5
        head_norm.weight[heads:] = torch.rand(dim) + 0.5
    frequencies = (1e4 ** -(torch.arange(0, dim, 2) / dim)).float().to(DEVICE)
    header = torch.tensor([width, 0], dtype=torch.int32, device=DEVICE)
    backend, ops = CudaAttention(DEVICE, HALF, heads, kv_heads, dim), TritonOps(DEVICE)

    def run(independent: bool) -> tuple[Tensor, Tensor]:
        plan = DecodePlan(rows, tables.int().flatten().to(DEVICE), header, independent)
        batch = AttentionBatch(at.int().to(DEVICE), slots.int().to(DEVICE), CudaPlan(plan, None))
        assert backend.places(batch) == independent
        written = cache.clone()
        shape = Heads(heads, kv_heads, dim)
        return ops.attend(qkv.clone(), shape, head_norm, frequencies, batch, written, backend), written

    apart, written = run(False)
    at_once, also_written = run(True)
    assert not backend.arrived.any()
    assert error(also_written, written) < 1e-5
    assert error(at_once, apart) < 1e-3
    for row in range(rows):
        known = written[tables[row].to(DEVICE)].flatten(0, 1)[: lengths[row]].double()
        query = rotated(qkv[row].view(-1, dim)[:heads], head_norm, frequencies, int(at[row]))
        keys, values = (known[:, kind].repeat_interleave(heads // kv_heads, 1) for kind in (0, 1))
        weights = torch.softmax(torch.einsum("hd,nhd->hn", query, keys) / math.sqrt(dim), 1)
        assert error(at_once[row].view(heads, dim), torch.einsum("hn,nhd->hd", weights, values)) < 5e-3


def rotated(query: Tensor, norm: HeadNorm | None, frequencies: Tensor, position: int) -> Tensor:
    """float64, rounded where the kernels round."""
    query = query.double()
    if norm is not None:
        query = query * torch.rsqrt(query.square().mean(1, keepdim=True) + EPS) * norm.weight[: len(query)].double()
    real, imaginary = query.chunk(2, 1)
    angle = (position * frequencies).double()
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), 1).to(HALF).double()


@pytest.mark.parametrize(
    ("rows", "most"), [*((rows, 16) for rows in (1, 2, 3, 4, 5, 8, 16, 17)), (17, 32), (32, 32)]
)  # fmt: skip
@pytest.mark.parametrize(
    ("outputs", "inputs", "tuning"),
    [
        (64, 512, (16, 128, 2, 4, 2)), (96, 768, (32, 128, 3, 4, 2)), (128, 256, (16, 256, 1, 4, 2)),
        (64, 2048, (64, 128, 1, 4, 2)), (128, 512, (64, 64, 1, 4, 6)), (30, 100, None),
    ],
)  # fmt: skip
def test_products_with_what_stands_around_them(
    rows: int, most: int, outputs: int, inputs: int, tuning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_products, "_SOME_ROWS", (most,))
    monkeypatch.setattr(small_products, "_FEW_ROWS", dict.fromkeys((1, 2, 4), 1 << 30))
    chosen = None if tuning is None else small_products._SomeRows(*tuning)
    monkeypatch.setattr(small_products, "some_tuning", lambda *_: chosen)
    torch.manual_seed(outputs + rows)
    weight = torch.randn(outputs, inputs).to(DEVICE, HALF)
    x, before = (torch.randn(rows, size).mul(0.05).to(DEVICE, HALF) for size in (inputs, outputs))
    ops = TritonOps(DEVICE)
    norm = RMSNorm("n", inputs, EPS, ops, HALF, DEVICE)
    norm.weight[:] = torch.rand(inputs) + 0.5
    products = SmallProducts(weight)
    normed = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS) * norm.weight[0].double()
    for _ in range(2):  # the second time finds what the first has left
        for given, of in ((x, None), (normed, norm)):
            y = given.double() @ weight.double().t()
            gate, up = y.chunk(2, 1)
            assert error(products.product(x, weight, None, of), y) < 3e-3
            assert error(products.gated(x, weight, None, ops.silu_mul, of), F.silu(gate) * up) < 5e-3
        total = before.clone()
        products.add_to_(total, x, weight)
        assert error(total, before.double() + x.double() @ weight.double().t()) < 3e-3
    assert chosen is None or not products.arrived.any()


def test_tunings_divide_what_they_are_for() -> None:
    sizes = (30, 64, 100, 512, 1024, 1536, 2048, 3072, 4095, 4096, 5120, 6144, 12288, 24576, 25600, 151936)
    chosen = [(o, i, small_products.some_tuning(o, i, most)) for most in (16, 32) for o in sizes for i in sizes]
    taken = [(outputs, inputs, tuning) for outputs, inputs, tuning in chosen if tuning is not None]
    assert len(taken) > 50
    for outputs, inputs, tuning in taken:
        assert (outputs % tuning.outputs, inputs % (tuning.inputs * tuning.splits)) == (0, 0), (outputs, inputs, tuning)


def test_norm_and_sum_are_fused_where_no_tuning_is() -> None:
    def fuses(outputs: int, inputs: int) -> list[int]:
        products = SmallProducts(torch.zeros(outputs, inputs, dtype=HALF, device=DEVICE))
        return [rows for rows in (1, 3, 4, 5, 8, 16, 17, 32, 33, 256) if products.fuses(rows)]

    assert fuses(1024, 3072) == [1, 4, 33, 256]
    assert fuses(3072, 4096) == [1, 17, 32, 33, 256]  # of 16 rows alone
    assert fuses(30, 100) == [17, 32, 33, 256]


def test_two_tunings_of_a_weight_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    tunings = {16: small_products._SomeRows(16, 128, 4, 4, 2), 32: small_products._SomeRows(64, 128, 2, 4, 2)}
    monkeypatch.setattr(small_products, "some_tuning", lambda outputs, inputs, most: tunings[most])
    weight = torch.randn(128, 512).to(DEVICE, HALF)
    products = SmallProducts(weight)
    for rows in (8, 32, 5, 17):
        x = torch.randn(rows, 512).mul(0.05).to(DEVICE, HALF)
        assert error(products.product(x, weight, None), x.double() @ weight.double().t()) < 3e-3
        assert not products.arrived.any()


def test_tunings_fit_smaller_devices() -> None:
    """99 KB a program are what the GPUs of compute capability 8.6 and 8.9 have, 227 what those of 9.0 have."""
    for most, rules in small_products._SOME_TUNINGS.items():
        for *_, tuning in rules:
            assert small_products._fitted(tuning, most, 227 << 10) == tuning
            fitted = small_products._fitted(tuning, most, 99 << 10)
            assert fitted is not None
            assert (fitted.stages + 1) * (fitted.outputs + most) * fitted.inputs * 2 <= 99 << 10
    assert small_products._fitted(small_products._SomeRows(64, 256, 1, 4, 2), 32, 48 << 10) is None


def test_counters_sleep_with_the_weights() -> None:
    """No checkpoint has them and kernels rely on their zeros, so level 2 has to find and keep them."""
    linear = Linear(1024, 64, False, HALF, DEVICE)
    linear.products = SmallProducts(linear.weight)
    backend = CudaAttention(DEVICE, HALF, 4, 2, 32)
    found = {id(one) for one in tensors_of([linear, backend])}
    assert {id(linear.products.arrived), id(backend.arrived)} <= found
