"""Blocks of KV cache: who holds them, and what those that nobody holds still contain.

A block that is let go keeps its content until it is granted anew, oldest first; till then a request whose beginning
hashes to the same value takes it as computed. A block's hash covers all tokens up to its end, so that equal hashes mean
equal keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """16 bytes over the hash of the block before and this block's tokens (packed int32)."""
    return blake2b(parent + tokens, digest_size=16).digest()


class BlockPool:
    """Counts the holders of blocks 0 … num_blocks-1. caching: whether it remembers what they contain."""

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.caching = caching
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning of these."""
        found: list[int] = []
        for value in hashes:
            block = self._block_of.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of these would be taken out of the free ones by `share`."""
        return sum(not self._holders[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            self._holders[block] += 1
            self._free.pop(block, None)

    def grant(self, number: int) -> list[int]:
        """So many blocks for one new holder; what was in them is forgotten. The caller has seen that they are free."""
        assert number <= len(self._free)
        granted = [self._free.popitem(last=False)[0] for _ in range(number)]
        for block in granted:
            self._holders[block] = 1
            value = self._hash_of.pop(block, None)
            if value is not None:
                del self._block_of[value]
        return granted

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each; the last of a chain is granted anew before what it builds on."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def remember(self, block: int, value: bytes) -> None:
        """The block is written in full and has this hash. Of two with one hash the first is kept."""
        if self.caching and value not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = value
            self._block_of[value] = block
