"""Embedding and head, each rank holding an equal share of the vocabulary's rows.

The vocabulary is padded to a multiple of the ranks; padding rows are zero, belong to no token, are cut off the logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.layers.linear import Linear, TensorParallelGroup
from worker.topology import padded_vocab
from worker.weights.placement import Piece, Placement, Share


def _share(vocab: int, group: TensorParallelGroup) -> tuple[int, int, int]:
    """(first row, rows of the checkpoint, rows with padding) of a rank."""
    rows = padded_vocab(vocab, group.size) // group.size
    start = min(group.rank * rows, vocab)
    return start, min(rows, vocab - start), rows


class Embedding:
    def __init__(
        self, name: str, vocab: int, hidden: int, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.group = group
        self.start, filled, rows = _share(vocab, group)
        self.weight = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self.placements = [Placement(name, (vocab, hidden), (Piece(self.weight[:filled], 0, self.start),))]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden] on every rank of the stage."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        hidden = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self.group.all_reduce_(hidden.masked_fill_(elsewhere[:, None], 0))


class Head(Linear):
    """Hidden states to logits. `tied_to` shares the embedding's tensor when both are on this stage."""

    def __init__(
        self,
        name: str,
        vocab: int,
        hidden: int,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: Embedding | None = None,
    ) -> None:
        start, filled, rows = _share(vocab, group)
        super().__init__(hidden, rows if tied_to is None else 0, False, dtype, device)
        self.vocab, self.group = vocab, group
        if tied_to is None:
            self.place(name, (vocab, hidden), Share(0, start, slice(filled)))
        else:
            self.weight = tied_to.weight
        self.tied_to = tied_to

    def begin_loading(self) -> None:
        if self.tied_to is None:
            super().begin_loading()
        else:
            self.weight, self.packed = self.tied_to.weight, None

    def scores(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] -> [n, vocab] in the model dtype on tp rank 0, None on the others; n may be 0, on all alike."""
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self.vocab) if self.group.rank == 0 else None
        gathered = self.group.gather_vocab(self(hidden))
        return None if gathered is None else gathered[:, : self.vocab]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """As `scores`, in float32."""
        scores = self.scores(hidden)
        return None if scores is None else scores.float()
