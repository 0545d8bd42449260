"""Filling a model from a source of weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import torch

from worker.weights.placement import Placement
from worker.weights.source import Weights

Progress = Callable[[int, int], None]  # bytes done, bytes in all, of this rank's tensors


class Loadable(Protocol):
    @property
    def placements(self) -> list[Placement]: ...

    @property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def harmless(self) -> re.Pattern[str]: ...

    def finish_loading(self) -> None: ...


@torch.inference_mode()
def load_weights(model: Loadable, weights: Weights, progress: Progress | None = None) -> int:
    """Check the whole checkpoint, load this rank's pieces, convert to the model's dtype. Returns the bytes loaded.

    Every rank judges all tensors and not only its own, so all refuse alike. Raises WeightsError.
    """
    with weights:
        weights.check(model.checkpoint_shapes, model.harmless)
        total = fill(model.placements, weights, progress)
    model.finish_loading()
    return total


def fill(placements: list[Placement], weights: Weights, progress: Progress | None) -> int:
    """Copy every piece to where it goes; returns the bytes.

    A function of its own, so that nothing holds the tensors any more when `finish_loading` replaces them.
    """
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
