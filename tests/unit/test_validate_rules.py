"""Each rule of a step, broken alone: the refusal names code, field, value, bound and request."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from workerproto.codec import encode_body, pack
from workerproto.messages import HeaderFlag, New, RefusalCode, Resume, RowFlag, Sampling, Step
from workerproto.steps import Refusal, StepLimits
from workerproto.testing.random_walk import snapshot
from workerproto.validate import StepValidator

S, F = int(RowFlag.SAMPLE), int(RowFlag.FORCED)
LIMITS = StepLimits(
    num_blocks=16, block_size=4, vocabulary=100, max_model_len=16, tokens=20, rows=4, live_requests=5, logprobs=2
)


def new(name: int, length: int, blocks: list[int], computed: int = 0, **sampling: int) -> New:
    return New(name, pack([7] * length), pack(blocks), computed, Sampling(**sampling))


def resume(name: int, length: int, blocks: list[int], computed: int = 0) -> Step:
    return Step(resumed=[Resume(name, pack([7] * length), pack(blocks), computed)])


def rows(
    *each: tuple[int, int, int, int],
    grants: list[list[int]] | None = None,
    forced: list[int] | None = None,
    **other: object,
) -> Step:
    """Rows of (id, position, count, flags)."""
    grants = grants or [[] for _ in each]
    columns = [list(column) for column in zip(*each, strict=True)] or [[], [], [], []]
    return Step(
        **other,  # type: ignore[arg-type] # names are those of the fields
        ids=pack(columns[0]),
        positions=pack(columns[1]),
        counts=pack(columns[2]),
        row_flags=pack(columns[3]),
        grant_counts=pack([len(blocks) for blocks in grants]),
        grants=pack([block for blocks in grants for block in blocks]),
        forced=pack(forced or []),
    )


def standing() -> StepValidator:
    """Request 1: 6 tokens + 1, blocks 0 1, all computed. Request 2: 9 tokens, blocks 2 3, 5 computed. Request 3:
    preempted, 8 tokens known. Block 4 (of request 3) is written in full, nobody's. Live: 3 of 5.
    """
    validator = StepValidator(LIMITS)
    start = [new(1, 6, [0, 1]), new(2, 9, [2, 3]), new(3, 7, [4, 5])]
    validator.check(1, 0, encode_body(rows((1, 0, 6, S), (2, 0, 5, 0), (3, 0, 7, S), new=start)))
    validator.check(2, 0, encode_body(Step(preempted=pack([3]))))
    return validator


R = RefusalCode
ROW1 = (1, 6, 1, S)
RUNS, PREEMPTED, FREE = "one that runs", "one that is preempted", "an id that is free"
ONE, ONCE, UNOWNED = "one row", "once", "a block without owner"
BROKEN: dict[str, tuple[Step, RefusalCode, str, object, object, int | None]] = {
    "finished unknown": (Step(finished=pack([9])), R.UNKNOWN_REQUEST, "finished", 9, RUNS, 9),
    "finished twice": (Step(finished=pack([1, 1])), R.UNKNOWN_REQUEST, "finished", 1, RUNS, 1),
    "preempted unknown": (Step(preempted=pack([9])), R.UNKNOWN_REQUEST, "preempted", 9, RUNS, 9),
    "preempted twice": (Step(preempted=pack([3])), R.UNKNOWN_REQUEST, "preempted", 3, RUNS, 3),
    "preempted after finished": (
        Step(finished=pack([1]), preempted=pack([1])), R.UNKNOWN_REQUEST, "preempted", 1, RUNS, 1,
    ),
    "new that lives": (Step(new=[new(1, 1, [])]), R.DUPLICATE_REQUEST, "new.id", 1, FREE, 1),
    "new that is preempted": (Step(new=[new(3, 1, [])]), R.DUPLICATE_REQUEST, "new.id", 3, FREE, 3),
    "new that this step finishes": (
        Step(finished=pack([1]), new=[new(1, 1, [])]), R.DUPLICATE_REQUEST, "new.id", 1, FREE, 1,
    ),
    "new without tokens": (Step(new=[new(8, 0, [])]), R.EMPTY_PROMPT, "new.tokens", 0, 1, 8),
    "new too long": (Step(new=[new(8, 17, [])]), R.TOO_LONG, "new.tokens", 17, 16, 8),
    "new token": (
        Step(new=[New(8, pack([1, 100]), pack([]), 0, Sampling())]), R.TOKEN_OUT_OF_VOCABULARY,
        "new.tokens", 100, 99, 8,
    ),
    "new token below": (
        Step(new=[New(8, pack([-1]), pack([]), 0, Sampling())]), R.TOKEN_OUT_OF_VOCABULARY, "new.tokens", -1, 99, 8,
    ),
    "new logprobs": (Step(new=[new(8, 1, [], logprobs=3)]), R.BAD_SAMPLING, "new.sampling.logprobs", 3, 2, 8),
    "computed in a block": (Step(new=[new(8, 8, [4], 3)]), R.BAD_COMPUTED, "new.computed", 3, 7, 8),
    "computed whole": (Step(new=[new(8, 4, [4], 4)]), R.BAD_COMPUTED, "new.computed", 4, 3, 8),
    "prefix without blocks": (Step(new=[new(8, 9, [4], 8)]), R.BLOCKS_MISSING, "new.blocks", 1, 4, 8),
    "more blocks than fit": (Step(new=[new(8, 1, [6, 7, 8, 9, 10])]), R.TOO_MANY_BLOCKS, "new.blocks", 5, 4, 8),
    "block beyond": (Step(new=[new(8, 1, [16])]), R.BLOCK_OUT_OF_RANGE, "new.blocks", 16, 15, 8),
    "block below": (Step(new=[new(8, 1, [-1])]), R.BLOCK_OUT_OF_RANGE, "new.blocks", -1, 15, 8),
    "prefix block beyond": (Step(new=[new(8, 5, [16], 4)]), R.BLOCK_OUT_OF_RANGE, "new.blocks", 16, 15, 8),
    "block owned": (Step(new=[new(8, 1, [2])]), R.BLOCK_OWNED, "new.blocks", 2, UNOWNED, 8),
    "block twice": (Step(new=[new(8, 1, [6, 6])]), R.BLOCK_OWNED, "new.blocks", 6, ONCE, 8),
    "block shared and granted": (Step(new=[new(8, 5, [4, 4], 4)]), R.BLOCK_OWNED, "new.blocks", 4, UNOWNED, 8),
    "block granted to two": (Step(new=[new(8, 1, [6]), new(9, 1, [6])]), R.BLOCK_OWNED, "new.blocks", 6, UNOWNED, 9),
    "prefix written in part": (Step(new=[new(8, 5, [1], 4)]), R.BLOCK_UNWRITTEN, "new.blocks", 2, 4, 8),
    "prefix never written": (Step(new=[new(8, 5, [9], 4)]), R.BLOCK_UNWRITTEN, "new.blocks", 0, 4, 8),
    "prefix granted anew": (
        Step(new=[new(8, 1, [4])], resumed=[Resume(3, pack([7] * 8), pack([4]), 4)]), R.BLOCK_UNWRITTEN,
        "resumed.blocks", 0, 4, 3,
    ),
    "resumed unknown": (resume(9, 1, []), R.UNKNOWN_REQUEST, "resumed.id", 9, PREEMPTED, 9),
    "resumed running": (resume(1, 7, []), R.NOT_PREEMPTED, "resumed.id", 1, PREEMPTED, 1),
    "resumed short": (resume(3, 7, []), R.TOKENS_DISAGREE, "resumed.tokens", 7, 8, 3),
    "resumed long": (resume(3, 9, []), R.TOKENS_DISAGREE, "resumed.tokens", 9, 8, 3),
    "resumed in a block": (resume(3, 8, [4], 2), R.BAD_COMPUTED, "resumed.computed", 2, 7, 3),
    "too many live": (Step(new=[new(n, 1, []) for n in (10, 11, 12)]), R.TOO_MANY_REQUESTS, "new", 6, 5, None),
    "row unknown": (rows((9, 0, 1, 0)), R.UNKNOWN_REQUEST, "ids", 9, RUNS, 9),
    "row preempted": (rows((3, 0, 1, 0)), R.UNKNOWN_REQUEST, "ids", 3, RUNS, 3),
    "row finished": (rows(ROW1, finished=pack([1])), R.UNKNOWN_REQUEST, "ids", 1, RUNS, 1),
    "two rows": (rows(ROW1, (2, 5, 1, 0), (1, 7, 1, S)), R.DUPLICATE_REQUEST, "ids", 1, ONE, 1),
    "no tokens in a row": (rows((1, 6, 0, 0)), R.BAD_COUNT, "counts", 0, 1, 1),
    "row elsewhere": (rows((1, 5, 1, S)), R.BAD_POSITION, "positions", 5, 6, 1),
    "row ahead": (rows((2, 6, 1, 0)), R.BAD_POSITION, "positions", 6, 5, 2),
    "row of unknown tokens": (rows((1, 6, 2, S)), R.BAD_COUNT, "counts", 8, 7, 1),
    "row flag": (rows((1, 6, 1, 4)), R.BAD_ROW_FLAGS, "row_flags", 4, 3, 1),
    "sample early": (rows((2, 5, 2, S)), R.BAD_SAMPLE, "row_flags", 7, 9, 2),
    "forced sample early": (rows((2, 5, 2, S | F), forced=[1, 2]), R.BAD_SAMPLE, "row_flags", 7, 9, 2),
    "grows too long": (
        rows((1, 6, 10, S | F), grants=[[6, 7]], forced=[1] * 10), R.TOO_LONG, "positions", 17, 16, 1,
    ),
    "forced token": (rows((1, 6, 1, F), forced=[100]), R.TOKEN_OUT_OF_VOCABULARY, "forced", 100, 99, 1),
    "forced short": (rows((1, 6, 2, F), forced=[1]), R.MALFORMED, "forced", 1, 2, None),
    "forced without a row": (rows(ROW1, forced=[1]), R.MALFORMED, "forced", 1, 0, None),
    "block missing": (rows((2, 5, 4, S)), R.BLOCKS_MISSING, "grant_counts", 2, 3, 2),
    "grant owned": (rows((2, 5, 4, S), grants=[[0]]), R.BLOCK_OWNED, "grants", 0, UNOWNED, 2),
    "grant twice": (rows(ROW1, (2, 5, 4, S), grants=[[6], [6]]), R.BLOCK_OWNED, "grants", 6, ONCE, 2),
    "grant beyond": (rows((2, 5, 4, S), grants=[[16]]), R.BLOCK_OUT_OF_RANGE, "grants", 16, 15, 2),
    "grants too many": (rows((2, 5, 4, S), grants=[[6, 7, 8]]), R.TOO_MANY_BLOCKS, "grant_counts", 5, 4, 2),
    "too many rows": (rows(*[(n, 0, 1, 0) for n in range(5)]), R.TOO_MANY_ROWS, "ids", 5, 4, None),
    "too many tokens": (rows((1, 6, 21, 0)), R.TOO_MANY_TOKENS, "counts", 21, 20, None),
    "columns": (
        msgspec.structs.replace(rows(ROW1), counts=pack([1, 1])), R.MALFORMED, "counts", 2, 1, None,
    ),
    "bytes": (msgspec.structs.replace(rows(ROW1), grants=b"abc"), R.MALFORMED, "grants", 3, 4, None),
    "bytes of tokens": (
        Step(new=[New(8, b"abc", pack([]), 0, Sampling())]), R.MALFORMED, "new.tokens", 3, 4, 8,
    ),
    "grant sum": (
        msgspec.structs.replace(rows(ROW1), grants=pack([6])), R.MALFORMED, "grants", 1, 0, None,
    ),
    "grants below none": (
        msgspec.structs.replace(rows(ROW1), grant_counts=pack([-1])), R.BAD_COUNT, "grant_counts", -1, 0, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_the_refusal_says_what_and_leaves_nothing_behind(what: str) -> None:
    step, code, field, value, bound, request = BROKEN[what]
    validator = standing()
    before, digest = snapshot(validator), validator.digest
    with pytest.raises(Refusal) as caught:
        validator.check(3, 0, encode_body(step))
    refusal = caught.value
    assert (refusal.code, refusal.field, refusal.value, refusal.bound, refusal.request) == (
        code, field, str(value), str(bound), request,
    )  # fmt: skip
    assert refusal.cause == 3
    assert snapshot(validator) == before
    assert validator.digest != digest


ALLOWED: dict[str, Step] = {
    "nothing at all": Step(),
    "decode": rows(ROW1),
    "decode without sampling": rows((1, 6, 1, 0)),
    "a chunk": rows((2, 5, 2, 0)),
    "the last chunk": rows((2, 5, 4, S), grants=[[6]]),
    "a forced token instead of the sampled one": rows((1, 6, 1, S | F), forced=[3]),
    "forced beyond what is known": rows((1, 6, 5, F), grants=[[6]], forced=[1, 2, 3, 4, 5]),
    "to the very end": rows((1, 6, 9, S | F), grants=[[6, 7]], forced=[1] * 9),
    "blocks of a request that this step finishes": rows((2, 5, 4, S), grants=[[0]], finished=pack([1])),
    "blocks of a request that this step preempts": rows((2, 5, 4, S), grants=[[0]], preempted=pack([1])),
    "a prefix that nobody holds": Step(new=[new(8, 5, [4], 4)]),
    "a prefix that another holds": Step(new=[new(8, 5, [0], 4)]),
    "a prefix that a row of this step completes": rows((2, 5, 3, 0), new=[new(8, 5, [3], 4)]),
    "a prefix that a new request of this step writes": rows((8, 0, 5, S), new=[new(8, 5, [6, 7]), new(9, 5, [6], 4)]),
    "resume": Step(resumed=[Resume(3, pack([7] * 8), pack([4, 6]), 4)]),
    "resume from the beginning": rows((3, 0, 8, S), resumed=[Resume(3, pack([7] * 8), pack([4, 5]), 0)]),
    "finish a preempted request": Step(finished=pack([3])),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_the_rules_allow_is_accepted(what: str) -> None:
    standing().check(3, 0, encode_body(ALLOWED[what]))


def test_a_resumed_request_samples_as_it_came() -> None:
    validator, sampling = standing(), Sampling(0.5, 3, 0.9, 0.1, 7, 1)
    validator.check(3, 0, encode_body(Step(new=[New(8, pack([7]), pack([]), 0, sampling)])))
    validator.check(4, 0, encode_body(Step(preempted=pack([8]))))
    accepted = validator.check(5, 0, encode_body(resume(8, 1, [])))
    assert [started.sampling for started in accepted.started] == [sampling]


def test_an_id_is_free_again_from_the_next_step() -> None:
    validator = standing()
    validator.check(3, 0, encode_body(Step(finished=pack([1]))))
    validator.check(4, 0, encode_body(rows((1, 0, 2, S), new=[new(1, 2, [0])])))


def test_after_a_refusal_only_resync_goes_on() -> None:
    validator, good, bad = standing(), encode_body(rows(ROW1)), encode_body(rows((1, 9, 1, S)))
    resync = int(HeaderFlag.RESYNC)

    def refused(seq: int, flags: int, body: bytes) -> tuple[str, int]:
        with pytest.raises(Refusal) as caught:
            validator.check(seq, flags, body)
        return caught.value.code, caught.value.cause

    assert refused(3, resync, good) == ("UNEXPECTED_RESYNC", 3)
    validator.check(4, resync, encode_body(Step()))
    assert refused(5, 0, bad) == ("BAD_POSITION", 5)
    assert refused(6, 0, good) == ("AFTER_REFUSAL", 5)
    assert refused(7, resync, bad) == ("BAD_POSITION", 7)
    assert refused(8, 0, good) == ("AFTER_REFUSAL", 7)
    validator.check(9, resync, good)
    validator.check(10, 0, encode_body(rows((1, 7, 1, S))))


@pytest.mark.parametrize(
    "change", [lambda body: body[:-1], lambda body: body + b"\0", lambda _: b"", lambda _: b"\xc1"]
)
def test_what_is_not_a_step_is_malformed(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(Refusal) as caught:
        standing().check(3, 0, change(encode_body(rows(ROW1))))
    assert caught.value.code is RefusalCode.MALFORMED


def test_a_step_with_a_member_too_many_is_malformed() -> None:
    members = [*msgspec.msgpack.decode(encode_body(rows(ROW1))), b""]
    with pytest.raises(Refusal) as caught:
        standing().check(3, 0, msgspec.msgpack.encode(members))
    assert caught.value.code is RefusalCode.MALFORMED


def test_a_refused_step_gives_back_the_blocks_of_a_slot_that_it_used_anew() -> None:
    """Request 1 is finished, its slot goes to request 8, whose row is granted more blocks than 8 came with; refused."""
    validator = standing()
    before = snapshot(validator)
    start = [new(8, 5, []), new(9, 5, [9], 4)]
    step = rows((8, 0, 5, S), grants=[[6, 7]], finished=pack([1]), new=start)
    with pytest.raises(Refusal) as caught:
        validator.check(3, 0, encode_body(step))
    assert caught.value.code is RefusalCode.BLOCK_UNWRITTEN  # which is judged last
    assert snapshot(validator) == before


def test_ranks_that_see_other_bytes_have_another_digest() -> None:
    one, other = standing(), standing()
    assert one.digest == other.digest
    one.check(3, 0, encode_body(rows(ROW1)))
    other.check(3, 0, encode_body(rows((1, 6, 1, 0))))
    assert one.digest != other.digest


def test_a_new_lease_forgets_requests_and_what_was_written() -> None:
    validator = standing()
    assert validator.reset() == 3
    assert (validator.live_requests, validator.used_blocks) == (0, 0)
    with pytest.raises(Refusal) as caught:
        validator.check(1, 0, encode_body(Step(new=[new(8, 5, [4], 4)])))
    assert caught.value.code is RefusalCode.BLOCK_UNWRITTEN


def test_logprobs_may_be_as_many_as_the_bound() -> None:
    StepValidator(replace(LIMITS, logprobs=0)).check(1, 0, encode_body(Step(new=[new(8, 1, [], logprobs=0)])))


def test_the_longest_request_that_int32_can_count_ends_where_its_limit_says() -> None:
    longest = 2**31 - 1
    validator = StepValidator(StepLimits(4, 2**30, 50, longest, 8, 4, 2, 0))
    validator.check(1, 0, encode_body(rows((1, 0, 1, S), new=[new(1, 1, [0, 1])])))
    validator.table.computed[:] = longest - 2  # two thousand million steps on
    validator.table.known_end[:] = longest - 1
    validator.check(2, 0, encode_body(rows((1, longest - 2, 1, S))))
    with pytest.raises(Refusal) as raised:
        validator.check(3, 0, encode_body(rows((1, longest - 1, 1, S))))
    assert (raised.value.code, raised.value.value) == (R.TOO_LONG, str(longest + 1))
