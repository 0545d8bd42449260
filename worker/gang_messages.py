"""What coordinator and ranks say to each other; nobody else reads it.

*Step sockets* speak the public envelope (header and body) with the gang's own sequence, plus the kinds below.
*Control sockets* carry one frame a message: msgpack maps, told apart by their `type`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
from msgspec import Struct

from workerproto.codec import HEADER_BYTES, MAGIC, VERSION

RESET = 64  # to ranks: a lease ended, forget all requests
RESET_DONE = 65  # from the output rank: body is the number of requests dropped, msgpack
STOP = 66  # to ranks: leave, everything before is done
PERFORM = 67  # to ranks: carry out the operation that was proposed last; all of you have agreed to it

_HEADER = struct.Struct("<4sBBHIIQ")


class Envelope(NamedTuple):
    """A header on a step socket; `kind` may be one that the public wire does not have."""

    kind: int
    flags: int
    epoch: int
    seq: int
    named: int = 0  # modulo 2^32


def seal(kind: int, flags: int, epoch: int, seq: int, named: int = 0) -> bytes:
    """24 bytes. The lease is not the ranks' business; in its place stands what the scheduler calls the step that this
    is, or, of a Sample, the one that it is for.
    """
    return _HEADER.pack(MAGIC, VERSION, kind, flags, epoch, named & 0xFFFFFFFF, seq)


def unseal(frame: bytes) -> Envelope:
    """Raises ValueError for what is not a header of this version."""
    if len(frame) != HEADER_BYTES:
        raise ValueError(f"a header of {len(frame)} bytes on a step socket")
    magic, version, kind, flags, epoch, named, seq = _HEADER.unpack(frame)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"{magic!r} version {version} on a step socket")
    return Envelope(kind, flags, epoch, seq, named)


class _Message(Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    pass


# From a rank.


class Hello(_Message, frozen=True):
    """The first word, before torch is imported. `parent` is the process that restarts or reaps the rank."""

    rank: int
    world_size: int
    node: str
    pid: int
    started: int  # clock ticks since boot: with pid, the identity of a process
    parent: int


class Present(_Message, frozen=True):
    """Roll-call: `facts` must be the same on all ranks, `own` (its device) need not be."""

    facts: dict[str, str]
    device: str
    threads: int


class Phase(_Message, frozen=True):
    """The rank has entered this phase (`rank.phases`)."""

    phase: str


class Note(_Message, frozen=True):
    """One line for a person."""

    text: str


class Loaded(_Message, frozen=True):
    """`kernels`: which this rank uses, for people."""

    bytes: int
    seconds: float
    kernels: str


class KvOffer(_Message, frozen=True):
    """What this rank could hold."""

    available_bytes: int
    block_bytes: int
    num_blocks: int


class Warm(_Message, frozen=True):
    """Nothing is left to be done before READY."""

    kv_bytes: int
    seconds: float


class Memory(_Message, frozen=True):
    """The rank's ledger, anew: `total` and the lines that sum to it, and labels on them. Bytes."""

    lines: dict[str, int]
    labels: dict[str, int]


class Heartbeat(_Message, frozen=True):
    """`digests`: StepValidator.digest after each frame judged since the last heartbeat, u32 in this host's order, the
    first of them of gang sequence `first`."""

    first: int
    digests: bytes


class Refusal(_Message, frozen=True):
    """This rank refused a step. All ranks must, and alike."""

    seq: int
    code: str
    request: int | None
    field: str


class Agreed(_Message, frozen=True):
    """This rank can carry out the operation of this sequence, and will once told to."""

    seq: int


class Declined(_Message, frozen=True):
    """This rank cannot; `refused` is the body of the public answer."""

    seq: int
    refused: msgspec.Raw


class Performed(_Message, frozen=True):
    """It is done on this rank. `event`: what it does to the gang's state (states.GangEvent), the same on all ranks;
    `report` is the rank's map in the public Done. `weights_id`: if other weights are in force now. `weights_valid`: as
    in the public facts.
    """

    seq: int
    op: str
    event: str | None
    report: msgspec.Raw
    weights_id: str | None = None
    weights_valid: bool = True


class RankFault(_Message, frozen=True):
    """The rank's own account of its end. `peer`: it broke because another did; `limit`: it waited too long."""

    code: int
    phase: str
    step: int | None
    message: str
    traceback: str
    peer: bool = False
    limit: bool = False


class StopAsked(_Message, frozen=True):
    """The rank was told to end by someone else (SIGTERM): only the coordinator ends a gang."""

    reason: str


# To a rank.


class Welcome(_Message, frozen=True):
    """The coordinator is there. Its identity, so that the rank can watch it."""

    pid: int
    started: int


class Proceed(_Message, frozen=True):
    """Roll-call is complete: meet in the store."""


class KvConfig(_Message, frozen=True):
    """Agreed over the gang. The last two are positions."""

    num_blocks: int
    max_model_len: int
    layout: str
    hash_block_size: int
    alignment: int


class LogLevel(_Message, frozen=True):
    """From now on: debug, info, warning or error."""

    level: str


class Stop(_Message, frozen=True):
    """End now with this code. A clean end comes in the step stream instead."""

    code: int
    reason: str


FromRank = (
    Hello | Present | Phase | Note | Loaded | KvOffer | Warm | Memory | Heartbeat | Refusal | Agreed | Declined
    | Performed | RankFault | StopAsked
)  # fmt: skip
ToRank = Welcome | Proceed | KvConfig | LogLevel | Stop

_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)
_to_rank = msgspec.msgpack.Decoder(ToRank)


def encode(message: FromRank | ToRank) -> bytes:
    return _encoder.encode(message)


def decode_from_rank(frame: bytes) -> FromRank:
    return _from_rank.decode(frame)


def decode_to_rank(frame: bytes) -> ToRank:
    return _to_rank.decode(frame)
