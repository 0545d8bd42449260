"""A plain thread that polls sockets and runs what other threads post to it. It blocks when idle."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from worker.coordinator.pauses import USUAL_S

TROUBLES = 8
"""Errors after which it gives up: there is something in its way that does not go away."""


class PollThread:
    """`due()`: when, in monotonic seconds, `after()` has something to do; None if it never has. A turn that came late
    is followed by another before `after()` is called: the process was stopped or starved, and what others have sent in
    time is not all read yet. `trouble(error)`: what any of the callbacks has raised; the thread goes on. All are called
    on it.
    """

    def __init__(
        self, name: str, due: Callable[[], float | None], after: Callable[[], None],
        trouble: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._due = due
        self._after = after
        self._trouble = trouble
        self._poller = zmq.Poller()
        self._handlers: dict[zmq.Socket[bytes], Callable[[], object]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._running = True
        self._late = False
        self.troubles = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def broken(self) -> bool:
        """It has given up."""
        return self.troubles > TROUBLES

    def start(self) -> None:
        self._thread.start()

    # Any thread.

    def post(self, call: Callable[[], None]) -> None:
        """Run it on the thread, soon and in order."""
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def join(self, timeout: float) -> None:
        """After `stop`."""
        self._thread.join(timeout)
        os.close(self._wake)

    # The thread, or before it starts.

    def hear(self, socket: zmq.Socket[bytes], handler: Callable[[], object]) -> None:
        """Call it once a turn while something can be read there: who sends much holds up nobody else."""
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def deafen(self, socket: zmq.Socket[bytes]) -> None:
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def stop(self) -> None:
        """When this turn is over."""
        self._running = False

    def _run(self) -> None:
        while self._running and not self.broken:
            try:
                self._turn()
            except Exception as error:
                self.troubles += 1
                self._trouble(error)

    def _turn(self) -> None:
        due = self._due()
        for socket, _ in self._poller.poll(None if due is None else max(0, int((due - time.monotonic()) * 1000) + 1)):
            if isinstance(socket, int):
                os.eventfd_read(self._wake)
                while self._calls:
                    self._calls.popleft()()
            elif (handler := self._handlers.get(socket)) is not None:  # it may have been given up in this very turn
                handler()
        if due is None or (late := time.monotonic() - due) < 0:
            self._late = False
            return
        self._late = late > USUAL_S and not self._late
        if not self._late:
            self._after()
