"""The validator agrees with the rules written a second time, and no bytes whatever get past it."""

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workerproto.codec import HEADER_BYTES, Header, WireError, decode_body, decode_header, encode_body
from workerproto.messages import BODIES, Kind, Step
from workerproto.steps import Refusal, StepLimits
from workerproto.testing.random_scheduler import RandomScheduler
from workerproto.testing.random_walk import LIMITS, random_walk, snapshot
from workerproto.testing.slow_rules import SlowRules
from workerproto.validate import StepValidator

TIGHT = StepLimits(
    num_blocks=9, block_size=2, vocabulary=7, max_model_len=8, tokens=9, rows=3, live_requests=4, logprobs=0
)
ALIGNED = replace(LIMITS, alignment=8)
WALKS = {"small": (LIMITS, 1, 6_000), "tight": (TIGHT, 2, 8_000), "aligned": (ALIGNED, 3, 4_000)}


@pytest.mark.parametrize(("limits", "seed", "steps"), WALKS.values(), ids=WALKS)
def test_the_validator_walks_with_the_rules(limits: StepLimits, seed: int, steps: int) -> None:
    seen = random_walk(seed, steps, limits)
    for what in ("finished", "preempted", "resumed", "forced", "chunks", "without rows", "blocks shared"):
        assert seen[what] > steps / 100, what
    assert seen["masks"] > steps / 50
    assert len([what for what in seen if what.startswith("refused: mask")]) == 10
    assert seen["blocks shared that this step writes"] > 0
    assert seen["blocks granted that this step releases"] > steps / 10
    assert sum(number for what, number in seen.items() if what.startswith("refused")) > steps / 4


def test_a_walk_without_broken_steps_refuses_nothing() -> None:
    seen = random_walk(3, 3_000, breakage=0)
    assert not [what for what in seen if what.startswith("refused")]


@given(
    mutations=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6),
    seed=st.integers(0, 50),
)
@settings(max_examples=600, deadline=None, derandomize=True)
def test_changed_bytes_are_refused_or_accepted_and_never_raise_else(
    mutations: list[tuple[int, int]], seed: int
) -> None:
    validator, body = _some_state(seed)
    changed = bytearray(body)
    for place, value in mutations:
        changed[place % len(changed)] = value
    before = snapshot(validator)
    try:
        validator.check(100, 0, bytes(changed))
    except Refusal:
        assert snapshot(validator) == before


@given(body=st.binary(max_size=200))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_bytes_are_refused_unless_they_are_a_step(body: bytes) -> None:
    validator = StepValidator(LIMITS)
    refused = None
    try:
        validator.check(1, 0, body)
    except Refusal as refusal:
        refused = refusal
    if refused is None:
        assert isinstance(decode_body(Kind.STEP, body), Step)
    else:
        assert all((refused.field, refused.value, refused.bound)), refused


@given(frame=st.binary(max_size=64) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_bytes_as_a_frame_are_a_wire_error_or_a_message(frame: bytes) -> None:
    for kind in Kind:
        try:
            decode_body(kind, frame)
        except WireError:
            pass
    try:
        decode_header(frame)
    except WireError:
        pass


@given(place=st.integers(0, HEADER_BYTES - 1), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_changed_header_is_a_wire_error_or_another_header(place: int, value: int) -> None:
    frame = bytearray(Header(Kind.STEP, 2, 3, 4, 5).encode())
    frame[place] = value
    try:
        header = decode_header(bytes(frame))
    except WireError:
        return
    assert header.encode() == bytes(frame)


def test_every_kind_but_the_bodiless_has_a_body() -> None:
    assert set(Kind) - set(BODIES) == {Kind.PING, Kind.PONG}


def _some_state(seed: int) -> tuple[StepValidator, bytes]:
    """A validator after some steps, and the next valid one."""
    validator, (*bodies, last) = StepValidator(LIMITS), _stream(seed)
    for now, body in enumerate(bodies, start=1):
        validator.check(now, 0, body)
    return validator, last


@cache
def _stream(seed: int) -> list[bytes]:
    rng, rules, bodies = random.Random(seed), SlowRules(LIMITS), []
    for now in range(1, 12):
        plain = RandomScheduler(rng, rules, {}, now).step()
        rules.apply(plain)
        bodies.append(encode_body(plain.packed()))
    return bodies
