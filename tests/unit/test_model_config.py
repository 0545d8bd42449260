"""config.json: what is read, and what every kind of bad one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker.model_config import ModelConfig, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def read(tmp_path: Path, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(tmp_path)


def test_llama(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.tied, config.dtype, config.eos_ids) == (64, True, "bfloat16", (2,))
    assert config.rope == RopeConfig(100000.0)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)


def test_both_spellings_of_rope(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    expected = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = read(tmp_path, rope_theta=..., rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope == expected
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(1e5, "linear", 2.0)


def test_families(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"], dtype="float16", eos_token_id=[1, 2])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.dtype, qwen2.eos_ids) == (True, False, "float16", (1, 2))
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.output_bias) == (128, True, True)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096),
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # as transformers reads a silent file
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True}, 64),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 30,
            },
            None,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 30,
            },
            None,
        ),
    ],
)
def test_sliding_window_in_use(tmp_path: Path, changes: dict[str, Any], window: int | None) -> None:
    config = read(tmp_path, **changes)
    assert config.sliding_window == window
    assert config.longest_context == (window or 8192)
    if window is None:
        assert config.resolve_context() == 8192
        return
    assert config.resolve_context(window) == window
    for wanted in (window + 1, None):  # None: the model's own length
        with pytest.raises(ValueError, match=f"exceeds the sliding window of {window} tokens"):
            config.resolve_context(wanted)


def test_context_beyond_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="9000 exceeds the model's max_position_embeddings 8192"):
        read(tmp_path).resolve_context(9000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r'architectures is \["GPT2LMHeadModel"\], must be one of LlamaForC'),
        ({"architectures": ...}, "architectures is missing"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "big"}, 'hidden_size is "big", must be an integer from 1'),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, must be an integer from 1 to 4096"),
        (
            {"num_attention_heads": 2**31 - 2, "num_key_value_heads": 1},
            "num_attention_heads is 2147483646, must be an integer from 1 to 4096",
        ),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers is 2\.0"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, must divide the 9 attention heads"),
        ({"head_dim": 63}, "head_dim is 63, must be even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": 5},
            "layer_types is 5, must be a list of 30",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 30},
            r"layer_types is .*must be a list of 30, each full_attention$",
        ),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity"),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes", must be true or false'),
        ({"torch_dtype": "int8"}, 'torch_dtype is "int8", must be one of float32'),
        ({"dtype": ["float32"]}, "dtype is"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not built"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r'rope_scaling\.rope_type is "yarn", must be default'),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"factor": 2}}, r"rope_scaling\.type is missing"),
        ({"rope_theta": "x"}, 'config.json: rope_theta is "x"'),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            r"rope_parameters\.full_attention is .*not known here",
        ),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"rope_parameters": {"rope_theta": 5e5}}, r"rope_theta is 100000, but rope_parameters.rope_theta is 500000.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": {"type": "linear", "factor": 4}},
            r"rope_scaling.factor is 4, but rope_parameters.factor is 2",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4}},
            r'rope_scaling.type is "linear", but',
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4}}, "but rope_type is 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_bad_fields(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b"[" * 200_000, "is not JSON"),
    ],
)
def test_not_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ValueError, match="absent does not exist"):
        ModelConfig.from_folder(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is not a folder"):
        ModelConfig.from_folder(tmp_path / "file")
