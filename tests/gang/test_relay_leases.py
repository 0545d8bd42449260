"""What SPEC.md says of leases in passing: order among errors, signs of life, what is remembered, socket options."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.gang.relay_house import CREDIT, EPOCH, FACTS, STEP, House
from tests.unit.test_spec import section, tables
from worker.config import FRAME_BYTES
from worker.coordinator.lease import Lease
from worker.gang_messages import RESET
from worker.step_trace import SIZE
from workerproto.client import Client
from workerproto.codec import Header, encode_body
from workerproto.messages import Bye, Error, ErrorCode, Event, Kind, Result, Welcome
from workerproto.states import Gang


@pytest.fixture
def house(run_dir: Path) -> Iterator[House]:
    house = House(run_dir, 30.0)
    yield house
    house.relay.close(1.0)
    house.context.destroy(linger=0)
    assert not house.errors


def test_socket_options_are_those_of_the_table(house: House) -> None:
    """A scheduler's bounds are the least that they may be; what an empty cell says is the sockets' own matter."""
    client = Client(house.files.scheduler_endpoint)
    ours, theirs = house.relay._schedulers.sockets[0], client._socket
    try:
        assert (ours.type, theirs.type, theirs.getsockopt(zmq.IDENTITY)) == (zmq.ROUTER, zmq.DEALER, b"")
        sent: list[bool] = []  # ROUTER_MANDATORY cannot be read, but its effect
        house.do(lambda: sent.append(house.relay._schedulers.send(b"\0nobody", Header(Kind.PING), b"")))
        assert sent == [False]
        rows = {row[0].strip("`"): row[1:] for row in tables(section("2. Transport"))[0]}
        for name in ("LINGER", "MAXMSGSIZE", "SNDHWM", "RCVHWM"):
            option = getattr(zmq, name)
            words = [
                cell.replace("at least ", "").replace(":", ";").split(";")[0].split(" (")[0] for cell in rows[name]
            ]
            assert ours.getsockopt(option) == int(words[0]), name
            if "at least" in rows[name][1]:
                assert theirs.getsockopt(option) >= int(words[1]), name
    finally:
        client.close()


def test_the_soft_limit_before_ready_is_that_of_the_spec(house: House) -> None:
    scheduler = house.attached()
    scheduler.step(bytes(FRAME_BYTES + 1))
    assert scheduler.expect(Error).code is ErrorCode.TOO_LARGE
    scheduler.step(bytes(FRAME_BYTES))
    assert scheduler.expect(Error).code is ErrorCode.NOT_READY
    assert f"16 MiB ({FRAME_BYTES})" in section("16. Sizes")
    assert "Before READY the soft limit is 16 MiB." in section("16. Sizes")


def test_errors_and_pongs_come_in_order_and_ahead_of_answers_to_steps(house: House) -> None:
    house.ready()
    scheduler = house.attached()
    scheduler.step()
    scheduler.send(Kind.STEP, STEP, seq=9)
    scheduler.send(Kind.PING)
    scheduler.send(Kind.STEP, STEP, seq=2, epoch=EPOCH + 1)
    assert scheduler.expect(Error).code is ErrorCode.BAD_SEQUENCE
    assert scheduler.receive()[0].kind is Kind.PONG
    assert scheduler.expect(Error).code is ErrorCode.BAD_EPOCH
    house.answer(house.take()[1])
    scheduler.expect(Result)


def test_a_frame_in_error_is_a_sign_of_life_too_if_it_is_the_holder_s(house: House) -> None:
    house.ready()
    scheduler, stranger = house.attached(), house.scheduler()
    lease = house.relay.holder
    assert lease is not None
    for kind, body, seq in [(Kind.STEP, STEP, 9), (Kind.RESULT, b"", 1), (Kind.PING, b"a body", 0)]:
        before = lease.heard
        scheduler.send(kind, body, seq=seq)
        scheduler.expect(Error)
        assert lease.heard > before
    stranger.lease, before = scheduler.lease, lease.heard
    stranger.send(Kind.STEP, STEP, seq=1)
    assert stranger.expect(Error).code is ErrorCode.BAD_LEASE
    assert lease.heard == before


def test_the_epoch_of_ping_pong_and_bye_and_their_sequence_are_not_looked_at(house: House) -> None:
    house.ready()
    scheduler = house.attached()
    scheduler.send(Kind.PONG, seq=5, epoch=EPOCH + 1)
    scheduler.send(Kind.PING, seq=5, epoch=EPOCH + 1)
    assert scheduler.receive()[0].kind is Kind.PONG
    scheduler.send(Kind.BYE, encode_body(Bye()), seq=5, epoch=0)
    scheduler.send(Kind.PING)
    assert scheduler.expect(Error).code is ErrorCode.LEASE_ENDED


def test_hello_is_answered_in_every_state_of_the_gang(house: House) -> None:
    told = {Gang.READY: FACTS, Gang.AWAITING_KV: FACTS}
    for state in Gang:
        house.enter(state, facts=FACTS)
        scheduler = house.scheduler()
        welcome = scheduler.attach()
        assert (welcome.state, welcome.facts) == (state, told.get(state))
        scheduler.bye()


@pytest.mark.parametrize("kind", [Kind.BYE, Kind.PING, Kind.PONG])
def test_a_wrong_body_is_found_after_the_lease(house: House, kind: Kind) -> None:
    holder, stranger = house.attached(), house.scheduler()
    for sender, code in ((stranger, ErrorCode.BAD_LEASE), (holder, ErrorCode.BAD_BODY)):
        sender.send(kind, b"\xc1")
        assert sender.expect(Error).code is code


def test_the_last_256_leases_are_remembered(house: House) -> None:
    house.enter(Gang.LOADING)
    first = house.attached()
    first.bye()
    second = house.attached()
    second.bye()
    for _ in range(255):
        house.attached().bye()
    for scheduler, code in ((second, ErrorCode.LEASE_ENDED), (first, ErrorCode.BAD_LEASE)):
        scheduler.step()
        assert scheduler.expect(Error).code is code


def test_a_step_gets_not_ready_while_the_ranks_forget_the_lease_before(house: House) -> None:
    house.ready()
    first, second = house.attached(), house.scheduler()
    for _ in range(CREDIT):
        first.step()
    first.in_order()
    second.hello(takeover=True)
    assert first.expect(Bye).code == "TAKEOVER"
    second.step()
    assert second.expect(Error).code is ErrorCode.NOT_READY
    assert [house.take()[0] for _ in range(CREDIT + 1)] == [Kind.STEP] * CREDIT + [RESET]


def test_who_waits_while_the_gang_fails_is_welcomed_by_the_next_epoch(house: House) -> None:
    """As it begins: the ranks that were to forget the lease before are gone, and FAILED was the old epoch."""
    house.ready()
    first, heir = house.attached(), house.scheduler()
    first.step()
    first.in_order()
    heir.hello(takeover=True)
    assert first.expect(Bye).code == "TAKEOVER"
    house.enter(Gang.FAILED, goes_on=True)
    with tempfile.TemporaryFile() as trace:
        trace.truncate(SIZE)
        house.relay.restart(house.files.of_epoch(EPOCH + 1), mmap.mmap(trace.fileno(), SIZE)).result(5)
    for state in (Gang.STARTING, Gang.ROLL_CALL):
        house.enter(state)
        header, message = heir.receive()
        assert isinstance(message, Welcome if state is Gang.STARTING else Event)
        assert (header.epoch, message.state) == (EPOCH + 1, state)


def test_a_name_cannot_steer_the_terminal_that_shows_it() -> None:
    lease = Lease(b"peer", 1, "\x1b[2Jit's\n\0 café \u202e", 0.0)
    assert lease.client == r"\x1b[2Jit's\n\x00 café \u202e"
