"""The likeliest token of each row on CUDA, and where it goes: one pass over the logits, and no waiting."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.layers import triton_kernels as kernels
from worker.layers.launch import Launcher, blocks, power_of_two

PART = 2048  # scores of a row whose largest is found by one program
_BLOCK, _DELIVERED = 1024, 256


class Greedy:
    """tokens: int32 [rows], of the last `choose`, and nonfinite, 1 where the row's logits held a NaN or an infinity."""

    def __init__(self, rows: int, vocab: int, stride: int, device: torch.device) -> None:
        """stride: elements from a row of the scores to the next, vocab or more."""
        self.parts = blocks(vocab, PART)
        self.values = torch.empty(rows * self.parts, device=device)
        self.ids = torch.empty(rows * self.parts, dtype=torch.int32, device=device)
        self.bad = torch.empty_like(self.ids)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.nonfinite = torch.zeros_like(self.tokens)
        self.of_parts = Launcher(kernels.argmax_parts, device, vocab, stride, PART, _BLOCK)
        self.of_all = Launcher(kernels.argmax_whole, device, self.parts, power_of_two(self.parts))
        self.delivery = Launcher(kernels.deliver, device, rows, _DELIVERED)

    def choose(self, scores: Tensor) -> None:
        """scores [n, vocabulary]. What is not finite is read as in `sampler`; ties go to the lowest id."""
        rows = len(scores)
        self.of_parts((rows, self.parts, 1), scores, self.values, self.ids, self.bad)
        self.of_all((rows, 1, 1), self.values, self.ids, self.bad, self.tokens, self.nonfinite)

    def deliver(self, slots: Tensor, header: Tensor, last_tokens: Tensor, outboxes: Tensor) -> None:
        """The tokens of the first len(slots) rows to `last_tokens`, by slot, and to the outbox the header names."""
        count = len(slots)
        grid = (blocks(count, _DELIVERED), 1, 1)
        self.delivery(grid, self.tokens, self.nonfinite, slots, header, last_tokens, outboxes, count)
