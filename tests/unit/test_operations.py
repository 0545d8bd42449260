"""When an operation is allowed, and what it does to what ranks know: the rules, without processes."""

from __future__ import annotations

import msgspec
import pytest

from workerproto.codec import encode_body, pack
from workerproto.messages import New, RefusalCode, Sampling, Step
from workerproto.operations import (
    ConfigureKv,
    Control,
    Drain,
    Part,
    Profile,
    Sleep,
    UpdateBegin,
    UpdateChunk,
    UpdateFinish,
    Wake,
)
from workerproto.standing import read_control
from workerproto.states import Gang, GangEvent
from workerproto.steps import Refusal, StepLimits
from workerproto.validate import StepValidator

LIMITS = StepLimits(
    num_blocks=8, block_size=4, vocabulary=100, max_model_len=16, tokens=32, rows=4, live_requests=4, logprobs=5
)
EMPTY = encode_body(Step())
WEIGHTS, CACHE, RUNTIME = Part.WEIGHTS, Part.KV_CACHE, Part.RUNTIME


class Ranks:
    """A validator and the next sequence."""

    def __init__(self, *operations: Control) -> None:
        self.validator = StepValidator(LIMITS)
        self.seq = 0
        for operation in operations:
            self.do(operation)

    def step(self, step: Step | bytes = EMPTY) -> None:
        self.seq += 1
        self.validator.check(self.seq, 0, step if isinstance(step, bytes) else encode_body(step))

    def do(self, operation: Control | bytes) -> GangEvent | None:
        self.seq += 1
        body = operation if isinstance(operation, bytes) else encode_body(operation)
        event = self.validator.propose(self.seq, body).event
        self.validator.carry_out()
        return event

    def refuses(self, operation: Control | bytes) -> RefusalCode:
        before = (self.state, self.validator.standing.asleep)
        with pytest.raises(Refusal) as caught:
            self.do(operation)
        assert (self.state, self.validator.standing.asleep) == before
        assert caught.value.cause == self.seq
        assert caught.value.field
        return caught.value.code

    def refuses_steps(self) -> RefusalCode:
        with pytest.raises(Refusal) as caught:
            self.step()
        return caught.value.code

    @property
    def state(self) -> Gang:
        return self.validator.standing.state


def prompt(name: int = 1, blocks: tuple[int, ...] = (0,), computed: int = 0) -> Step:
    return Step(
        [New(name, pack([1, 2, 3, 4, 5]), pack(blocks), computed, Sampling())],
        ids=pack([name]), positions=pack([computed]), counts=pack([4 - computed or 1]), row_flags=pack([0]),
        grant_counts=pack([0]),
    )  # fmt: skip


NOT_ALLOWED: list[tuple[list[Control], Control, RefusalCode]] = [
    ([], ConfigureKv(4), RefusalCode.KV_CONFIGURED),
    ([], Wake(), RefusalCode.NOT_ASLEEP),
    ([], UpdateChunk("x"), RefusalCode.NOT_UPDATING),
    ([], UpdateFinish("x"), RefusalCode.NOT_UPDATING),
    ([Sleep()], Sleep(2), RefusalCode.ASLEEP),
    ([Sleep()], UpdateBegin(), RefusalCode.ASLEEP),
    ([Sleep(1, [CACHE])], Sleep(1, [CACHE]), RefusalCode.ASLEEP),
    ([Sleep(1, [CACHE])], Wake([WEIGHTS]), RefusalCode.NOT_ASLEEP),
    ([Sleep(), Wake()], Wake(), RefusalCode.NOT_ASLEEP),
    ([UpdateBegin()], UpdateBegin(), RefusalCode.UPDATING),
    ([UpdateBegin()], Sleep(), RefusalCode.UPDATING),
    ([UpdateBegin()], Wake(), RefusalCode.UPDATING),
    ([Sleep(), Wake([CACHE])], UpdateBegin(), RefusalCode.ASLEEP),
    ([Sleep(), Wake([WEIGHTS]), UpdateBegin()], Wake(), RefusalCode.UPDATING),
    ([Sleep(), Wake([WEIGHTS]), UpdateBegin()], UpdateBegin(), RefusalCode.UPDATING),
]


