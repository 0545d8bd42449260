"""The usual step, accepted in a few microseconds: nobody comes or goes, and every row decodes.

Small models are bound by what a rank does a step on the host, and nearly all steps are of this one shape, so they are
compared with it column by column, as bytes where it can be. All is compared before anything is changed: nothing need be
taken back, no inverses are kept. A step of any other shape, right or wrong, is left to the general rules, which alone
know how to refuse.
"""

from __future__ import annotations

import numpy as np

from workerproto.blocks import BlockOwners
from workerproto.codec import Int32Array, pack, unpack
from workerproto.messages import RowFlag, Step
from workerproto.steps import AcceptedStep, RequestTable, StepLimits

_NONE = np.empty(0, np.int32)


class DecodeRows:
    """Reads and changes the same state as the general rules."""

    def __init__(
        self, limits: StepLimits, slot_of: dict[int, int], table: RequestTable, blocks: BlockOwners
    ) -> None:
        self._limits = limits
        self._slot_of = slot_of
        self._table = table
        self._blocks = blocks
        self._cells: Int32Array = table.blocks.reshape(-1)  # a view: cell slot * blocks_per_request + place
        self._width = limits.blocks_per_request
        rows = min(limits.rows, limits.tokens)  # a row has one token
        self._counts = pack([1] * rows)
        self._flags = pack([int(RowFlag.SAMPLE)] * rows)

    def accept(self, sequence: int, step: Step) -> AcceptedStep | None:
        """Carry the step out, or return None with nothing changed.

        Why what passes is acceptable: ids are distinct and run, and a row computes the one position from `computed` up
        to `known_end`, so none is BAD_ and each may sample; the longest stays within max_model_len. A request holds no
        fewer blocks than its computed positions began, so a row lacks at most one, and exactly those rows are granted
        one each: none has too few, nor, with a position below max_model_len, too many.
        """
        if step.new or step.resumed or len(step.finished) or len(step.preempted) or len(step.forced):
            return None
        table, limits, num_bytes = self._table, self._limits, len(step.ids)
        if not 0 < num_bytes <= len(self._counts) or num_bytes % 4:
            return None
        if bytes(step.counts) != self._counts[:num_bytes] or bytes(step.row_flags) != self._flags[:num_bytes]:
            return None
        ids = unpack(step.ids).tolist()
        try:
            slots = np.fromiter(map(self._slot_of.__getitem__, ids), np.int32, len(ids))
        except KeyError:
            return None
        positions = table.computed.take(slots)
        ends = positions + 1
        if (
            len(set(ids)) != len(ids)
            or bytes(step.positions) != positions.tobytes()
            or table.known_end.take(slots).tobytes() != ends.tobytes()
            or ends[ends.argmax()] >= limits.max_model_len
        ):
            return None
        places = positions // limits.block_size
        begins = places >= table.num_blocks.take(slots)
        if bytes(step.grant_counts) != begins.astype(np.int32).tobytes():
            return None
        granted = np.count_nonzero(begins)
        if len(step.grants) != 4 * granted:
            return None
        cells, grants = slots * self._width + places, _NONE
        if granted:
            grants = unpack(step.grants)
            if not self._blocks.grant_if_free(grants):
                return None
            self._cells[cells[begins]] = grants
            table.num_blocks[slots[begins]] += 1
        self._blocks.write_finally(self._cells.take(cells), ends - places * limits.block_size)
        table.computed.put(slots, ends)
        table.known_end.put(slots, ends + 1)
        counts, flags, grant_counts = unpack(step.counts), unpack(step.row_flags), unpack(step.grant_counts)
        return AcceptedStep(
            sequence, _NONE, [], slots, positions, counts, flags, forced=_NONE, grant_counts=grant_counts, grants=grants
        )
