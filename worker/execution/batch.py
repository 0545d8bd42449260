"""From an accepted step to what the model is fed: numpy only, and no loop over the rows that decode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.execution.slots import Int32Array, Int64Array, RequestSlots
from worker.layers.attention import Rows
from workerproto.messages import RowFlag
from workerproto.steps import AcceptedStep


@dataclass(frozen=True, slots=True)
class Inputs:
    """Token ids of a step, T in all. Those that an earlier step sampled are still on their way or on the device.

    known: int64 [T], 0 where a sampled token belongs. places: int64 [f], the indices of those. slots: int32 [f],
    whose last sampled token it is. needed: the latest step that sampled one of them, -1 if there is none.
    """

    known: Int64Array
    places: Int64Array
    slots: Int32Array
    needed: int

    def on(self, device: torch.device, last_tokens: Tensor) -> Tensor:
        """int64 [T]; `last_tokens` (int64, by slot) must hold what `needed` and earlier steps sampled."""
        if len(self.places) == len(self.known):
            return last_tokens[torch.from_numpy(self.slots).to(device)]
        tokens = torch.from_numpy(self.known).to(device)
        if len(self.places):
            tokens[torch.from_numpy(self.places).to(device)] = last_tokens[torch.from_numpy(self.slots).to(device)]
        return tokens


@dataclass(frozen=True, slots=True)
class Samples:
    """The SAMPLE rows, n of them, in row order. places: int64 [n], index of the row's last token among the step's T.
    slots: int32 [n]. positions: int32 [n], of the token to be sampled."""

    places: Int64Array
    slots: Int32Array
    positions: Int32Array

    def __len__(self) -> int:
        return len(self.places)


def rows_of(step: AcceptedStep, block_tables: Int32Array, block_size: int) -> Rows:
    """The step as attention sees it. block_tables: int32 [slots, blocks per request], as after the step's grants."""
    query_start = np.zeros(step.num_rows + 1, np.int32)
    np.cumsum(step.counts, out=query_start[1:])
    longest = int((step.positions + step.counts).max())
    tables = block_tables[step.slots, : -(-longest // block_size)]
    return Rows(query_start, step.positions, step.counts, tables, block_size)


def inputs_of(step: AcceptedStep, query_start: Int32Array, slots: RequestSlots) -> Inputs:
    """FORCED tokens as given; a row that starts where its request last sampled reads that token; the rest reads the
    prompt."""
    known = np.zeros(int(query_start[-1]), np.int64)
    forced = (step.flags & RowFlag.FORCED) != 0
    sampled = (slots.sampled_at[step.slots] == step.positions) & ~forced
    for row in np.flatnonzero(~sampled & ~forced).tolist():
        start, count = int(step.positions[row]), int(step.counts[row])
        tokens = slots.tokens[step.slots[row]]
        assert tokens is not None
        assert start + count <= len(tokens), "the validator lets no row read unknown tokens"
        known[query_start[row] : query_start[row + 1]] = tokens[start : start + count]
    if len(step.forced):
        known[np.repeat(forced, step.counts)] = step.forced
    read = step.slots[sampled]
    needed = int(slots.sampled_step[read].max()) if len(read) else -1
    return Inputs(known, query_start[:-1][sampled].astype(np.int64), read, needed)


def samples_of(step: AcceptedStep, row_ends: Int32Array) -> Samples:
    """row_ends: int32 [rows], one past each row's last token."""
    rows = step.sampled_rows
    positions = step.positions[rows] + step.counts[rows]
    return Samples(row_ends[rows].astype(np.int64) - 1, step.slots[rows], positions)
