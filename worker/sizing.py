"""Would it fit: bytes of a rank's weights and blocks, exactly, and of what a start measures, roughly. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from worker.model_config import ModelConfig
from worker.topology import Topology, padded_vocab, split_heads

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}

CONTEXT = 600 << 20
COMMUNICATOR = 100 << 20
GRAPHS = 512 << 20
"""Estimates on CUDA: of the context with its libraries, of a communicator, of captured graphs."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step: what buffers and intermediate results are made for."""

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class RankSize:
    """Bytes of one rank. weights and block are exact; context, step and graphs are estimates."""

    rank: int
    weights: int
    block: int
    context: int
    step: int
    graphs: int

    @property
    def beside_kv(self) -> int:
        return self.weights + self.context + self.step + self.graphs

    def blocks_in(self, usable: int) -> int:
        """Beside the one for padding; 0 if none fits."""
        return max(0, (usable - self.beside_kv) // self.block - 1)


def weight_bytes(config: ModelConfig, topology: Topology, dtype: str) -> int:
    """Of the parameters that the rank holds, padding of the vocabulary included: those of `models.decoder`."""
    hidden, tp = config.hidden, topology.tp
    heads = split_heads(config.heads, config.kv_heads, tp, topology.tp_rank)
    qkv = (len(heads.heads) + 2 * len(heads.kv_heads)) * config.head_dim
    output, inner = len(heads.heads) * config.head_dim, config.intermediate // tp
    layer = hidden * (qkv + output + 3 * inner) + 4 * hidden  # two norms, each of which is kept twice
    layer += qkv * config.qkv_bias + 2 * inner * config.mlp_bias
    if topology.tp_rank == 0:  # what is added to a sum over the ranks is added once
        layer += hidden * (config.output_bias + config.mlp_bias)
    if config.architecture == "Qwen3ForCausalLM":  # norms of queries and keys, a row a head
        layer += (len(heads.heads) + len(heads.kv_heads)) * config.head_dim
    table = padded_vocab(config.vocab, tp) // tp * hidden
    total = layer * len(topology.layers)
    if topology.is_first_stage:
        total += table
    if topology.is_last_stage:
        total += 2 * hidden + table * (not (config.tied and topology.is_first_stage))
    return total * BYTES_OF[dtype]


def block_bytes(config: ModelConfig, topology: Topology, dtype: str, block_size: int) -> int:
    """Of one block over the rank's layers: keys and values of its heads."""
    kv_heads = len(split_heads(config.heads, config.kv_heads, topology.tp, topology.tp_rank).kv_heads)
    return len(topology.layers) * block_size * 2 * kv_heads * config.head_dim * BYTES_OF[dtype]


def rank_size(config: ModelConfig, topology: Topology, dtype: str, block_size: int, step: StepSize) -> RankSize:
    """On CUDA."""
    width = BYTES_OF[dtype]
    heads = split_heads(config.heads, config.kv_heads, topology.tp, topology.tp_rank)
    qkv = (len(heads.heads) + 2 * len(heads.kv_heads)) * config.head_dim
    widest = max(qkv + len(heads.heads) * config.head_dim, 3 * config.intermediate // topology.tp)
    results = step.tokens * (3 * config.hidden + widest) * width
    logits = step.rows * config.vocab * (2 * width + 3 * 4) if topology.is_last_stage else 0
    hops = 2 * step.tokens * config.hidden * width * (topology.pp > 1)
    communicators = (topology.tp > 1) + (topology.pp > 1) * 2
    return RankSize(
        topology.rank,
        weight_bytes(config, topology, dtype),
        block_bytes(config, topology, dtype, block_size),
        CONTEXT + COMMUNICATOR * communicators,
        max(results, logits) + hops,
        GRAPHS,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout on devices of one size. blocks: of the gang, which is the smallest number over the ranks; tokens of KV
    cache are its positions."""

    tp: int
    pp: int
    ranks: list[RankSize]
    usable: int
    blocks: int
    tokens: int


def fit(
    config: ModelConfig, tp: int, pp: int, dtype: str, block_size: int, step: StepSize, usable: int,
    partition: tuple[int, ...] | None = None,
) -> Fit:  # fmt: skip
    """usable: bytes of each device. Raises ValueError for a layout that cannot be."""
    whole = Topology.of(config, 0, tp, pp, partition)
    ranks = [
        rank_size(config, Topology(rank, tp, pp, whole.partition), dtype, block_size, step) for rank in range(tp * pp)
    ]
    blocks = min(size.blocks_in(usable) for size in ranks)
    return Fit(tp, pp, ranks, usable, blocks, blocks * block_size)
