"""The table in docs/behaviour.md of what a gang survives: every row is provoked, most of them on one gang, which serves
on after each of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tests.faults.fake_gangs import fake_gang, first_token, prompt_step
from tests.faults.side_by_side import WAIT_S
from tests.faults.table import rows_of
from tests.gang import test_gang_sleep, test_relay_unread
from tests.gang.gangs import RunningGang
from tests.gang.test_recovery import attached, crash
from workerproto.client import Client, LeaseHeld, TimedOut
from workerproto.codec import Header, decode_body, decode_header, unpack
from workerproto.messages import Bye, Error, ErrorCode, Event, Kind, Message, Refused, Result
from workerproto.operations import Sleep, UpdateBegin, Wake
from workerproto.rundir import endpoint_of

ROWS = [cause for cause, _, _ in rows_of("What a gang survives")]
LEASE_S, SAMPLE_S = 1.0, 0.3

ON_TORCH = {
    "a wake for which a rank has not the memory, or whose weights on disk have changed": (
        test_gang_sleep.test_a_wake_that_one_rank_cannot_do_leaves_all_asleep
    ),
    "a lease that ends in a weight update": test_gang_sleep.test_new_weights_come_in_place_or_not_at_all,
}
"""What takes memory and weights to be seen, and who shows it."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    with tempfile.TemporaryDirectory(prefix="rankd-") as run_dir:
        limits = ["--lease-timeout", f"{LEASE_S}", "--sample-timeout", f"{SAMPLE_S}"]
        with fake_gang(Path(run_dir), tmp_path_factory.mktemp("gang"), *limits) as running:
            yield running.wait_ready()


def answer(client: Client) -> Message | None:
    while isinstance(message := client.receive(WAIT_S).message, Event):
        pass
    return message


def serves(running: RunningGang) -> None:
    """Whoever attaches, of whatever was there before."""
    client, _ = attached(endpoint_of(running.name, running.environment), takeover=False)
    with closing(client):
        facts = client.wait_ready(WAIT_S)
        client.submit(prompt_step(1, 0))
        result = answer(client)
        assert isinstance(result, Result)
        assert unpack(result.tokens).tolist() == [first_token(facts.vocabulary)]


def a_step_that_breaks_a_rule(running: RunningGang) -> None:
    with running.client() as client:
        blocks = client.wait_ready(WAIT_S).kv.num_blocks
        for timeout in (0, -1):  # a deadline in the past means now
            with pytest.raises(TimedOut):
                client.receive(timeout)
        client.submit(prompt_step(1, blocks))
        refused = answer(client)
        assert isinstance(refused, Refused)
        assert (refused.request, refused.value) == (1, f"{blocks}")
        assert "blocks" in refused.field
        assert str(blocks - 1) in refused.bound + refused.message
        client.submit(prompt_step(1, 0), resync=True)  # the same request: nothing of the other step has happened
        assert isinstance(answer(client), Result)


def an_operation_that_cannot_be(running: RunningGang) -> None:
    """In this state, or with these ranks."""
    with running.client() as client:
        client.wait_ready(WAIT_S)
        for operation, code in ((Wake(), "NOT_ASLEEP"), (UpdateBegin(), "NOT_IMPLEMENTED")):
            client.control(operation)
            refused = answer(client)
            assert isinstance(refused, Refused)
            assert (refused.code, bool(refused.message)) == (code, True)
        client.submit(prompt_step(1, 0))
        client.control(Sleep(1))
        assert isinstance(answer(client), Result)
        refused = answer(client)
        assert isinstance(refused, Refused)
        assert refused.code == "REQUESTS_LIVE"
        assert [one["state"] for one in running.status()["ranks"]] == ["READY"] * 2


def masks_that_do_not_come(running: RunningGang) -> None:
    with running.client() as client:
        client.wait_ready(WAIT_S)
        began = time.monotonic()
        client.submit(prompt_step(1, 0), sample_follows=True)
        bye = answer(client)
        assert isinstance(bye, Bye)
        assert bye.code == "NO_SAMPLE"
        assert time.monotonic() - began >= SAMPLE_S


def a_frame_that_is_not_of_the_wire(running: RunningGang) -> None:
    with running.client() as holder:
        facts = holder.wait_ready(WAIT_S)
        stranger = running.client()
        with closing(stranger), pytest.raises(LeaseHeld):
            stranger.attach()
        for frames, code, seq in (
            ([b"rubbish"], ErrorCode.BAD_FRAMES, 0),
            ([b"rubbish", b""], ErrorCode.BAD_HEADER, 0),
            ([Header(Kind.STEP, 0, 1, 4711, 9).encode(), b""], ErrorCode.BAD_LEASE, 9),
        ):
            error = said_to(running, frames)
            assert (error.code, error.seq) == (code, seq), error
        holder.submit(prompt_step(1, 0))
        result = answer(holder)
        assert isinstance(result, Result)
        assert unpack(result.tokens).tolist() == [first_token(facts.vocabulary)]


def said_to(running: RunningGang, frames: list[bytes]) -> Error:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint_of(running.name, running.environment))
        socket.send_multipart(frames)
        assert socket.poll(WAIT_S * 1000)
        header, body = socket.recv_multipart()
        message = decode_body(decode_header(header).kind, body)
        assert isinstance(message, Error)
        return message


def a_scheduler_that_is_gone(running: RunningGang) -> None:
    """Killed; or there, without a ping, to find its lease ended."""
    assert test_relay_unread.test_who_does_not_read_loses_the_lease_and_nobody_else_waits, "which is the third way"
    endpoint = endpoint_of(running.name, running.environment)
    crash(endpoint, running)
    client, welcome = attached(endpoint, takeover=False)
    assert welcome.requests_dropped == 3
    with closing(client):
        client.wait_ready(WAIT_S)
        client.submit(prompt_step(1, 0))
        second, welcome = attached(endpoint, takeover=False)  # while the first says nothing
        with closing(second):
            assert welcome.requests_dropped == 1
        assert isinstance(answer(client), Result)
        bye = answer(client)
        assert isinstance(bye, Bye)
        assert bye.code == "TIMEOUT"


HERE: dict[str, Callable[[RunningGang], None]] = {
    "a step that breaks a rule": a_step_that_breaks_a_rule,
    "an operation that a state does not allow, or that a rank cannot do": an_operation_that_cannot_be,
    "a grammar's masks that do not come": masks_that_do_not_come,
    "a frame that is not of the wire": a_frame_that_is_not_of_the_wire,
    "a scheduler that vanishes, stops reading or stops pinging": a_scheduler_that_is_gone,
}


def test_every_row_is_shown_once() -> None:
    assert sorted(ROWS) == sorted([*HERE, *ON_TORCH])


@pytest.mark.parametrize("cause", HERE)
def test_what_a_gang_survives(running: RunningGang, cause: str) -> None:
    HERE[cause](running)
    serves(running)
    assert running.process.poll() is None
    assert not running.errors()
