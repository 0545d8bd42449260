"""A relay with the test in all the other places: schedulers, and ranks that answer when they are told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from worker.config import FRAME_BYTES
from worker.coordinator.relay import Relay
from worker.gang_messages import seal, unseal
from worker.run_files import RunFiles
from workerproto.codec import Header, decode_body, decode_header, encode_body
from workerproto.messages import (
    Bye,
    Cache,
    Error,
    ErrorCode,
    Facts,
    Hello,
    Kind,
    Limits,
    Message,
    Result,
    Step,
    Welcome,
)
from workerproto.operations import Control
from workerproto.states import Gang

EPOCH, CREDIT, LIMIT_MS = 7, 3, 5000
STEP = encode_body(Step())
FACTS = Facts(
    "m",
    10,
    100,
    "w",
    True,
    Cache(4, 16, "float32", "NHD", [1, 1], [9, 9], 16, 16),
    1,
    2,
    Limits(CREDIT, 8, 8, 8, FRAME_BYTES, 5),
    [{}, {}],
)


class Scheduler:
    def __init__(self, context: zmq.Context[Any], endpoint: str, lease: int) -> None:
        self.lease, self.seq = lease, 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def send(self, kind: Kind, body: bytes = b"", *, seq: int = 0, epoch: int = EPOCH, flags: int = 0) -> None:
        self.socket.send_multipart([Header(kind, flags, epoch, self.lease, seq).encode(), body])

    def hello(self, *, takeover: bool = False) -> None:
        self.send(Kind.HELLO, encode_body(Hello(f"client {self.lease}", [], takeover)), epoch=0)

    def step(self, body: bytes = STEP, flags: int = 0) -> None:
        self.seq += 1
        self.send(Kind.STEP, body, seq=self.seq, flags=flags)

    def control(self, operation: Control) -> None:
        self.seq += 1
        self.send(Kind.CONTROL, encode_body(operation), seq=self.seq)

    def receive(self) -> tuple[Header, Message | None]:
        assert self.socket.poll(LIMIT_MS), "nothing came"
        frame, body = self.socket.recv_multipart()
        header = decode_header(frame)
        return header, decode_body(header.kind, body)

    def expect(self, kind: type[Message]) -> Any:
        message = self.receive()[1]
        assert isinstance(message, kind), message
        return message

    def attach(self, *, takeover: bool = False) -> Welcome:
        self.hello(takeover=takeover)
        welcome: Welcome = self.expect(Welcome)
        return welcome

    def in_order(self) -> None:
        """What was sent before has been taken: a ping comes back after it."""
        self.send(Kind.PING)
        assert self.receive()[0].kind is Kind.PONG

    def bye(self) -> None:
        """Taken before anybody else's hello: the sockets of two schedulers have no order between them."""
        self.send(Kind.BYE, encode_body(Bye()))
        self.send(Kind.PING)
        assert self.expect(Error).code == ErrorCode.LEASE_ENDED


class House:
    """A relay, two ranks (1 answers), and any number of schedulers."""

    def __init__(self, run_dir: Path, lease_timeout: float, sample_timeout: float = 30.0) -> None:
        self.files = RunFiles("g", {"RANKD_RUN_DIR": str(run_dir)}, "01234567", EPOCH)
        self.files.folder.mkdir()
        self.context: zmq.Context[Any] = zmq.Context()
        self.errors: list[BaseException] = []
        self.configured: list[bytes] = []
        self.updates_lost = 0
        self.relay = Relay(self.context, self.files, 2, 1, CREDIT, lease_timeout, sample_timeout, self)
        self.ranks = [self.context.socket(zmq.DEALER) for _ in range(2)]
        for rank, socket in enumerate(self.ranks):
            socket.connect(self.files.steps_endpoint(rank))
            socket.send(b"")  # as a rank does
        self.answers = self.context.socket(zmq.PUSH)
        self.answers.connect(self.files.answers_endpoint(1))
        self.relay.start()
        self.leases = 0
        self._taken = 0  # gang sequence of the last frame that the ranks have

    # What the relay says to the main thread.

    def relay_failed(self, error: BaseException) -> None:
        self.errors.append(error)

    def configure_kv(self, body: bytes) -> None:
        self.configured.append(body)

    def update_lost(self) -> None:
        self.updates_lost += 1

    # What the main thread asks for.

    def enter(self, state: Gang, **more: Any) -> None:
        """Returns when it has, so that whoever attaches next finds that state."""
        self.do(lambda: self.relay.enter(state, **more))

    def do(self, act: Callable[[], None]) -> None:
        """On the relay's thread; returns when it is done."""
        done = threading.Event()

        def call() -> None:
            act()
            done.set()

        self.relay.post(call)
        assert done.wait(LIMIT_MS / 1000)

    def settle(self, kind: Kind, body: bytes, *, moved: bool = False) -> None:
        self.do(lambda: self.relay.settle(kind, body, moved=moved))

    def ready(self) -> None:
        self.enter(Gang.READY, facts=FACTS)

    def scheduler(self) -> Scheduler:
        self.leases += 1
        return Scheduler(self.context, self.files.scheduler_endpoint, self.leases)

    def attached(self) -> Scheduler:
        scheduler = self.scheduler()
        scheduler.attach()
        return scheduler

    def take(self) -> tuple[int, int, bytes]:
        """(kind, gang sequence, body), the same on both ranks."""
        got = []
        for socket in self.ranks:
            assert socket.poll(LIMIT_MS), "no rank got anything"
            got.append(socket.recv_multipart())
        assert got[0] == got[1]
        envelope = unseal(got[0][0])
        assert envelope.epoch == EPOCH
        self._taken = envelope.seq
        return envelope.kind, envelope.seq, got[0][1]

    def answer(self, seq: int, kind: int = Kind.RESULT, body: bytes | None = None) -> None:
        """Behind what it answers: that is taken first, if it was not."""
        while self._taken < seq:
            self.take()
        body = encode_body(Result()) if body is None else body
        self.answers.send_multipart([seal(kind, 0, EPOCH, seq), body])

    def idle(self) -> bool:
        return not any(socket.poll(50) for socket in self.ranks)
