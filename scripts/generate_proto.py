"""Write what is derived from `proto/workerproto`: proto/schema, proto/vectors, docs/states.md, the exchange in SPEC.md.

    python scripts/generate_proto.py            writes
    python scripts/generate_proto.py --check    names what is stale, and exits 1 if anything is
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from msgspec import inspect

from proto_exchanges import Done, Said, exchanges
from proto_vectors import LIMITS, stories, valid_frames
from proto_wrong_frames import wrong_frames
from workerproto import messages, operations
from workerproto.codec import HEADER_BYTES, WireError, decode_body, decode_header, encode_body
from workerproto.fields import INT32_MAX, INTEGER_MAX
from workerproto.messages import BODIES, Step
from workerproto.states import GANG, LEASE, REQUEST, Gang, Lease, Request
from workerproto.steps import Refusal
from workerproto.validate import StepValidator

ROOT = Path(__file__).resolve().parent.parent
FLOATS = frozenset({"logprob_values"})
Plain = dict[str, Any]


def plain(value: object, field: str = "") -> Any:
    """A message as JSON has it: structs are objects by field name, packed members are lists of numbers."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        tag = {config.tag_field: config.tag} if config.tag_field else {}
        return tag | {name: plain(getattr(value, name), name) for name in value.__struct_fields__}
    if isinstance(value, memoryview | bytes):
        if len(value) % 4:
            return {"hex": bytes(value).hex()}
        return np.frombuffer(value, "<f4" if field in FLOATS else "<i4").tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


def _frames(header: bytes, body: bytes) -> Plain:
    return {"header": header.hex(), "body": body.hex()}


def _meaning(header: bytes, body: bytes) -> Plain:
    read = decode_header(header)
    described = {"kind": read.kind.name, "flags": read.flags, "epoch": read.epoch, "lease": read.lease, "seq": read.seq}
    return described | {"body": plain(decode_body(read.kind, body))}


# Vectors.


def frame_vectors() -> dict[str, list[Plain]]:
    """By kind. `encodes` says whether this codec writes these very bytes, or a longer body of the same meaning."""
    found: dict[str, list[Plain]] = {}
    for name, header, message, raw in valid_frames():
        body = raw if raw is not None else b"" if message is None else encode_body(message)
        vector = {"name": name, "encodes": raw is None, **_frames(header.encode(), body)}
        found.setdefault(header.kind.name.lower(), []).append(vector | {"meaning": _meaning(header.encode(), body)})
    return found


def wrong_vectors() -> list[Plain]:
    return [
        {"name": name, "error": code, "field": field, "frames": [frame.hex() for frame in frames]}
        for name, frames, code, field in wrong_frames()
    ]


def step_vectors() -> Plain:
    """Stories with the verdict on each of their steps, by the validator."""
    found = []
    for name, steps in stories():
        validator, told = StepValidator(LIMITS), []
        for seq, (flags, step) in enumerate(steps, start=1):
            body = encode_body(step) if isinstance(step, Step) else step
            verdict: Plain | str = "accepted"
            try:
                validator.check(seq, flags, body)
            except Refusal as refusal:
                verdict = plain_refusal(refusal)
            meaning = _try_plain(body)
            told.append({"seq": seq, "flags": flags, "body": body.hex(), "meaning": meaning, "verdict": verdict})
        found.append({"name": name, "steps": told})
    return {"limits": {name: getattr(LIMITS, name) for name in LIMITS.__slots__}, "stories": found}


def plain_refusal(refusal: Refusal) -> Plain:
    """All but the message, whose words are free."""
    return {
        "code": refusal.code,
        "cause_seq": refusal.cause,
        "request": refusal.request,
        "field": refusal.field,
        "value": refusal.value,
        "bound": refusal.bound,
    }


def _try_plain(body: bytes) -> Plain | None:
    try:
        return cast(Plain, plain(msgspec.msgpack.decode(body, type=Step)))
    except msgspec.MsgspecError:
        return None


def exchange_vectors() -> list[Plain]:
    found = []
    for name, script in exchanges().items():
        messages = [{"happens": said.what} if isinstance(said, Done) else _said(said) for said in script]
        found.append({"name": name, "messages": messages})
    return found


def _said(said: Said) -> Plain:
    ends = {"from": "gang", "to": said.peer} if said.gang else {"from": said.peer, "to": "gang"}
    try:
        meaning = _meaning(*said.frames)
    except WireError:
        meaning = None
    header, body = said.frames
    if len(body) > 4096:  # of zeros
        return ends | {"header": header.hex(), "body_zeros": len(body)}
    return ends | _frames(header, body) | {"meaning": meaning}


# Draws, as SPEC.md tells them and without a look at the worker's own.


