"""Random weights without a checkpoint, for `--load-format dummy`: the same model whatever the tp, pp or rank."""

from __future__ import annotations

import re
import zlib

import torch
from torch import Tensor

from worker.weights.placement import Piece

STANDARD_DEVIATION = 0.02
# Row i is a window of one random line, starting at i times this: a slice costs a copy, not a generator's pass over the
# whole tensor, and any rank can take its slice alone.
ROW_STEP = 7


class DummyWeights:
    """Norm weights are 1; all else is normal with deviation 0.02, determined by seed, name and place in the tensor."""

    held_outside = 0

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: dict[str, tuple[int, ...]], harmless: re.Pattern[str]) -> None:
        self.shapes = expected

    def read(self, name: str, piece: Piece) -> Tensor:
        """float32, of the shape of the piece's target, and on its device: a line is moved there, not a matrix."""
        size = tuple(piece.target.shape)
        if name.endswith("norm.weight"):
            return torch.ones(size)
        shape = self.shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        if len(shape) == 1:
            line = torch.randn(shape[0], generator=generator)[piece.start : piece.stop]
        else:
            line = torch.randn((shape[0] - 1) * ROW_STEP + shape[1], generator=generator).to(piece.target.device)
            line = line.as_strided(size, (ROW_STEP, 1), piece.start * (ROW_STEP if piece.dim == 0 else 1))
        return line * STANDARD_DEVIATION

    def __enter__(self) -> DummyWeights:
        return self

    def __exit__(self, *_: object) -> None:
        pass
