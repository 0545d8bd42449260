"""Frames that are no message: the golden vectors of what is refused, written by hand, byte by byte."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from proto_vectors import LEASE
from workerproto.codec import Header
from workerproto.messages import ErrorCode, Kind


class Wrong(NamedTuple):
    """Frames that no receiver takes, with the code and the field of its Error."""

    name: str
    frames: list[bytes]
    code: ErrorCode
    field: str


def of(kind: Kind, seq: int = 0) -> bytes:
    return Header(kind, 0, 1, LEASE, seq).encode()


def wrong_frames() -> list[Wrong]:
    """Ways not to be a message, each with a header or a body that is otherwise right."""
    ping, hello = Header(Kind.PING, 0, 1, LEASE), Header(Kind.HELLO, 0, 0, LEASE).encode()
    order, control = of(Kind.STEP, 1), of(Kind.CONTROL, 1)
    good = ping.encode()
    request = b"\x91\x91\x95"  # Step [ new [ New [ …

    def patched(offset: int, value: bytes) -> list[bytes]:
        return [good[:offset] + value + good[offset + len(value) :], b""]

    bodies = [
        ("empty body of a map", hello, b"", "body"),
        ("array where a map belongs", hello, b"\x90", "body"),
        ("map where an array belongs", order, b"\x80", "body"),
        ("truncated", hello, b"\x81\xa6cli", "body"),
        ("trailing byte", hello, b"\x80\xc0", "body"),
        ("unknown field", hello, b"\x81\xa5color\xa3red", "body"),
        ("key that is a number", hello, b"\x81\x01\x02", "body"),
        ("number where text belongs", hello, b"\x81\xa6client\x01", "client"),
        ("text beyond 256 characters", hello, b"\x81\xa6client\xda\x01\x01" + b"x" * 257, "client"),
        ("text that is not UTF-8", hello, b"\x81\xa6client\xa1\xff", "body"),
        ("a byte that msgpack never uses", hello, b"\xc1", "body"),
        ("lying length", order, b"\x93\x90\x90\xc6\xff\xff\xff\xff", "body"),
        ("one member too many", order, b"\x9c\x90\x90" + b"\xc4\x00" * 10, "body"),
        ("text where bytes belong", order, b"\x93\x90\x90\xa0", "[2]"),
        ("deep nesting", order, b"\x91" * 5000, "[0][0]"),
        ("request with too few members", order, b"\x91\x91\x92\x01\xc4\x00", "[0][0]"),
        ("negative id", order, request + b"\xff\xc4\x00\xc4\x00\x00\x90", "[0][0][0]"),
        ("id beyond int32", order, request + b"\xce\x80\x00\x00\x00\xc4\x00\xc4\x00\x00\x90", "[0][0][0]"),
        ("id that is a float", order,
         request + b"\xcb" + struct.pack(">d", 1.0) + b"\xc4\x00\xc4\x00\x00\x90", "[0][0][0]"),
        ("id that is null", order, request + b"\xc0\xc4\x00\xc4\x00\x00\x90", "[0][0][0]"),
        ("temperature beyond 100", order, request + b"\x01\xc4\x00\xc4\x00\x00\x91\x65", "[0][0][4][0]"),
        ("temperature that is no number", order,
         request + b"\x01\xc4\x00\xc4\x00\x00\x91\xcb" + struct.pack(">d", math.nan), "[0][0][4][0]"),
        ("top_p of 0", order, request + b"\x01\xc4\x00\xc4\x00\x00\x93\x00\x00\x00", "[0][0][4][2]"),
        ("seed of 2^53", order,
         request + b"\x01\xc4\x00\xc4\x00\x00\x95\x00\x00\x01\x00\xcf" + struct.pack(">Q", 2**53), "[0][0][4][4]"),
        ("operation cut short", control, b"\x81\xa2op", "body"),
        ("operation that is none", control, b"\x81\xa2op\xa3nap", "op"),
        ("argument of another operation", control, b"\x82\xa2op\xa5drain\xa5level\x01", "body"),
        ("level of 3", control, b"\x82\xa2op\xa5sleep\xa5level\x03", "level"),
        ("part that is none", control, b"\x82\xa2op\xa4wake\xa5parts\x91\xa4legs", "parts[0]"),
        ("masks without a step", of(Kind.SAMPLE, 2), b"\x90", "body"),
        ("step that is a float", of(Kind.SAMPLE, 2), b"\x91\xca\x3f\x80\x00\x00", "[0]"),
        ("rows as integers", of(Kind.SAMPLE, 2), b"\x92\x01\x91\x00", "[1]"),
        ("Bye as text", of(Kind.BYE), b"\xa3bye", "body"),
        ("Bye with a number as its code", of(Kind.BYE), b"\x81\xa4code\x01", "code"),
        ("body of a Pong", of(Kind.PONG), b"\x90", "body"),
        ("Welcome without a state", of(Kind.WELCOME), b"\x81\xb0lease_timeout_ms\x01", "body"),
        ("Welcome with facts that are none", of(Kind.WELCOME),
         b"\x83\xa5state\xa5READY\xb0lease_timeout_ms\x01\xa5facts\x80", "facts"),
        ("Error with a code that is none", of(Kind.ERROR), b"\x81\xa4code\xa3ODD", "code"),
        ("Error with a negative sequence", of(Kind.ERROR), b"\x82\xa4code\xa8BAD_BODY\xa3seq\xff", "seq"),
        ("Event without an epoch", of(Kind.EVENT), b"\x81\xa5state\xa5READY", "body"),
        ("Event with a fault that is none", of(Kind.EVENT),
         b"\x83\xa5state\xa6FAILED\xa5epoch\x01\xa5fault\x90", "fault"),
        ("tokens as integers", of(Kind.RESULT, 1), b"\x91\x91\x07", "[0]"),
        ("result with a member too many", of(Kind.RESULT, 1), b"\x97\xc4\x00\x00" + b"\xc4\x00" * 4 + b"\x00", "body"),
        ("refusal without a cause", of(Kind.REFUSED, 1), b"\x81\xa4code\xa9MALFORMED", "body"),
        ("refusal with a code that is none", of(Kind.REFUSED, 1), b"\x82\xa4code\xa3ODD\xa9cause_seq\x01", "code"),
        ("refusal of a negative request", of(Kind.REFUSED, 1),
         b"\x83\xa4code\xa9MALFORMED\xa9cause_seq\x01\xa7request\xff", "request"),
        ("report that is no list", of(Kind.DONE, 1), b"\x82\xa2op\xa4wake\xa6report\x80", "report"),
        ("a pickle", order, b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94.", "body"),
    ]  # fmt: skip
    headers = [
        Wrong("no frame", [], ErrorCode.BAD_FRAMES, "frames"),
        Wrong("one frame", [good], ErrorCode.BAD_FRAMES, "frames"),
        Wrong("three frames", [good, b"", b""], ErrorCode.BAD_FRAMES, "frames"),
        Wrong("empty header", [b"", b""], ErrorCode.BAD_HEADER, "header"),
        Wrong("header of 23 bytes", [good[:23], b""], ErrorCode.BAD_HEADER, "header"),
        Wrong("header of 25 bytes", [good + b"\x00", b""], ErrorCode.BAD_HEADER, "header"),
        Wrong("wrong magic", patched(0, b"RNKX"), ErrorCode.BAD_HEADER, "magic"),
        Wrong("version 0", patched(4, b"\x00"), ErrorCode.BAD_VERSION, "version"),
        Wrong("version 2", patched(4, b"\x02"), ErrorCode.BAD_VERSION, "version"),
        Wrong("kind 0", patched(5, b"\x00"), ErrorCode.BAD_KIND, "kind"),
        Wrong("kind 64", patched(5, b"\x40"), ErrorCode.BAD_KIND, "kind"),
        Wrong("flag on a ping", patched(6, b"\x02\x00"), ErrorCode.BAD_FLAGS, "flags"),
        Wrong("flag 4 on a step", [order[:6] + b"\x04\x00" + order[8:], b"\x90"], ErrorCode.BAD_FLAGS, "flags"),
        Wrong("flag 8 on a step", [order[:6] + b"\x08\x00" + order[8:], b"\x90"], ErrorCode.BAD_FLAGS, "flags"),
        Wrong("sequence of 2^53", patched(16, struct.pack("<Q", 2**53)), ErrorCode.BAD_HEADER, "seq"),
        Wrong("body of a ping", [good, b"\xc0"], ErrorCode.BAD_BODY, "body"),
    ]
    return headers + [Wrong(name, [header, body], ErrorCode.BAD_BODY, field) for name, header, body, field in bodies]
