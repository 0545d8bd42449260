"""The client on real sockets, against the fake worker."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from workerproto.client import Client, ClientError, GangFailed, LeaseHeld, LeaseLost, NoSuchGang, TimedOut
from workerproto.codec import Header, encode_body, pack
from workerproto.frames import MOST, receive
from workerproto.messages import Bye, Event, Kind, New, Result, Sampling, Step, Welcome
from workerproto.rundir import endpoint_of
from workerproto.states import Gang
from workerproto.testing.fake_gang import FakeGang
from workerproto.testing.fake_worker import FakeWorker

LIMIT = 20.0
PROMPT = Step(
    [New(1, pack([1, 2, 3]), pack([0]), 0, Sampling())],
    ids=pack([1]), positions=pack([0]), counts=pack([3]), row_flags=pack([1]), grant_counts=pack([0]),
)  # fmt: skip


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeWorker("tcp://127.0.0.1:*") as worker:
        yield worker


def test_a_name_leads_to_a_gang(run_dir: Path) -> None:
    (run_dir / "demo").mkdir()
    endpoint = endpoint_of("demo", os.environ)
    with FakeWorker(endpoint), Client(endpoint) as client:
        assert client.wait_ready(LIMIT).model == "fake"


def test_no_such_gang(run_dir: Path) -> None:
    with pytest.raises(NoSuchGang, match=f"no gang listens at ipc://{run_dir}/demo/sched"):
        Client(endpoint_of("demo", os.environ)).__enter__()


def test_nobody_answers() -> None:
    with zmq.Context.instance().socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(TimedOut, match=r"no answer from .* within 0\.05 s"):
            Client(f"tcp://127.0.0.1:{port}", timeout=0.05).__enter__()


def test_one_scheduler_at_a_time_unless_it_takes_over(worker: FakeWorker) -> None:
    with Client(worker.endpoint, name="first") as first:
        first.submit(Step())
        assert isinstance(first.receive(LIMIT).message, Result)
        with pytest.raises(LeaseHeld, match="another scheduler holds the gang"):
            Client(worker.endpoint, name="second").__enter__()
        with Client(worker.endpoint, name="third", takeover=True) as third:
            bye = first.receive(LIMIT).message
            assert isinstance(bye, Bye)
            assert bye.code == "TAKEOVER"
            with pytest.raises(LeaseLost):
                first.receive(LIMIT)
            third.submit(Step())
            assert third.receive(LIMIT).seq == 1


def test_the_lease_is_free_after_bye(worker: FakeWorker) -> None:
    for _ in range(3):
        with Client(worker.endpoint) as client:
            client.submit(Step())
            client.receive(LIMIT)


def test_a_takeover_says_how_many_requests_it_dropped(worker: FakeWorker) -> None:
    with Client(worker.endpoint) as first:
        first.submit(PROMPT)
        first.receive(LIMIT)
        second = Client(worker.endpoint, takeover=True)
        assert second.attach().requests_dropped == 1
        second.close()


def test_it_waits_for_a_gang_that_loads() -> None:
    with FakeWorker("tcp://127.0.0.1:*", FakeGang(ready=False)) as worker, Client(worker.endpoint) as client:
        with pytest.raises(TimedOut, match="the gang is LOADING, not READY"):
            client.wait_ready(0.05)
        worker.tell(FakeGang.become_ready)
        assert client.wait_ready(LIMIT).vocabulary == 1000


def test_a_gang_that_fails_while_it_loads() -> None:
    with FakeWorker("tcp://127.0.0.1:*", FakeGang(ready=False)) as worker, Client(worker.endpoint) as client:
        worker.tell(lambda gang: gang.fail("no such weights", code=65, rank=1))
        with pytest.raises(GangFailed, match="the gang failed on rank 1: no such weights") as caught:
            client.wait_ready(LIMIT)
        assert isinstance(caught.value.event, Event)


def test_pings_keep_a_lease_that_has_nothing_to_say() -> None:
    """Three time-outs pass without a step or an answer; the gang would end the lease, and so would the client."""
    with FakeWorker("tcp://127.0.0.1:*", FakeGang(lease_timeout_ms=150)) as worker, Client(worker.endpoint) as client:
        worker.tell(FakeGang.hold_back)
        client.submit(Step())
        with pytest.raises(TimedOut):
            client.receive(0.5)
        worker.tell(FakeGang.release)
        assert client.receive(LIMIT).seq == 1


def test_a_gang_that_went_silent_is_lost() -> None:
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def welcome() -> None:
            peer, header, _ = router.recv_multipart()
            lease = int.from_bytes(header[12:16], "little")
            body = encode_body(Welcome(Gang.LOADING, 100))
            router.send_multipart([peer, Header(Kind.WELCOME, 0, 1, lease).encode(), body])

        thread = threading.Thread(target=welcome)
        thread.start()
        with Client(f"tcp://127.0.0.1:{port}") as client:
            thread.join(LIMIT)
            with pytest.raises(LeaseLost, match="has not answered for"):
                client.receive(LIMIT)
            with pytest.raises(LeaseLost, match="is over"):
                client.receive(LIMIT)


def test_a_peer_that_is_killed_is_missed_at_once(run_dir: Path) -> None:
    """Its lease's time-out is longer than what this waits; what it had sent is still read."""
    command = [sys.executable, "-m", "workerproto.testing.fake_worker", "--name", "demo"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    endpoint = endpoint_of("demo", os.environ)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as peer:
        try:
            deadline = time.monotonic() + LIMIT
            while not Path(endpoint.removeprefix("ipc://")).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with Client(endpoint) as client:
                client.wait_ready(LIMIT)
                client.submit(Step())
                assert client.receive(LIMIT).seq == 1
                peer.kill()
                began = time.monotonic()
                with pytest.raises(LeaseLost, match="its process is gone"):
                    client.receive(LIMIT)
                assert time.monotonic() - began < 3, "a second, and time for others"
        finally:
            peer.kill()


def test_every_reason_is_one_kind_of_error() -> None:
    assert all(issubclass(kind, ClientError) for kind in (NoSuchGang, LeaseHeld, LeaseLost, GangFailed, TimedOut))
    assert issubclass(ClientError, ValueError)


def test_closing_twice_is_harmless(worker: FakeWorker) -> None:
    client = Client(worker.endpoint)
    client.close()
    client.close()


def test_frames_that_nobody_reads_are_counted_and_not_copied() -> None:
    with zmq.Context.instance().socket(zmq.PAIR) as ours, zmq.Context.instance().socket(zmq.PAIR) as theirs:
        ours.bind("inproc://frames")
        theirs.connect("inproc://frames")
        theirs.send_multipart([b"a", b"", *[b"c"] * 30])
        theirs.send(b"next")
        assert receive(ours) == [b"a", b"", *[b"c"] * (MOST - 2), *[b""] * (32 - MOST)]
        assert receive(ours) == [b"next"]
