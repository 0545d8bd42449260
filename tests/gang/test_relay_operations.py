"""Operations through the relay: a barrier in the stream; the test plays schedulers, ranks and main thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.gang.relay_house import FACTS, House, Scheduler
from worker.coordinator.recorder import Recorder
from worker.gang_messages import PERFORM, RESET, RESET_DONE
from worker.recording import Recording
from workerproto.codec import encode_body
from workerproto.messages import Done, Error, ErrorCode, Event, Kind, RefusalCode, Refused, Result, Welcome
from workerproto.operations import Drain, Profile, Sleep, UpdateBegin
from workerproto.states import Gang

SLEEP_DONE = encode_body(Done("sleep", [{}, {}]))


@pytest.fixture
def house(run_dir: Path) -> Iterator[House]:
    house = House(run_dir, 30.0)
    house.ready()
    yield house
    house.relay.close(1.0)
    house.context.destroy(linger=0)
    assert not house.errors


def in_error(scheduler: Scheduler, code: ErrorCode) -> None:
    error = scheduler.expect(Error)
    assert (error.code, error.seq, error.expected_seq) == (code, scheduler.seq, scheduler.seq)
    scheduler.seq -= 1


def test_earlier_steps_are_answered_first_and_nothing_is_taken_meanwhile(house: House, tmp_path: Path) -> None:
    """All of it is recorded that is taken, and nothing else."""
    house.relay.recorder = recorder = Recorder(tmp_path / "r", tokens=True, most_bytes=1 << 20, say=print)
    recorder.begin(FACTS)
    scheduler = house.attached()
    scheduler.step()
    scheduler.control(Sleep())
    scheduler.step()
    in_error(scheduler, ErrorCode.BARRIER)
    scheduler.control(Drain())
    in_error(scheduler, ErrorCode.BARRIER)
    assert house.take()[:2] == (Kind.STEP, 1)
    assert house.idle(), "the step is not answered yet"
    house.answer(1)
    scheduler.expect(Result)
    assert house.take() == (Kind.CONTROL, 2, encode_body(Sleep()))
    scheduler.step()
    in_error(scheduler, ErrorCode.BARRIER)
    house.do(house.relay.perform)
    assert house.take()[:2] == (PERFORM, 3)
    house.enter(Gang.ASLEEP)
    house.settle(Kind.DONE, SLEEP_DONE, moved=True)
    assert scheduler.expect(Event).state == "ASLEEP"
    header, done = scheduler.receive()
    assert (header.seq, done) == (2, msgspec.msgpack.decode(SLEEP_DONE, type=Done))
    scheduler.step()
    in_error(scheduler, ErrorCode.NOT_READY)
    scheduler.control(Profile(True))  # a gang that sleeps takes operations
    assert house.take()[:2] == (Kind.CONTROL, 4)
    recorder.close(5)
    recorded = [(frame.header.kind, frame.header.seq) for frame in Recording(tmp_path / "r").frames()]
    assert recorded == [
        (Kind.STEP, 1), (Kind.CONTROL, 2), (Kind.RESULT, 1), (Kind.DONE, 2), (Kind.CONTROL, 3),
    ]  # fmt: skip


def test_a_refused_operation_names_itself_and_leaves_no_refusal(house: House) -> None:
    scheduler = house.attached()
    scheduler.step()
    house.answer(house.take()[1])
    scheduler.expect(Result)
    scheduler.control(Sleep())
    house.take()
    house.settle(Kind.REFUSED, encode_body(Refused(RefusalCode.REQUESTS_LIVE, 77)))
    header, refused = scheduler.receive()
    assert isinstance(refused, Refused)
    assert (header.seq, refused.cause_seq) == (2, 2)
    scheduler.step()
    house.answer(house.take()[1], Kind.REFUSED, encode_body(Refused(RefusalCode.MALFORMED, 3)))
    assert scheduler.expect(Refused).cause_seq == 3


def test_an_operator_s_takes_its_place_in_the_order_and_the_scheduler_is_told(house: House) -> None:
    scheduler = house.attached()
    scheduler.step()
    scheduler.in_order()
    told: list[tuple[Kind, bytes]] = []
    house.do(lambda: house.relay.operate(encode_body(Sleep()), lambda *answer: told.append(answer)))
    scheduler.step()
    in_error(scheduler, ErrorCode.BARRIER)
    house.answer(house.take()[1])
    scheduler.expect(Result)
    assert house.take()[:2] == (Kind.CONTROL, 2)
    again: list[tuple[Kind, bytes]] = []
    house.do(lambda: house.relay.operate(encode_body(Drain()), lambda *answer: again.append(answer)))
    assert again[0][0] is Kind.ERROR
    refused = encode_body(Refused(RefusalCode.REQUESTS_LIVE, 2))
    house.settle(Kind.REFUSED, refused)
    assert told == [(Kind.REFUSED, refused)]
    event = scheduler.expect(Event)
    assert (event.state, event.facts, event.last_answered) == ("READY", FACTS, 1)
    scheduler.step()
    house.answer(house.take()[1])
    assert scheduler.receive()[0].seq == 2


@pytest.mark.parametrize("proposed", [False, True])
def test_a_lease_that_ends_in_its_operation_is_forgotten_behind_it(house: House, proposed: bool) -> None:
    scheduler = house.attached()
    if not proposed:
        scheduler.step()
    scheduler.control(Sleep())
    sequence = house.take()[1]
    scheduler.bye()
    second = house.scheduler()
    second.hello()
    if proposed:
        assert house.idle(), "the reset waits for the operation to be done"
        house.settle(Kind.DONE, SLEEP_DONE)
    else:
        house.answer(sequence)  # the operation had not begun, and nobody waits for it any more
    kind, sequence, _ = house.take()
    assert kind == RESET
    house.answer(sequence, RESET_DONE, msgspec.msgpack.encode(1))
    assert second.expect(Welcome).requests_dropped == 1
    second.step()
    assert house.take()[0] == Kind.STEP


def test_a_lease_lost_in_an_update_is_told_once_the_ranks_have_forgotten_it(house: House) -> None:
    scheduler = house.attached()
    scheduler.control(UpdateBegin())
    house.take()
    house.enter(Gang.UPDATING)
    house.settle(Kind.DONE, encode_body(Done("update_begin", [{}, {}])), moved=True)
    scheduler.expect(Event)
    scheduler.expect(Done)
    scheduler.bye()
    kind, sequence, _ = house.take()
    assert (kind, house.updates_lost) == (RESET, 0)
    house.answer(sequence, RESET_DONE, msgspec.msgpack.encode(0))
    house.attached()
    assert house.updates_lost == 1


def test_a_gang_that_awaits_its_cache_takes_operations_for_the_main_thread(house: House) -> None:
    house.enter(Gang.AWAITING_KV, facts=FACTS)
    scheduler = house.scheduler()
    assert scheduler.attach().facts == FACTS
    scheduler.step()
    in_error(scheduler, ErrorCode.NOT_READY)
    scheduler.control(Sleep())
    scheduler.in_order()
    assert house.configured == [encode_body(Sleep())]
    house.settle(Kind.REFUSED, encode_body(Refused(RefusalCode.AWAITING_KV, 0)))
    assert scheduler.expect(Refused).cause_seq == 1
    assert house.idle()
