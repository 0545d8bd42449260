"""Who owns which block of KV cache, and how far each is written.

A block is granted to one request, which alone writes it; other requests may share it as prefix once it is written
whole. So no row ever writes a block with two owners: a sharer begins behind its prefix, and the request that a block
was granted to is past its last position by the time it can be shared. What is written outlives its owners, until the
block is granted anew: a scheduler's prefix cache lives on that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workerproto.codec import Int32Array
from workerproto.messages import RefusalCode
from workerproto.steps import Refusal, StepLimits
from workerproto.transaction import Transaction


class BlockOwners:
    """owners: int32 [num_blocks], requests that hold the block. written: int32 [num_blocks], positions 0 … block_size.

    `requests` below has, for each of `blocks`, the request that it is for: a refusal names it. `field` is the member
    at fault.
    """

    def __init__(self, limits: StepLimits, transaction: Transaction) -> None:
        self._num_blocks = limits.num_blocks
        self._block_size = limits.block_size
        self._transaction = transaction
        self._owners: Int32Array = np.zeros(limits.num_blocks, np.int32)
        self._written: Int32Array = np.zeros(limits.num_blocks, np.int32)
        self._used: Int32Array = np.zeros(1, np.int32)  # kept, since to count it takes longer than all the rest

    @property
    def used(self) -> int:
        """Blocks that have an owner."""
        return int(self._used[0])

    def release(self, blocks: Int32Array) -> None:
        """Take one owner from each of a request's blocks."""
        owners = self._owners[blocks] - 1
        self._transaction.assign(self._owners, blocks, owners)
        self._count(-int(np.count_nonzero(owners == 0)))

    def _count(self, more: int) -> None:
        if more:
            self._transaction.assign(self._used, 0, int(self._used[0]) + more)

    def share(self, blocks: Int32Array, requests: Int32Array, field: str) -> None:
        """Give each block one more owner. Whether it is written is judged after the rows: see `judge_prefix`."""
        self._judge_range(blocks, requests, field)
        self._judge_distinct(blocks, requests, field)
        owners = self._owners[blocks] + 1
        self._transaction.assign(self._owners, blocks, owners)
        self._count(int(np.count_nonzero(owners == 1)))

    def grant(self, blocks: Int32Array, requests: Int32Array, field: str) -> None:
        """Give blocks without an owner their only one; nothing in them counts as written any more."""
        self._judge_range(blocks, requests, field)
        self._judge_distinct(blocks, requests, field)
        owned = self._owners[blocks] != 0
        if owned.any():
            block, request = _at(owned, blocks, requests)
            raise Refusal(
                RefusalCode.BLOCK_OWNED,
                f"request {request} is granted block {block}, which has an owner",
                field,
                block,
                "a block without owner",
                request,
            )
        self._transaction.assign(self._owners, blocks, 1)
        self._count(len(blocks))
        self._transaction.assign(self._written, blocks, 0)

    def write(self, blocks: Int32Array, ends: Int32Array) -> None:
        """Positions up to `ends` (in 1 … block_size) of each of these distinct blocks are written by this step."""
        self._transaction.assign(self._written, blocks, ends)

    def grant_if_free(self, blocks: Int32Array) -> bool:
        """Whether `grant` would accept these blocks, at least one; if so they are granted, and stay so."""
        each = blocks.tolist()
        if min(each) < 0 or max(each) >= self._num_blocks or len(set(each)) != len(each) or self._owners[blocks].any():
            return False
        self._owners[blocks] = 1
        self._used += len(each)
        self._written[blocks] = 0
        return True

    def write_finally(self, blocks: Int32Array, ends: Int32Array) -> None:
        """As `write`, but this cannot be taken back."""
        self._written.put(blocks, ends)

    def forget_written(self) -> None:
        """The cache has lost its content. Who owns what stays as it is; this cannot be taken back."""
        self._written[:] = 0

    def judge_prefix(self, blocks: Int32Array, request: int, field: str) -> None:
        """Refuse a prefix over positions that nothing has written."""
        holes = self._written[blocks] < self._block_size
        if holes.any():
            block = int(blocks[holes.argmax()])
            written = int(self._written[block])
            raise Refusal(
                RefusalCode.BLOCK_UNWRITTEN,
                f"request {request} takes block {block} as computed, "
                f"{written} of {self._block_size} positions are written",
                field,
                written,
                self._block_size,
                request,
            )

    def _judge_range(self, blocks: Int32Array, requests: Int32Array, field: str) -> None:
        outside = (blocks < 0) | (blocks >= self._num_blocks)
        if outside.any():
            (block, request), last = _at(outside, blocks, requests), self._num_blocks - 1
            raise Refusal(
                RefusalCode.BLOCK_OUT_OF_RANGE,
                f"request {request}: block {block} is not in 0 … {last}",
                field,
                block,
                last,
                request,
            )

    @staticmethod
    def _judge_distinct(blocks: Int32Array, requests: Int32Array, field: str) -> None:
        if len(blocks) < 2:
            return
        order = np.argsort(blocks, kind="stable")
        again = np.zeros(len(blocks), bool)
        again[order[1:]] = blocks[order[1:]] == blocks[order[:-1]]
        if again.any():
            block, request = _at(again, blocks, requests)
            raise Refusal(
                RefusalCode.BLOCK_OWNED,
                f"request {request} is given block {block} a second time",
                field,
                block,
                "once",
                request,
            )


def _at(wrong: NDArray[np.bool_], blocks: Int32Array, requests: Int32Array) -> tuple[int, int]:
    """The first block at fault, and the request it was meant for."""
    place = int(wrong.argmax())
    return int(blocks[place]), int(requests[place])
