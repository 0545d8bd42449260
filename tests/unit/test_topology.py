"""Ranks, stages, layers and heads; what cannot be divided says so with the arithmetic."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from worker.model_config import ModelConfig, RopeConfig
from worker.topology import Topology, check_divisible, padded_vocab, partition_layers, split_heads

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    vocab=49152, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, rms_eps=1e-5, rope=RopeConfig(1e5),
    max_position=8192, sliding_window=None, dtype="bfloat16", eos_ids=(2,),
)  # fmt: skip


def test_places() -> None:
    ranks = [Topology(rank, 2, 3, (2, 3, 2)) for rank in range(6)]
    assert [(r.pp_rank, r.tp_rank) for r in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [r.layers for r in ranks[::2]] == [range(2), range(2, 5), range(5, 7)]
    assert [r.previous for r in ranks] == [None, None, 0, 1, 2, 3]
    assert [r.next for r in ranks] == [2, 3, 4, 5, None, None]
    assert [r.rank for r in ranks if r.is_output] == [4]
    assert [r.is_first_stage for r in ranks] == [True, True, False, False, False, False]
    assert ranks[3].stage_ranks == range(2, 4)


@pytest.mark.parametrize(
    ("rank", "tp", "pp", "partition", "message"),
    [
        (6, 2, 3, (2, 3, 2), "rank 6 is not in 0 … 5"),
        (-1, 1, 1, (1,), "rank -1"),
        (0, 0, 1, (1,), "tp 0 and pp 1 must both be at least 1"),
        (0, 1, 2, (1,), "do not give each of 2 stages"),
        (0, 1, 2, (1, 0), "at least one"),
    ],
)
def test_impossible_places(rank: int, tp: int, pp: int, partition: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(rank, tp, pp, partition)


def test_partition_is_even_and_spares_the_last_stage() -> None:
    assert partition_layers(30, 1) == (30,)
    assert partition_layers(7, 2) == (4, 3)
    assert partition_layers(7, 3) == (2, 3, 2)
    assert partition_layers(11, 4) == (3, 3, 3, 2)
    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            parts = partition_layers(layers, pp)
            assert sum(parts) == layers
            assert len(parts) == pp
            assert max(parts) - min(parts) <= 1
            assert parts[-1] == min(parts)


def test_explicit_partition() -> None:
    assert partition_layers(7, 2, [1, 6]) == (1, 6)
    for wrong in ([3, 3], [7, 0], [7], [2, 2, 3], [], [8, -1]):
        with pytest.raises(ValueError, match="needed are 2 stages of at least one layer that sum to 7"):
            partition_layers(7, 2, wrong)


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be divided over 3 stages; pp may be at most 2"):
        partition_layers(2, 3)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 2, "9 attention heads cannot be divided by tp 2: 9 / 2 = 4.5; tp may be 1, 3$"),
        ({}, 9, r"1536 MLP columns \(intermediate_size\) cannot be divided by tp 9: 1536 / 9 = 170.7; tp may be 1, 3$"),
        (
            {"heads": 12, "kv_heads": 6},
            4,
            "6 key-value heads cannot be divided by tp 4: 6 / 4 = 1.5; tp may be 1, 2, 3, 6, 12$",
        ),
        ({}, 0, "tp 0 must be at least 1"),
    ],
)
def test_what_cannot_be_divided(changes: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_divisible(dataclasses.replace(SMOLLM2, **changes), tp)


def test_every_query_head_finds_its_kv_head() -> None:
    for heads in (1, 2, 9, 12, 16, 24):
        for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
            for tp in (n for n in range(1, heads + 1) if heads % n == 0):
                splits = [split_heads(heads, kv_heads, tp, rank) for rank in range(tp)]
                assert [head for split in splits for head in split.heads] == list(range(heads))
                assert len({(len(split.kv_heads), split.group) for split in splits}) == 1
                for split in splits:
                    served = [split.kv_heads[i // split.group] for i in range(len(split.heads))]
                    assert served == [head // (heads // kv_heads) for head in split.heads]
                    if kv_heads % tp == 0:
                        assert len(split.kv_heads) == kv_heads // tp  # nothing is held twice without need


def test_vocabulary_padding() -> None:
    assert [padded_vocab(131, tp) for tp in (1, 2, 3, 4)] == [131, 132, 132, 132]


def test_no_torch_is_imported() -> None:
    code = "import sys, worker.topology; sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "."}, timeout=30, check=False)
    assert ran.returncode == 0
