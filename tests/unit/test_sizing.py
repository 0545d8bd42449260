"""What `workerctl plan` says of weights and blocks is what a rank then holds, to the byte."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from worker.layers.linear import SoleRank
from worker.memory.kv_cache import KVCacheShape
from worker.model_config import ModelConfig, RopeConfig
from worker.models import build_model
from worker.sizing import StepSize, block_bytes, fit, weight_bytes
from worker.topology import Topology, split_heads

BASE = ModelConfig(
    architecture="LlamaForCausalLM", hidden=48, layers=7, heads=12, kv_heads=6, head_dim=8, intermediate=96, vocab=131,
    tied=False, qkv_bias=False, output_bias=False, mlp_bias=False, rms_eps=1e-5, rope=RopeConfig(10000.0),
    max_position=256, sliding_window=None, dtype="float32", eos_ids=(),
)  # fmt: skip
MODELS = {
    "plain": BASE,
    "tied": dataclasses.replace(BASE, tied=True),
    "biases everywhere": dataclasses.replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
    "norms of heads": dataclasses.replace(BASE, architecture="Qwen3ForCausalLM", head_dim=16),
    "few key-value heads": dataclasses.replace(BASE, kv_heads=2),
}


class Group(SoleRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def parameters(config: ModelConfig, topology: Topology) -> int:
    """Bytes of the distinct tensors that weights are put into; padding rows are not."""
    group = Group(topology.tp_rank, topology.tp)
    model = build_model(config, topology, torch.bfloat16, torch.device("meta"), group)
    storages = {}
    for placement in model.placements:
        for piece in placement.pieces:
            storage = piece.target.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_weights_are_those_of_the_model(name: str, tp: int, pp: int) -> None:
    config = MODELS[name]
    for rank in range(tp * pp):
        topology = Topology.of(config, rank, tp, pp)
        assert weight_bytes(config, topology, "bfloat16") == parameters(config, topology), (name, rank)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 3), (4, 1), (4, 3)])
def test_blocks_are_those_of_the_cache(tp: int, pp: int) -> None:
    config = MODELS["few key-value heads"]
    for rank in range(tp * pp):
        topology = Topology.of(config, rank, tp, pp)
        heads = len(split_heads(config.heads, config.kv_heads, tp, topology.tp_rank).kv_heads)
        shape = KVCacheShape(len(topology.layers), 16, heads, config.head_dim, torch.bfloat16)
        assert block_bytes(config, topology, "bfloat16", 16) == shape.block_bytes


def test_the_smallest_rank_counts_for_all() -> None:
    done = fit(BASE, 1, 3, "float32", 16, StepSize(128, 8), 2 << 30)
    assert done.blocks == min(size.blocks_in(2 << 30) for size in done.ranks) > 0
    assert done.tokens == 16 * done.blocks
    assert fit(BASE, 1, 1, "float32", 16, StepSize(128, 8), 1 << 20).blocks == 0
    with pytest.raises(ValueError, match="12 attention heads cannot be divided by tp 5"):
        fit(BASE, 5, 1, "float32", 16, StepSize(128, 8), 2 << 30)
