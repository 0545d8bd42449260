"""A scheduler that does not read what it is sent loses its lease, and learns of it: nothing is lost in silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.gang.relay_house import STEP, House
from worker.gang_messages import RESET, RESET_DONE
from workerproto.messages import Bye, Error, ErrorCode, Kind


@pytest.fixture
def house(run_dir: Path) -> Iterator[House]:
    house = House(run_dir, 30.0)
    yield house
    house.relay.close(1.0)
    house.context.destroy(linger=0)
    assert not house.errors


def test_who_does_not_read_its_errors_loses_the_lease_too(house: House) -> None:
    """Nothing to the holder is lost in silence: it would wait for ever for the answer to a step that never was."""
    house.ready()
    first = house.attached()
    lease = house.relay.holder
    for _ in range(100_000):
        first.send(Kind.STEP, STEP, seq=99)
        if house.relay.holder is not lease:
            break
    assert house.relay.holder is None


def test_who_does_not_read_loses_the_lease_and_nobody_else_waits(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers pile up in queues and buffers until nothing can be delivered any more. None of those before is lost, and
    the next frame shows that the lease has ended, if there was no room for Bye."""
    caplog.set_level(logging.INFO, "rankd.relay")
    house.ready()
    first = house.attached()
    lease = house.relay.holder
    for _ in range(100_000):
        first.step()
        kind, sequence, _ = house.take()
        if kind == RESET:
            break
        house.answer(sequence)
        while lease is not None and lease.in_flight and house.relay.holder is lease:
            time.sleep(0)
    assert (kind, house.relay.holder) == (RESET, None)
    house.answer(sequence, RESET_DONE, msgspec.msgpack.encode(0))
    second = house.attached()
    second.step()
    assert house.take()[:2] == (Kind.STEP, sequence + 1)

    assert "ends: NOT_READING" in caplog.text
    assert lease is not None
    assert [first.receive()[0].seq for _ in range(1, lease.answered)] == list(range(1, lease.answered))
    first.send(Kind.PING)
    message = first.receive()[1]
    if isinstance(message, Bye):
        assert message.code == "NOT_READING"
        message = first.receive()[1]
    assert isinstance(message, Error)
    assert message.code is ErrorCode.LEASE_ENDED
