"""The relay on real sockets; the test plays schedulers and ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.gang.relay_house import CREDIT, EPOCH, FACTS, STEP, House
from worker.config import FRAME_BYTES
from worker.coordinator.stream import FRAMES_WAITING
from worker.gang_messages import RESET, RESET_DONE, STOP, unseal
from workerproto.codec import Header, encode_body
from workerproto.messages import (
    Bye,
    Error,
    ErrorCode,
    Event,
    Fault,
    HeaderFlag,
    Kind,
    RefusalCode,
    Refused,
    Result,
    Welcome,
)  # fmt: skip
from workerproto.states import Gang


@pytest.fixture
def house(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    marker = request.node.get_closest_marker("parametrize")
    house = House(run_dir, 0.6 if marker and "lease_timeout" in marker.args[0] else 30.0)
    yield house
    house.relay.close(1.0)
    house.context.destroy(linger=0)
    assert not house.errors


def test_attach_before_ready_and_facts_by_event(house: House) -> None:
    scheduler = house.scheduler()
    welcome = scheduler.attach()
    assert (welcome.state, welcome.facts, welcome.lease_timeout_ms) == ("STARTING", None, 30000)
    scheduler.step()
    assert scheduler.expect(Error).code is ErrorCode.NOT_READY
    house.enter(Gang.LOADING)
    house.ready()
    assert scheduler.expect(Event).state == "LOADING"
    event = scheduler.expect(Event)
    assert (event.state, event.epoch, event.facts) == ("READY", EPOCH, FACTS)
    scheduler.seq = 0  # the refused frame counts as never sent
    scheduler.step()
    assert house.take()[:2] == (Kind.STEP, 1)


def test_steps_are_relayed_undecoded_and_results_come_back_in_the_lease_s_numbers(house: House) -> None:
    house.ready()
    first = house.attached()
    first.step(b"not msgpack: the ranks' to judge")
    assert house.take() == (Kind.STEP, 1, b"not msgpack: the ranks' to judge")
    house.answer(1)
    header, _ = first.receive()
    assert header == Header(Kind.RESULT, 0, EPOCH, first.lease, 1)
    first.bye()
    assert house.take()[:2] == (RESET, 2)
    house.answer(2, RESET_DONE, msgspec.msgpack.encode(5))
    second = house.scheduler()
    assert second.attach().requests_dropped == 5
    second.step()
    assert house.take()[:2] == (Kind.STEP, 3)
    house.answer(3)
    assert second.receive()[0] == Header(Kind.RESULT, 0, EPOCH, second.lease, 1)


def test_first_tier_by_header(house: House) -> None:
    house.ready()
    scheduler = house.attached()

    def error(**header: Any) -> Error:
        scheduler.send(**({"kind": Kind.STEP, "body": STEP, "seq": 1} | header))
        answer: Error = scheduler.expect(Error)
        assert answer.expected_seq == 1
        return answer

    assert error(seq=2).code is ErrorCode.BAD_SEQUENCE
    assert error(epoch=EPOCH + 1).code is ErrorCode.BAD_EPOCH
    assert error(kind=Kind.SAMPLE).code is ErrorCode.NO_STEP_OPEN
    assert error(kind=Kind.CONTROL, seq=2).code is ErrorCode.BAD_SEQUENCE
    assert error(kind=Kind.WELCOME).code is ErrorCode.BAD_KIND
    assert error(body=bytes(FRAME_BYTES + 1)).code is ErrorCode.TOO_LARGE
    for _ in range(CREDIT):
        scheduler.step()
    scheduler.step()
    refused = scheduler.expect(Error)
    assert (refused.code, refused.seq, refused.expected_seq) == (ErrorCode.NO_CREDIT, CREDIT + 1, CREDIT + 1)
    house.answer(house.take()[1])
    scheduler.expect(Result)
    scheduler.seq = CREDIT
    scheduler.step()
    for _ in range(CREDIT):
        assert house.take()[0] == Kind.STEP
    assert house.idle()


RUBBISH = [
    [],
    [b""],
    [b"", b"", b""],
    [b"x" * 24, b""],
    [b"x" * 23, b""],
    [b"RNKD" + b"\xff" * 20, b""],
    [b"RNKD\x01\x10" + bytes(18), b"\xc1"],
    [b"RNKD\x01\x01" + bytes(18), b"\xc1"],
    [b"RNKD\x01\x01" + bytes(6) + b"\x09\x00\x00\x00" + bytes(8), b"\x91" * 100_000],
    [b"RNKD\x01\x01" + bytes(6) + b"\x09\x00\x00\x00" + bytes(8), b"\x81\xa1x\x01"],
    [b"RNKD\x01\x06" + bytes(6) + b"\x01\x00\x00\x00" + bytes(8), b""],
    [os.urandom(1 << 20), os.urandom(1 << 20)],
    *([os.urandom(24), os.urandom(8)] for _ in range(50)),
]


def test_rubbish_from_a_stranger_never_disturbs_the_holder(house: House) -> None:
    house.ready()
    holder = house.attached()
    stranger = house.scheduler()
    for parts in RUBBISH:
        if parts:
            stranger.socket.send_multipart(parts)
        else:
            stranger.socket.send(b"")
        holder.step()
        house.answer(house.take()[1])
        assert isinstance(holder.receive()[1], Result)
    for _ in RUBBISH:
        assert isinstance(stranger.expect(Error).message, str)
    assert house.idle()


def test_frame_over_the_hard_limit_only_disconnects_its_sender(house: House) -> None:
    house.ready()
    holder = house.attached()
    stranger = house.scheduler()
    stranger.socket.send(bytes(65 << 20))
    holder.step()
    house.answer(house.take()[1])
    assert isinstance(holder.receive()[1], Result)


def test_what_waits_of_a_peer_is_bounded(house: House) -> None:
    """While the relay is busy, a stranger's frames stay with the stranger, but for a few."""
    busy = threading.Event()
    house.relay.post(lambda: busy.wait(30))
    stranger = house.scheduler()
    stranger.socket.disconnect(house.files.scheduler_endpoint)
    stranger.socket.sndhwm = 1  # of connections that are made from now on
    stranger.socket.connect(house.files.scheduler_endpoint)
    sent = 0
    while stranger.socket.poll(200, zmq.POLLOUT):
        stranger.socket.send(bytes(1 << 20))
        sent += 1
        assert sent < 3 * FRAMES_WAITING
    busy.set()
    for _ in range(sent):
        assert stranger.expect(Error).code is ErrorCode.BAD_FRAMES


