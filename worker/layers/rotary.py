"""Rotary position embedding (arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model_config import RopeConfig


class Rotary:
    """cos and sin of a step's positions are computed once and serve all layers; no table bounds the context."""

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(rope, head_dim).to(device)
        self.dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cos, sin [T, 1, head_dim] in the model dtype; sin's first half is negated, see `rotate_`."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), -1).to(self.dtype).unsqueeze(1),
            torch.cat((-sin, sin), -1).to(self.dtype).unsqueeze(1),
        )


def rotate_(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
    """Rotate [T, heads, head_dim] in place: x * cos + (-x2, x1) * sin, the sign being in sin already."""
    cos, sin = rotation
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians a position.

    "linear" stretches all wavelengths by the factor. "llama3" stretches those longer than original / low_freq_factor,
    keeps those shorter than original / high_freq_factor, and blends between (as transformers' modeling_rope_utils).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: Tensor = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)  # within the original context
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    assert rope.kind == "default"
    return frequencies
