"""The kernels that draw on CUDA against the sampler: equal tokens, whatever the filters. Without a GPU they run in
Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from worker.execution.sampler import SamplingRows, sample
from workerproto.messages import Sampling
from workerproto.steps import StartedRequest

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
pytest.importorskip("triton")

from worker.execution.device_sampler import DeviceSampler  # noqa: E402 - imports Triton
from worker.execution.greedy import PART, Greedy  # noqa: E402 - imports Triton

DEVICE = torch.device("cuda" if CUDA else "cpu")
ROWS, SLOTS = 12, 40
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, top_k=50, seed=2**53 - 1),
    Sampling(temperature=1.0, top_p=0.9, seed=3),
    Sampling(temperature=2.5, min_p=0.05, seed=4),
    Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=5),
    Sampling(temperature=1.0, top_k=1, seed=6),
    Sampling(temperature=1.0, top_p=1e-6, seed=7),
    Sampling(temperature=1.3, top_k=7, top_p=0.5, min_p=0.01, seed=8),
    Sampling(temperature=1.0, top_k=10**6, seed=9),
    Sampling(temperature=1e-6, top_p=0.5, seed=10),
    Sampling(temperature=100.0, top_k=300, top_p=0.99, seed=11),
]


def scores_of(kind: str, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(ROWS, vocab, generator=generator) * 3
    if kind == "flat":
        scores = scores / 3
    if kind == "ties":
        scores = scores.round()
    if kind == "tiny":  # weights that tie though their scores differ, over many values
        scores = scores * 1e-12
        scores[:, ::7] -= 9
    if kind == "broken":
        scores[:, 1] = float("nan")
        scores[1::2, 2] = float("inf")
        scores[:, 3] = float("-inf")
        scores[3] = float("nan")
    return scores.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "vocab"), [("peaked", 4500), ("flat", 4500), ("ties", 2000), ("tiny", 2000), ("broken", 700)]
)
@pytest.mark.parametrize("placed", [False, True])
def test_tokens_are_those_of_the_sampler(kind: str, vocab: int, dtype: torch.dtype, placed: bool) -> None:
    scores, rng = scores_of(kind, vocab, dtype), np.random.default_rng(0)
    slots = rng.permutation(SLOTS - 1)[:ROWS].astype(np.int32)
    positions = rng.integers(0, 10000, ROWS).astype(np.int32)
    stride = vocab + 24  # as where the vocabulary is padded to a multiple of the ranks
    wide = torch.full((ROWS, stride), 60000.0).to(dtype)
    wide[:, :vocab] = scores
    wide = wide.to(DEVICE)
    greedy = Greedy(ROWS, vocab, stride, DEVICE)
    greedy.choose(wide[:, :vocab])
    sampler = DeviceSampler(ROWS, SLOTS, vocab, stride, PART, dtype, DEVICE)
    none = np.empty(0, np.int32)
    sampler.seat([StartedRequest(i, s, none, 0, SAMPLINGS[i]) for i, s in enumerate(slots.tolist())])
    spread = np.zeros(2 * ROWS, np.int32)
    spread[1::2] = positions[::-1]
    places = np.arange(2 * ROWS - 1, 0, -2, dtype=np.int32)
    at = [torch.from_numpy(x).to(DEVICE) for x in ((spread, places) if placed else (positions, none))]
    before = greedy.tokens.tolist()
    sampler.draw_(
        greedy.tokens, wide[:, :vocab], greedy.values, torch.from_numpy(slots).to(DEVICE), *at, filtered=True
    )
    kinds = {"top_k": np.int32, "seed": np.int64, "logprobs": np.int32}
    columns: dict[str, Any] = {
        name: np.array([getattr(sampling, name) for sampling in SAMPLINGS], kinds.get(name, np.float64))
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "logprobs")
    }
    rows = SamplingRows(**columns, position=positions + 1)
    expected = sample(scores.float().clamp(torch.finfo(dtype).min, torch.finfo(dtype).max), rows).tokens.tolist()
    assert greedy.tokens.tolist() == expected
    assert before[0] == expected[0]


def test_a_slot_that_changes_hands_forgets_how_it_sampled() -> None:
    sampler = DeviceSampler(1, 3, 100, 100, PART, torch.bfloat16, DEVICE)
    none = np.empty(0, np.int32)
    sampler.seat([StartedRequest(1, 2, none, 0, SAMPLINGS[2])])
    assert sampler.drawn.tolist() == sampler.filtered.tolist() == [False, False, True]
    sampler.seat([StartedRequest(2, 2, none, 0, Sampling())])
    assert not sampler.drawn.any()
    assert not sampler.filtered.any()
    assert sampler.table[2, 0] == 0
