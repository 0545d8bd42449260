"""A grammar's masks: judged whole against the step that waits for them, and what of a rank's knowledge they touch."""

from __future__ import annotations

import numpy as np
import pytest

from workerproto.codec import encode_body, pack
from workerproto.masks import Masks
from workerproto.messages import HeaderFlag, New, RefusalCode, Sample, Sampling, Step
from workerproto.steps import Refusal, StepLimits
from workerproto.validate import StepValidator

VOCABULARY = 40  # two words, of which the second has 8 bits
LIMITS = StepLimits(
    num_blocks=8, block_size=4, vocabulary=VOCABULARY, max_model_len=16, tokens=32, rows=4, live_requests=4, logprobs=5
)
FOLLOWS, RESYNC = int(HeaderFlag.SAMPLE_FOLLOWS), int(HeaderFlag.RESYNC)
EMPTY = encode_body(Step())


def waiting() -> StepValidator:
    """Step 1 waits: its rows 0 and 2, of requests 1 and 3, draw; row 1, of request 2, does not."""
    new = [New(name, pack([1, 2]), pack([name]), 0, Sampling()) for name in (1, 2, 3)]
    step = Step(
        new, ids=pack([1, 2, 3]), positions=pack([0, 0, 0]), counts=pack([2, 2, 2]), row_flags=pack([1, 0, 1]),
        grant_counts=pack([0, 0, 0]),
    )  # fmt: skip
    validator = StepValidator(LIMITS)
    validator.check(1, FOLLOWS, encode_body(step))
    return validator


def accepted(validator: StepValidator, rows: list[int], masks: list[int]) -> Masks:
    masks_of = validator.check_sample(2, encode_body(Sample(1, pack(rows), pack(masks))), 1)
    assert masks_of is not None
    return masks_of


def test_rows_become_places_among_those_that_draw_and_words_become_tokens() -> None:
    masks = accepted(waiting(), [2, 0], [-(2**31), 0b1000_0001, 0b10, 0])
    assert masks.samples.tolist() == [1, 0]
    allowed = masks.allowed(VOCABULARY)
    assert allowed.shape == (2, VOCABULARY)
    assert [np.flatnonzero(row).tolist() for row in allowed] == [[31, 32, 39], [1]]


@pytest.mark.parametrize(("rows", "masks"), [([], []), ([0], [-1, -1]), ([0, 2], [0, 1, 1, 0])])
def test_what_is_right_ends_the_wait(rows: list[int], masks: list[int]) -> None:
    validator = waiting()
    accepted(validator, rows, masks)
    assert validator.open is None
    validator.check(3, 0, EMPTY)


WRONG: list[tuple[Sample | bytes, RefusalCode, str, int | None]] = [
    (b"\xc1", RefusalCode.MALFORMED, "body", None),
    (encode_body(Sample(1)) + b"\x00", RefusalCode.MALFORMED, "body", None),
    (b"\x91\xa1x", RefusalCode.MALFORMED, "step", None),
    (Sample(1, b"\0"), RefusalCode.MALFORMED, "rows", None),
    (Sample(1, pack([0]), b"\0" * 7), RefusalCode.MALFORMED, "masks", None),
    (Sample(2), RefusalCode.BAD_STEP, "step", None),
    (Sample(1, pack([3]), pack([1, 1])), RefusalCode.BAD_MASK, "rows", None),
    (Sample(1, pack([-1]), pack([1, 1])), RefusalCode.BAD_MASK, "rows", None),
    (Sample(1, pack([1]), pack([1, 1])), RefusalCode.BAD_MASK, "rows", 2),
    (Sample(1, pack([2, 2]), pack([1, 1, 1, 1])), RefusalCode.BAD_MASK, "rows", 3),
    (Sample(1, pack([0]), pack([1])), RefusalCode.BAD_MASK, "masks", None),
    (Sample(1, pack([]), pack([1, 1])), RefusalCode.BAD_MASK, "masks", None),
    (Sample(1, pack([0, 2]), pack([1, 1, 0, 0])), RefusalCode.BAD_MASK, "masks", 3),
    (Sample(1, pack([0]), pack([0, -256])), RefusalCode.BAD_MASK, "masks", 1),  # of tokens from 40 on
]


