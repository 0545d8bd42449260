"""The rows of a step: read, judged and turned into written positions, all with numpy, none one by one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workerproto.codec import Int32Array, unpack
from workerproto.fields import Packed
from workerproto.messages import RefusalCode, RowFlag, Step
from workerproto.steps import Refusal, RequestTable, StepLimits

# As plain integers: an operation with an IntFlag makes another one, which takes microseconds.
_SAMPLE, _FORCED = int(RowFlag.SAMPLE), int(RowFlag.FORCED)
_ALL_FLAGS = _SAMPLE | _FORCED


class Rows(NamedTuple):
    """int32 arrays; the first five have one value a row."""

    ids: Int32Array
    positions: Int32Array
    counts: Int32Array
    row_flags: Int32Array
    grant_counts: Int32Array
    grants: Int32Array
    forced: Int32Array


def row_members(step: Step) -> tuple[Packed, ...]:
    """What a step says of its rows, in the order of `Rows`."""
    return (
        step.ids,
        step.positions,
        step.counts,
        step.row_flags,
        step.grant_counts,
        step.grants,
        step.forced,
    )


def read_rows(step: Step) -> Rows:
    """Views of a step's packed members. Raises Refusal MALFORMED if lengths do not fit each other."""
    members = row_members(step)
    num_bytes = len(step.ids)
    for place, (field, packed) in enumerate(zip(Rows._fields, members, strict=True)):
        if len(packed) % 4:
            raise Refusal(
                RefusalCode.MALFORMED, f"{field} has {len(packed)} bytes, not a multiple of 4", field, len(packed), 4
            )
        if place < 5 and len(packed) != num_bytes:
            values, rows = len(packed) // 4, num_bytes // 4
            raise Refusal(RefusalCode.MALFORMED, f"{field} has {values} values for {rows} rows", field, values, rows)
    return Rows(*map(unpack, members))


def judge_rows(rows: Rows, slot_of: dict[int, int], table: RequestTable, limits: StepLimits) -> Int32Array:
    """Judge all but the ownership of grants. Returns int32 [rows], the rows' slots. Raises Refusal for the first row
    at fault.
    """
    num_rows = len(rows.ids)
    if num_rows > limits.rows:
        raise Refusal(
            RefusalCode.TOO_MANY_ROWS, f"{num_rows} rows, at most {limits.rows} a step", "ids", num_rows, limits.rows
        )
    ids = rows.ids.tolist()
    try:
        slots = np.fromiter(map(slot_of.__getitem__, ids), np.int32, num_rows)
    except KeyError:
        unknown = np.array([request not in slot_of for request in ids])
        _refuse_first(unknown, RefusalCode.UNKNOWN_REQUEST, rows, "ids", rows.ids, "one that runs", "is not running")
    if len(set(ids)) != num_rows:
        twice = np.ones(num_rows, bool)
        twice[np.unique(rows.ids, return_index=True)[1]] = False
        _refuse_first(twice, RefusalCode.DUPLICATE_REQUEST, rows, "ids", rows.ids, "one row", "has two rows")
    _refuse_first(rows.counts < 1, RefusalCode.BAD_COUNT, rows, "counts", rows.counts, 1, "computes too few tokens")
    tokens = int(rows.counts.sum(dtype=np.int64))
    if tokens > limits.tokens:
        raise Refusal(
            RefusalCode.TOO_MANY_TOKENS,
            f"{tokens} tokens, at most {limits.tokens} a step",
            "counts",
            tokens,
            limits.tokens,
        )
    odd = (rows.row_flags & ~_ALL_FLAGS) != 0
    _refuse_first(
        odd, RefusalCode.BAD_ROW_FLAGS, rows, "row_flags", rows.row_flags, _ALL_FLAGS, "has a flag that is not in use"
    )
    computed = table.computed[slots]
    _refuse_first(
        rows.positions != computed,
        RefusalCode.BAD_POSITION,
        rows,
        "positions",
        rows.positions,
        computed,
        "is elsewhere",
    )
    # From here on sums stay in int32: a position is below max_model_len, a count at most the token budget.
    ends = rows.positions + rows.counts
    forced = (rows.row_flags & _FORCED) != 0
    sampled = rows.row_flags & _SAMPLE
    known = table.known_end[slots]
    _judge_forced(rows, forced, limits)
    beyond = (ends > known) & ~forced
    _refuse_first(beyond, RefusalCode.BAD_COUNT, rows, "counts", ends, known, "computes tokens that nobody knows")
    early = (sampled != 0) & (ends < known)
    _refuse_first(early, RefusalCode.BAD_SAMPLE, rows, "row_flags", ends, known, "samples before its last known token")
    lengths = np.maximum(ends, known).astype(np.int64) + sampled  # one more than the longest there can be
    long = lengths > limits.max_model_len
    _refuse_first(long, RefusalCode.TOO_LONG, rows, "positions", lengths, limits.max_model_len, "grows too long")
    _judge_grant_counts(rows, table.num_blocks[slots], ends, limits)
    return slots


