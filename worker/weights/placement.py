"""Where a checkpoint's tensor goes on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows (dim 0) or columns (dim 1) of a checkpoint tensor from `start` on, as many as `target` has."""

    target: Tensor
    dim: int = 0
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.target.shape[self.dim]


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor of the checkpoint, by name and whole shape, and the pieces of it that this rank holds."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """As `Piece`, for a tensor that may be replaced: which of its rows are filled, all of them if None."""

    dim: int = 0
    start: int = 0
    rows: slice | None = None

    def of(self, tensor: Tensor) -> Piece:
        return Piece(tensor if self.rows is None else tensor[self.rows], self.dim, self.start)
