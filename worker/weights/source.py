"""The plain interface of a loader, so that others than ours plug in by `--load-format module:Class`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import TracebackType
from typing import Protocol

from torch import Tensor

from worker.weights.checkpoint import Checkpoint
from worker.weights.dummy import DummyWeights
from worker.weights.placement import Piece


class Weights(Protocol):
    """One model's tensors. A context manager: what it opens while it is read it closes at the exit.

    A class that is given as module:Class is called with (folder, seed) and may raise WeightsError, as all methods may.
    """

    @property
    def held_outside(self) -> int:
        """Bytes on this rank's device that another process holds for it already, as a loader of its own may; they are
        counted in the memory budget, once. Known from the start."""

    def check(self, expected: dict[str, tuple[int, ...]], harmless: re.Pattern[str]) -> None:
        """Raises WeightsError unless exactly the expected tensors are there, by name and shape, beside harmless
        ones."""

    def read(self, name: str, piece: Piece) -> Tensor:
        """The rows (piece.dim 0) or columns (1) from piece.start to piece.stop, in any dtype that copies into the
        target."""

    def __enter__(self) -> Weights: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


LOAD_FORMATS = ("auto", "safetensors", "dummy")


def open_weights(folder: str | Path, load_format: str = "auto", seed: int = 0) -> Weights:
    """`load_format` is one of LOAD_FORMATS or module:Class. ValueError for another, WeightsError for a folder that is
    not sound."""
    if ":" in load_format:
        module, _, name = load_format.partition(":")
        try:
            make = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"load format {load_format!r} cannot be had: {error}") from None
        weights: Weights = make(Path(folder), seed)
        return weights
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r} is not module:Class or one of {', '.join(LOAD_FORMATS)}")
    return DummyWeights(seed) if load_format == "dummy" else Checkpoint(folder)
