"""A loader as somebody else may write one."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from worker.weights import Piece


class Constant:
    """All weights are the seed."""

    held_outside = 0

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed

    def check(self, expected: dict[str, tuple[int, ...]], harmless: re.Pattern[str]) -> None:
        assert expected

    def read(self, name: str, piece: Piece) -> Tensor:
        return torch.full(tuple(piece.target.shape), float(self.seed))

    def __enter__(self) -> Constant:
        return self

    def __exit__(self, *_: object) -> None:
        pass
