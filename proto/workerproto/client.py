"""The socket under a `Session`: what a scheduler in Python uses to drive a gang.

    with Client(endpoint_of("demo", os.environ)) as gang:
        facts = gang.wait_ready()
        gang.submit(Step(...))
        answer = gang.receive()

Not for several threads. Pings are exchanged inside `receive`: a scheduler that stays away from it for longer than the
lease's time-out loses the lease.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from workerproto.curve import CurveKeys
from workerproto.fields import EMPTY, Packed
from workerproto.frames import receive
from workerproto.messages import Bye, Error, ErrorCode, Event, Facts, Kind, Step, Welcome
from workerproto.operations import Control
from workerproto.session import Frames, Received, Session
from workerproto.states import Gang, RemoteStateError

_PARTING_S = 0.2
_LOOK_S = 0.5
"""While nothing comes: how often to look whether the peer is still there."""
_LOOK_EARLY_S = 0.05
"""The same before the lease is held: a gang that does not take the client's key never answers."""
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.SNDMORE | zmq.DONTWAIT)
MAX_FRAME_BYTES = 64 * 2**20
"""Hard limit of one frame; a peer that sends more is disconnected."""


class ClientError(ValueError):
    """The gang cannot be used, for a reason that the message gives."""


class NoSuchGang(ClientError):
    """Nothing listens there."""


class HandshakeFailed(ClientError):
    """Somebody listens there, and did not take this client's key, or has another than the client was told."""


class LeaseHeld(ClientError):
    """Another scheduler drives the gang."""


class LeaseLost(ClientError):
    """The lease ended: taken over, timed out, or the gang said Bye."""


class GangFailed(ClientError):
    """The gang failed; `event` has the cause."""

    def __init__(self, event: Event) -> None:
        fault = event.fault
        where = "" if fault is None or fault.rank is None else f" on rank {fault.rank}"
        what = "" if fault is None else f": {fault.message or fault.signal or f'exit code {fault.code}'}"
        super().__init__(f"the gang failed{where}{what}")
        self.event = event