def test_lease_held_and_taken_over(house: House) -> None:
    house.ready()
    first, second = house.attached(), house.scheduler()
    second.hello()
    held = second.expect(Error)
    assert (held.code, held.expected_seq) == (ErrorCode.LEASE_HELD, None)
    assert "client 1" in held.message
    first.step()
    first.step()
    assert house.take()[1] == 1
    third = house.scheduler()
    third.hello(takeover=True)
    assert first.expect(Bye).code == "TAKEOVER"
    house.take()
    assert house.take()[:2] == (RESET, 3)
    house.answer(1)
    house.answer(2)  # of a lease that has ended: for nobody
    assert not third.socket.poll(50), "Welcome waits for the ranks to have forgotten"
    house.answer(3, RESET_DONE, msgspec.msgpack.encode(2))
    assert third.expect(Welcome).requests_dropped == 2
    first.step()
    assert first.expect(Error).code is ErrorCode.LEASE_ENDED
    third.in_order()
    assert not first.socket.poll(0)


def test_attaching_twice_on_one_socket_is_refused(house: House) -> None:
    scheduler = house.attached()
    scheduler.hello()
    assert scheduler.expect(Error).code is ErrorCode.BAD_LEASE
    scheduler.in_order()


def test_lease_zero_is_none(house: House) -> None:
    scheduler = house.scheduler()
    scheduler.lease = 0
    scheduler.hello()
    assert scheduler.expect(Error).code is ErrorCode.BAD_HEADER


@pytest.mark.parametrize("lease_timeout", [0.6])
def test_silent_holder_loses_the_lease(house: House, lease_timeout: float) -> None:
    house.ready()
    silent = house.attached()
    began = time.monotonic()
    kinds = []
    while not kinds or kinds[-1] is not Kind.BYE:
        kinds.append(silent.receive()[0].kind)
    assert lease_timeout * 0.9 < time.monotonic() - began < lease_timeout * 5
    assert Kind.PING in kinds
    assert house.relay.holder is None
    house.attached()


def test_holder_whose_result_cannot_be_delivered_loses_the_lease(house: House) -> None:
    """Its socket is gone: the answer is not lost in silence, and nobody has to wait for the time-out."""
    house.ready()
    gone = house.attached()
    for sequence in range(1, CREDIT + 1):
        gone.step()
        assert house.take()[:2] == (Kind.STEP, sequence)
    gone.socket.close()
    for sequence in range(1, CREDIT + 1):  # the first may leave before the relay's socket learns of the hang-up
        house.answer(sequence)
        if house.ranks[0].poll(1000):
            break
    assert house.take()[0] == RESET