def written_blocks(
    rows: Rows, slots: Int32Array, table: RequestTable, limits: StepLimits
) -> tuple[Int32Array, Int32Array]:
    """Blocks that the rows write, and how far each is written afterwards (1 … block_size); both int32 [blocks
    written].
    """
    size = limits.block_size
    ends = rows.positions + rows.counts
    first = rows.positions // size
    spans = (ends - 1) // size - first + 1
    if np.count_nonzero(spans == 1) == len(spans):
        return table.blocks[slots, first], ends - first * size
    row = np.repeat(np.arange(len(slots)), spans)
    place = (
        first[row] + np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(spans) - spans, spans).astype(np.int32)
    )
    return table.blocks[slots[row], place], np.minimum(ends[row] - place * size, size)


def _judge_forced(rows: Rows, forced: NDArray[np.bool_], limits: StepLimits) -> None:
    if not len(rows.forced) and not np.count_nonzero(forced):
        return
    wanted = int(rows.counts[forced].sum())
    if wanted != len(rows.forced):
        raise Refusal(
            RefusalCode.MALFORMED,
            f"forced has {len(rows.forced)} tokens, its rows compute {wanted}",
            "forced",
            len(rows.forced),
            wanted,
        )
    outside = (rows.forced < 0) | (rows.forced >= limits.vocabulary)
    if outside.any():
        place, last = int(outside.argmax()), limits.vocabulary - 1
        request = int(np.repeat(rows.ids[forced], rows.counts[forced])[place])
        token = int(rows.forced[place])
        raise Refusal(
            RefusalCode.TOKEN_OUT_OF_VOCABULARY,
            f"request {request}: token {token} is not in 0 … {last}",
            "forced",
            token,
            last,
            request,
        )


def _judge_grant_counts(rows: Rows, held: Int32Array, ends: Int32Array, limits: StepLimits) -> None:
    counts, most = rows.grant_counts, limits.blocks_per_request
    _refuse_first(counts < 0, RefusalCode.BAD_COUNT, rows, "grant_counts", counts, 0, "is granted fewer than no blocks")
    granted = int(counts.sum(dtype=np.int64))
    if granted != len(rows.grants):
        raise Refusal(
            RefusalCode.MALFORMED,
            f"grants has {len(rows.grants)} blocks, grant_counts sum to {granted}",
            "grants",
            len(rows.grants),
            granted,
        )
    blocks = held + counts
    _refuse_first(
        blocks > most, RefusalCode.TOO_MANY_BLOCKS, rows, "grant_counts", blocks, most, "holds too many blocks"
    )
    needed = (ends + limits.block_size - 1) // limits.block_size
    _refuse_first(
        blocks < needed,
        RefusalCode.BLOCKS_MISSING,
        rows,
        "grant_counts",
        blocks,
        needed,
        "has no block for what it computes",
    )


def _refuse_first(
    wrong: NDArray[np.bool_],
    code: RefusalCode,
    rows: Rows,
    field: str,
    values: Int32Array | NDArray[np.int64],
    bounds: Int32Array | int | str,
    what: str,
) -> None:
    """Refuse for the first row at fault, with its value and the bound that it misses."""
    if not np.count_nonzero(wrong):
        return
    row = int(wrong.argmax())
    request, value = int(rows.ids[row]), int(values[row])
    bound = int(bounds[row]) if isinstance(bounds, np.ndarray) else bounds
    raise Refusal(
        code,
        f"request {request} {what}: {field} gives {value}, the bound is {bound}",
        field,
        value,
        bound,
        request,
    )
