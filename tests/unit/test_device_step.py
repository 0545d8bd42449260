"""What an asynchronous device is sent: rows in the order that its kernels want, padding that is nobody's."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from worker.execution.batch import inputs_of, rows_of, samples_of
from worker.execution.device_step import (
    eager_arrays,
    graph_size,
    single_queries_first,
)
from worker.execution.slots import RequestSlots
from workerproto.messages import Sampling
from workerproto.steps import AcceptedStep, StartedRequest

NONE = np.empty(0, np.int32)
BLOCK = 4
TABLE = np.arange(24, dtype=np.int32).reshape(4, 6)


def step_of(rows: list[tuple[int, int, int, int]], forced: list[int]) -> AcceptedStep:
    """rows: slot, position, count, flags (1 samples, 2 forced)."""
    slots, positions, counts, flags = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return AcceptedStep(1, NONE, [], slots, positions, counts, flags, np.array(forced, np.int32), slots * 0, NONE)


def prompts() -> RequestSlots:
    slots = RequestSlots(4)
    started = [StartedRequest(s, s, np.arange(10 * s, 10 * s + 9, dtype=np.int32), 0, Sampling()) for s in range(4)]
    slots.apply(AcceptedStep(0, NONE, started, *[NONE] * 7))
    slots.sampled(0, np.array([1], np.int32), np.array([9], np.int32))
    return slots


def test_rows_of_one_token_come_first_and_answers_keep_the_order_of_the_step() -> None:
    step = step_of([(3, 0, 3, 3), (1, 9, 1, 1), (2, 4, 2, 0), (0, 5, 1, 3)], [71, 72, 73, 80])
    moved, place = single_queries_first(step)
    assert moved.slots.tolist() == [1, 0, 3, 2]
    assert moved.forced.tolist() == [80, 71, 72, 73]
    assert place.tolist() == [2, 0, 3, 1]
    slots, rows = prompts(), rows_of(moved, TABLE, BLOCK)
    samples = samples_of(step, rows.query_start[1:][place])
    arrays = eager_arrays(moved, rows, inputs_of(moved, rows.query_start, slots), samples, outbox=2)
    assert arrays.header.tolist() == [3, 2]
    assert arrays.known.tolist() == [-1, 80, 71, 72, 73, 24, 25]
    assert arrays.slots.tolist() == [1, 0, 3, 3, 3, 2, 2]
    assert arrays.positions.tolist() == [9, 5, 0, 1, 2, 4, 5]
    assert arrays.mapping.tolist() == [8 * BLOCK + 1, 1 * BLOCK + 1, 72, 73, 74, 13 * BLOCK, 13 * BLOCK + 1]
    assert arrays.places.tolist() == [4, 0, 1]  # of slots 3, 1, 0: the order in which the step has them
    assert arrays.sample_slots.tolist() == [3, 1, 0]
    assert arrays.tables.tolist() == [[6, 7, 8], [0, 1, 2]]


def test_a_step_that_is_in_order_is_left_alone() -> None:
    step = step_of([(1, 9, 1, 1), (2, 4, 2, 1)], [])
    assert single_queries_first(step)[0] is step


@pytest.mark.parametrize(
    ("counts", "computed", "size"),
    [([1, 1, 1], None, 4), ([1], None, 1), ([1] * 5, None, 0), ([1, 2], None, 0), ([1, 1], 0, 2), ([1, 1], 8, 0)],
)
def test_a_graph_takes_rows_of_one_token_that_read_nothing_of_the_same_step(
    counts: list[int], computed: int | None, size: int
) -> None:
    """Behind a prefix (the last case) a request may start in the very step that writes the prefix."""
    step = step_of([(slot, 8, count, 1) for slot, count in enumerate(counts)], [])
    if computed is not None:
        started = StartedRequest(1, 1, np.arange(9, dtype=np.int32), computed, Sampling())
        step = replace(step, started=[started])
    assert graph_size(step, [1, 2, 4]) == size
