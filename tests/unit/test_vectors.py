"""The golden vectors: bytes that any implementation must read, write and judge alike."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import inspect

import generate_proto
from worker.execution.random_draw import uniforms
from worker.execution.sampler import SamplingRows, sample
from workerproto.codec import Header, WireError, decode_body, decode_header, encode_body, pack
from workerproto.messages import BODIES, ErrorCode, Kind, RefusalCode
from workerproto.steps import Refusal, StepLimits
from workerproto.testing.fake_gang import FakeGang
from workerproto.testing.random_walk import OF_NO_REQUEST
from workerproto.validate import StepValidator

VECTORS = Path(__file__).resolve().parents[2] / "proto" / "vectors"
Json = dict[str, Any]


def load(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


FRAMES = [
    pytest.param(kind, vector, id=f"{kind.name.lower()}-{vector['name']}")
    for kind in Kind
    for vector in load(f"frames/{kind.name.lower()}")
]
WRONG = [pytest.param(vector, id=vector["name"]) for vector in load("wrong_frames")]
STEPS = load("steps")
STORIES = [pytest.param(story, id=story["name"]) for story in STEPS["stories"]]
EXCHANGES = [pytest.param(exchange, id=exchange["name"]) for exchange in load("exchanges")]


def built(kind: inspect.Type, value: Any, name: str = "") -> Any:
    """A message from its JSON."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: built(field.type, value[field.name], field.name) for field in fields})
        case inspect.MemoryViewType():
            floats = name in generate_proto.FLOATS
            return np.asarray(value, "<f4").tobytes() if floats else pack(value)
        case inspect.ListType(item_type=item):
            return [built(item, one) for one in value]
        case inspect.UnionType(types=(first, _)):
            return None if value is None else built(first, value)
        case inspect.EnumType(cls=cls):
            return cls(value)
    return value


@pytest.mark.parametrize(("kind", "vector"), FRAMES)
def test_a_frame_is_read_and_written(kind: Kind, vector: Json) -> None:
    header, body, meaning = bytes.fromhex(vector["header"]), bytes.fromhex(vector["body"]), vector["meaning"]
    read = decode_header(header)
    assert read.kind is kind
    assert meaning["kind"] == kind.name
    assert {name: getattr(read, name) for name in ("flags", "epoch", "lease", "seq")} == {
        name: meaning[name] for name in ("flags", "epoch", "lease", "seq")
    }
    assert generate_proto.plain(decode_body(kind, body)) == meaning["body"]
    assert Header(kind, meaning["flags"], meaning["epoch"], meaning["lease"], meaning["seq"]).encode() == header
    if kind not in BODIES:
        assert body == b""
        return
    message = built(inspect.type_info(BODIES[kind]), meaning["body"])
    if vector["encodes"]:
        assert encode_body(message) == body
    else:
        assert generate_proto.plain(decode_body(kind, encode_body(message))) == meaning["body"]


def test_every_field_is_somewhere_other_than_by_default() -> None:
    """A vector whose field always holds the default would not notice that two were swapped."""
    seen: dict[str, set[str]] = {}

    def look(message: Any) -> None:
        if isinstance(message, msgspec.Struct):
            for name in message.__struct_fields__:
                value = getattr(message, name)
                seen.setdefault(f"{type(message).__name__}.{name}", set()).add(repr(generate_proto.plain(value, name)))
                look(value)
        elif isinstance(message, list):
            for one in message:
                look(one)

    for param in FRAMES:
        kind, vector = param.values
        look(decode_body(kind, bytes.fromhex(vector["body"])))
    dull = {"[]", "0", "''", "None", "False"}
    assert not [field for field, values in seen.items() if values <= dull]


@pytest.mark.parametrize("vector", WRONG)
def test_a_wrong_frame_is_refused(vector: Json) -> None:
    """By the codec where it alone can tell, and by a gang in any case, with the same code."""
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    gang = FakeGang()
    if len(frames) == 2:
        with pytest.raises(WireError) as caught:
            decode_body(decode_header(frames[0]).kind, frames[1])
        assert (caught.value.code, caught.value.field) == (vector["error"], vector["field"])
    gang.receive(b"peer", frames)
    if len(frames) != 2 or decode_header_or_none(frames[0]) in (None, Kind.HELLO):
        (_, header, body), *_ = gang.outbox
        answer: Any = decode_body(decode_header(header).kind, body)
        assert (answer.code, answer.field) == (vector["error"], vector["field"])


def test_every_kind_has_a_body_that_is_none() -> None:
    kinds = set()
    for param in WRONG:
        (vector,) = param.values
        if vector["error"] == "BAD_BODY":
            kinds.add(decode_header(bytes.fromhex(vector["frames"][0])).kind)
    assert kinds == set(Kind)


def decode_header_or_none(frame: bytes) -> Kind | None:
    try:
        return decode_header(frame).kind
    except WireError:
        return None


