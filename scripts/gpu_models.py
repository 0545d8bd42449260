"""The shapes that speed on GPUs is measured with: Qwen3's, weights random, so a folder needs a config.json alone."""

import json
from pathlib import Path
from typing import Any

LONGEST = 4096


def _shape(layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "0.6b": _shape(28, 1024, 3072, 16, tied=True),
    "8b": _shape(36, 4096, 12288, 32, tied=False),
    "32b": _shape(64, 5120, 25600, 64, tied=False),
}
_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": LONGEST,
    "attention_bias": False,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def model_folder(name: str, parent: Path) -> Path:
    """Write the model's config.json into a folder of its own, and return the folder. KeyError for an unknown name."""
    folder = parent / f"qwen3-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | SHAPES[name], indent=1))
    return folder


def matrix_elements(name: str) -> int:
    """Weights that a decode step reads: all but the embedding, of which a row is looked up; the head is read."""
    shape = SHAPES[name]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = hidden * 128 * (heads + 2 * 8) + heads * 128 * hidden
    layer: int = attention + 3 * hidden * shape["intermediate_size"]
    return int(layer * shape["num_hidden_layers"] + hidden * _COMMON["vocab_size"])


def cache_bytes_per_token(name: str) -> int:
    """Keys and values of all layers, bfloat16."""
    return int(SHAPES[name]["num_hidden_layers"]) * 2 * 8 * 128 * 2