@pytest.mark.parametrize("lease_timeout", [0.6])
def test_pings_keep_the_lease(house: House, lease_timeout: float) -> None:
    house.ready()
    holder = house.attached()
    deadline = time.monotonic() + lease_timeout * 3
    while time.monotonic() < deadline:
        if holder.receive()[0].kind is Kind.PING:
            holder.send(Kind.PONG)
    assert house.relay.holder is not None


def test_refusals_name_their_cause_in_the_lease_s_numbers(house: House) -> None:
    house.ready()
    house.attached().bye()
    first = house.scheduler()
    first.attach()
    first.step()
    house.take()
    house.answer(1)
    first.receive()
    first.bye()
    house.answer(house.take()[1], RESET_DONE, msgspec.msgpack.encode(0))
    second = house.attached()
    for _ in range(2):
        second.step()
        house.take()
    house.answer(3, Kind.REFUSED, encode_body(Refused(RefusalCode.MALFORMED, 3)))
    house.answer(4, Kind.REFUSED, encode_body(Refused(RefusalCode.AFTER_REFUSAL, 3)))
    for seq in (1, 2):
        header, refused = second.receive()
        assert isinstance(refused, Refused)
        assert (header.seq, refused.cause_seq) == (seq, 1)
    second.step(flags=HeaderFlag.RESYNC)
    assert unseal(house.ranks[0].recv_multipart()[0]).flags == HeaderFlag.RESYNC


def test_failure_comes_after_the_results_that_were_there(house: House) -> None:
    house.ready()
    scheduler = house.attached()
    scheduler.step()
    scheduler.step()
    house.take()
    house.answer(1)
    house.take()
    fault = Fault(70, 1, "step", 2, None, "boom")
    deadline = time.monotonic() + 5
    while len(house.relay.stream.in_flight) != 1:
        assert time.monotonic() < deadline
    house.enter(Gang.FAILED, fault=fault)
    assert scheduler.receive()[0].seq == 1
    event = scheduler.expect(Event)
    assert (event.state, event.last_answered, event.fault) == ("FAILED", 1, fault)
    bye = scheduler.expect(Bye)
    assert (bye.code, bye.message) == ("FAILED", "boom")
    scheduler.step()
    assert scheduler.expect(Error).code is ErrorCode.LEASE_ENDED


def test_who_waits_for_a_lease_when_the_gang_fails_is_told_that_it_has(house: House) -> None:
    """The ranks were to forget the lease before, which they never will."""
    house.ready()
    house.attached().step()
    house.take()
    second = house.scheduler()
    second.hello(takeover=True)
    assert house.take()[0] == RESET
    house.enter(Gang.FAILED, fault=Fault(70, 1, "step", 1, None, "boom"))
    bye = second.expect(Bye)
    assert (bye.code, bye.message) == ("FAILED", "boom")


@pytest.mark.parametrize(("gang_step", "lease_step"), [(3, 1), (1, None), (9, None), (None, None)])
def test_a_fault_names_its_step_in_the_lease_s_numbers(
    house: House, gang_step: int | None, lease_step: int | None
) -> None:
    house.ready()
    first = house.attached()
    first.step()
    house.take()
    house.answer(1)
    first.receive()
    first.bye()
    house.answer(house.take()[1], RESET_DONE, msgspec.msgpack.encode(0))
    second = house.attached()
    second.step()
    house.take()
    house.enter(Gang.FAILED, fault=Fault(70, 1, "step", gang_step))
    assert second.expect(Event).fault.step == lease_step


def test_stop_is_the_last_of_the_stream(house: House) -> None:
    house.ready()
    house.attached().step()
    house.take()
    house.relay.post(house.relay.stop_ranks)
    assert house.take()[:2] == (STOP, 2)


def test_answer_out_of_order_ends_the_gang(run_dir: Path) -> None:
    house = House(run_dir, 30)
    house.ready()
    scheduler = house.attached()
    scheduler.step()
    scheduler.step()
    house.answer(2)
    deadline = time.monotonic() + 5
    while not house.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "the output rank answered 2" in str(house.errors[0])
    house.relay.close(1.0)
    house.context.destroy(linger=0)
