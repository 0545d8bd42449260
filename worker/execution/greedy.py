"""The likeliest token of each row on CUDA, and where it goes: no more than two passes over the logits' bytes, no waiting."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from worker.layers import triton_kernels as kernels
from worker.layers.triton_ops import overlaps

_CHUNK, _BLOCK, _DELIVERED = 4096, 1024, 256


class Greedy:
    """tokens: int32 [rows], of the last `choose`, and nonfinite, 1 where the row's logits held a NaN or an infinity."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.parts = triton.cdiv(vocab, _CHUNK)
        self.values = torch.empty(rows * self.parts, device=device)
        self.ids = torch.empty(rows * self.parts, dtype=torch.int32, device=device)
        self.bad = torch.empty_like(self.ids)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.nonfinite = torch.zeros_like(self.tokens)
        self.overlap = overlaps(device)

    def choose(self, scores: Tensor) -> None:
        """scores [n, vocabulary]. Not finite numbers are read as `sampler.sample` reads them; ties go to the lowest id."""
        rows, vocab = scores.shape
        kernels.argmax_parts[(rows, self.parts)](
            scores, self.values, self.ids, self.bad, vocab, scores.stride(0), _CHUNK, _BLOCK, self.overlap,
            launch_pdl=self.overlap,
        )  # fmt: skip
        kernels.argmax_whole[(rows,)](
            self.values, self.ids, self.bad, self.tokens, self.nonfinite, self.parts,
            triton.next_power_of_2(self.parts), self.overlap, launch_pdl=self.overlap,
        )  # fmt: skip

    def deliver(self, slots: Tensor, header: Tensor, last_tokens: Tensor, outboxes: Tensor) -> None:
        """The tokens of the first len(slots) rows to `last_tokens`, by slot, and to the outbox that the header names."""
        kernels.deliver[(triton.cdiv(len(slots), _DELIVERED),)](
            self.tokens, self.nonfinite, slots, header, last_tokens, outboxes, len(slots), outboxes.shape[2],
            _DELIVERED, self.overlap, launch_pdl=self.overlap,
        )  # fmt: skip
