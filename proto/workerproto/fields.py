"""Bounds and types that the messages of the wire share, and the two ways to write a body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

INT32_MAX = 2**31 - 1
INTEGER_MAX = 2**53 - 1

Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Balance = Annotated[int, Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)]
Id = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Text = Annotated[str, Meta(max_length=65536)]
Name = Annotated[str, Meta(max_length=256)]
if TYPE_CHECKING:
    Packed = memoryview | bytes
else:  # what it is decoded as
    Packed = memoryview
"""int32 (or, where said, float32) values, little-endian, unaligned. Bytes where a message is written; decoded as a view
into the received frame."""

EMPTY = b""


class MapBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A body that is a msgpack map; unknown fields are refused."""


class ArrayBody(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A body that is a msgpack array; additional members are refused."""
