"""A step that a captured graph takes, written straight into its pinned packet.

For these steps the host has the least time: on a small model the device is done with one in 0.8 ms, in which the rank
receives, judges, builds and launches the next, and reads out the last. And numpy in a gang takes three to four times
what it takes hot in a loop (docs/gpu_log.md). So this is `batch` and `device_step` once more, with as few
calls as it takes; a test holds the two against each other.
"""

from __future__ import annotations

import numpy as np

from worker.execution.batch import Samples, inputs_of, samples_of
from worker.execution.device_step import ALIGNED, SAMPLED, Padding, aligned, known_of
from worker.execution.slots import Int32Array, RequestSlots
from workerproto.messages import RowFlag
from workerproto.steps import AcceptedStep

_SAMPLE = int(RowFlag.SAMPLE)


def graph_inputs(step: AcceptedStep, slots: RequestSlots) -> tuple[Int32Array | int, int]:
    """int32 [rows] as `StepArrays.known`, or SAMPLED if all are; and `Inputs.needed`."""
    if not len(step.forced) and (slots.sampled_at[step.slots] == step.positions).all():
        return SAMPLED, int(slots.sampled_step[step.slots].max())
    inputs = inputs_of(step, np.arange(step.num_rows + 1, dtype=np.int32), slots)
    return known_of(inputs, step.num_rows), inputs.needed


def graph_samples(step: AcceptedStep) -> Samples:
    if (step.flags & _SAMPLE).all():
        return Samples(np.arange(step.num_rows), step.slots, step.positions + 1)
    return samples_of(step, np.arange(1, step.num_rows + 1, dtype=np.int32))


def write_graph_step(
    packet: Int32Array, step: AcceptedStep, known: Int32Array | int, table: Int32Array, block_size: int, size: int,
    padding: Padding, outbox: int, *, all_sample: bool,
) -> int:  # fmt: skip
    """Write the step, made up to `size` rows, where `padding_arrays` had its arrays when the graph was captured.
    Returns the elements used.

    known: of all rows. table: int32 [slots, blocks per request], as after the step's grants. All rows sample, some of
    them for nobody.
    """
    rows, slots, positions = step.num_rows, step.slots, step.positions
    stride = aligned(size)
    start = ALIGNED + 5 * stride
    columns = packet[ALIGNED:start].reshape(5, stride)
    block = positions // block_size
    width = int(block.max()) + 1
    used = start + size * width
    tables = packet[start:used].reshape(size, width)
    tables[:rows] = table[slots, :width]
    if rows < size:
        tables[rows:] = padding.block
        columns[:, rows:size] = [[0], [padding.slot], [0], [padding.block * block_size], [padding.slot]]
    packet[0], packet[1] = width, outbox
    columns[0, :rows] = known
    columns[1, :rows] = slots
    columns[2, :rows] = positions
    columns[3, :rows] = positions + (table[slots, block] - block) * block_size
    columns[4, :rows] = slots if all_sample else np.where(step.flags & _SAMPLE, slots, padding.slot)
    return used
