"""The sampler: exact whatever the batch, and right in distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from worker.execution import sampler
from worker.execution.random_draw import philox4x32, uniforms
from worker.execution.sampler import SamplingRows, sample
from workerproto.masks import Masks

FIELDS: dict[str, tuple[Any, Any]] = {  # type and "off" value
    "temperature": (np.float64, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float64, 1.0),
    "min_p": (np.float64, 0.0),
    "seed": (np.int64, 0),
    "logprobs": (np.int32, -1),
    "position": (np.int32, 0),
}


def rows_of(n: int, **values: Any) -> SamplingRows:
    """n rows; a value is one for all, or one for each."""
    columns = {name: np.asarray(values.get(name, off), kind) for name, (kind, off) in FIELDS.items()}
    return SamplingRows(**{name: np.ascontiguousarray(np.broadcast_to(column, n)) for name, column in columns.items()})


def take(rows: SamplingRows, index: Any) -> SamplingRows:
    return SamplingRows(**{name: getattr(rows, name)[index] for name in FIELDS})


def mixed_rows(n: int) -> SamplingRows:
    """Every kind of sampling, filters alone and together."""
    rng = np.random.default_rng(1)
    return rows_of(
        n,
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.7], n),
        top_k=rng.choice([0, 1, 5, 40, 10**6], n),
        top_p=rng.choice([1.0, 0.95, 0.5, 1e-6], n),
        min_p=rng.choice([0.0, 0.02, 0.3, 1.0], n),
        seed=rng.integers(0, 2**53, n),
        position=rng.integers(1, 10000, n),
        logprobs=rng.choice([-1, 0, 3], n),
    )


PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, the authors' own implementation
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (*PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: str) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in (*counter, *key))
    words = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert " ".join(f"{int(w[0]):08x}" for w in words) == expected


def test_uniforms_are_independent_over_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200), np.arange(200), indexing="ij")
    u = uniforms(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert (u >= 0).all()
    assert (u < 1).all()
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() - 1 / 12) < 0.002
    neighbours = [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])]
    for a, b in neighbours:  # the standard error is 0.005
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
        cells = np.histogram2d(a.ravel(), b.ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
        assert_chi_square(cells.ravel(), np.full(64, 1 / 64))


def test_large_seeds_and_positions_do_not_collide() -> None:
    seeds = np.array([0, 2**32, 2**53 - 1, 1, 0], np.int64)
    positions = np.array([0, 0, 0, 0, 2**31 - 1], np.int64)
    assert len(set(uniforms(seeds, positions).tolist())) == 5


@pytest.mark.parametrize("vocabulary", [7, 1003, 49152])
def test_a_row_draws_the_same_alone_in_a_batch_and_in_any_place(vocabulary: int) -> None:
    n = 64
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(n, vocabulary, generator=generator) * 4
    logits[::5] = (logits[::5] * 2).round() / 2  # many ties
    rows = mixed_rows(n)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1].clone(), take(rows, slice(i, i + 1))) for i in range(n)]
    assert together.tokens.tolist() == [int(a.tokens[0]) for a in alone]
    assert together.logprobs is not None
    np.testing.assert_array_equal(together.logprobs.ids, np.concatenate([a.logprobs.ids for a in alone if a.logprobs]))
    values = np.concatenate([a.logprobs.values for a in alone if a.logprobs])
    np.testing.assert_array_equal(together.logprobs.values, values)
    order = np.random.default_rng(2).permutation(n)
    assert sample(logits[order], take(rows, order)).tokens.tolist() == together.tokens[order].tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_threads_nor_alignment_decide(threads: int) -> None:
    vocabulary, n = 5003, 20
    logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    rows = mixed_rows(n)
    expected = sample(logits, rows).tokens.tolist()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shift in (1, 3, 17):
            storage = torch.zeros(n * vocabulary + shift)
            moved = storage[shift:].view(n, vocabulary)
            moved.copy_(logits)
            assert sample(moved, rows).tokens.tolist() == expected
    finally:
        torch.set_num_threads(before)


def test_host_and_device_find_the_same_largest() -> None:
    weights = torch.randint(0, 50, (8, 1000), generator=torch.Generator().manual_seed(1))
    for count in (1, 7, 999, 1000):
        assert torch.equal(sampler._largest(weights, count), weights.topk(count).values)


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9, 1.0])
def test_ties_at_top_k_do_not_depend_on_the_neighbours_top_k(top_p: float) -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 0.0, -1.0]).expand(400, -1).contiguous()
    rows = rows_of(400, temperature=1.0, top_k=2, top_p=top_p, seed=np.arange(400))
    alone = sample(logits, rows).tokens
    rows.top_k[1::2] = [5, 0] * 100
    beside = sample(logits, rows).tokens
    assert torch.equal(alone[::2], beside[::2])


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, rows_of(2)).tokens.tolist() == [1, 0]


@pytest.mark.parametrize(
    "greedy",
    [
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_the_narrowest_filter_is_greedy(greedy: dict[str, Any]) -> None:
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(4))
    rows = rows_of(16, seed=np.arange(16), **greedy)
    assert sample(logits, rows).tokens.tolist() == logits.argmax(-1).tolist()


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])


def reference(temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution by the book, in float64: temperature, min-p, top-k, top-p. LOGITS descend, so a prefix is
    kept."""
    p = np.exp(LOGITS.double().numpy() / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    if top_k:
        p[top_k:] = 0
    p /= p.sum()
    if top_p < 1:
        p[int(np.searchsorted(p.cumsum(), top_p)) + 1 :] = 0
    return p / p.sum()


def assert_chi_square(observed: np.ndarray, probabilities: np.ndarray) -> None:
    assert observed[probabilities == 0].sum() == 0, "a token that was filtered out was drawn"
    kept = probabilities > 0
    expected = observed.sum() * probabilities[kept]
    statistic = ((observed[kept] - expected) ** 2 / expected).sum()
    freedom = kept.sum() - 1
    # Wilson and Hilferty: the 1 - 1e-5 quantile of chi-square. Draws are fixed by seeds, so this passes always or
    # never.
    z, spread = 4.265, 2 / (9 * max(freedom, 1))
    assert statistic <= max(freedom, 1) * (1 - spread + z * math.sqrt(spread)) ** 3


CASES: list[dict[str, Any]] = [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.9}, {"min_p": 0.2},
    {"temperature": 2.0, "min_p": 0.3, "top_k": 4, "top_p": 0.8}, {"top_k": 5, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("varying", ["seed", "position"])
def test_the_distribution_is_right(case: dict[str, Any], varying: str) -> None:
    n = 20000
    rows = rows_of(n, **{"temperature": 1.0, varying: np.arange(n), **case})
    tokens = sample(LOGITS.expand(n, -1).contiguous(), rows).tokens.numpy()
    assert_chi_square(np.bincount(tokens, minlength=8), reference(**case))


def test_successive_tokens_are_independent() -> None:
    n, size = 40000, len(LOGITS)
    rows = rows_of(n, temperature=1.0, position=np.arange(n), seed=7)
    tokens = sample(LOGITS.expand(n, -1).contiguous(), rows).tokens.numpy()
    pairs = np.bincount(tokens[:-1:2] * size + tokens[1::2], minlength=size * size)
    p = reference()
    assert_chi_square(pairs, np.outer(p, p).ravel())


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -9.0]]).expand(300, -1).contiguous()
    for limits in ({"top_k": 2}, {"top_p": 0.4}):
        drawn = sample(logits, rows_of(300, temperature=1.0, seed=np.arange(300), **limits)).tokens
        assert set(drawn.tolist()) == {0, 1, 2}


