"""The decoder that the Llama family shares: pre-norm attention and gated MLP, a residual stream between them.

A stage builds its own layers only; embedding on the first, final norm and head on the last. With tied embeddings the
last stage loads the embedding's weight once more as its head, unless it is the first stage too and shares the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from worker.layers.attention import AttentionBackend, AttentionBatch, make_backend
from worker.layers.linear import QKV, GateUp, Linear, RowParallel, SoleRank, TensorParallelGroup
from worker.layers.norm import HeadNorm, RMSNorm
from worker.layers.ops import Heads, Ops, make_ops
from worker.layers.rotary import Rotary
from worker.layers.vocabulary import Embedding, Head
from worker.model_config import ModelConfig
from worker.topology import HeadSplit, Topology, check_divisible, split_heads
from worker.weights.placement import Placement


class Part(Protocol):
    @property
    def placements(self) -> list[Placement]: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What every part of a rank's model is built from."""

    config: ModelConfig
    heads: HeadSplit
    group: TensorParallelGroup
    backend: AttentionBackend
    ops: Ops
    dtype: torch.dtype
    device: torch.device


class Attention:
    def __init__(self, name: str, context: Context) -> None:
        config, heads, group = context.config, context.heads, context.group
        made = (context.dtype, context.device)
        self.backend, self.ops = context.backend, context.ops
        self.heads = Heads(len(heads.heads), len(heads.kv_heads), config.head_dim)
        self.head_norm: HeadNorm | None = None  # of queries and keys, in architectures that have one
        width, total = config.heads * config.head_dim, (config.heads, config.kv_heads)
        self.qkv = QKV(name, config.hidden, heads, total, config.head_dim, config.qkv_bias, *made)
        self.output = RowParallel(f"{name}.o_proj", width, config.hidden, config.output_bias, group, *made)
        self.parts: list[Part] = [self.qkv, self.output]

    def heads_of(self, qkv: Tensor, rotation: Any, batch: AttentionBatch, cache: Tensor) -> Tensor:
        """What the heads have seen, before the output projection."""
        return self.ops.attend(qkv, self.heads, self.head_norm, rotation, batch, cache, self.backend)


class MLP:
    def __init__(self, name: str, context: Context) -> None:
        config, group = context.config, context.group
        sizes = (config.hidden, config.intermediate)
        self.gate_up = GateUp(name, *sizes, config.mlp_bias, group, context.dtype, context.device)
        self.down = RowParallel(
            f"{name}.down_proj", *sizes[::-1], config.mlp_bias, group, context.dtype, context.device
        )
        self.ops = context.ops
        self.parts: list[Part] = [self.gate_up, self.down]


