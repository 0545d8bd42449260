"""What a Control asks for: one struct an operation, told apart on the wire by the field `op`.

An operation is a barrier in the gang's ordered stream: steps before it are answered first, nothing is taken until its
own answer. When it is allowed is said in `workerproto.standing`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from workerproto.fields import Count, MapBody, Name, Text


class Part(StrEnum):
    """What of a rank's memory can be given back by itself."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    RUNTIME = "runtime"


class _Operation(MapBody, frozen=True, tag_field="op"):
    pass


class ConfigureKv(_Operation, frozen=True, tag="configure_kv"):
    """The KV cache of a gang that waits for it (AWAITING_KV); once, and no more than the ranks offer. "" and 0 leave it
    to the gang; hash_block_size and alignment are positions.
    """

    num_blocks: Count
    layout: Name = ""
    hash_block_size: Count = 0
    alignment: Count = 0


class Sleep(_Operation, frozen=True, tag="sleep"):
    """Give memory back; empty `parts` are all. Level 1 keeps weights on the host, level 2 drops them."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1
    parts: list[Part] = field(default_factory=list)


class Wake(_Operation, frozen=True, tag="wake"):
    """Take memory back; empty `parts` are all that sleep. Blocks come back unwritten."""

    parts: list[Part] = field(default_factory=list)


class UpdateBegin(_Operation, frozen=True, tag="update_begin"):
    """From now on until UpdateFinish no step is taken. Requests that hold blocks are in the way unless kept by
    choice: they then go on with what the old weights have cached.
    """

    keep_requests: bool = False


class UpdateChunk(_Operation, frozen=True, tag="update_chunk"):
    """Some of the new weights: `source` is a folder or a shared-memory segment on the gang's host, never the bytes."""

    source: Text
    digest: Name = ""


class UpdateFinish(_Operation, frozen=True, tag="update_finish"):
    """All chunks are in: the weights are valid, and bear this name."""

    weights_id: Name


class Profile(_Operation, frozen=True, tag="profile"):
    """Start or stop the profiler of every rank; `steps` bounds it, 0 is the rank's own bound."""

    start: bool
    steps: Count = 0


class Drain(_Operation, frozen=True, tag="drain"):
    """End the gang in order, once what was sent before is answered."""


Control = ConfigureKv | Sleep | Wake | UpdateBegin | UpdateChunk | UpdateFinish | Profile | Drain


def name_of(operation: Control) -> str:
    """As it stands in `op`."""
    return str(operation.__struct_config__.tag)
