"""Passing tensors between stages: rings of preallocated buffers over isend and irecv.

Nothing but payload is on the wire. Whether a step sends, and in which shape, follows from the step, which both ends
have; so both ends count the same messages, and message k uses slot k mod S on either side. The rules that keep this
right:

* A backend reads the buffer of an isend until its handle was waited on, and may drop a message whose handle is
  dropped: a slot keeps (handle, buffer), and is written again only after the wait.
* Every rank posts and waits in one order: receive hidden, send hidden, send tokens, post the receive of tokens. The
  last is waited on lazily, so no two ranks ever wait for each other.
* Steps without rows (or, for tokens, without samples) pass nothing at all.

A check of what arrives against what was announced (step, shape, dtype) would go into a row in front of each buffer,
written by `Sender.send` and read by `Receiver.wait`; gloo itself takes a short message silently and aborts the
process on a long one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.groups import Hop


class HopError(RuntimeError):
    """A transfer between stages failed: the peer died, or a time-out passed."""

    def __init__(self, hop: Hop, doing: str, step: int, cause: BaseException) -> None:
        super().__init__(f"step {step}: {doing} {hop.name}, peer rank {hop.peer}: {cause}")
        self.hop = hop.name
        self.doing = doing
        self.step = step
        self.peer = hop.peer


class _Flight(NamedTuple):
    """A transfer under way. The tensor is held because the backend holds only its address."""

    step: int
    handle: dist.Work
    tensor: Tensor


class _Ring:
    def __init__(self, hop: Hop, slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        if slots < 1:
            raise ValueError(f"{hop.name}: a ring needs at least one slot, not {slots}")
        self.hop = hop
        self.buffers = torch.zeros((slots, *shape), dtype=dtype, device=device)
        self.flights: list[_Flight | None] = [None] * slots
        self.messages = 0

    def _wait(self, slot: int, doing: str) -> Tensor | None:
        flight = self.flights[slot]
        if flight is None:
            return None
        try:
            flight.handle.wait()
        except RuntimeError as error:
            raise HopError(self.hop, doing, flight.step, error) from error
        self.flights[slot] = None
        return flight.tensor

    def _claim(self, count: int) -> tuple[int, Tensor]:
        slot = self.messages % len(self.flights)
        capacity = self.buffers.shape[1]
        assert 0 < count <= capacity, f"{self.hop.name}: {count} rows in a buffer of {capacity}"
        return slot, self.buffers[slot, :count]


class Sender(_Ring):
    """Sends [n, …] tensors, 0 < n <= shape[0], up to `slots` of them not yet taken by the peer; a further one waits.

    shape: of one buffer, (most rows, …). Raises HopError from the send that fails, or from a later one that finds out.
    """

    def send(self, step: int, tensor: Tensor) -> None:
        """Copy into the ring and start sending; the caller may overwrite `tensor` at once."""
        slot, buffer = self._claim(len(tensor))
        self._wait(slot, "sending")
        buffer.copy_(tensor)
        try:
            handle = dist.isend(buffer, self.hop.peer, group=self.hop.group)
        except RuntimeError as error:
            raise HopError(self.hop, "sending", step, error) from error
        assert handle is not None
        self.flights[slot] = _Flight(step, handle, buffer)
        self.messages += 1

    def drain(self) -> None:
        """Wait until the peer has everything."""
        for k in range(self.messages, self.messages + len(self.flights)):
            self._wait(k % len(self.flights), "sending")


class Receiver(_Ring):
    """Receives what a Sender of the same shape and dtype sends: `post` in the sender's order, then `wait` in the same
    order."""

    def __init__(self, hop: Hop, slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hop, slots, shape, dtype, device)
        self.taken = 0

    @property
    def outstanding(self) -> int:
        """Posted and not waited for."""
        return self.messages - self.taken

    def post(self, step: int, count: int) -> None:
        """Have the next message, [count, …], written into its slot when it comes. What that slot held before is
        gone."""
        slot, buffer = self._claim(count)
        assert self.flights[slot] is None, f"{self.hop.name}: {self.outstanding} receives posted, none waited for"
        try:
            handle = dist.irecv(buffer, self.hop.peer, group=self.hop.group)
        except RuntimeError as error:
            raise HopError(self.hop, "receiving", step, error) from error
        assert handle is not None
        self.flights[slot] = _Flight(step, handle, buffer)
        self.messages += 1

    def wait(self) -> Tensor:
        """The oldest posted message, a view of its slot: valid until `slots` further messages were posted."""
        tensor = self._wait(self.taken % len(self.flights), "receiving")
        assert tensor is not None, f"{self.hop.name}: wait without post"
        self.taken += 1
        return tensor


class TokenFeed:
    """Stage 0's copy of each slot's last sampled token, fed by the last stage.

    Tokens are waited for when a row reads one of them, or when the ring comes round; until then several steps may be
    under way. They are stored in the order of the steps, so a slot that has changed hands ends with its present
    owner's token.
    """

    def __init__(self, receiver: Receiver, last_tokens: Tensor) -> None:
        self.receiver = receiver
        self.last_tokens = last_tokens
        self.pending: deque[tuple[int, Tensor]] = deque()

    def expect(self, step: int, slots: Tensor) -> None:
        """Post the receive of the tokens that `step` samples for these slots (int64 [n], n > 0)."""
        if self.receiver.outstanding == len(self.receiver.flights):
            self._store_oldest()
        self.receiver.post(step, len(slots))
        self.pending.append((step, slots))

    def settle(self, step: int) -> None:
        """Return when the tokens sampled by `step` and everything before it are in `last_tokens`."""
        while self.pending and self.pending[0][0] <= step:
            self._store_oldest()

    def settle_all(self) -> None:
        while self.pending:
            self._store_oldest()

    def _store_oldest(self) -> None:
        _, slots = self.pending.popleft()
        self.last_tokens[slots] = self.receiver.wait().to(self.last_tokens.dtype)
