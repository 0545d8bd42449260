"""Small models with random weights, made and saved by transformers, which is also the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_hidden_layers": 7,
    "intermediate_size": 192,
    "vocab_size": 131,  # a prime: every tp pads it
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 3.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3-tied-biases": (
        "Llama",
        {
            "num_key_value_heads": 2,
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-linear": ("Llama", {"num_key_value_heads": 6, "rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 6}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3-tied-biases": (
        "Qwen3",
        {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def make(variant: str, folder: Path, **overrides: Any) -> Path:
    """Save the variant to `folder`, with weights large enough that every part of it matters."""
    family, settings = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **overrides})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.12)
    model.save_pretrained(folder)
    return folder


def reference_logits(folder: Path, sequences: list[Tensor]) -> list[Tensor]:
    """float32 [positions, vocabulary] of each sequence by itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(tokens[None]).logits[0] for tokens in sequences]