def test_logits_that_are_not_finite_are_counted_and_decide_nothing_by_chance() -> None:
    nan, inf = math.nan, math.inf
    bad = [[0.0, nan, 2.0], [nan, nan, nan], [0.0, inf, 1.0], [-inf, 1.0, 0.5], [-inf, -inf, -inf]]
    good = [[1.0, 2.0, 3.0], [3e38, 3e38, 3e38]]
    logits = torch.tensor(bad + good)
    original = logits.clone()
    greedy = sample(logits, rows_of(7))
    assert greedy.tokens.tolist() == [2, 0, 1, 1, 0, 2, 0]
    assert greedy.nonfinite == 5
    drawn = sample(logits, rows_of(7, temperature=1.0, seed=5, position=9, top_p=0.9, top_k=2, min_p=0.1, logprobs=1))
    again = sample(logits, rows_of(7, temperature=1.0, seed=5, position=9, top_p=0.9, top_k=2, min_p=0.1, logprobs=1))
    assert torch.equal(drawn.tokens, again.tokens)
    assert drawn.nonfinite == 5
    assert ((drawn.tokens >= 0) & (drawn.tokens < 3)).all()
    assert torch.equal(logits.isnan(), original.isnan()), "the caller's logits were changed"


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6))
    wanted = [2, -1, 0, 5]
    result = sample(logits, rows_of(4, temperature=0.3, top_k=2, seed=[1, 2, 3, 4], logprobs=wanted))
    assert result.logprobs is not None
    ids, values, ranks = result.logprobs.ids, result.logprobs.values, result.logprobs.ranks
    assert ids.dtype == np.int32
    assert values.dtype == np.float32
    assert ranks.dtype == np.int32
    assert len(ids) == len(values) == 3 + 1 + 6
    assert len(ranks) == 3
    expected = logits.log_softmax(-1)
    start = 0
    for place, row in enumerate((0, 2, 3)):
        n = wanted[row]
        token = int(result.tokens[row])
        top = expected[row].sort(descending=True)
        assert ids[start] == token
        assert ids[start + 1 : start + 1 + n].tolist() == top.indices[:n].tolist()
        mine = slice(start, start + 1 + n)
        np.testing.assert_allclose(values[mine], expected[row][ids[mine].tolist()], rtol=1e-6)
        assert ranks[place] == top.indices.tolist().index(token) + 1
        start += 1 + n


