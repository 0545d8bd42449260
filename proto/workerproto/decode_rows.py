"""The usual step, accepted in a few microseconds: nobody comes or goes, and every row decodes.

Small models are bound by what a rank does a step on the host, and nearly all steps are of this one shape, so they are
compared with it column by column, as bytes where it can be. All is compared before anything is changed: nothing need be
taken back, no inverses are kept. A step of any other shape, right or wrong, is left to the general rules, which alone
know how to refuse.

Most often the rows are those of the step before, one position on, and in the same blocks: then what was found for that
step still holds. Nothing has changed it in between, for whatever changes a request is a step, and passes here first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workerproto.blocks import BlockOwners
from workerproto.codec import Int32Array, unpack
from workerproto.messages import RowFlag, Step
from workerproto.steps import AcceptedStep, RequestTable, StepLimits

_NONE = np.empty(0, np.int32)


class _Rows(NamedTuple):
    """Distinct requests that run, each with one token to compute, its last; its end lies within max_model_len.

    slots, positions, ends: int32 [rows]. left: how often all of them can decode after this.
    """

    ids: bytes
    slots: Int32Array
    positions: Int32Array
    ends: Int32Array
    left: int


class _Place(NamedTuple):
    """blocks: int32 [rows], where the rows write, up to `filled`, int32 [rows]. left: how often all of them can decode
    in these blocks after this.
    """

    blocks: Int32Array
    filled: Int32Array
    left: int


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
        self._counts = np.ones(rows, "<i4").tobytes()
        self._flags = np.full(rows, int(RowFlag.SAMPLE), "<i4").tobytes()
        self._no_grants = bytes(4 * rows)
        self._last: tuple[_Rows, _Place] | None = None

    def accept(self, sequence: int, step: Step) -> AcceptedStep | None:
        """Carry the step out, or return None with nothing changed."""
        last, self._last = self._last, None
        size = len(step.ids)
        if (
            not 0 < size <= len(self._counts)
            or bytes(step.counts) != self._counts[:size]
            or bytes(step.row_flags) != self._flags[:size]
            or step.new
            or step.resumed
            or len(step.finished)
            or len(step.preempted)
            or len(step.forced)
        ):
            return None
        rows, place = (self._find(step), None) if last is None else self._follow(step, *last)
        if rows is None or (place := place or self._place(step, rows)) is None:
            return None
        self._blocks.write_finally(place.blocks, place.filled)
        self._table.computed.put(rows.slots, rows.ends)
        self._table.known_end.put(rows.slots, rows.ends + 1)
        self._last = rows, place
        return AcceptedStep(
            sequence,
            _NONE,
            [],
            rows.slots,
            rows.positions,
            unpack(step.counts),
            unpack(step.row_flags),
            _NONE,
            unpack(step.grant_counts),
            unpack(step.grants),
        )

    def _follow(self, step: Step, last: _Rows, place: _Place) -> tuple[_Rows | None, _Place | None]:
        """Its rows, and where they write if that is where the last step's did."""
        ids, slots, _, positions, left = last
        if bytes(step.ids) != ids or bytes(step.positions) != positions.tobytes() or not left:
            return self._find(step), None
        rows = _Rows(ids, slots, positions, positions + 1, left - 1)
        if not place.left or len(step.grants) or bytes(step.grant_counts) != self._no_grants[: len(ids)]:
            return rows, None
        return rows, _Place(place.blocks, place.filled + 1, place.left - 1)

    def _find(self, step: Step) -> _Rows | None:
        """Its rows, if they are what `_Rows` says: then positions and counts are right, and each may sample."""
        if len(step.ids) % 4:
            return None
        ids = unpack(step.ids).tolist()
        try:
            slots = np.fromiter(map(self._slot_of.__getitem__, ids), np.int32, len(ids))
        except KeyError:
            return None
        positions = self._table.computed.take(slots)
        ends = positions + 1
        left = self._limits.max_model_len - 1 - int(ends[ends.argmax()])  # a token is sampled behind each end
        if (
            len(set(ids)) != len(ids)
            or bytes(step.positions) != positions.tobytes()
            or self._table.known_end.take(slots).tobytes() != ends.tobytes()
            or left < 0
        ):
            return None
        return _Rows(bytes(step.ids), slots, positions, ends, left)

    def _place(self, step: Step, rows: _Rows) -> _Place | None:
        """Where the rows write, with their grants carried out; None if these are not one block for just the rows that
        begin a block.

        Then no row has too few: a request holds a block for each that its computed positions began, so it lacks at
        most one. And none has too many, for its position is below max_model_len.
        """
        table, size = self._table, self._limits.block_size
        _, slots, positions, ends, _ = rows
        places = positions // size
        begins = places >= table.num_blocks.take(slots)
        granted = np.count_nonzero(begins)
        if bytes(step.grant_counts) != begins.astype(np.int32).tobytes() or len(step.grants) != 4 * granted:
            return None
        cells = slots * self._width + places
        if granted:
            grants = unpack(step.grants)
            if not self._blocks.grant_if_free(grants):
                return None
            self._cells[cells[begins]] = grants
            table.num_blocks[slots[begins]] += 1
        filled = ends - places * size
        return _Place(self._cells.take(cells), filled, size - int(filled[filled.argmax()]))