@pytest.mark.parametrize(("sample", "code", "field", "request_id"), WRONG)
def test_what_is_wrong_is_refused_whole_and_the_step_waits_on(
    sample: Sample | bytes, code: RefusalCode, field: str, request_id: int | None
) -> None:
    validator = waiting()
    body = sample if isinstance(sample, bytes) else encode_body(sample)
    with pytest.raises(Refusal) as caught:
        validator.check_sample(2, body, 1)
    refusal = caught.value
    assert (refusal.code, refusal.field, refusal.request, refusal.cause) == (code, field, request_id, 2)
    assert refusal.value
    assert refusal.bound
    with pytest.raises(Refusal) as behind:
        validator.check(3, 0, EMPTY)
    assert (behind.value.code, behind.value.cause) == (RefusalCode.AFTER_REFUSAL, 2)
    with pytest.raises(Refusal) as impatient:
        validator.check(4, RESYNC, EMPTY)
    assert impatient.value.code is RefusalCode.SAMPLE_DUE
    assert accepted(validator, [0], [1, 0]).samples.tolist() == [0]
    validator.check(6, RESYNC, EMPTY)


def test_masks_of_a_step_that_was_refused_are_let_go() -> None:
    validator = StepValidator(LIMITS)
    with pytest.raises(Refusal):
        validator.check(1, FOLLOWS, b"\xc1")
    assert validator.check_sample(2, b"\xc1", 1) is None
    validator.check(3, RESYNC, EMPTY)


def test_a_new_lease_finds_no_step_waiting() -> None:
    validator = waiting()
    validator.reset()
    validator.check(1, 0, EMPTY)


def test_a_step_is_named_modulo_2_to_the_32() -> None:
    validator = StepValidator(LIMITS)
    validator.check(1, FOLLOWS, EMPTY, named=2**40 + 7)
    assert validator.check_sample(2, encode_body(Sample(2**40 + 7)), 7) is not None


def test_masks_of_another_step_than_waits_are_let_go() -> None:
    """Sent before it was known that the Sample of the one before is refused, and with it this step."""
    validator = StepValidator(LIMITS)
    validator.check(11, FOLLOWS, EMPTY, named=1)
    with pytest.raises(Refusal):
        validator.check_sample(12, b"\xc1", 1)
    with pytest.raises(Refusal):
        validator.check(13, FOLLOWS, EMPTY, named=3)
    assert validator.check_sample(14, encode_body(Sample(3)), 3) is None
    assert validator.check_sample(15, encode_body(Sample(1)), 1) is not None


def test_a_sample_is_part_of_what_ranks_compare() -> None:
    digests = set()
    for rows in ([], [0], [0, 2]):
        validator = waiting()
        accepted(validator, rows, [1, 0] * len(rows))
        digests.add(validator.digest)
    assert len(digests) == 3


def test_masks_of_a_whole_step_over_a_large_vocabulary() -> None:
    limits = StepLimits(4096, 16, 151_936, 16, 2048, 256, 256, 0)
    rows = 256
    new = [New(name, pack([1]), pack([name]), 0, Sampling()) for name in range(rows)]
    ones = pack(np.ones(rows, np.int32))
    step = Step(
        new, ids=pack(range(rows)), positions=pack(np.zeros(rows, np.int32)), counts=ones, row_flags=ones,
        grant_counts=pack(np.zeros(rows, np.int32)),
    )  # fmt: skip
    validator = StepValidator(limits)
    validator.check(1, FOLLOWS, encode_body(step))
    words = np.full(rows * (151_936 // 32), -1, np.int32)
    masks = validator.check_sample(2, encode_body(Sample(1, pack(range(rows)), pack(words))), 1)
    assert masks is not None
    assert masks.words.shape == (rows, 151_936 // 32)