def test_no_logprobs_asked_none_given() -> None:
    assert sample(torch.zeros(2, 4), rows_of(2)).logprobs is None


def test_masks_leave_the_allowed_as_if_there_were_no_others() -> None:
    """Whatever the sampling; rows that are not named draw as ever, and logprobs are those without masks."""
    n, vocabulary = 24, 70
    rng = np.random.default_rng(3)
    logits, rows = torch.from_numpy(rng.normal(size=(n, vocabulary)).astype(np.float32) * 3), mixed_rows(n)
    before = logits.clone()
    samples = np.array([5, 0, 23, 7, 11], np.int32)
    allowed = rng.random((len(samples), vocabulary)) < 0.2
    allowed[:, 69] = True
    padded = np.zeros((len(samples), 96), bool)
    padded[:, :vocabulary] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    drawn = sample(logits, rows, Masks(samples, words))
    least = logits.clone()
    least[torch.from_numpy(samples).long()] -= torch.from_numpy(~allowed).float() * 1e30
    assert drawn.tokens.tolist() == sample(least, rows).tokens.tolist()
    for place, row in enumerate(samples.tolist()):
        assert allowed[place, drawn.tokens[row]]
    named = np.isin(np.arange(n), samples)
    assert drawn.tokens[~named].tolist() == sample(logits, rows).tokens[~named].tolist()
    assert torch.equal(logits, before)
    assert drawn.nonfinite == 0
    assert drawn.logprobs is not None
    chosen = logits.log_softmax(-1)[torch.arange(n), drawn.tokens.long()].numpy()
    asked = np.flatnonzero(rows.logprobs >= 0)
    given = rows.logprobs[asked] + 1
    firsts = np.cumsum(given) - given
    assert np.allclose(drawn.logprobs.values[firsts], chosen[asked], atol=1e-6)


def test_a_mask_decides_where_nothing_that_it_allows_is_finite() -> None:
    logits = torch.full((1, 33), -torch.inf)
    logits[0, 3] = 5.0
    masks = Masks(np.array([0], np.int32), np.array([[0, 1]], np.uint32))
    assert sample(logits, rows_of(1), masks).tokens.tolist() == [32]
    assert sample(logits, rows_of(1, temperature=1.0, seed=4), masks).tokens.tolist() == [32]
