"""Changes that can be taken back: every change keeps its inverse until the whole is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from workerproto.codec import Int32Array

K = TypeVar("K")
V = TypeVar("V")


class Transaction:
    """A list of inverses. `rollback` plays them newest first; `commit` forgets them."""

    def __init__(self) -> None:
        self._inverses: list[Callable[[], object]] = []

    def commit(self) -> None:
        self._inverses.clear()

    def rollback(self) -> None:
        while self._inverses:
            self._inverses.pop()()

    def assign(self, array: Int32Array, index: NDArray[np.integer] | int, values: Int32Array | int) -> None:
        """`array[index] = values`; index is one row or an array of distinct positions."""
        saved = array[index].copy()
        self._inverses.append(lambda: array.__setitem__(index, saved))
        array[index] = values

    def put(self, mapping: dict[K, V], key: K, value: V) -> None:
        """Add a key that is not there."""
        assert key not in mapping
        self._inverses.append(lambda: mapping.pop(key))
        mapping[key] = value

    def pop(self, mapping: dict[K, V], key: K) -> V:
        """Take out a key that is there."""
        value = mapping.pop(key)
        self._inverses.append(lambda: mapping.__setitem__(key, value))
        return value

    def push(self, stack: list[V], value: V) -> None:
        """Append to a stack."""
        self._inverses.append(stack.pop)
        stack.append(value)

    def take(self, stack: list[V]) -> V:
        """Pop off a stack that is not empty."""
        value = stack.pop()
        self._inverses.append(lambda: stack.append(value))
        return value
