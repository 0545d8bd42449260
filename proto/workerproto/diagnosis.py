"""What is wrong with a body that cannot be read: whose member it is, what stands there, and what should.

The decoder names the place by indices, and the bound in words. Every rank reads the same bytes with the same words, so
all come to the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from workerproto.codec import WireError
from workerproto.fields import INT32_MAX
from workerproto.messages import New, RefusalCode, Resume, Sampling, Step
from workerproto.steps import Refusal

MOST_BYTES = 2**20
"""Larger bodies are not read a second time: a body of empty arrays takes sixty times its size in memory."""

_MEMBERS: dict[type[Struct], dict[str, type[Struct]]] = {
    Step: {"new": New, "resumed": Resume},
    New: {"sampling": Sampling},
    Resume: {},
    Sampling: {},
}


def malformed_member(body: bytes | memoryview, error: WireError, whole: str, names: Sequence[str] = ()) -> Refusal:
    """The refusal of a Sample's or a Control's body that `decode_body` raised this error for. whole: what the body
    should have been; names: of an array's members.
    """
    words, path = _words(error), _path(error)
    if not path:
        return Refusal(RefusalCode.MALFORMED, str(error), "body", f"{len(body)} bytes", whole)
    first = path[0]
    field = names[first] if isinstance(first, int) else error.field
    bound = words[1].replace("`", "") if "Expected" in str(error) else "one that the spec lists"
    read = _read(body)
    value = _shown(_at(read, path)) if read is not None else words[2] or f"in a body of {len(body)} bytes"
    value = value.replace("`", "")
    return Refusal(RefusalCode.MALFORMED, f"{field} is {value}, not {bound}", field, value, bound)


def malformed(body: bytes | memoryview, error: WireError) -> Refusal:
    """The refusal of a Step's body that `decode_body` raised this error for."""
    words = _words(error)
    path = [int(index) for index in re.findall(r"\[(\d+)\]", error.field)]
    if not path:
        bound = "one msgpack array of at most 11 members, and nothing behind it"
        value = words[2] or f"{len(body)} bytes"
        return Refusal(RefusalCode.MALFORMED, str(error), "body", value.replace("`", ""), bound)
    field, bound = _name(path), words[1].replace("`", "")
    read = _read(body)
    request = _at(read, [*path[:2], 0]) if path[0] < 2 and len(path) > 1 else None
    request = request if type(request) is int and 0 <= request <= INT32_MAX else None
    value = _shown(_at(read, path)) if read is not None else words[2] or f"in a body of {len(body)} bytes"
    who = "" if request is None else f"request {request}: "
    return Refusal(RefusalCode.MALFORMED, f"{who}{field} is {value}, not {bound}", field, value, bound, request)


def _words(error: WireError) -> re.Match[str]:
    """What was expected, and of which kind the thing was that came, if it says so."""
    words = re.fullmatch(r"[A-Z]+: (?:Expected )?(.*?)(?:, got (.*?))?(?: - at `.*`)?", str(error), re.DOTALL)
    assert words is not None
    return words


def _path(error: WireError) -> list[int | str]:
    """`parts[1]` is a name and an index, `body` no path at all."""
    if error.field == "body":
        return []
    return [int(index) if index else name for index, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", error.field)]


def _name(path: list[int]) -> str:
    """`[0][7][4][1]` is `new.sampling.top_k`: the place in a list of requests is left out."""
    names: list[str] = []
    kind: type[Struct] = Step
    rest = path
    while rest:
        member = kind.__struct_fields__[rest[0]]
        names.append(member)
        nested = _MEMBERS[kind].get(member)
        if nested is None:
            break
        kind, rest = nested, rest[2:] if kind is Step else rest[1:]
    return ".".join(names)


def _read(body: bytes | memoryview) -> Any:
    if len(body) > MOST_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # it is broken in a second place
        return None


def _at(read: Any, path: Sequence[int | str]) -> Any:
    for place in path:
        try:
            read = read[place]
        except (LookupError, TypeError):
            return None
    return read


def _shown(value: Any) -> str:
    match value:
        case list():
            return f"array of {len(value)}"
        case bytes():
            return f"bytes of {len(value)}"
        case dict():
            return f"object of {len(value)}"
        case str():
            return f"text of {len(value)}"
        case None | bool() | int() | float():
            return str(value)[:64]
    return type(value).__name__
