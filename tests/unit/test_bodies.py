"""What a body may be written as, and what none may be, beside what the conformance suite sends (section 4)."""

from __future__ import annotations

import struct

import msgspec
import pytest

from workerproto.codec import WireError, decode_body, encode_body, pack
from workerproto.messages import ErrorCode, Hello, Kind, New, Resume, Sampling, Step

TOKENS, BLOCKS = pack([1, 2]), pack([0])
STEP = Step([New(7, TOKENS, BLOCKS, 0, Sampling(0.5, 3, 1.0, 0.0, 9))], [Resume(8, TOKENS, BLOCKS, 0)])


def packed(value: bytes) -> bytes:
    return b"\xc4" + bytes([len(value)]) + value


def step(sampling: bytes, number: bytes = b"\x07", behind: bytes = b"") -> bytes:
    """The body of STEP, with its first request's id and sampling in these bytes."""
    start = packed(TOKENS) + packed(BLOCKS) + b"\x00"
    members = 2 + bool(behind)
    return bytes([0x90 + members]) + b"\x91\x95" + number + start + sampling + b"\x91\x94\x08" + start + behind


FLOAT32, FLOAT64 = b"\xca" + struct.pack(">f", 0.5), b"\xcb" + struct.pack(">d", 0.5)
SAME: dict[str, tuple[Kind, bytes, object]] = {
    "float64": (Kind.STEP, step(b"\x95" + FLOAT64 + b"\x03\x01\x00\x09"), STEP),
    "float32, and integers where floats belong": (Kind.STEP, step(b"\x95" + FLOAT32 + b"\x03\x01\x00\x09"), STEP),
    "wide integers": (
        Kind.STEP,
        step(b"\x95" + FLOAT32 + b"\xd3" + bytes(7) + b"\x03" + b"\x01\x00" + b"\xcf" + bytes(7) + b"\x09",
             b"\xce" + bytes(3) + b"\x07"),
        STEP,
    ),
    "a long form of bin": (
        Kind.STEP, step(b"\x95" + FLOAT32 + b"\x03\x01\x00\x09", behind=b"\xc6\x00\x00\x00\x04\x05\x00\x00\x00"),
        msgspec.structs.replace(STEP, finished=pack([5])),
    ),
    "trailing members with a default left out": (Kind.STEP, b"\x90", Step()),
    "an empty bin": (Kind.STEP, b"\x93\x90\x90\xc4\x00", Step()),
    "any order of keys": (Kind.HELLO, b"\x82\xa8takeover\xc3\xa6client\xa1x", Hello("x", [], True)),
    "of a key that comes twice the last": (Kind.HELLO, b"\x82\xa6client\xa1x\xa6client\xa1y", Hello("y")),
}  # fmt: skip


@pytest.mark.parametrize("what", SAME)
def test_what_else_is_the_same(what: str) -> None:
    kind, body, message = SAME[what]
    assert decode_body(kind, body) == message
    assert decode_body(kind, encode_body(message)) == message  # type: ignore[arg-type]  # messages, all of them


OTHER: dict[str, tuple[Kind, bytes]] = {
    "a float for an int": (Kind.STEP, step(b"\x91\x00", FLOAT32)),
    "an int of 2^53": (Kind.STEP, step(b"\x95\x00\x00\x01\x00\xcf\x00\x20" + bytes(6))),
    "NaN": (Kind.STEP, step(b"\x91\xca\x7f\xc0\x00\x00")),
    "true for an int": (Kind.STEP, step(b"\x90", b"\xc3")),
    "null for an int": (Kind.STEP, step(b"\x90", b"\xc0")),
    "null for a bool": (Kind.HELLO, b"\x81\xa8takeover\xc0"),
    "null for text": (Kind.HELLO, b"\x81\xa6client\xc0"),
    "bin for text": (Kind.HELLO, b"\x81\xa6client\xc4\x01x"),
    "a key that is bin": (Kind.HELLO, b"\x81\xc4\x06client\xa1x"),
    "a member of a list beyond its bound": (Kind.HELLO, b"\x81\xa8features\x91\xda\x01\x01" + b"x" * 257),
    "ext": (Kind.HELLO, b"\x81\xa6client\xd4\x01x"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_is_not_of_its_type(what: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_body(*OTHER[what])
    assert caught.value.code is ErrorCode.BAD_BODY
