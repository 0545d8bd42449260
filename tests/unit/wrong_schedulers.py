"""Schedulers that are wrong in one way each: `engine_stub`, with something between it and the wire."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, cast

import msgspec
import zmq

from engine_stub.engine import Engine
from engine_stub.request import Params
from workerproto.client import Client, TimedOut
from workerproto.codec import Header, decode_body, encode_body, pack, unpack
from workerproto.masks import words_of
from workerproto.messages import Error, ErrorCode, Hello, Kind, New, Result, Sampling, Step
from workerproto.operations import Wake
from workerproto.session import Frames, Received, Session
from workerproto.states import Gang, RemoteStateError

TOKENS = 40
PROMPTS = [[*range(20)], [*range(20)], [7, 8, 9]]


class Right(Client):
    """What the others are made of: `outgoing` changes a frame, None holds it back; `session` is another `Session`."""

    session: ClassVar[type[Session]] = Session
    batches: ClassVar[int | None] = None

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, timeout=3)
        self._session = self.session()
        self.sent = 0  # steps

    @classmethod
    def run(cls, endpoint: str) -> None:
        with cls(endpoint) as client:
            client.generate()

    def generate(self) -> None:
        Engine(self, batches=self.batches).generate(PROMPTS[:1], Params(2))
        Engine(self, batches=self.batches).generate(PROMPTS, Params(TOKENS))

    def outgoing(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes] | None:
        return header, body

    def _send(self, frames: Frames) -> None:
        names = ("magic", "version", "kind", "flags", "epoch", "lease", "seq")
        header = dict(zip(names, struct.unpack("<4sBBHIIQ", frames[0]), strict=True))
        self.sent += header["kind"] == Kind.STEP
        changed = self.outgoing(header, frames[1])
        if changed is not None:
            super()._send((struct.pack("<4sBBHIIQ", *changed[0].values()), changed[1]))


def header_with(**changes: Any) -> type[Right]:
    """Overwrites these fields in every step from the third on; a function is given what is there."""

    class Changed(Right):
        def outgoing(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
            if header["kind"] == Kind.STEP and self.sent > 2:
                header |= {name: to(header[name]) if callable(to) else to for name, to in changes.items()}
            return header, body

    return Changed


def step_with(change: Callable[[Step], Step | bytes], after: int = 2) -> type[Right]:
    """Changes the body of every step behind the first two."""

    class Changed(Right):
        def outgoing(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
            if header["kind"] == Kind.STEP and self.sent > after:
                changed = change(cast(Step, decode_body(Kind.STEP, body)))
                body = changed if isinstance(changed, bytes) else encode_body(changed)
            return header, body

    return Changed


def without(kind: Kind) -> type[Right]:
    class Silent(Right):
        def outgoing(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes] | None:
            return None if header["kind"] == kind else (header, body)

    return Silent


class WakesTheAwake(Right):
    def outgoing(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if header["kind"] == Kind.STEP and self.sent == 3:
            return header | {"kind": int(Kind.CONTROL)}, encode_body(Wake())
        return header, body


def added(member: str, change: Callable[[list[int]], list[int]]) -> type[Right]:
    """Changes a packed member where it is not empty."""

    def changed(step: Step) -> Step:
        values = unpack(getattr(step, member)).tolist()
        return msgspec.structs.replace(step, **{member: pack(change(values) if values else values)})

    return step_with(changed)


def first_new(**changes: Any) -> type[Right]:
    def changed(step: Step) -> Step:
        new = [msgspec.structs.replace(new, **changes) for new in step.new]
        return msgspec.structs.replace(step, new=new)

    return step_with(changed, after=0)


class OneLeaseForAll(Right):
    class session(Session):  # takes the place of a class attribute
        def __init__(self) -> None:
            super().__init__()
            self.lease = 7


class LeavesWithoutBye(Right):
    def close(self) -> None:
        self._socket.close()


class ThreeFrames(Right):
    def _send(self, frames: Frames) -> None:
        super()._send(frames)
        if self.sent == 3:
            self._socket.send_multipart([*frames, b""])


class UsesMoreCredit(Right):
    """Reads one step more than there is into the facts."""

    batches = 8

    class session(Session):
        @property
        def credit(self) -> int:
            return super().credit + 1 if self.facts else 0

    def generate(self) -> None:
        facts = self.wait_ready()
        limits = msgspec.structs.replace(facts.limits, steps_in_flight=facts.limits.steps_in_flight + 1)
        self._session.facts = msgspec.structs.replace(facts, limits=limits)
        super().generate()


class SharesAnyBlock(Right):
    """Takes every block for the end of a prefix."""

    def generate(self) -> None:
        facts = self.wait_ready()
        self._session.facts = msgspec.structs.replace(
            facts, kv=msgspec.structs.replace(facts.kv, alignment=facts.kv.block_size)
        )
        super().generate()


class Credulous(Right):
    """Takes no notice of what breaks the spec, nor of the end of its lease."""

    class session(Session):
        def receive(self, frames: list[bytes]) -> tuple[Received | None, Frames | None]:
            if frames[0][5:6] in (bytes([Kind.BYE]), bytes([Kind.ERROR])):
                return None, None
            try:
                return super().receive(frames)
            except (RemoteStateError, ValueError):
                return None, None


class StartsWithoutReady(Right):
    def generate(self) -> None:
        self._send((Header(Kind.STEP, 0, self.epoch, self._session.lease, 1).encode(), encode_body(Step())))
        self.receive(3)


class DeafToEvents(Right):
    class session(Session):
        def _take_event(self, header: Header, event: Any) -> None:
            pass


class RefusedForEver(Right):
    """Finishes whom nobody knows, again and again; four seconds, lest it stay in the test's process."""

    def generate(self) -> None:
        self.wait_ready()
        deadline, resync = time.monotonic() + 4, False
        while time.monotonic() < deadline:
            self.submit(Step(finished=pack([99])), resync=resync)
            self.receive(4)
            resync = True