class Layer:
    def __init__(self, name: str, context: Context, attention: type[Attention]) -> None:
        config = context.config

        def norm(which: str) -> RMSNorm:
            made = (context.ops, context.dtype, context.device)
            return RMSNorm(f"{name}.{which}.weight", config.hidden, config.rms_eps, *made)

        self.attention_norm = norm("input_layernorm")
        self.attention = attention(f"{name}.self_attn", context)
        self.mlp_norm = norm("post_attention_layernorm")
        self.mlp = MLP(f"{name}.mlp", context)
        self.parts: list[Part] = [self.attention_norm, *self.attention.parts, self.mlp_norm, *self.mlp.parts]

    def __call__(
        self, hidden: Tensor, update: Tensor | None, rotation: Any, batch: AttentionBatch, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it, so that a device can fuse that with the next norm.

        The sum goes into the projection's fresh output: `hidden` may be a buffer that a receive refills.
        """
        if update is None:
            x = self.attention_norm(hidden)
        else:
            x, hidden = self.attention_norm.added_to_(update, hidden), update
        seen = self.attention.heads_of(self.attention.qkv(x), rotation, batch, cache)
        update = self.attention.output(seen)
        x, hidden = self.mlp_norm.added_to_(update, hidden), update
        return hidden, self.mlp.down(self.mlp.gate_up.gated(x, self.mlp.ops.silu_mul))

    def accumulates(self, rows: int) -> bool:
        """Whether `add_to_` may be called, and is the faster way, for so many rows."""
        attention, mlp = self.attention, self.mlp
        products = [part.products for part in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
        allowed = attention.output.accumulates and mlp.down.accumulates
        return allowed and all(one.fuses(rows) for one in products)

    def add_to_(self, hidden: Tensor, rotation: Any, batch: AttentionBatch, cache: Tensor) -> None:
        """The same into `hidden`, by products that accumulate."""
        qkv = self.attention.qkv(hidden, self.attention_norm)
        self.attention.output.add_to_(hidden, self.attention.heads_of(qkv, rotation, batch, cache))
        self.mlp.down.add_to_(hidden, self.mlp.gate_up.gated(hidden, self.mlp.ops.silu_mul, self.mlp_norm))


class Decoder:
    """One rank's share of a model. All methods are called by every tp rank of the stage, in the same order.

    T is the number of tokens of a step; hidden states are [T, hidden] in the model dtype, whole on every tp rank.
    """

    attention: ClassVar[type[Attention]] = Attention

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup,
    ) -> None:
        check_divisible(config, topology.tp)
        assert (group.rank, group.size) == (topology.tp_rank, topology.tp)
        self.config, self.topology, self.dtype, self.device, self.group = config, topology, dtype, device, group
        heads = split_heads(config.heads, config.kv_heads, topology.tp, topology.tp_rank)
        self.kv_heads = len(heads.kv_heads)
        self.backend = make_backend(device, dtype, len(heads.heads), self.kv_heads, config.head_dim)
        self.ops = make_ops(device)
        context = Context(config, heads, group, self.backend, self.ops, dtype, device)
        self.rotary = Rotary(config.rope, config.head_dim, dtype, device)
        self.layers = [Layer(f"model.layers.{i}", context, self.attention) for i in topology.layers]
        self.embedding, self.final_norm, self.head = self._ends(context)

    def _ends(self, context: Context) -> tuple[Embedding | None, RMSNorm | None, Head | None]:
        config, group, dtype, device = context.config, context.group, context.dtype, context.device
        table = "model.embed_tokens.weight"
        embedding = norm = head = None
        if self.topology.is_first_stage:
            embedding = Embedding(table, config.vocab, config.hidden, group, dtype, device)
        if self.topology.is_last_stage:
            norm = RMSNorm("model.norm.weight", config.hidden, config.rms_eps, self.ops, dtype, device)
            name, shared = (table, embedding) if config.tied else ("lm_head.weight", None)
            head = Head(name, config.vocab, config.hidden, group, dtype, device, shared)
        return embedding, norm, head

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]; first stage only."""
        assert self.embedding is not None
        return self.embedding(token_ids)

    def forward(self, hidden: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
        """[T, hidden] -> [T, hidden] through this stage's layers, each with its cache (see `worker.memory.kv_cache`);
        through the first of them where there are caches for no more.

        `hidden` is not written; the result is a tensor of its own.
        """
        rotation, update = self.ops.rotation(self.rotary, batch.positions), None
        if self.layers[0].accumulates(len(hidden)):  # as do the others, being of the same sizes
            hidden = hidden.clone()
            for layer, cache in zip(self.layers[: len(caches)], caches, strict=True):
                layer.add_to_(hidden, rotation, batch, cache)
            return hidden
        for layer, cache in zip(self.layers[: len(caches)], caches, strict=True):
            hidden, update = layer(hidden, update, rotation, batch, cache)
        assert update is not None
        return update.add_(hidden)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] of the positions to sample -> float32 [n, vocab] on tp rank 0, else None; last stage only."""
        assert self.final_norm is not None
        assert self.head is not None
        return self.head.logits(self.final_norm(hidden))

    def scores(self, hidden: Tensor) -> Tensor | None:
        """As `logits`, in the model dtype."""
        assert self.final_norm is not None
        assert self.head is not None
        return self.head.scores(self.final_norm(hidden))

    def _parts(self) -> Iterator[Part]:
        ends: tuple[Part | None, ...] = (self.embedding, self.final_norm, self.head)
        yield from (part for part in ends if part is not None)
        for layer in self.layers:
            yield from layer.parts

    @property
    def placements(self) -> list[Placement]:
        """What this rank loads, and where it goes."""
        return [placement for part in self._parts() for placement in part.placements]

    @property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the whole model's checkpoint, so that each rank can judge all of it and all judge alike."""
        alone = Topology(0, 1, 1, (self.config.layers,))
        whole = type(self)(self.config, alone, self.dtype, torch.device("meta"), SoleRank())
        return {placement.name: placement.shape for placement in whole.placements}

    @property
    def harmless(self) -> re.Pattern[str]:
        """Tensors that checkpoints may hold and nobody needs: rotary tables, and a head that is the embedding."""
        tied = r"|lm_head\.weight" if self.config.tied else ""
        return re.compile(rf"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq{tied}")

    def begin_loading(self) -> None:
        """Called before weights are put in place of others."""
        for part in self._parts():
            if isinstance(part, Linear):
                part.begin_loading()

    def finish_loading(self) -> None:
        """Called once all weights are in place."""
        for part in self._parts():
            if isinstance(part, Linear | RMSNorm):
                part.finish_loading()
