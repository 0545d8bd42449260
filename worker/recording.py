"""Recordings of a gang's step stream: the wire's own frames, each with its time. docs/recording.md is the format.

    magic[4] version:u32 length:u32 JSON[length]                     once
    nanoseconds:u64 length:u32 header[24] body[length]               for each frame, little-endian

Frames are those of the ordered stream, from schedulers (STEP, SAMPLE, CONTROL) and to them (RESULT, REFUSED, DONE), as
the coordinator took and gave them; which way one went follows from its kind. Times count from the recording's begin.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from workerproto.codec import HEADER_BYTES, Header, WireError, decode_body, decode_header, encode_body
from workerproto.fields import Packed
from workerproto.messages import Facts, Kind, Message, Result, Step

MAGIC = b"RKRC"
VERSION = 1

_START = struct.Struct("<4sII")
_FRAME = struct.Struct("<QI24s")


class Frame(NamedTuple):
    """nanoseconds since the recording began."""

    nanoseconds: int
    header: Header
    body: bytes

    @property
    def message(self) -> Message | None:
        return decode_body(self.header.kind, self.body)


@dataclass(frozen=True, slots=True)
class Recording:
    """tokens: whether token ids are in it. cut: it ends in the middle of a frame, as after a kill."""

    facts: Facts
    tokens: bool
    frames: list[Frame]
    cut: bool


def start_of(facts: Facts, *, tokens: bool) -> bytes:
    text = json.dumps({"facts": msgspec.to_builtins(facts), "tokens": tokens}).encode()
    return _START.pack(MAGIC, VERSION, len(text)) + text


def frame_of(nanoseconds: int, header: bytes, body: bytes) -> bytes:
    return _FRAME.pack(nanoseconds, len(body), header) + body


def without_tokens(kind: int, body: bytes) -> bytes:
    """The same frame with every token id 0 and no logprobs: of the same length and shape, and says nothing."""
    if kind == Kind.STEP:
        step = cast(Step, decode_body(Kind.STEP, body))
        return encode_body(
            msgspec.structs.replace(
                step,
                new=[msgspec.structs.replace(new, tokens=_zeros(new.tokens)) for new in step.new],
                resumed=[msgspec.structs.replace(one, tokens=_zeros(one.tokens)) for one in step.resumed],
                forced=_zeros(step.forced),
            )
        )
    if kind == Kind.RESULT:
        result = cast(Result, decode_body(Kind.RESULT, body))
        return encode_body(Result(_zeros(result.tokens), result.nonfinite, timings_us=result.timings_us))
    return body


def _zeros(packed: Packed) -> Packed:
    return memoryview(bytes(len(packed)))


def read_recording(path: Path) -> Recording:
    """Raises ValueError: not a recording, of another version, or damaged; OSError."""
    with open(path, "rb") as file:
        start = file.read(_START.size)
        magic, version, length = _START.unpack(start) if len(start) == _START.size else (b"", 0, 0)
        if magic != MAGIC:
            raise ValueError(f"{path} is not a recording of rankd, made by workerctl up --record FILE")
        if version != VERSION:
            raise ValueError(f"{path} is a recording of version {version}, {VERSION} is read here")
        try:
            about: dict[str, Any] = json.loads(file.read(length))
            facts = msgspec.convert(about["facts"], Facts)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}: what the recording says of its gang is damaged: {error}") from None
        frames, cut = [], False
        for frame in _frames(file, path):
            if frame is None:
                cut = True
            else:
                frames.append(frame)
    return Recording(facts, bool(about.get("tokens", True)), frames, cut)


def _frames(file: BinaryIO, path: Path) -> Iterator[Frame | None]:
    while start := file.read(_FRAME.size):
        if len(start) < _FRAME.size:
            yield None
            return
        nanoseconds, length, header = _FRAME.unpack(start)
        body = file.read(length)
        if len(body) < length:
            yield None
            return
        try:
            yield Frame(nanoseconds, decode_header(header), body)
        except WireError as error:
            raise ValueError(f"{path} is damaged before byte {file.tell()}: {error}") from None


assert _FRAME.size == 12 + HEADER_BYTES
