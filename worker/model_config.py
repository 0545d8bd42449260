"""What rankd needs to know of a model, read once from its Hugging Face `config.json`. No torch.

Field names and defaults are those of transformers' configuration classes (`configuration_llama.py` and its siblings);
both spellings of the rotary settings are read: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`.
Whatever would change the numbers and is not built is refused by name, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
LARGEST_CONFIG = 1 << 24  # bytes; a real one has a few thousand
LARGEST_SIZE = (1 << 31) - 1
MOST_LAYERS, MOST_HEADS = 1 << 12, 1 << 12  # both are counted one by one before anything is judged: no hour of that


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is "default", "linear" (factor) or "llama3" (all fields)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and switches of a decoder model; sizes in elements, positions in tokens."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rms_eps: float
    rope: RopeConfig
    max_position: int
    sliding_window: int | None  # tokens; None also when the file names a window that no layer uses
    dtype: str  # of the checkpoint as the file says; "float32" when it says nothing
    eos_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `folder/config.json`. Raises ValueError: one line with the file, the field, its value and the bound."""
        path = Path(folder) / "config.json"
        fields = _Fields(path, _read(path))
        architecture = _architecture(fields)
        family = _FAMILIES[architecture]
        heads = fields.integer("num_attention_heads", most=MOST_HEADS)
        kv_heads = fields.integer("num_key_value_heads", family.kv_heads or heads)
        if heads % kv_heads:
            fields.fail("num_key_value_heads", kv_heads, f"must divide the {heads} attention heads")
        hidden = fields.integer("hidden_size")
        head_dim = fields.integer("head_dim", family.head_dim or hidden // heads)
        if head_dim % 2:
            fields.fail("head_dim", head_dim, "must be even: rotary embedding turns pairs")
        _refuse_unbuilt(fields)
        attention_bias = family.attention_bias_key and fields.flag("attention_bias", False)
        config = cls(
            architecture=architecture,
            hidden=hidden,
            layers=fields.integer("num_hidden_layers", most=MOST_LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.integer("intermediate_size"),
            vocab=fields.integer("vocab_size"),
            tied=fields.flag("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.mlp_bias_key and fields.flag("mlp_bias", False),
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields),
            max_position=fields.integer("max_position_embeddings"),
            sliding_window=_sliding_window(fields, family),
            dtype=_dtype(fields),
            eos_ids=_eos_ids(fields),
        )
        return config

    @property
    def longest_context(self) -> int:
        """Most positions that full attention computes as the model means them."""
        return min(self.max_position, self.sliding_window or self.max_position)

    def resolve_context(self, requested: int | None = None) -> int:
        """Positions a request may have. ValueError if `requested` (or, without it, the model's own length) passes what
        is computed right: sliding windows are not built, so a context longer than the window would be silently wrong.
        """
        wanted = self.max_position if requested is None else requested
        if wanted < 1:
            raise ValueError(f"maximal model length {wanted} is less than 1")
        if wanted > self.max_position:
            raise ValueError(
                f"maximal model length {wanted} exceeds the model's max_position_embeddings {self.max_position}"
            )
        if wanted > self.longest_context:
            raise ValueError(
                f"maximal model length {wanted} exceeds the sliding window of {self.sliding_window} tokens, and "
                f"sliding-window attention is not built; give --max-model-len {self.longest_context} or less"
            )
        return wanted


@dataclass(frozen=True, slots=True)
class _Family:
    """What the architecture fixes and its config.json does not say, or says under its own keys."""

    attention_bias_key: bool = False
    mlp_bias_key: bool = False
    qkv_bias: bool = False
    head_dim: int = 0  # default if the file is silent; 0: hidden_size // heads
    kv_heads: int = 0  # likewise; 0: as many as attention heads
    window: int | None = None  # sliding_window if the file is silent
    window_is_optional: bool = False  # only with use_sliding_window, and only in the layers it names


_FAMILIES = {
    "LlamaForCausalLM": _Family(attention_bias_key=True, mlp_bias_key=True),
    "MistralForCausalLM": _Family(kv_heads=8, window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, kv_heads=32, window_is_optional=True, window=4096),
    "Qwen3ForCausalLM": _Family(
        attention_bias_key=True, head_dim=128, kv_heads=32, window_is_optional=True, window=4096
    ),
}
ARCHITECTURES = tuple(_FAMILIES)
_REQUIRED: Any = object()


class _Fields:
    """Typed reading of one JSON object; every complaint names the file and the field."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def fail(self, name: str, value: object, bound: str) -> None:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ValueError(f"{self.path}: {self.prefix}{name} is {shown}, {bound}")

    def get(self, name: str, default: Any) -> Any:
        """The value, or the default where the file is silent or says null."""
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.path}: {self.prefix}{name} is missing")
            return default
        return value

    def integer(self, name: str, default: Any = _REQUIRED, most: int = LARGEST_SIZE) -> int:
        value = self.get(name, default)
        if type(value) is not int or not 0 < value <= most:
            self.fail(name, value, f"must be an integer from 1 to {most}")
        return int(value)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < 1e300:
            self.fail(name, value, "must be a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            self.fail(name, value, "must be true or false")
        return bool(value)

    def group(self, name: str) -> _Fields:
        value = self.get(name, {})
        if type(value) is not dict:
            self.fail(name, value, "must be an object")
        return _Fields(self.path, value, f"{self.prefix}{name}.")


def _read(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        what = "is not a folder" if path.parent.exists() else "does not exist"
        raise ValueError(f"model folder {path.parent} {what}")
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a Hugging Face model folder has one")
    if (size := path.stat().st_size) > LARGEST_CONFIG:
        raise ValueError(f"{path} has {size} bytes, more than {LARGEST_CONFIG}: not a config.json")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if type(values) is not dict:
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures", _REQUIRED)
    if type(names) is not list or len(names) != 1 or names[0] not in ARCHITECTURES:
        fields.fail("architectures", names, f"must be one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_unbuilt(fields: _Fields) -> None:
    if (act := fields.get("hidden_act", "silu")) != "silu":
        fields.fail("hidden_act", act, 'must be "silu"')
    if (quantization := fields.get("quantization_config", None)) is not None:
        fields.fail("quantization_config", quantization, "quantized weights are not built")


_ROPE_FIELDS = {
    "rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings",
}  # fmt: skip


def _rope(fields: _Fields) -> RopeConfig:
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    rope = fields.group(name)
    _refuse_contradictions(fields, rope)
    theta = rope.number("rope_theta") if "rope_theta" in rope.values else fields.number("rope_theta", 10000.0)
    silent = _REQUIRED if "factor" in rope.values else "default"
    kind = rope.get("type", silent) if rope.get("rope_type", None) is None else rope.values["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        rope.fail("rope_type", kind, "must be default, linear or llama3")
    for unknown in rope.values.keys() - _ROPE_FIELDS:  # as where each kind of layer has settings of its own
        rope.fail(unknown, rope.values[unknown], "which is not known here")
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        fields.fail("partial_rotary_factor", share, "must be 1.0")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, rope.number("factor"))
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.fail("high_freq_factor", high, f"must be above low_freq_factor {low}")
    original = rope.integer("original_max_position_embeddings")
    return RopeConfig(theta, "llama3", rope.number("factor"), low, high, original)


def _refuse_contradictions(fields: _Fields, rope: _Fields) -> None:
    """A file may hold both spellings, as long as they say the same."""
    theta, other = rope.get("rope_theta", None), fields.get("rope_theta", None)
    if theta is not None and other is not None and theta != other:
        fields.fail("rope_theta", other, f"but {rope.prefix}rope_theta is {theta}")
    old = fields.group("rope_scaling")
    for group in (rope, old):
        if "type" in group.values and group.values["type"] != group.get("rope_type", group.values["type"]):
            group.fail("type", group.values["type"], f"but rope_type is {group.values['rope_type']!r}")
    spelt = {"type": "rope_type", "rope_type": "type"}  # either way
    for name, value in old.values.items():
        of_new = rope.get(name, rope.get(spelt.get(name, name), None))
        if value is not None and of_new != value:
            old.fail(name, value, f"but {rope.prefix}{name} is {of_new}")


def _sliding_window(fields: _Fields, family: _Family) -> int | None:
    if family.window is None or ("sliding_window" in fields.values and fields.values["sliding_window"] is None):
        return None
    window = fields.integer("sliding_window", family.window)
    if not family.window_is_optional:
        return window
    layers, wanted = fields.integer("num_hidden_layers", most=MOST_LAYERS), fields.flag("use_sliding_window", False)
    kinds = fields.get("layer_types", None)
    if kinds is not None:
        known = ["full_attention", "sliding_attention"] if wanted else ["full_attention"]
        if type(kinds) is not list or len(kinds) != layers or any(kind not in known for kind in kinds):
            fields.fail("layer_types", kinds, f"must be a list of {layers}, each {' or '.join(known)}")
        return window if "sliding_attention" in kinds else None
    full = fields.get("max_window_layers", 28)  # the layers before this one attend to everything
    return window if wanted and not (type(full) is int and full >= layers) else None


def _dtype(fields: _Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name, "float32")
    if dtype not in DTYPES:
        fields.fail(name, dtype, f"must be one of {', '.join(DTYPES)}")
    return str(dtype)


def _eos_ids(fields: _Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id", [])
    ids = value if type(value) is list else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        fields.fail("eos_token_id", value, "must be a token id or a list of them")
    return tuple(ids)