@pytest.mark.parametrize(("before", "operation", "code"), NOT_ALLOWED)
def test_what_a_state_does_not_allow_is_refused_by_type(
    before: list[Control], operation: Control, code: RefusalCode
) -> None:
    assert Ranks(*before).refuses(operation) is code


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"op": "sleep", "level": 3}, ("level", "3", "int <= 2")),
        ({"op": "sleep", "level": 1.0}, ("level", "1.0", "int")),
        ({"op": "sleep", "parts": ["weights", "legs"]}, ("parts[1]", "text of 4", "one that the spec lists")),
        ({"op": "configure_kv", "num_blocks": -1}, ("num_blocks", "-1", "int >= 0")),
        ({"op": "configure_kv", "num_blocks": 2**53}, ("num_blocks", str(2**53), f"int <= {2**53 - 1}")),
        ({"op": "update_chunk", "source": "x" * 70_000}, ("source", "text of 70000", "str of length <= 65536")),
        ({"op": 7}, ("op", "7", "str")),
        ({"op": "nap"}, ("op", "text of 3", "one that the spec lists")),
        ({"op": "drain", "now": True}, ("body", "15 bytes", "one map: an operation and its arguments")),
        ([], ("body", "1 bytes", "one map: an operation and its arguments")),
    ],
)
def test_a_body_that_is_none_is_told_by_member_value_and_bound(body: object, told: tuple[str, ...]) -> None:
    with pytest.raises(Refusal) as caught:
        read_control(msgspec.msgpack.encode(body))
    assert caught.value.code is RefusalCode.MALFORMED
    assert (caught.value.field, caught.value.value, caught.value.bound) == told


def test_steps_are_refused_while_anything_sleeps_and_while_weights_change() -> None:
    for operation, code in ((Sleep(1, [CACHE]), RefusalCode.ASLEEP), (UpdateBegin(), RefusalCode.UPDATING)):
        ranks = Ranks(operation)
        assert ranks.refuses_steps() is code
        ranks.do(Profile(True))
        assert ranks.do(Drain()) is GangEvent.DRAIN


def test_sleep_and_wake_by_part() -> None:
    ranks = Ranks()
    assert ranks.do(Sleep(1, [CACHE])) is GangEvent.SLEEP
    assert ranks.do(Sleep(1, [CACHE, WEIGHTS])) is GangEvent.SLEEP
    assert ranks.do(Wake([WEIGHTS])) is GangEvent.WAKE_PARTLY
    assert ranks.state is Gang.ASLEEP
    assert ranks.do(Wake()) is GangEvent.WAKE
    assert ranks.state is Gang.READY
    ranks.step()


def test_new_weights_come_while_the_cache_sleeps() -> None:
    ranks = Ranks()
    for turn in range(2):
        ranks.do(Sleep(2))
        assert ranks.validator.standing.weights_valid is (turn == 0)  # what came by an update nobody has
        assert ranks.do(Wake([WEIGHTS])) is GangEvent.WAKE_PARTLY
        assert ranks.do(UpdateBegin()) is GangEvent.UPDATE_BEGIN
        ranks.do(UpdateChunk("x"))
        assert ranks.do(UpdateFinish("new")) is GangEvent.UPDATE_FINISH_ASLEEP
        assert (ranks.state, ranks.refuses_steps()) == (Gang.ASLEEP, RefusalCode.ASLEEP)
        assert ranks.do(Wake()) is GangEvent.WAKE
        ranks.seq += 1
        ranks.validator.reset()
        ranks.step()


def test_weights_that_nobody_can_bring_back_are_not_computed_with() -> None:
    ranks = Ranks(UpdateBegin(), UpdateChunk("x"), UpdateFinish("new"), Sleep(1), Wake())
    ranks.step()
    ranks.do(Sleep(2, [CACHE]))
    ranks.do(Wake())
    ranks.step()
    ranks.do(Sleep(2))
    ranks.do(Wake())
    assert ranks.refuses_steps() is RefusalCode.WEIGHTS_INVALID