def uniform(seed: int, position: int) -> int:
    """The random number of a draw, in units of 2**-53: Philox4x32-10."""
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = position & word, position >> 32, 0, 0
    k0, k1 = seed & word, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & word, (p0 >> 32) ^ c3 ^ k1, p0 & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return (c0 << 21) | (c1 >> 11)


def draw(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, point: int) -> int:
    """The token drawn with this random number."""
    best = max(logits)
    if temperature == 0:
        return logits.index(best)
    one = 2**40
    weights = [round(one * math.exp((logit - best) / temperature)) for logit in logits]
    _drop(weights, math.ceil(min_p * one))
    if 0 < top_k < len(weights):
        _drop(weights, sorted(weights, reverse=True)[top_k - 1])
    if top_p < 1:
        goal, running = math.ceil(float(sum(weights)) * top_p), 0
        for weight in sorted(weights, reverse=True):
            running += weight
            if running >= goal:
                _drop(weights, weight)
                break
    total = sum(weights)
    aim, running = min(math.floor(float(total) * (point * 2.0**-53)), total - 1), 0
    for token, weight in enumerate(weights):
        running += weight
        if running > aim:
            return token
    raise AssertionError("the aim is below the total")


def _drop(weights: list[int], least: int) -> None:
    weights[:] = [weight if weight >= least else 0 for weight in weights]


def draw_vectors() -> Plain:
    """Logits are quarters, so that float32 holds them exactly."""
    logits = [(37 * token * token + 11 * token) % 29 / 4 for token in range(16)]
    found = []
    for seed, position, temperature, top_k, top_p, min_p in [
        (0, 1, 0.0, 0, 1.0, 0.0), (0, 1, 1.0, 0, 1.0, 0.0), (1, 1, 1.0, 0, 1.0, 0.0), (0, 2, 1.0, 0, 1.0, 0.0),
        (2**53 - 1, 8191, 0.7, 0, 1.0, 0.0), (42, 100, 100.0, 0, 1.0, 0.0), (42, 100, 2.0, 3, 1.0, 0.0),
        (42, 101, 2.0, 0, 0.5, 0.0), (42, 102, 2.0, 0, 1.0, 0.25), (2**32, 7, 3.0, 8, 0.9, 0.05),
        (2**32 + 1, 7, 50.0, 1, 1.0, 0.0), (9, 9, 0.01, 0, 0.1, 1.0),
    ]:  # fmt: skip
        point = uniform(seed, position)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        token = draw(logits, temperature, top_k, top_p, min_p, point)
        found.append({"sampling": sampling, "position": position, "uniform_times_2_53": point, "token": token})
    return {"logits": logits, "draws": found}


# Schemas.


def schemas() -> Iterator[tuple[str, Plain]]:
    """(file name, JSON Schema) of each kind's body."""
    for kind, body in BODIES.items():
        (schema,), components = msgspec.json.schema_components([body], ref_template="#/$defs/{name}")
        for name, component in components.items():
            _name_members(component, (vars(messages) | vars(operations))[name])
        title = f"body of kind {int(kind)}, {kind.name}"
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
        yield kind.name.lower(), head | schema | {"$defs": components}


def _name_members(component: Plain, struct: type[msgspec.Struct]) -> None:
    """Say of an array's members what they are called, and of packed ones what they hold."""
    if component.get("enum"):
        return
    tag = struct.__struct_config__.tag_field
    named = {name: member for name, member in component.get("properties", {}).items() if name != tag}
    members = component.get("prefixItems") or list(named.values())
    for name, member in zip(struct.__struct_fields__, members, strict=True):
        if "prefixItems" in component:
            member["title"] = name
        if member.get("contentEncoding"):
            del member["contentEncoding"]
            kind = "float32" if name in FLOATS else "int32"
            member["description"] = f"msgpack bin of {kind}, little-endian, unaligned"


# The fields as SPEC.md's tables have them.


