"""Of several faults of a step the one that is named is the first in the order of SPEC.md, section 12: each list begins
with a step that is wrong in every way, and mends one fault after the other.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.test_operations import CACHE, Ranks
from tests.unit.test_validate_rules import standing
from workerproto.codec import encode_body, pack
from workerproto.messages import HeaderFlag, New, RefusalCode, Resume, RowFlag, Sampling, Step
from workerproto.operations import Sleep, UpdateBegin, Wake
from workerproto.steps import Refusal
from workerproto.validate import StepValidator

R, S, F = RefusalCode, int(RowFlag.SAMPLE), int(RowFlag.FORCED)
FOLLOWS, RESYNC = int(HeaderFlag.SAMPLE_FOLLOWS), int(HeaderFlag.RESYNC)
THREE_BYTES = b"abc"
Fault = tuple[RefusalCode, str] | tuple[RefusalCode, str, str]  # code, field, and the value where there is a doubt


def new(name: int, tokens: Any, blocks: Any, computed: int = 0, logprobs: int = -1) -> New:
    packed = [value if isinstance(value, bytes) else pack(value) for value in (tokens, blocks)]
    return New(name, *packed, computed, Sampling(logprobs=logprobs))


def named(wrong: dict[str, Any]) -> Fault | None:
    """Of the fault that the step is refused for."""
    members = {name: value if name in ("new", "resumed") else pack(value) for name, value in wrong.items()}
    try:
        standing().check(3, 0, encode_body(Step(**members)))
    except Refusal as refusal:
        return refusal.code, refusal.field, str(refusal.value)
    return None


def told_in_order(wrong: dict[str, Any], mended: list[tuple[Fault, dict[str, Any]]]) -> None:
    """`mended`: the fault that is named, and what is then set right, or wrong in another way."""
    for fault, mend in mended:
        assert (named(wrong) or ())[: len(fault)] == fault
        wrong = wrong | mend
    assert named(wrong) is None


NO_LENGTHS = {"ids": [1], "positions": []}


def test_members_and_starts() -> None:
    owned, live = new(8, [1] * 5, [0, 1]), [new(name, [1], []) for name in (8, 9, 10)]
    started = [new(8, [1], [])]

    def one(*start: Any) -> dict[str, Any]:
        return {"new": [new(*start)]}

    told_in_order(
        {"finished": [99], "preempted": [99], "resumed": [Resume(99, pack([]), pack([]), 0)], **NO_LENGTHS,
         **one(1, THREE_BYTES, THREE_BYTES, 3, 9)},
        [
            ((R.UNKNOWN_REQUEST, "finished"), {"finished": []}),
            ((R.UNKNOWN_REQUEST, "preempted"), {"preempted": []}),
            ((R.DUPLICATE_REQUEST, "new.id"), one(8, THREE_BYTES, THREE_BYTES, 3, 9)),
            ((R.BAD_SAMPLING, "new.sampling.logprobs"), one(8, THREE_BYTES, THREE_BYTES, 3)),
            ((R.MALFORMED, "new.tokens"), one(8, [], THREE_BYTES, 3)),
            ((R.MALFORMED, "new.blocks"), one(8, [], [99] * 5, 3)),
            ((R.EMPTY_PROMPT, "new.tokens"), one(8, [100] * 17, [99] * 5, 3)),
            ((R.TOO_LONG, "new.tokens"), one(8, [100] * 16, [99] * 5, 3)),
            ((R.TOKEN_OUT_OF_VOCABULARY, "new.tokens"), one(8, [1] * 16, [99] * 5, 3)),
            ((R.BAD_COMPUTED, "new.computed"), one(8, [1] * 16, [99] * 5, 8)),
            ((R.TOO_MANY_BLOCKS, "new.blocks"), {"new": [*live, new(11, [1] * 16, [99] * 4, 8)]}),
            ((R.TOO_MANY_REQUESTS, "new"), one(8, [1] * 16, [4, 99, 99, 99], 8)),
            ((R.BLOCK_OUT_OF_RANGE, "new.blocks"), one(8, [1] * 16, [4, 4, 99, 99], 8)),
            ((R.BLOCK_OWNED, "new.blocks", "4"), one(8, [1] * 16, [4, 9, 6, 99], 8)),
            ((R.BLOCK_OUT_OF_RANGE, "new.blocks"), {"new": [new(8, [1] * 16, [4, 6, 6, 0], 4)]}),
            ((R.BLOCK_OWNED, "new.blocks", "6"), {"new": [owned]}),
            ((R.BLOCK_OWNED, "new.blocks", "0"), {"new": started}),
            ((R.UNKNOWN_REQUEST, "resumed.id"), {"resumed": [Resume(1, pack([]), pack([]), 0)]}),
            ((R.NOT_PREEMPTED, "resumed.id"), {"resumed": [Resume(3, pack([]), pack([]), 0)]}),
            ((R.TOKENS_DISAGREE, "resumed.tokens"), {"resumed": [Resume(3, pack([100] * 8), pack([]), 0)]}),
            ((R.TOKEN_OUT_OF_VOCABULARY, "resumed.tokens"), {"resumed": [], "new": live}),
            ((R.TOO_MANY_REQUESTS, "new"), {"new": started}),
            ((R.MALFORMED, "positions"), {"ids": []}),
        ],
    )  # fmt: skip


def test_rows() -> None:
    """Request 8's prefix, block 9, is written by nobody, which is found last; request 10 has a prompt of 6."""
    five = {"ids": [99, 1, 1, 2, 2], "positions": [9] * 3, "counts": [0] * 5, "row_flags": [4] * 5,
            "grant_counts": [-1] * 5, "grants": [99], "forced": [100]}  # fmt: skip

    def cut(count: int) -> dict[str, list[int]]:
        return {name: five[name][:1] * count for name in ("counts", "row_flags", "grant_counts")} | {
            "positions": [9] * count
        }

    told_in_order(
        five | {"new": [new(8, [1] * 5, [9], 4), new(10, [1] * 6, [10, 11])]},
        [
            ((R.MALFORMED, "positions"), cut(5)),
            ((R.TOO_MANY_ROWS, "ids"), {"ids": [99, 1, 1, 2], **cut(4)}),
            ((R.UNKNOWN_REQUEST, "ids"), {"ids": [1, 1, 2], **cut(3)}),
            ((R.DUPLICATE_REQUEST, "ids"), {"ids": [1, 2, 10]}),
            ((R.BAD_COUNT, "counts"), {"counts": [2, 99, 1]}),
            ((R.TOO_MANY_TOKENS, "counts"), {"counts": [2, 17, 1]}),
            ((R.BAD_ROW_FLAGS, "row_flags"), {"row_flags": [S, F, S]}),
            ((R.BAD_POSITION, "positions"), {"positions": [6, 5, 0]}),
            ((R.MALFORMED, "forced"), {"forced": [100] * 17}),
            ((R.TOKEN_OUT_OF_VOCABULARY, "forced"), {"forced": [1] * 17}),
            ((R.BAD_COUNT, "counts"), {"counts": [1, 17, 1]}),
            ((R.BAD_SAMPLE, "row_flags"), {"row_flags": [S, F, 0]}),
            ((R.TOO_LONG, "positions"), {"counts": [1, 5, 1], "forced": [1] * 5}),
            ((R.BAD_COUNT, "grant_counts"), {"grant_counts": [0, 3, 0]}),
            ((R.MALFORMED, "grants"), {"grants": [99, 99, 0]}),
            ((R.TOO_MANY_BLOCKS, "grant_counts"), {"grant_counts": [1, 0, 2]}),
            ((R.BLOCKS_MISSING, "grant_counts"), {"grant_counts": [0, 2, 1], "grants": [6, 6, 99]}),
            ((R.BLOCK_OUT_OF_RANGE, "grants"), {"grants": [6, 6, 0]}),
            ((R.BLOCK_OWNED, "grants", "6"), {"grants": [6, 7, 0]}),
            ((R.BLOCK_OWNED, "grants", "0"), {"grants": [6, 7, 8]}),
            ((R.BLOCK_UNWRITTEN, "new.blocks"), {"new": [new(8, [1] * 5, [4], 4), new(10, [1] * 6, [10, 11])]}),
        ],
    )


