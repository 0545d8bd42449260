"""Frames: a fixed binary header and one msgpack body.

The header is read without touching the body, so that a relay decides by header alone and forwards the body's bytes as
they came:

    magic[4] version:u8 kind:u8 flags:u16 epoch:u32 lease:u32 seq:u64      (24 bytes, little-endian)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy import frombuffer, ndarray
from numpy.typing import NDArray

from workerproto.fields import INTEGER_MAX, Packed
from workerproto.messages import BODIES, ErrorCode, HeaderFlag, Kind, Message

MAGIC = b"RNKD"
VERSION = 1
HEADER_BYTES = 24
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]

_HEADER = struct.Struct("<4sBBHIIQ")
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_STEP_FLAGS = int(HeaderFlag.SAMPLE_FOLLOWS | HeaderFlag.RESYNC)
_KINDS = {int(kind): kind for kind in Kind}

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Kind, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()
}


class WireError(ValueError):
    """A frame that does not follow the spec. `code` says in which way; `field` names the part."""

    def __init__(self, code: ErrorCode, message: str, field: str = "", value: str = "", bound: str = "") -> None:
        # What a peer sent may stand in these texts, and they go back to it in fields that have bounds.
        super().__init__(message[:1024])
        self.code = code
        self.field = field[:256]
        self.value = value[:256]
        self.bound = bound


class Header(NamedTuple):
    """Frame 1. `lease` is 0 only where no lease is meant; `seq` counts from 1 in a lease, 0 on kinds that are not
    ordered.
    """

    kind: Kind
    flags: int = 0
    epoch: int = 0
    lease: int = 0
    seq: int = 0

    def encode(self) -> bytes:
        """24 bytes. Raises struct.error if a number does not fit its field."""
        return _HEADER.pack(MAGIC, VERSION, self.kind, self.flags, self.epoch, self.lease, self.seq)


def decode_header(frame: bytes | memoryview) -> Header:
    """Read frame 1. Raises WireError: BAD_HEADER, BAD_VERSION, BAD_KIND or BAD_FLAGS, judged in this order."""
    if len(frame) != HEADER_BYTES:
        raise WireError(
            ErrorCode.BAD_HEADER,
            f"the header has {len(frame)} bytes, not {HEADER_BYTES}",
            "header",
            str(len(frame)),
            "24",
        )
    magic, version, kind, flags, epoch, lease, seq = _HEADER.unpack(frame)
    if magic != MAGIC:
        raise WireError(
            ErrorCode.BAD_HEADER, f"the magic is {magic!r}, not {MAGIC!r}", "magic", repr(magic), repr(MAGIC)
        )
    if version != VERSION:
        raise WireError(
            ErrorCode.BAD_VERSION,
            f"version {version} is not spoken here, {VERSION} is",
            "version",
            str(version),
            str(VERSION),
        )
    if kind not in _KINDS:
        raise WireError(ErrorCode.BAD_KIND, f"kind {kind} is not known", "kind", str(kind))
    usable = _STEP_FLAGS if kind == Kind.STEP else 0
    if flags & ~usable:
        raise WireError(
            ErrorCode.BAD_FLAGS,
            f"flags {flags:#x} hold a bit that {_KINDS[kind].name} does not use",
            "flags",
            hex(flags),
            hex(usable),
        )
    if seq > INTEGER_MAX:
        raise WireError(ErrorCode.BAD_HEADER, f"sequence {seq} is not below 2^53", "seq", str(seq), str(INTEGER_MAX))
    return Header(_KINDS[kind], flags, epoch, lease, seq)


def read_sequence(frame: bytes | memoryview) -> int:
    """The sequence of a header that may be wrong in every other way; 0 where none can be read."""
    if len(frame) != HEADER_BYTES or bytes(frame[:4]) != MAGIC:
        return 0
    seq: int = _HEADER.unpack(frame)[6]
    return seq if seq <= INTEGER_MAX else 0


def read_lease(frame: bytes | memoryview) -> int:
    """The lease of a header that may be wrong in every other way; 0 where none can be read."""
    return int(_HEADER.unpack(frame)[5]) if len(frame) == HEADER_BYTES else 0


def encode_body(message: Message) -> bytes:
    """msgpack bytes of a body."""
    return _encoder.encode(message)


def decode_body(kind: Kind, frame: bytes | memoryview) -> Message | None:
    """Read frame 2. Packed members are views into `frame`. Raises WireError BAD_BODY, whatever the bytes are."""
    decoder = _decoders.get(kind)
    if decoder is None:
        if len(frame):
            raise WireError(ErrorCode.BAD_BODY, f"{kind.name} has no body, {len(frame)} bytes came", "body")
        return None
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(ErrorCode.BAD_BODY, f"{kind.name}: {error}", _path_of(error)) from None
    except (RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise WireError(ErrorCode.BAD_BODY, f"{kind.name}: {type(error).__name__}", "body") from None


def _path_of(error: Exception) -> str:
    """msgspec names the place as `… - at `$.limits.rows``."""
    text = str(error)
    return (text.rsplit("`$", 1)[1].rstrip("`").lstrip(".") if "`$" in text else "") or "body"


def pack(values: Int32Array | Sequence[int]) -> bytes:
    """int32 little-endian bytes of a sequence of integers. Raises OverflowError if a Python integer is outside
    int32.
    """
    if type(values) is not ndarray or values.dtype is not _INT32:
        values = np.asarray(values, _INT32)
    return values.tobytes()


def unpack(packed: Packed) -> Int32Array:
    """int32 [len / 4] view. Raises ValueError if the length is not a multiple of 4."""
    return frombuffer(packed, _INT32)


def unpack_floats(packed: Packed) -> Float32Array:
    """float32 [len / 4] view. Raises ValueError if the length is not a multiple of 4."""
    return frombuffer(packed, _FLOAT32)
