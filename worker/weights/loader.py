"""Filling a model from a source of weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from worker.weights.checkpoint import Checkpoint
from worker.weights.dummy import DummyWeights
from worker.weights.placement import Placement

Progress = Callable[[int, int], None]  # bytes done, bytes in all, of this rank's tensors
LOAD_FORMATS = ("auto", "safetensors", "dummy")


class Loadable(Protocol):
    @property
    def placements(self) -> list[Placement]: ...

    @property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def harmless(self) -> re.Pattern[str]: ...

    def finish_loading(self) -> None: ...


def open_weights(folder: str | Path, load_format: str = "auto", seed: int = 0) -> Checkpoint | DummyWeights:
    """`load_format` is one of LOAD_FORMATS. ValueError for another, WeightsError for a folder that is not sound."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    return DummyWeights(seed) if load_format == "dummy" else Checkpoint(folder)


@torch.inference_mode()
def load_weights(model: Loadable, weights: Checkpoint | DummyWeights, progress: Progress | None = None) -> int:
    """Check the whole checkpoint, load this rank's pieces, convert to the model's dtype. Returns the bytes loaded.

    Every rank judges all tensors and not only its own, so all refuse alike. Raises WeightsError.
    """
    with weights:
        weights.check(model.checkpoint_shapes, model.harmless)
        total = _fill(model.placements, weights, progress)
    model.finish_loading()
    return total


def _fill(placements: list[Placement], weights: Checkpoint | DummyWeights, progress: Progress | None) -> int:
    """On its own, so that nothing holds the tensors any more when `finish_loading` replaces them."""
    assert len({placement.name for placement in placements}) == len(placements), "a tensor is asked for twice"
    total = sum(piece.target.nbytes for placement in placements for piece in placement.pieces)
    done = 0
    for placement in placements:
        for piece in placement.pieces:
            piece.target.copy_(weights.read(placement.name, piece))
            done += piece.target.nbytes
        if progress is not None:
            progress(done, total)
    return total
