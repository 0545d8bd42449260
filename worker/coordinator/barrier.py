"""An operation in the gang's order: it waits until all before it is answered; nothing is taken until its own answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from worker.coordinator.lease import Lease
from worker.coordinator.stream import Stream
from workerproto.messages import Kind
from workerproto.states import Gang


class Operation(NamedTuple):
    """`settled`: how an operator is answered, whose operation has no lease."""

    body: bytes
    lease: Lease | None = None
    lease_seq: int = 0
    settled: Callable[[Kind, bytes], None] | None = None


class Barrier:
    """Of one epoch. operation: None while there is none. begun: it is the ranks' now, and will be answered whatever
    becomes of whoever asked for it.
    """

    def __init__(self, stream: Stream, configure_kv: Callable[[bytes], None]) -> None:
        self.operation: Operation | None = None
        self.begun = False
        self._stream = stream
        self._configure_kv = configure_kv

    def put_up(self, operation: Operation, state: Gang) -> None:
        self.operation = operation
        self.begin(state)

    def begin(self, state: Gang) -> None:
        """If all before it is answered, a reset that is on its way too."""
        operation = self.operation
        if operation is None or self.begun or self._stream.in_flight:
            return
        self.begun = True
        if state is Gang.AWAITING_KV:  # its ranks take no frames yet
            self._stream.expect(0, operation.lease, operation.lease_seq)
            self._configure_kv(operation.body)
        else:
            self._stream.send(Kind.CONTROL, 0, operation.body, operation.lease, operation.lease_seq)

    def take_down(self) -> Operation:
        """It is answered."""
        operation, self.operation, self.begun = self.operation, None, False
        assert operation is not None
        self._stream.answered()
        return operation

    def leave(self) -> None:
        """The lease has ended: what it asked for, and has not begun, nobody waits for."""
        if self.operation is not None and self.operation.lease is not None and not self.begun:
            self.operation = None