@pytest.mark.parametrize("story", STORIES)
def test_a_step_is_judged(story: Json) -> None:
    validator = StepValidator(StepLimits(**STEPS["limits"]))
    for step in story["steps"]:
        verdict: Any = "accepted"
        try:
            validator.check(step["seq"], step["flags"], bytes.fromhex(step["body"]))
        except Refusal as refusal:
            verdict = generate_proto.plain_refusal(refusal)
        assert verdict == step["verdict"]
        if step["meaning"] is not None and all(isinstance(value, list) for value in step["meaning"].values()):
            message = built(inspect.type_info(BODIES[Kind.STEP]), step["meaning"])
            assert generate_proto.plain(message) == step["meaning"]


OF_OPERATIONS = {
    RefusalCode.REQUESTS_LIVE, RefusalCode.ASLEEP, RefusalCode.NOT_ASLEEP, RefusalCode.UPDATING,
    RefusalCode.NOT_UPDATING, RefusalCode.WEIGHTS_INVALID, RefusalCode.AWAITING_KV, RefusalCode.KV_CONFIGURED,
    RefusalCode.BAD_ARGUMENT, RefusalCode.SAMPLE_DUE, RefusalCode.BAD_STEP, RefusalCode.BAD_MASK,
}  # fmt: skip


def test_every_refusal_ends_a_story_or_answers_an_operation() -> None:
    last = [story["steps"][-1]["verdict"] for story in STEPS["stories"]]
    refused = [verdict for verdict in last if verdict != "accepted"]
    for param in EXCHANGES:
        meanings = [message.get("meaning") for message in param.values[0]["messages"]]
        refused += [meaning["body"] for meaning in meanings if meaning and meaning["kind"] == "REFUSED"]
    told = {verdict["code"] for verdict in refused}
    of_ranks_alone = {RefusalCode.NOT_POSSIBLE, RefusalCode.NOT_IMPLEMENTED}
    assert told == set(RefusalCode) - of_ranks_alone
    for verdict in refused:
        assert verdict["field"], verdict
        assert verdict["value"], verdict
        assert verdict["bound"], verdict
        negative = verdict["value"].startswith("-")  # an id that is nobody's
        none = negative or verdict["code"] in OF_NO_REQUEST | OF_OPERATIONS
        assert verdict["request"] is not None or none, verdict


def test_every_error_is_somewhere() -> None:
    codes = {param.values[0]["error"] for param in WRONG}
    for param in EXCHANGES:
        for message in param.values[0]["messages"]:
            if (message.get("meaning") or {}).get("kind") == "ERROR":
                codes.add(message["meaning"]["body"]["code"])
    assert codes == set(ErrorCode)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchange_reads_as_it_says(exchange: Json) -> None:
    """That the fake gang still answers so is a part of `test_nothing_generated_is_stale`."""
    for message in exchange["messages"]:
        if message.get("meaning"):
            header, body = bytes.fromhex(message["header"]), bytes.fromhex(message["body"])
            read = decode_header(header)
            assert read.kind.name == message["meaning"]["kind"]
            assert generate_proto.plain(decode_body(read.kind, body)) == message["meaning"]["body"]


@pytest.mark.parametrize("number", range(len(load("draws")["draws"])))
def test_a_draw_is_what_the_spec_says(number: int) -> None:
    draws = load("draws")
    logits, case = draws["logits"], draws["draws"][number]
    sampling, position = case["sampling"], case["position"]
    point = generate_proto.uniform(sampling["seed"], position)
    assert point == case["uniform_times_2_53"]
    assert uniforms(np.array([sampling["seed"]]), np.array([position]))[0] == point * 2.0**-53
    assert drawn([logits], [sampling], [position]) == [case["token"]]


def test_many_draws_are_what_the_spec_says() -> None:
    """The spec's words, written once more in plain Python, against the sampler; logits with many ties among them."""
    random = np.random.default_rng(5)
    logits = (random.integers(-12, 12, (400, 40)) / 4).astype(np.float32).tolist()
    samplings: list[Json] = [
        {
            "temperature": float(random.choice([0.0, 0.3, 1.0, 7.5])),
            "top_k": int(random.choice([0, 1, 5, 39, 40, 1000])),
            "top_p": float(random.choice([1.0, 0.9, 0.5, 1e-6])),
            "min_p": float(random.choice([0.0, 0.05, 0.5, 1.0])),
            "seed": int(random.integers(2**53)),
        }
        for _ in logits
    ]
    positions = random.integers(1, 10_000, len(logits)).tolist()
    wanted = [
        generate_proto.draw(
            row, how["temperature"], how["top_k"], how["top_p"], how["min_p"], generate_proto.uniform(how["seed"], at)
        )
        for row, how, at in zip(logits, samplings, positions, strict=True)
    ]
    assert drawn(logits, samplings, positions) == wanted


def drawn(logits: list[list[float]], samplings: list[Json], positions: list[int]) -> list[int]:
    def column(name: str, dtype: type) -> Any:
        return np.array([sampling[name] for sampling in samplings], dtype)

    rows = SamplingRows(
        temperature=column("temperature", np.float64),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float64),
        min_p=column("min_p", np.float64),
        seed=column("seed", np.int64),
        logprobs=np.full(len(samplings), -1, np.int32),
        position=np.array(positions, np.int32),
    )
    tokens: list[int] = sample(torch.tensor(logits), rows).tokens.tolist()
    return tokens
