"""Weights for a folder that has a config.json alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from worker.layers.linear import SoleRank
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.topology import Topology
from worker.weights import DummyWeights, Piece


def random_weights(folder: Path, seed: int) -> dict[str, Tensor]:
    """By the checkpoint's names, in its whole shapes; float32."""
    config = ModelConfig.from_folder(folder)
    model = Decoder(config, Topology(0, 1, 1, (config.layers,)), torch.float32, torch.device("meta"), SoleRank())
    source, shapes = DummyWeights(seed), model.checkpoint_shapes
    source.check(shapes, model.harmless)
    return {name: source.read(name, Piece(torch.empty(shape))).contiguous() for name, shape in shapes.items()}
