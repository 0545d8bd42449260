"""A model without weights that reads its context through the block table, as attention does.

Its next token is a checksum of every token it can see. So a scheduler that shares the wrong block, writes over a live
one, or drops a token on the way through preemption gets another text than `continuation` says, and a test notices.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from workerproto.codec import Int32Array, pack
from workerproto.fields import Packed
from workerproto.masks import Masks
from workerproto.messages import Result, RowFlag, Sampling
from workerproto.steps import AcceptedStep, RequestTable, StepLimits

GREEDY = Sampling()


def next_token(context: Int32Array, vocabulary: int, sampling: Sampling = GREEDY) -> int:
    """crc32 of the context (int32, little-endian), of the seed too unless temperature is 0, modulo the vocabulary."""
    start = sampling.seed & 0xFFFFFFFF if sampling.temperature else 0
    return zlib.crc32(context.astype("<i4").tobytes(), start) % vocabulary


def continuation(prompt: Sequence[int], length: int, vocabulary: int, sampling: Sampling = GREEDY) -> list[int]:
    """The `length` tokens that follow a prompt, whatever batches, blocks and preemptions they are computed in."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(np.array(tokens, np.int32), vocabulary, sampling))
    return tokens[len(prompt) :]


class FakeModel:
    """cells: int32 [num_blocks, block_size], the token whose keys and values a position would hold."""

    def __init__(self, limits: StepLimits) -> None:
        self._vocabulary = limits.vocabulary
        self.block_size = limits.block_size
        self._cells: Int32Array = np.full((limits.num_blocks, limits.block_size), -1, np.int32)
        self._known: Int32Array = np.zeros((limits.live_requests, limits.max_model_len), np.int32)
        self._sampling = [GREEDY] * limits.live_requests

    def execute(self, step: AcceptedStep, table: RequestTable, masks: Masks | None = None) -> Result:
        """The result of a step that a validator with this table has just accepted. Of a row that is masked it is the
        first token that is allowed, from that on which it would be without.
        """
        allowed = masks.allowed(self._vocabulary) if masks is not None else ()
        allowed_of = dict(zip(masks.samples.tolist(), allowed, strict=True)) if masks is not None else {}
        for started in step.started:
            self._known[started.slot, : len(started.tokens)] = started.tokens
            self._sampling[started.slot] = started.sampling
        self._write(step, table)
        tokens: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        ranks: list[int] = []
        for place, row in enumerate(step.sampled_rows.tolist()):
            slot, end = int(step.slots[row]), int(step.positions[row] + step.counts[row])
            context = self._cells[table.blocks[slot, : -(-end // self.block_size)]].reshape(-1)[:end]
            sampling = self._sampling[slot]
            token = next_token(context, self._vocabulary, sampling)
            if place in allowed_of:
                token = (token + int(np.roll(allowed_of[place], -token).argmax())) % self._vocabulary
            if end < self._known.shape[1]:
                self._known[slot, end] = token
            tokens.append(token)
            if sampling.logprobs >= 0:
                ids += [token] + [(token + rank) % self._vocabulary for rank in range(sampling.logprobs)]
                values += [-0.5] + [-0.5 * (rank + 1) for rank in range(sampling.logprobs)]
                ranks.append(1)
        return Result(pack(tokens), 0, pack(ids), _pack_floats(values), pack(ranks), pack([0, 0, 0, 0]))

    def content(self, blocks: Int32Array) -> Int32Array:
        """int32 [blocks x block_size], the tokens whose keys and values stand in these blocks."""
        return self._cells[blocks].reshape(-1)

    def _write(self, step: AcceptedStep, table: RequestTable) -> None:
        """Every row writes before any row reads."""
        taken = 0
        for slot, first, count, flags in zip(
            step.slots.tolist(), step.positions.tolist(), step.counts.tolist(), step.flags.tolist(), strict=True
        ):
            if flags & RowFlag.FORCED:
                self._known[slot, first : first + count] = step.forced[taken : taken + count]
                taken += count
            positions = np.arange(first, first + count)
            blocks = table.blocks[slot, positions // self.block_size]
            self._cells[blocks, positions % self.block_size] = self._known[slot, first : first + count]


def _pack_floats(values: list[float]) -> Packed:
    return np.asarray(values, "<f4").tobytes()