def test_an_update_that_is_lost_while_a_part_sleeps_leaves_it_asleep() -> None:
    ranks = Ranks(Sleep(1, [CACHE]), UpdateBegin())
    ranks.validator.reset()
    assert (ranks.state, ranks.validator.standing.weights_valid) == (Gang.ASLEEP, False)
    ranks.do(Wake())
    assert ranks.refuses_steps() is RefusalCode.WEIGHTS_INVALID


def test_what_takes_the_cache_waits_for_the_requests_in_it() -> None:
    ranks = Ranks()
    ranks.step(prompt())
    for operation in (Sleep(), Sleep(2, [CACHE]), UpdateBegin()):
        assert ranks.refuses(operation) is RefusalCode.REQUESTS_LIVE
    ranks.do(Sleep(1, [WEIGHTS]))
    assert ranks.refuses(Sleep()) is RefusalCode.REQUESTS_LIVE
    ranks.do(Wake())
    ranks.do(UpdateBegin(keep_requests=True))
    ranks.do(UpdateFinish("new"))
    ranks.step(Step(preempted=pack([1])))
    ranks.do(Sleep())  # a preempted request holds no block


def test_a_refused_operation_leaves_no_refusal_pending_and_none_is_ended() -> None:
    ranks = Ranks()
    ranks.refuses(Wake())
    ranks.step()
    with pytest.raises(Refusal):
        ranks.step(b"\xc1")
    ranks.refuses(Wake())
    ranks.do(Profile(True))
    assert ranks.refuses_steps() is RefusalCode.AFTER_REFUSAL


@pytest.mark.parametrize("operations", [[Sleep(1, [CACHE]), Wake()], [UpdateBegin(), UpdateFinish("new")]])
def test_blocks_come_back_unwritten(operations: list[Control]) -> None:
    ranks = Ranks()
    ranks.step(prompt())
    ranks.step(Step(finished=pack([1])))
    ranks.step(prompt(2, (0, 1), 4))  # a prefix that outlived its owner
    ranks.step(Step(finished=pack([2])))
    for operation in operations:
        ranks.do(operation)
    with pytest.raises(Refusal) as caught:
        ranks.step(prompt(3, (0, 1), 4))
    assert caught.value.code is RefusalCode.BLOCK_UNWRITTEN


def test_an_update_that_is_broken_off_leaves_the_weights_invalid_until_a_whole_one() -> None:
    ranks = Ranks(UpdateBegin(), UpdateChunk("x"))
    ranks.validator.reset()
    assert ranks.state is Gang.READY
    assert ranks.refuses_steps() is RefusalCode.WEIGHTS_INVALID
    ranks.validator.reset()
    ranks.do(UpdateBegin())
    ranks.do(UpdateFinish("new"))
    ranks.step()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xc1", "body"),
        (b"\x80", "body"),
        (b"\x81\xa2op\xa5dance", "op"),
        (b"\x82\xa2op\xa5drain\xa1x\x01", "body"),
        (b"\x82\xa2op\xa5sleep\xa5level\x03", "level"),
        (b"\x82\xa2op\xa5sleep\xa5parts\x91\xa3all", "parts[0]"),
        (b"\x81\xa2op\xacupdate_chunk", "body"),
    ],
)
def test_a_body_that_is_none_is_malformed(body: bytes, field: str) -> None:
    with pytest.raises(Refusal) as caught:
        Ranks().do(body)
    assert (caught.value.code, caught.value.field) == (RefusalCode.MALFORMED, field)


def test_operations_are_part_of_what_ranks_compare() -> None:
    digests = {Ranks().validator.digest, Ranks(Profile(True)).validator.digest, Ranks(Profile(False)).validator.digest}
    refused = Ranks()
    refused.refuses(Wake())
    assert len(digests | {refused.validator.digest}) == 4