class NeverDone(Right):
    """Sends steps without rows; four seconds, as above."""

    def generate(self) -> None:
        self.wait_ready()
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            self.submit(Step())
            self.receive(4)


class StopsHalfWay(Right):
    """Sends its first step and no more; four seconds, lest it stay in the test's process."""

    def generate(self) -> None:
        self.wait_ready()
        self.submit(Step())
        deadline = time.monotonic() + 4
        while (left := deadline - time.monotonic()) > 0:
            with suppress(TimedOut):
                self.receive(left)


class GoesOnWhileDraining(Right):
    class session(Session):
        def _take_event(self, header: Header, event: Any) -> None:
            super()._take_event(header, event)
            if self.state is Gang.DRAINING:
                self.state = Gang.READY


class StaysInItsEpoch(Right):
    def outgoing(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return header | {"epoch": min(header["epoch"], 1)}, body


class TakesBackWhatFailedAnswered(Right):
    """Error BAD_EPOCH takes back the step of the new epoch that has the sequence."""

    class session(Session):
        def _take_error(self, error: Error) -> Received:
            super()._take_error(msgspec.structs.replace(error, code=ErrorCode.BAD_SEQUENCE))
            return Received(error.seq, error)


class WaitsForever(Right):
    """For a host that is gone; eight seconds, lest it stay in the test's process."""

    class session(Session):
        @property
        def lease_timeout_s(self) -> float:
            return 8.0

        @lease_timeout_s.setter
        def lease_timeout_s(self, _: float) -> None:
            pass


class Masked(Right):
    """Right, and draws by a grammar: even tokens alone."""

    def generate(self) -> None:
        facts = self.wait_ready()
        mask = pack([0x55555555] * words_of(facts.vocabulary))
        new, position, count = [New(1, pack([1, 2, 3]), pack([0, 1]), 0, Sampling())], 0, 3
        for _ in range(5):
            row = {"ids": 1, "positions": position, "counts": count, "row_flags": 1, "grant_counts": 0}
            self.submit(Step(new, **{member: pack([value]) for member, value in row.items()}), sample_follows=True)
            self.sample(pack([0]), mask)
            message = self.receive(4).message
            assert isinstance(message, Result)
            assert unpack(message.tokens)[0] % 2 == 0
            new, position, count = [], position + count, 1


def never_resyncs(_: int) -> int:
    return 0


def asks_again_on_the_same_socket(endpoint: str) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        for lease in (1001, 1002):
            socket.send_multipart([Header(Kind.HELLO, lease=lease).encode(), encode_body(Hello())])
            assert socket.poll(3000)
            socket.recv_multipart()


def does_nothing(_: str) -> None:
    pass


MANY_LOGPROBS = Sampling(logprobs=1000)


def waits_to_attach(endpoint: str) -> None:
    """Holds on to a socket whose Hello was refused."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart([Header(Kind.HELLO, lease=1003).encode(), encode_body(Hello())])
        socket.recv_multipart()
        socket.poll(2000)


def resumed_with_other_tokens() -> type[Right]:
    def changed(step: Step) -> Step:
        resumed = [msgspec.structs.replace(r, tokens=pack([*unpack(r.tokens)[:-1], 999])) for r in step.resumed]
        return msgspec.structs.replace(step, resumed=resumed)

    return step_with(changed)