class TimedOut(ClientError):
    """No answer within the caller's limit. The lease, if held, is still held."""


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Raises NoSuchGang where an ipc endpoint is not there, ClientError for what is none."""
    path = endpoint.removeprefix("ipc://")
    try:
        if path != endpoint and not Path(path).exists():
            raise NoSuchGang(f"no gang listens at {endpoint}")
        socket.connect(endpoint)
    except (zmq.ZMQError, OSError) as error:
        reason = f"no connection to {endpoint!r}: {error.strerror}"
        raise ClientError(f"{reason}; an endpoint is ipc://PATH or tcp://HOST:PORT") from None


class Client:
    """One lease on the gang at `endpoint`, from `attach` (or `with`) to `close`. To attach again, make a new one."""

    def __init__(
        self, endpoint: str, *, name: str = "", takeover: bool = False, timeout: float = 10.0,
        keys: CurveKeys | None = None,
    ) -> None:  # fmt: skip
        """`name` is for people who look at the gang's status; `timeout`, seconds, bounds `attach`; `keys`: over tcp."""
        self.endpoint = endpoint
        self._name = name
        self._takeover = takeover
        self._timeout = timeout
        self._session = Session()
        self._waiting: deque[Received] = deque()
        # A fresh socket a lease: what an old one still queues would reach a newly bound coordinator.
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Credit bounds both queues; the marks only keep a broken peer from filling memory.
        self._socket.setsockopt(zmq.SNDHWM, 1024)
        self._socket.setsockopt(zmq.RCVHWM, 1024)
        if keys is not None:
            keys.apply(self._socket)
        self._poller = zmq.Poller()  # kept: `Socket.poll` makes one each time
        self._poller.register(self._socket, zmq.POLLIN)
        self._endings: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._next_ping = 0.0
        self._silent_since = 0.0

    @property
    def facts(self) -> Facts | None:
        """What the gang is; None before it is READY."""
        return self._session.facts

    @property
    def state(self) -> Gang:
        return self._session.state

    @property
    def epoch(self) -> int:
        return self._session.epoch

    @property
    def failure(self) -> Event | None:
        """Event FAILED, from then on until the gang is READY again; never if Bye follows instead."""
        return self._session.failure

    @property
    def unanswered(self) -> int:
        """Steps sent whose answer has not come."""
        return self._session.unanswered

    @property
    def credit(self) -> int:
        """Steps that `submit` takes before the next answer."""
        return self._session.credit

    def __enter__(self) -> Self:
        try:
            self.attach()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def attach(self) -> Welcome:
        """Get the lease. Raises NoSuchGang, HandshakeFailed, LeaseHeld, TimedOut, or another ClientError."""
        connect(self._socket, self.endpoint)
        self._send(self._session.hello(self._name, self._takeover))
        received = self._next(self._timeout, f"no answer from {self.endpoint} within {self._timeout:g} s")
        message = received.message
        if isinstance(message, Error):
            held = message.code is ErrorCode.LEASE_HELD
            raise (LeaseHeld if held else ClientError)(f"{self.endpoint}: {message.message or message.code}")
        if not isinstance(message, Welcome):
            raise LeaseLost(f"{self.endpoint} answered Hello with {type(message).__name__}")
        return message

    def wait_ready(self, timeout: float | None = None) -> Facts:
        """Return once the gang is READY. Raises TimedOut, GangFailed, LeaseLost.

        What else comes meanwhile is kept for `receive`.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        while self.state is not Gang.READY or self.facts is None:
            left = None if limit is None else limit - time.monotonic()
            received = self._next(left, f"the gang is {self.state}, not READY, after {timeout} s")
            if isinstance(received.message, Bye) and self.failure is not None:
                raise GangFailed(self.failure)
            if not isinstance(received.message, Event):
                self._waiting.append(received)
        return self.facts

    def submit(self, step: Step, *, resync: bool = False, sample_follows: bool = False) -> int:
        """Send a step and return its sequence, by which its one answer will be known.

        `resync` marks the step that goes on after a refusal, `sample_follows` one that waits for a grammar's masks:
        `sample` has to come next. Raises LocalStateError without lease, READY gang or credit, or while a step waits.
        """
        seq, frames = self._session.step(step, resync, sample_follows)
        self._send(frames)
        return seq

    def sample(self, rows: Packed = EMPTY, masks: Packed = EMPTY) -> int:
        """Send the masks of the step that waits for them, see `messages.Sample`, and return their sequence, by which a
        refusal is known: the step then waits for others. Raises LocalStateError if no step waits.
        """
        seq, frames = self._session.sample(rows, masks)
        self._send(frames)
        return seq

    def control(self, operation: Control) -> int:
        """Send an operation and return its sequence; its one answer is Done or Refused, or an Error before it counted.

        Raises LocalStateError without lease, in a state of the gang that takes none, or while another is unanswered.
        """
        seq, frames = self._session.control(operation)
        self._send(frames)
        return seq

    def receive(self, timeout: float | None = None) -> Received:
        """The next answer or event, and the sequence it answers; `timeout` in seconds, None without limit.

        Raises TimedOut; LeaseLost once the lease is over (of which Bye or an Error may have told before);
        RemoteStateError if the peer breaks the spec.
        """
        if self._waiting:
            return self._waiting.popleft()
        return self._next(timeout, f"nothing came within {timeout} s")

    def close(self) -> None:
        """Say Bye if there is someone to say it to, and close the socket. Closing twice is harmless."""
        if self._socket.closed:
            return
        try:
            if self._session.held:
                self._part()
        finally:
            self._socket.disable_monitor()
            self._socket.close()

    def _part(self) -> None:
        """Say Bye, and wait a moment until it has been taken: whoever attaches next then finds the lease free. A Ping
        of an ended lease is answered by an Error, which shows it.
        """
        self._send(self._session.bye())
        self._send(self._session.ping())
        limit = time.monotonic() + _PARTING_S
        while (left := limit - time.monotonic()) > 0 and self._socket.poll(int(left * 1000)):
            header, *_ = self._socket.recv_multipart()
            if header[5:6] == bytes([Kind.ERROR]):
                return

    def _next(self, timeout: float | None, overdue: str) -> Received:
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = self._keep_alive()
            if limit is not None:
                wait = min(wait, max(0.0, limit - time.monotonic()))
            look = _LOOK_S if self._session.held else _LOOK_EARLY_S
            if not self._poller.poll(int(min(wait, look) * 1000 + 0.999)):
                self._look_for_peer()
                if limit is not None and time.monotonic() >= limit:
                    raise TimedOut(overdue)
                continue
            self._silent_since = 0.0
            received, reply = self._session.receive(receive(self._socket))
            if reply is not None:
                self._send(reply)
            if received is not None:
                return received

    def _look_for_peer(self) -> None:
        """A lease is bound to its connection: if the peer's process is gone, so is the lease, and no ping need wait."""
        if self._endings.poll(0) and not self._socket.poll(0):
            if self._session.held:
                self._session.lapse()
                raise LeaseLost(f"{self.endpoint} has closed the connection: its process is gone")
            if recv_monitor_message(self._endings)["event"] & _HANDSHAKE_FAILED:
                raise HandshakeFailed(
                    f"{self.endpoint} has refused the connection: does it know this client's key, and is its own the "
                    "right one?"
                )
            raise NoSuchGang(f"{self.endpoint} has closed the connection without an answer")

    def _keep_alive(self) -> float:
        """Ping when it is due. Returns seconds until the next is; raises LeaseLost if there is no one left."""
        session, now = self._session, time.monotonic()
        if session.ended:
            raise LeaseLost(f"the lease on {self.endpoint} is over")
        if not session.held:
            return 60.0
        # What came while the caller was away has not been read yet, and is a sign of life.
        silent = now - self._silent_since if self._silent_since else 0.0
        if silent >= session.lease_timeout_s and not self._socket.poll(0):
            session.lapse()
            raise LeaseLost(f"{self.endpoint} has not answered for {silent:.1f} s")
        if now >= self._next_ping:
            self._send(session.ping())
            self._silent_since = self._silent_since or now
            self._next_ping = now + session.lease_timeout_s / 3
        return self._next_ping - now

    def _send(self, frames: Frames) -> None:
        try:
            self._socket.send(frames[0], _MORE)
            self._socket.send(frames[1], _NOW)
        except zmq.Again:
            raise RemoteStateError(f"{self.endpoint} does not read what is sent to it") from None