def test_flags_and_states_come_before_a_body_that_is_none() -> None:
    def code(validator: StepValidator, flags: int) -> RefusalCode:
        with pytest.raises(Refusal) as caught:
            validator.check(9, flags, b"\xc1")
        return caught.value.code

    ranks = Ranks(Sleep(1, [CACHE]), UpdateBegin())
    assert code(ranks.validator, RESYNC) is R.UNEXPECTED_RESYNC
    assert code(ranks.validator, 0) is R.AFTER_REFUSAL
    assert code(ranks.validator, RESYNC) is R.UPDATING
    ranks.validator.reset()
    assert code(ranks.validator, 0) is R.ASLEEP
    ranks.do(Wake())
    assert code(ranks.validator, RESYNC) is R.WEIGHTS_INVALID
    waits = standing()
    waits.check(3, FOLLOWS, encode_body(Step()))
    assert code(waits, RESYNC) is R.UNEXPECTED_RESYNC
    assert code(waits, 0) is R.AFTER_REFUSAL
    assert code(waits, RESYNC) is R.SAMPLE_DUE


def test_of_several_prefixes_the_first_request_s_is_named() -> None:
    starts = {"new": [new(8, [1] * 5, [9], 4)], "resumed": [Resume(3, pack([7] * 8), pack([10]), 4)]}
    told_in_order(
        starts,
        [((R.BLOCK_UNWRITTEN, "new.blocks"), {"new": []}), ((R.BLOCK_UNWRITTEN, "resumed.blocks"), {"resumed": []})],
    )
