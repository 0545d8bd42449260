"""Steps that wait for a grammar's masks, through the relay; the test plays schedulers and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.gang.relay_house import EPOCH, STEP, House, Scheduler
from worker.gang_messages import RESET, RESET_DONE, unseal
from workerproto.codec import encode_body
from workerproto.messages import (
    Bye,
    Error,
    ErrorCode,
    HeaderFlag,
    Kind,
    RefusalCode,
    Refused,
    Result,
    Sample,
    Welcome,
)
from workerproto.operations import Drain

FOLLOWS, RESYNC = HeaderFlag.SAMPLE_FOLLOWS, HeaderFlag.RESYNC


@pytest.fixture
def house(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    marker = request.node.get_closest_marker("parametrize")
    house = House(run_dir, 30.0, 0.3 if marker and "sample_timeout" in marker.args[0] else 30.0)
    house.ready()
    yield house
    house.relay.close(1.0)
    house.context.destroy(linger=0)
    assert not house.errors


def sample(scheduler: Scheduler, body: bytes = b"the ranks' to judge") -> None:
    scheduler.seq += 1
    scheduler.send(Kind.SAMPLE, body, seq=scheduler.seq)


def in_error(scheduler: Scheduler, code: ErrorCode) -> None:
    error = scheduler.expect(Error)
    assert (error.code, error.seq, error.expected_seq) == (code, scheduler.seq, scheduler.seq)
    scheduler.seq -= 1


def refuse(house: House, seq: int, code: RefusalCode = RefusalCode.BAD_MASK) -> None:
    house.answer(seq, Kind.REFUSED, encode_body(Refused(code, seq)))


def test_masks_go_to_the_ranks_undecoded_with_the_step_s_name_and_earlier_steps_are_answered(house: House) -> None:
    scheduler = house.attached()
    scheduler.step()
    house.take()
    scheduler.step(flags=FOLLOWS)
    house.take()
    scheduler.step()
    in_error(scheduler, ErrorCode.SAMPLE_DUE)
    scheduler.control(Drain())
    in_error(scheduler, ErrorCode.SAMPLE_DUE)
    house.answer(1)
    assert scheduler.receive()[0].seq == 1
    assert house.relay.stream.head_since == 0, "the scheduler is waited for, not the ranks"
    sample(scheduler)
    for socket in house.ranks:
        frame, body = socket.recv_multipart()
        assert unseal(frame) == (Kind.SAMPLE, 0, EPOCH, 3, 2)
        assert body == b"the ranks' to judge"
    assert house.relay.stream.head_since > 0
    house.answer(2)
    header, result = scheduler.receive()
    assert isinstance(result, Result)
    assert header.seq == 2
    sample(scheduler)
    in_error(scheduler, ErrorCode.NO_STEP_OPEN)
    scheduler.step()
    assert house.take()[:2] == (Kind.STEP, 4)


def test_a_refused_sample_leaves_the_step_to_wait_for_another(house: House) -> None:
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    sample(scheduler)
    scheduler.step()  # before it is known
    for sequence in (1, 2, 3):
        assert house.take()[1] == sequence
    lease = house.relay.holder
    assert lease is not None
    since = lease.sampling.due_since
    refuse(house, 2)
    header, refused = scheduler.receive()
    assert isinstance(refused, Refused)
    assert (header.seq, refused.cause_seq) == (2, 2)
    assert lease.sampling.due_since > since, "its time begins anew"
    scheduler.step()
    in_error(scheduler, ErrorCode.SAMPLE_DUE)
    sample(scheduler)
    assert house.take()[:2] == (Kind.SAMPLE, 4)
    house.answer(1)
    assert scheduler.receive()[0].seq == 1
    house.answer(3, Kind.REFUSED, encode_body(Refused(RefusalCode.AFTER_REFUSAL, 2)))
    assert scheduler.expect(Refused).cause_seq == 2
    scheduler.step(flags=RESYNC)
    assert house.take()[:2] == (Kind.STEP, 5)


@pytest.mark.parametrize("behind", [0, RESYNC], ids=["after-refusal", "sample-due"])
def test_each_refusal_names_its_cause_though_samples_overtake_steps(house: House, behind: int) -> None:
    """A second Sample is refused before the step that was sent behind the first has had its answer."""
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    sample(scheduler)
    scheduler.step(flags=behind)
    scheduler.in_order()  # between its socket and that of the answers there is no order
    refuse(house, 2)
    assert scheduler.expect(Refused).cause_seq == 2
    for seq in (4, 5):
        sample(scheduler)
        scheduler.in_order()
        refuse(house, seq)
        assert scheduler.expect(Refused).cause_seq == seq
    sample(scheduler)
    scheduler.in_order()
    house.answer(1)
    scheduler.expect(Result)
    late = RefusalCode.SAMPLE_DUE if behind else RefusalCode.AFTER_REFUSAL
    house.answer(3, Kind.REFUSED, encode_body(Refused(late, 3 if behind else 2)))
    assert scheduler.expect(Refused).cause_seq == (3 if behind else 2)
    for seq in (7, 8):  # of the ranks' refusals the last in the stream's order is the one that counts
        scheduler.step()
        scheduler.in_order()
        house.answer(seq, Kind.REFUSED, encode_body(Refused(RefusalCode.AFTER_REFUSAL, 5)))
        assert scheduler.expect(Refused).cause_seq == 5
    assert len(house.relay.stream._primaries) <= 2


@pytest.mark.parametrize("sent_before", [True, False])
def test_two_steps_wait_and_the_first_one_s_sample_is_refused(house: House, sent_before: bool) -> None:
    """The second step is refused with it; its Sample goes no further, whether it came before that was known or not."""
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    sample(scheduler)
    scheduler.step(flags=FOLLOWS)
    if sent_before:
        sample(scheduler, encode_body(Sample(3)))
    for _ in range(scheduler.seq):
        house.take()
    refuse(house, 2)
    assert scheduler.receive()[0].seq == 2
    if not sent_before:
        sample(scheduler, encode_body(Sample(3)))
        scheduler.in_order()
        assert house.idle(), "it was let go"
    sample(scheduler, encode_body(Sample(1)))
    kind, seq, body = house.take()
    assert (kind, body) == (Kind.SAMPLE, encode_body(Sample(1)))
    house.answer(1)
    assert scheduler.receive()[0].seq == 1
    house.answer(3, Kind.REFUSED, encode_body(Refused(RefusalCode.AFTER_REFUSAL, 2)))
    header, refused = scheduler.receive()
    assert isinstance(refused, Refused)
    assert (header.seq, refused.cause_seq) == (3, 2)
    scheduler.step(STEP, RESYNC)
    house.answer(house.take()[1])
    assert scheduler.receive()[0].seq == 6
    assert seq == (5 if sent_before else 4)


@pytest.mark.parametrize("sent_before", [True, False])
def test_a_refused_step_waits_for_nothing(house: House, sent_before: bool) -> None:
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    house.take()
    if sent_before:
        sample(scheduler)
        assert house.take()[:2] == (Kind.SAMPLE, 2), "the ranks drop it"
    refuse(house, 1, RefusalCode.MALFORMED)
    assert scheduler.expect(Refused).code is RefusalCode.MALFORMED
    if not sent_before:  # it was on its way: it takes its sequence, and goes no further
        sample(scheduler)
    scheduler.step(STEP, RESYNC)
    assert house.take()[0] == Kind.STEP
    assert scheduler.seq == 3


def test_a_refused_step_s_sample_need_not_come(house: House) -> None:
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    refuse(house, house.take()[1], RefusalCode.MALFORMED)
    scheduler.expect(Refused)
    scheduler.step(STEP, RESYNC)
    house.answer(house.take()[1])
    assert scheduler.receive()[0].seq == 2
    sample(scheduler)
    in_error(scheduler, ErrorCode.NO_STEP_OPEN)


def test_an_operator_s_operation_waits_for_the_step_and_lets_its_sample_through(house: House) -> None:
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    house.take()
    house.do(lambda: house.relay.operate(encode_body(Drain()), lambda *_: None))
    sample(scheduler)
    assert house.take()[:2] == (Kind.SAMPLE, 2)
    house.answer(1)
    assert house.take()[:2] == (Kind.CONTROL, 3)


def test_a_lease_that_ends_while_a_step_waits_is_forgotten_behind_it(house: House) -> None:
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    house.take()
    scheduler.bye()
    assert house.take()[:2] == (RESET, 2)
    house.answer(1)  # the ranks end the step without masks
    house.answer(2, RESET_DONE, msgspec.msgpack.encode(1))
    second = house.scheduler()
    assert second.attach().requests_dropped == 1
    second.step()
    assert house.take()[:2] == (Kind.STEP, 3)


@pytest.mark.parametrize("sample_timeout", [0.3])
def test_a_sample_that_does_not_come_ends_the_lease_and_not_the_gang(house: House, sample_timeout: float) -> None:
    scheduler = house.attached()
    scheduler.step(flags=FOLLOWS)
    house.take()
    bye = scheduler.expect(Bye)
    assert (bye.code, bye.message) == ("NO_SAMPLE", f"step 1 had no Sample within {sample_timeout:g} s")
    assert house.take()[:2] == (RESET, 2)
    house.answer(1)
    house.answer(2, RESET_DONE, msgspec.msgpack.encode(0))
    second = house.scheduler()
    second.hello()
    assert isinstance(second.receive()[1], Welcome)
