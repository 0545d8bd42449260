"""A step as an asynchronous device sees it: flat int32 arrays, built with numpy and sent in one piece."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from worker.execution.batch import Inputs, Samples
from worker.execution.slots import Int32Array, Int64Array
from worker.layers.attention import Rows
from workerproto.messages import RowFlag
from workerproto.steps import AcceptedStep

ALIGNED = 4  # int32 elements: 16 bytes. Each array begins at a multiple, so that kernels see the same in every step
SAMPLED = -1  # an input that is the slot's last sampled token


class StepArrays(NamedTuple):
    """T tokens, S samples, D rows of one query, which come first; in the order in which they are sent."""

    header: Int32Array  # [2] blocks a row of the tables, outbox
    known: Int32Array  # [T] the input, or SAMPLED
    slots: Int32Array  # [T] by token
    positions: Int32Array  # [T]
    mapping: Int32Array  # [T] cache slot
    places: Int32Array  # [S] the tokens that sample, in row order; empty if all do, or may
    sample_slots: Int32Array  # [S] where the sampled tokens go
    tables: Int32Array  # [D, header[0]]


class StepTensors(NamedTuple):
    """`StepArrays` on the device, all int32 and flat."""

    header: Tensor
    known: Tensor
    slots: Tensor
    positions: Tensor
    mapping: Tensor
    places: Tensor
    sample_slots: Tensor
    tables: Tensor


class LaunchedStep(NamedTuple):
    """A step between its forward pass and its end. turn: its packet's. size: of its graph, 0
    for none. scores: [samples, vocabulary] on tp rank 0 of the last stage."""

    step: AcceptedStep
    samples: Samples
    turn: int
    size: int
    sent: StepTensors
    scores: Tensor | None


class Padding(NamedTuple):
    """What rows that are nobody's read and write."""

    slot: int  # of `last_tokens`
    block: int


def aligned(elements: int) -> int:
    """What they take in a packet."""
    return -(-elements // ALIGNED) * ALIGNED


def packet_capacity(tokens: int, rows: int, width: int) -> int:
    """int32 elements of any step's arrays, gaps for alignment included."""
    return 4 * tokens + 2 * rows + rows * width + 64


def graph_size(step: AcceptedStep, sizes: Sequence[int]) -> int:
    """Rows of the graph, of ascending `sizes`, that the step takes; 0 for none.

    A graph's rows are one token each and read nothing that another row of the step writes. What is shared is written
    whole by the end of the step that starts a request behind it (SPEC, Blocks); so such a step takes none, as its other
    rows may be writing it, and a later step has nothing of the kind.
    """
    if step.num_tokens != step.num_rows or any(request.computed for request in step.started):
        return 0
    place = bisect_left(sizes, step.num_rows)
    return sizes[place] if place < len(sizes) else 0


def single_queries_first(step: AcceptedStep) -> tuple[AcceptedStep, Int64Array]:
    """The step with its rows of one token in front, else in their order; and for each of its rows where it is now."""
    several = step.counts > 1
    if not several.any() or bool((np.diff(several.astype(np.int8)) >= 0).all()):
        return step, np.arange(step.num_rows)
    order = np.argsort(several, kind="stable")
    given = np.where(step.flags & RowFlag.FORCED, step.counts, 0)
    start, moved = given.cumsum() - given, given[order]
    source = np.repeat(start[order] - (moved.cumsum() - moved), moved) + np.arange(len(step.forced))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    moved_step = replace(
        step, slots=step.slots[order], positions=step.positions[order], counts=step.counts[order],
        flags=step.flags[order], forced=step.forced[source], grant_counts=np.zeros_like(step.grant_counts),
        grants=step.grants[:0],
    )  # fmt: skip
    return moved_step, place


def eager_arrays(
    step: AcceptedStep, rows: Rows, inputs: Inputs | None, samples: Samples, outbox: int
) -> StepArrays:
    """inputs: None on stages that get none."""
    positions, mapping = rows.tokens()
    single = int((rows.counts == 1).sum())
    known = known_of(inputs, len(positions))
    return StepArrays(
        _header(rows.block_tables.shape[1], outbox), known, np.repeat(step.slots, step.counts),
        positions.astype(np.int32), mapping.astype(np.int32), samples.places.astype(np.int32), samples.slots,
        rows.block_tables[:single],
    )  # fmt: skip


def padding_arrays(size: int, padding: Padding, block_size: int) -> StepArrays:
    """Rows of nobody alone, to capture with."""
    slots = np.full(size, padding.slot, np.int32)
    zeros = np.zeros(size, np.int32)
    return StepArrays(
        _header(1, 0), zeros, slots, zeros, np.full(size, padding.block * block_size, np.int32), np.empty(0, np.int32),
        slots, np.full((size, 1), padding.block, np.int32),
    )  # fmt: skip


def _header(width: int, outbox: int) -> Int32Array:
    return np.array([width, outbox], np.int32)


def known_of(inputs: Inputs | None, tokens: int) -> Int32Array:
    """`StepArrays.known`; zeros on stages that get no inputs."""
    if inputs is None:
        return np.zeros(tokens, np.int32)
    known = inputs.known.astype(np.int32)
    known[inputs.places] = SAMPLED
    return known
