"""Passing tensors between stages: rings of preallocated buffers over isend and irecv.

Whether a step sends, and in which shape, follows from the step, which both ends have; so both ends count the same
messages, and message k uses slot k mod S on either side. The rules that keep this right:

* A backend reads the buffer of an isend until its handle was waited on, and may drop a message whose handle is
  dropped: a slot keeps (handle, buffer), and is written again only after the wait.
* Every rank posts and waits in one order: receive hidden, send hidden, send tokens, post the receive of tokens. The
  last is waited on lazily, so no two ranks ever wait for each other.
* Steps without rows (or, for tokens, without samples) pass nothing at all.

On the CPU a header goes in front of each payload, in the same message, and what arrives is held against what the step
says. gloo would take a short message silently, and abort the process on one that is longer than what was posted; so a
whole slot is always posted, and no peer that was made for the same sizes can send more. (On CUDA a look at a header
would be a wait for the device: there the sizes are those of the step, and nothing else is checked.)
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.groups import Hop

_HEADER = struct.Struct("<4sIQIII")  # magic, dtype, step, rows, bytes of a row, crc32 of the payload or 0
_HEADER_BYTES = 64  # so that payloads stay aligned
_MAGIC = b"RKHP"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


class HopError(RuntimeError):
    """A transfer between stages failed: the peer died, or a time-out passed."""

    def __init__(self, hop: Hop, doing: str, step: int, cause: BaseException | str) -> None:
        super().__init__(f"step {step}: {doing} {hop.name}, peer rank {hop.peer}: {cause}")
        self.hop = hop.name
        self.doing = doing
        self.step = step
        self.peer = hop.peer


class HopMismatch(HopError):
    """What arrived is not what the step says: the two ends do not see the same stream."""


class _Flight(NamedTuple):
    """A transfer under way. The tensor is held because the backend holds only its address."""

    step: int
    handle: dist.Work
    tensor: Tensor


class _Ring:
    """checksum: of every payload, on the CPU; both ends must be made alike."""

    def __init__(
        self, hop: Hop, slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *,
        checksum: bool = False,
    ) -> None:  # fmt: skip
        if slots < 1:
            raise ValueError(f"{hop.name}: a ring needs at least one slot, not {slots}")
        self.hop = hop
        self.dtype = dtype
        self.checksum = checksum
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.head = _HEADER_BYTES if device.type == "cpu" else 0
        self.slots = torch.zeros((slots, self.head + shape[0] * self.row_bytes), dtype=torch.uint8, device=device)
        self.buffers = [slot[self.head :].view(dtype).view(shape) for slot in self.slots]
        self.flights: list[_Flight | None] = [None] * slots
        self.messages = 0

    def _wait(self, slot: int, doing: str) -> _Flight | None:
        flight = self.flights[slot]
        if flight is None:
            return None
        try:
            flight.handle.wait()
        except RuntimeError as error:
            raise HopError(self.hop, doing, flight.step, error) from error
        self.flights[slot] = None
        return flight

    def _claim(self, count: int) -> tuple[int, Tensor]:
        slot = self.messages % len(self.flights)
        capacity = len(self.buffers[slot])
        assert 0 < count <= capacity, f"{self.hop.name}: {count} rows in a buffer of {capacity}"
        return slot, self.buffers[slot][:count]

    def _end(self, count: int) -> int:
        """Of a message of so many rows, in its slot."""
        return self.head + count * self.row_bytes

    def _bytes(self, slot: int) -> memoryview:
        """Of a slot on the CPU, where it lies now: a gang that has slept has other memory under the same tensors, and
        `numpy()` would forbid that."""
        whole = self.slots[slot]
        return memoryview((ctypes.c_ubyte * whole.numel()).from_address(whole.data_ptr())).cast("B")

    def _checksum(self, slot: int, count: int) -> int:
        return zlib.crc32(self._bytes(slot)[self.head : self._end(count)]) if self.checksum else 0


class Sender(_Ring):
    """Sends [n, …] tensors, 0 < n <= shape[0], up to `slots` of them not yet taken by the peer; a further one waits.

    shape: of one buffer, (most rows, …). Raises HopError from the send that fails, or from a later one that finds out.
    """

    def send(self, step: int, tensor: Tensor, *, spoil: bool = False) -> None:
        """Copy into the ring and start sending; the caller may overwrite `tensor` at once. `spoil`: for tests, damage
        the payload behind its checksum."""
        count = len(tensor)
        slot, buffer = self._claim(count)
        self._wait(slot, "sending")
        buffer.copy_(tensor)
        if self.head:
            header = _MAGIC, _DTYPES.index(self.dtype), step, count, self.row_bytes, self._checksum(slot, count)
            _HEADER.pack_into(self._bytes(slot), 0, *header)
            if spoil:
                self._bytes(slot)[self.head] ^= 1
        message = self.slots[slot, : self._end(count)]
        try:
            handle = dist.isend(message, self.hop.peer, group=self.hop.group)
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

    taken = 0

    @property
    def outstanding(self) -> int:
        """Posted and not waited for."""
        return self.messages - self.taken

    def post(self, step: int, count: int) -> None:
        """Have the next message, [count, …], written into its slot when it comes. What that slot held before is
        gone."""
        slot, buffer = self._claim(count)
        assert self.flights[slot] is None, f"{self.hop.name}: {self.outstanding} receives posted, none waited for"
        room = self.slots[slot] if self.head else self.slots[slot, : self._end(count)]
        try:
            handle = dist.irecv(room, self.hop.peer, group=self.hop.group)
        except RuntimeError as error:
            raise HopError(self.hop, "receiving", step, error) from error
        assert handle is not None
        self.flights[slot] = _Flight(step, handle, buffer)
        self.messages += 1

    def wait(self) -> Tensor:
        """The oldest posted message, a view of its slot: valid until `slots` further messages were posted. Raises
        HopMismatch if it is another than the step says."""
        slot = self.taken % len(self.flights)
        flight = self._wait(slot, "receiving")
        assert flight is not None, f"{self.hop.name}: wait without post"
        if self.head:
            self._check(slot, flight.step, len(flight.tensor))
        self.taken += 1
        return flight.tensor

    def _check(self, slot: int, step: int, count: int) -> None:
        magic, dtype, of_step, rows, row_bytes, checksum = _HEADER.unpack_from(self._bytes(slot), 0)
        named = {
            "step": (of_step, step),
            "rows": (rows, count),
            "bytes of a row": (row_bytes, self.row_bytes),
            "dtype": (_name(dtype), _name(_DTYPES.index(self.dtype))),
        }
        wrong = [f"{name} {came}, not {due}" for name, (came, due) in named.items() if came != due]
        if magic != _MAGIC:
            wrong = [f"no header, but {bytes(magic)!r}"]
        if not wrong and checksum != self._checksum(slot, count):
            wrong = [f"checksum {self._checksum(slot, count):08x} of what was sent with {checksum:08x}"]
        if wrong:
            raise HopMismatch(self.hop, "receiving", step, f"what arrived has {', '.join(wrong)}")


def _name(dtype: int) -> str:
    return str(_DTYPES[dtype]) if dtype < len(_DTYPES) else f"number {dtype}"


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
