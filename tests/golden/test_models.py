"""Logits at every position equal transformers' own, however the work is cut: chunks, batches, blocks, ranks, stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.golden.in_process import Gang, assert_close
from tests.golden.small_models import VARIANTS, make, reference_logits

LENGTHS = (61, 1, 90, 34, 17)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Tensor], list[Tensor]]]:
    """Folder, sequences and reference logits of every variant."""
    made = {}
    for variant in VARIANTS:
        folder = make(variant, tmp_path_factory.mktemp(variant))
        generator = torch.Generator().manual_seed(11)
        sequences = [torch.randint(0, 131, (length,), generator=generator) for length in LENGTHS]
        made[variant] = (folder, sequences, reference_logits(folder, sequences))
    return made


def run_mixed(gang: Gang, sequences: list[Tensor]) -> list[Tensor]:
    """Requests join and leave as they like; every step mixes prefill chunks of any length with single tokens."""
    rng = np.random.default_rng(5)
    requests = [gang.request(tokens) for tokens in sequences]
    while live := [request for request in requests if request.remaining]:
        chosen = [request for request in live if rng.random() < 0.8] or live
        rng.shuffle(chosen)
        wanted = rng.choice([1, 1, 1, 2, 13, 40], size=len(chosen))
        gang.step([(request, min(int(n), request.remaining)) for request, n in zip(chosen, wanted, strict=True)])
    return [torch.cat(request.logits) for request in requests]


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(models: dict, variant: str, block_size: int) -> None:
    folder, sequences, reference = models[variant]
    for actual, expected in zip(run_mixed(Gang(folder, block_size=block_size), sequences), reference, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (1, 3), (3, 1)])
def test_parallel_equals_transformers(models: dict, variant: str, tp: int, pp: int) -> None:
    folder, sequences, reference = models[variant]
    for actual, expected in zip(run_mixed(Gang(folder, tp, pp), sequences), reference, strict=True):
        assert_close(actual, expected)


def test_uneven_explicit_partition(models: dict) -> None:
    folder, sequences, reference = models["qwen2"]
    gang = Gang(folder, pp=3, partition=[1, 5, 1])
    for actual, expected in zip(run_mixed(gang, sequences), reference, strict=True):
        assert_close(actual, expected)


def test_whole_prefill_then_decode(models: dict) -> None:
    """No chunks: prompts at once, then one token each, in equal and unequal lengths."""
    folder, sequences, reference = models["llama-linear"]
    gang = Gang(folder)
    requests = [gang.request(sequences[i]) for i in (0, 2, 0)]
    gang.step([(request, 40) for request in requests])
    while live := [(request, 1) for request in requests if request.remaining]:
        gang.step(live)
    for request, i in zip(requests, (0, 2, 0), strict=True):
        assert_close(torch.cat(request.logits), reference[i])


def test_prefix_written_in_the_same_step(models: dict) -> None:
    folder, sequences, reference = models["qwen3"]
    gang = Gang(folder)
    first = gang.request(sequences[2])
    second = gang.request(sequences[2], shared=first.blocks[:3])
    gang.step([(second, 40), (first, 60)])
    gang.step([(first, 30), (second, 2)])
    assert_close(torch.cat(first.logits), reference[2])
    assert_close(torch.cat(second.logits), reference[2][48:])


def test_long_chunk_behind_a_context(tmp_path: Path) -> None:
    """More queries than a mask tile holds, at positions that are no multiple of anything."""
    folder = make("llama-linear", tmp_path, num_hidden_layers=2, max_position_embeddings=1024)
    tokens = torch.randint(0, 131, (700,), generator=torch.Generator().manual_seed(1))
    (expected,) = reference_logits(folder, [tokens])
    gang = Gang(folder, num_blocks=100)
    request, other = gang.request(tokens), gang.request(tokens)
    gang.step([(request, 37)])
    gang.step([(request, 620), (other, 300)])
    gang.step([(request, 43), (other, 257)])
    gang.step([(other, 143)])
    assert_close(torch.cat(request.logits), expected)
    assert_close(torch.cat(other.logits), expected)


def test_what_others_left_in_a_block_is_never_read(models: dict) -> None:
    folder, sequences, reference = models["mistral"]
    gang = Gang(folder)
    for _, caches in gang.stages[0]:
        for cache in caches:
            cache.fill_(torch.nan)
    for actual, expected in zip(run_mixed(gang, sequences), reference, strict=True):
        assert_close(actual, expected)


def test_decode_groups_split_when_padding_is_dear(tmp_path: Path) -> None:
    folder = make("llama-linear", tmp_path, num_hidden_layers=2, max_position_embeddings=1024)
    lengths = (600, 3, 590, 40)
    sequences = [torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    expected = reference_logits(folder, sequences)
    gang = Gang(folder, num_blocks=100)
    requests = [gang.request(tokens) for tokens in sequences]
    gang.step([(request, request.remaining - 1) for request in requests])
    gang.step([(request, 1) for request in requests])
    for request, logits in zip(requests, expected, strict=True):
        assert_close(torch.cat(request.logits), logits)


@pytest.mark.parametrize("tp", [1, 3])
def test_bfloat16_is_close(models: dict, tp: int) -> None:
    """Packed weights included. The bound is that of rounding, not of a wrong kernel, which errs by about 1."""
    folder, sequences, reference = models["llama-llama3-tied-biases"]
    for actual, expected in zip(run_mixed(Gang(folder, tp, dtype=torch.bfloat16), sequences), reference, strict=True):
        assert_close(actual, expected, 0.15)


def test_logits_of_no_position(models: dict) -> None:
    (model, _), = Gang(models["qwen2"][0], dtype=torch.bfloat16).stages[0]
    logits = model.logits(torch.empty(0, 96, dtype=torch.bfloat16))
    assert logits is not None
    assert logits.shape == (0, 131)


def test_dummy_weights_do_not_depend_on_the_ranks(models: dict) -> None:
    folder, sequences, _ = models["qwen3-tied-biases"]
    alone = run_mixed(Gang(folder, load_format="dummy"), sequences)
    for tp, pp in ((3, 1), (2, 2)):
        split = run_mixed(Gang(folder, tp, pp, load_format="dummy"), sequences)
        for actual, expected in zip(split, alone, strict=True):
            assert_close(actual, expected)
    assert not torch.equal(alone[0][0], alone[2][0])
