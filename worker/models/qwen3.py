"""Qwen3: a decoder that normalizes every query and key head before the rotary embedding."""

from __future__ import annotations

from worker.layers.norm import HeadNorm
from worker.models.decoder import Attention, Context, Decoder


class Qwen3Attention(Attention):
    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        config, heads = context.config, context.heads
        counts = (len(heads.heads), len(heads.kv_heads))
        self.head_norm = HeadNorm(name, *counts, config.head_dim, config.rms_eps, context.dtype, context.device)
        self.parts.append(self.head_norm)


class Qwen3(Decoder):
    attention = Qwen3Attention
