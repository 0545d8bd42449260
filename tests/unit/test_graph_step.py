"""What a captured graph is given: what the general way makes of the same step, and padding that is nobody's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.test_device_step import step_of
from worker.execution.batch import inputs_of, rows_of, samples_of
from worker.execution.device_step import SAMPLED, Padding, aligned, eager_arrays, packet_capacity, padding_arrays
from worker.execution.graph_step import graph_inputs, graph_samples, write_graph_step
from worker.execution.slots import Int32Array, RequestSlots
from workerproto.messages import Sampling
from workerproto.steps import AcceptedStep, StartedRequest

BLOCK, WIDTH, SLOTS = 4, 6, 8
PADDING = Padding(SLOTS, 99)
GARBAGE = -77
NONE = np.empty(0, np.int32)


def parts_of(packet: Int32Array, size: int) -> dict[str, Int32Array]:
    """By the names of `StepArrays`, where the arrays stood that the graph was captured with."""
    found, start = {}, 0
    for name, array in padding_arrays(size, PADDING, BLOCK)._asdict().items():
        found[name] = packet[start : start + array.size]
        start += aligned(array.size)
    width = int(found["header"][0])
    tables_at = start - aligned(size)  # the last array is the tables, captured one block wide
    found["tables"] = packet[tables_at : tables_at + size * width].reshape(size, width)
    return found


def written(
    step: AcceptedStep, slots: RequestSlots, table: Int32Array, size: int, outbox: int
) -> tuple[Int32Array, int]:
    packet = np.full(packet_capacity(size, size, WIDTH), GARBAGE, np.int32)
    samples = graph_samples(step)
    used = write_graph_step(
        packet, step, graph_inputs(step, slots)[0], table, BLOCK, size, PADDING, outbox,
        all_sample=len(samples) == step.num_rows,
    )  # fmt: skip
    return packet, used


@pytest.mark.parametrize("seed", range(200))
def test_it_is_what_the_general_way_makes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = RequestSlots(SLOTS)
    started = [StartedRequest(s, s, rng.integers(0, 50, 24).astype(np.int32), 0, Sampling()) for s in range(SLOTS)]
    slots.apply(AcceptedStep(0, NONE, started, *[NONE] * 7))
    table = rng.permutation(SLOTS * WIDTH).astype(np.int32).reshape(SLOTS, WIDTH)
    count = int(rng.integers(1, SLOTS + 1))
    size = next(size for size in (1, 2, 4, 8) if size >= count)
    chosen, positions = rng.permutation(SLOTS)[:count], rng.integers(0, 24, count)
    usual = seed % 2  # all rows go on from what they sampled, and sample again
    flags = np.ones(count, int) if usual else rng.integers(0, 4, count)
    fed = np.ones(count, bool) if usual else rng.integers(0, 2, count) == 1
    for step_number, (slot, position) in enumerate(zip(chosen[fed], positions[fed], strict=True), 3):
        slots.sampled(step_number, np.array([slot], np.int32), np.array([position], np.int32))
    forced = rng.integers(100, 120, int((flags & 2 != 0).sum())).tolist()
    step = step_of([(int(s), int(p), 1, int(f)) for s, p, f in zip(chosen, positions, flags, strict=True)], forced)

    rows = rows_of(step, table, BLOCK)
    inputs, samples = inputs_of(step, rows.query_start, slots), samples_of(step, rows.query_start[1:])
    wanted = eager_arrays(step, rows, inputs, samples, outbox=2)
    known, needed = graph_inputs(step, slots)
    assert needed == inputs.needed
    assert (known == SAMPLED) if usual else np.array_equal(np.broadcast_to(known, count), wanted.known)
    found = graph_samples(step)
    for name in ("places", "slots", "positions"):
        assert np.array_equal(getattr(found, name), getattr(samples, name)), name
    packet, used = written(step, slots, table, size, outbox=2)
    parts = parts_of(packet, size)
    assert parts["header"].tolist() == wanted.header.tolist()
    for name in ("known", "slots", "positions", "mapping"):
        assert parts[name][:count].tolist() == getattr(wanted, name).tolist(), name
    assert parts["sample_slots"][:count].tolist() == np.where(step.flags & 1, step.slots, PADDING.slot).tolist()
    assert parts["tables"][:count].tolist() == wanted.tables.tolist()
    nobodys = {"known": 0, "slots": SLOTS, "positions": 0, "mapping": 99 * BLOCK, "sample_slots": SLOTS}
    for name, value in nobodys.items():
        assert parts[name][count:].tolist() == [value] * (size - count), name
    assert (parts["tables"][count:] == PADDING.block).all()
    assert (packet[used:] == GARBAGE).all()
    assert not (parts["tables"] == GARBAGE).any()
