"""Recordings of a gang's step stream: the wire's own frames, each with its time. docs/recording.md is the format.

    magic[4] version:u32 length:u32 JSON[length]                     once
    nanoseconds:u64 length:u32 header[24] body[length]               for each frame, little-endian

Frames are those of the ordered stream, from schedulers (STEP, SAMPLE, CONTROL) and to them (RESULT, REFUSED, DONE), as
the coordinator took and gave them; which way one went follows from its kind. Times count from the recording's begin.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec

from workerproto.codec import HEADER_BYTES, Header, WireError, decode_body, decode_header, encode_body
from workerproto.fields import Packed
from workerproto.messages import Facts, Kind, Message, Result, Sample, Step

MAGIC = b"RKRC"
VERSION = 1
MOST_BYTES = 64 << 20
"""Of a body: the hard limit of the wire, above any gang's own."""

_START = struct.Struct("<4sII")
_FRAME = struct.Struct("<QI24s")


class Frame(NamedTuple):
    """nanoseconds since the recording began. at: the byte of the file at which it begins."""

    nanoseconds: int
    header: Header
    body: bytes
    at: int


class _About(msgspec.Struct, frozen=True):
    facts: Facts
    tokens: bool = True


class Recording:
    """A file that is read frame by frame, since it may be larger than memory, up to where it ended when it was opened:
    the gang that it is fed to may be recording into it. What is in it was perhaps damaged since: every method raises
    ValueError with the file, the byte and what is wrong there; OSError.

    facts: of the gang. tokens: whether token ids are in it.
    """

    def __init__(self, path: Path) -> None:
        """Also raises ValueError: not a recording, or of another version."""
        self.path = path
        with open(path, "rb") as file:
            start = file.read(_START.size)
            magic, version, length = _START.unpack(start) if len(start) == _START.size else (b"", 0, 0)
            if magic != MAGIC:
                raise ValueError(f"{path} is not a recording of rankd, made by workerctl up --record FILE")
            if version != VERSION:
                raise ValueError(f"{path} is a recording of version {version}, {VERSION} is read here")
            if length > MOST_BYTES:
                raise self.damaged(0, f"it says of its gang {length} bytes, at most {MOST_BYTES} are possible")
            try:
                about = msgspec.json.decode(file.read(length), type=_About)
            except (msgspec.MsgspecError, RecursionError) as error:
                why = f"what it says of its gang: {error}; or another version of rankd has written it"
                raise self.damaged(_START.size, why) from None
            self._begin = file.tell()
            self._end = file.seek(0, os.SEEK_END)
        self.facts, self.tokens = about.facts, about.tokens

    def frames(self) -> Iterator[Frame]:
        """All, in order, up to one that is cut short."""
        with open(self.path, "rb") as file:
            at, before = self._begin, 0
            file.seek(at)
            while (frame := self._next(file, at)) is not None:
                if not before <= frame.nanoseconds < 1 << 63:
                    raise self.damaged(at, f"its time is {frame.nanoseconds} ns, after {before} ns")
                yield frame
                at, before = at + _FRAME.size + len(frame.body), frame.nanoseconds

    def frame_at(self, at: int) -> Frame:
        """The one that `frames` has found there."""
        with open(self.path, "rb") as file:
            file.seek(at)
            frame = self._next(file, at)
        if frame is None:
            raise self.damaged(at, "the file ends there since it was read first")
        return frame

    def _next(self, file: BinaryIO, at: int) -> Frame | None:
        start = file.read(_FRAME.size)
        if len(start) < _FRAME.size or at + _FRAME.size > self._end:
            return None
        nanoseconds, length, header = _FRAME.unpack(start)
        if length > MOST_BYTES:
            raise self.damaged(at, f"a body of {length} bytes, at most {MOST_BYTES} are possible")
        if at + _FRAME.size + length > self._end:
            return None
        body = file.read(length)
        if len(body) < length:
            raise self.damaged(at, "the file has become shorter since it was opened")
        try:
            return Frame(nanoseconds, decode_header(header), body, at)
        except WireError as error:
            raise self.damaged(at, str(error)) from None

    def is_whole(self, last: Frame | None) -> bool:
        """Whether the file ends with this frame, and not in the middle of another, as after a kill."""
        end = self._begin if last is None else last.at + _FRAME.size + len(last.body)
        return end == self._end

    def message(self, frame: Frame) -> Message | None:
        try:
            return decode_body(frame.header.kind, frame.body)
        except (WireError, RecursionError) as error:
            raise self.damaged(frame.at, str(error)) from None

    def damaged(self, at: int, why: str) -> ValueError:
        return ValueError(f"{self.path} is damaged at byte {at}: {why}")


def start_of(facts: Facts, *, tokens: bool) -> bytes:
    text = json.dumps({"facts": msgspec.to_builtins(facts), "tokens": tokens}).encode()
    return _START.pack(MAGIC, VERSION, len(text)) + text


def frame_of(nanoseconds: int, header: bytes, body: bytes) -> bytes:
    return _FRAME.pack(nanoseconds, len(body), header) + body


def without_tokens(kind: int, body: bytes) -> bytes:
    """The same frame with every token id 0, every token allowed by masks, and no logprobs: of the same shape, and says
    nothing."""
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
    if kind == Kind.SAMPLE:
        sample = cast(Sample, decode_body(Kind.SAMPLE, body))  # a mask tells the tokens that it allows
        return encode_body(msgspec.structs.replace(sample, masks=b"\xff" * len(sample.masks)))
    if kind == Kind.RESULT:
        result = cast(Result, decode_body(Kind.RESULT, body))
        return encode_body(Result(_zeros(result.tokens), result.nonfinite, timings_us=result.timings_us))
    return body


def _zeros(packed: Packed) -> Packed:
    return bytes(len(packed))


assert _FRAME.size == 12 + HEADER_BYTES
