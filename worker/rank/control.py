"""The control socket, on the main thread; the compute thread sends by it and waits on it from the outside."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
import zmq.asyncio

from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import FromRank, KvConfig, Proceed, ToRank, decode_to_rank, encode

M = TypeVar("M", Proceed, KvConfig)


class Control:
    """Made on the main thread inside its loop. It has a context of its own, to be able to wait for its last word."""

    def __init__(self, endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 500  # ms: the last word of a rank that fails
        self._socket.connect(endpoint)
        self._for_compute: queue.SimpleQueue[Proceed | KvConfig] = queue.SimpleQueue()

    # Main thread.

    async def send(self, message: FromRank) -> None:
        """Silent once closed: other threads may still report."""
        if self._socket.closed:
            return
        await self._socket.send(encode(message))

    async def receive(self, handle: Callable[[ToRank], None]) -> None:
        """For ever: what the compute thread waits for goes to it, the rest to `handle`."""
        while True:
            message = decode_to_rank(await self._socket.recv())
            if isinstance(message, Proceed | KvConfig):
                self._for_compute.put(message)
            else:
                handle(message)

    def close(self) -> None:
        """Returns when all has left, at the latest after the linger time."""
        self._socket.close()
        self._context.term()

    # Any thread.

    def report(self, message: FromRank) -> None:
        """Returns before it is sent."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self.send(message)))

    def wait_for(self, kind: type[M], deadline: float, what: str) -> M:
        """The next message, which must be of this kind. Raises Failure at the deadline (monotonic seconds, or inf)."""
        try:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            message = self._for_compute.get(timeout=left)
        except queue.Empty:
            raise Failure(ExitCode.LIMIT, f"the coordinator did not send {what} within the start-up limit") from None
        assert isinstance(message, kind)
        return message


def tell(endpoint: str, message: FromRank) -> None:
    """The only word of a rank that does not come to have a `Control`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 500  # ms, as above
        socket.connect(endpoint)
        socket.send(encode(message))