def field_cells(struct: type[msgspec.Struct]) -> list[list[str]]:
    """[field, type, bounds, default] of each field, with its place in front where the struct is an array."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    found = []
    for place, field in enumerate(info.fields):
        kind, bounds = _kind_and_bounds(field.type, field.name)
        default = "required" if field.required else "[]" if kind.startswith("list") else _default(field.default)
        found.append(([str(place)] if info.array_like else []) + [f"`{field.name}`", kind, bounds, default])
    return found


_POWERS = {INTEGER_MAX: "2^53-1", INT32_MAX: "2^31-1"}


def _kind_and_bounds(kind: inspect.Type, name: str) -> tuple[str, str]:
    match kind:
        case inspect.IntType(ge=least, le=most):
            return "int", f"{least} … {_POWERS.get(most or 0, most)}"
        case inspect.FloatType(gt=above, ge=least, le=most):
            return "float", f"{least} … {most}" if above is None else f"above {above} … {most}"
        case inspect.StrType(max_length=most):
            return "text", f"≤ {most}"
        case inspect.BoolType():
            return "bool", ""
        case inspect.MemoryViewType():
            return ("f32[]" if name in FLOATS else "i32[]"), ""
        case inspect.EnumType(cls=cls) | inspect.StructType(cls=cls):
            return cls.__name__, ""
        case inspect.ListType(item_type=item):
            inner, bounds = _kind_and_bounds(item, name)
            return f"list of {inner}", bounds
        case inspect.UnionType(types=(first, inspect.NoneType())):
            inner, bounds = _kind_and_bounds(first, name)
            return f"{inner} or null", bounds
    return "map", ""  # Done's reports


def _default(value: object) -> str:
    if isinstance(value, memoryview | bytes):
        return "empty"
    return json.dumps(int(value) if isinstance(value, float) else value)


# States.


TABLES: list[tuple[str, StrEnum, Mapping[Any, StrEnum]]] = [
    ("Gang", Gang.STARTING, GANG),
    ("Lease", Lease.NONE, LEASE),
    ("Request, on the ranks", Request.UNKNOWN, REQUEST),
]


def states_page() -> str:
    page = "# States\n\nGenerated from the tables in `proto/workerproto/states.py` by `scripts/generate_proto.py`.\n"
    page += "An event that a state does not list is an error, and the error says what would have been allowed.\n"
    page += "What the events mean stands in `proto/SPEC.md`.\n"
    for title, start, table in TABLES:
        arrows: dict[tuple[str, str], list[str]] = {}
        for (state, event), following in table.items():
            arrows.setdefault((state, following), []).append(event)
        page += f"\n## {title}\n\n```mermaid\nstateDiagram-v2\n    [*] --> {start}\n"
        page += "".join(f"    {a} --> {b}: {', '.join(events)}\n" for (a, b), events in arrows.items())
        page += "```\n"
    return page


def states_text() -> str:
    """The tables, one line for each event and next state."""
    text = ""
    for title, start, table in TABLES:
        lines: dict[tuple[str, str], list[str]] = {}
        for (state, event), following in table.items():
            lines.setdefault((event, following), []).append(state)
        text += f"**{title}**, from {start}:\n\n| in | event | next |\n|---|---|---|\n"
        text += "".join(f"| {', '.join(states)} | {event} | {end} |\n" for (event, end), states in lines.items()) + "\n"
    return text.rstrip() + "\n"


# The exchange that the spec prints.


def exchange_text() -> str:
    lines = []
    for said in exchanges()["generate"]:
        assert isinstance(said, Said)
        header, body = said.frames
        meaning = _meaning(header, body)
        arrow = "gang → scheduler" if said.gang else "scheduler → gang"
        lines.append(f"{arrow}: {meaning['kind']}, sequence {meaning['seq']}\n")
        lines.append("```text\n" + _hex(header) + ("\n" + _hex(body) if body else "\n(an empty frame)") + "\n```\n")
        if meaning["body"] is not None:
            lines.append("```json\n" + _folded(meaning["body"]) + "\n```\n")
    return "\n".join(lines)


def _hex(frame: bytes) -> str:
    return "\n".join(frame[at : at + HEADER_BYTES].hex(" ") for at in range(0, len(frame), HEADER_BYTES))


def _folded(body: Plain) -> str:
    """One member a line where it is long."""
    text = json.dumps(body, ensure_ascii=False)
    if len(text) <= 110:
        return text
    members = [f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in body.items()]
    return "{" + ",\n ".join(members) + "}"


# Files.


def files() -> dict[Path, str]:
    """Everything that this script writes, by path."""
    found: dict[Path, str] = {}
    for name, schema in schemas():
        found[ROOT / "proto" / "schema" / f"{name}.json"] = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    vectors: dict[str, Any] = {f"frames/{kind}": group for kind, group in frame_vectors().items()}
    vectors |= {"wrong_frames": wrong_vectors(), "steps": step_vectors(), "exchanges": exchange_vectors()}
    vectors["draws"] = draw_vectors()
    for name, value in vectors.items():
        found[ROOT / "proto" / "vectors" / f"{name}.json"] = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    found[ROOT / "docs" / "states.md"] = states_page()
    spec = ROOT / "proto" / "SPEC.md"
    text = spec.read_text(encoding="utf-8")
    for name, part in (("states", states_text()), ("exchange", exchange_text())):
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{part}\n{end}{rest.split(end)[1]}"
    found[spec] = text
    return found


def stale(found: Mapping[Path, str]) -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for path, text in found.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> None:
    found = files()
    if "--check" in sys.argv[1:]:
        if names := stale(found):
            sys.exit(f"stale, run python scripts/generate_proto.py: {', '.join(names)}")
        return
    for path, text in found.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
