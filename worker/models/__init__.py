"""Models by architecture. A new one is a file beside these and a line in the registry (and one in `model_config`)."""

from __future__ import annotations

import torch

from worker.layers.linear import TensorParallelGroup
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.qwen3 import Qwen3
from worker.topology import Topology

REGISTRY: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Qwen3,
}


def build_model(
    config: ModelConfig, topology: Topology, dtype: torch.dtype, device: torch.device, group: TensorParallelGroup
) -> Decoder:
    """The layers of one rank, weights zero. Raises ValueError for an architecture that is not in the registry."""
    if config.architecture not in REGISTRY:
        raise ValueError(f"no model is built for {config.architecture}; built are {', '.join(REGISTRY)}")
    return REGISTRY[config.architecture](config, topology, dtype, device, group)
