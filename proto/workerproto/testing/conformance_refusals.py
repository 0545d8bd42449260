"""Conformance, the second tier: each step below is wrong in one place, and refused whole for that reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from workerproto.codec import encode_body, pack
from workerproto.fields import INT32_MAX
from workerproto.messages import RefusalCode, Sampling, Step
from workerproto.testing.conformance_bench import FORCED, PROMPT, SAMPLE, Bench, Rules, Scene, drawn
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

REFUSALS = Rules()
_NOBODY = 999  # a request that never lived
_C = RefusalCode


def _refused(
    name: str, code: RefusalCode, make: Callable[[Scene], PlainStep | Step | bytes], request: int | None = None,
    field: str = "",
) -> None:  # fmt: skip
    @REFUSALS(f"15.{name}")
    def run(bench: Bench) -> None:
        scene = Scene(bench)
        scene.refuses(make(scene), code, request, field)


def _row(**changes: object) -> Callable[[Scene], PlainStep]:
    """The next row of request 1, with something else in it."""
    return lambda scene: PlainStep(rows=[replace(scene.next_row(), **changes)])  # type: ignore[arg-type]  # by name


def _new(make: Callable[[Scene], PlainStart]) -> Callable[[Scene], PlainStep]:
    return lambda scene: PlainStep(new=[make(scene)])


def _resume(name: int, length: int = PROMPT + 1) -> Callable[[Scene], PlainStep]:
    return lambda scene: PlainStep(
        resumed=[PlainStart(name, (scene.bench.prompt() + scene.expected)[:length], scene.free[:1], 0)]
    )


# Requests that are not there, or are already.
_refused("finished-unknown", _C.UNKNOWN_REQUEST, lambda _: PlainStep(finished=[_NOBODY]), _NOBODY, "finished")
_refused("finished-twice", _C.UNKNOWN_REQUEST, lambda _: PlainStep(finished=[1, 1]), 1, "finished")
_refused("finished-negative", _C.UNKNOWN_REQUEST, lambda _: PlainStep(finished=[-1]), None, "finished")
_refused("preempted-unknown", _C.UNKNOWN_REQUEST, lambda _: PlainStep(preempted=[_NOBODY]), _NOBODY, "preempted")
_refused("preempted-twice", _C.UNKNOWN_REQUEST, lambda _: PlainStep(preempted=[2]), 2, "preempted")
_refused("finished-and-preempted", _C.UNKNOWN_REQUEST, lambda _: PlainStep(finished=[1], preempted=[1]), 1, "preempted")
_refused("row-unknown", _C.UNKNOWN_REQUEST, _row(id=_NOBODY), _NOBODY, "ids")
_refused("row-of-preempted", _C.UNKNOWN_REQUEST, _row(id=2), 2, "ids")
_refused(
    "row-of-finished", _C.UNKNOWN_REQUEST, lambda scene: PlainStep(finished=[1], rows=[scene.next_row()]), 1, "ids"
)
_refused("resumed-unknown", _C.UNKNOWN_REQUEST, _resume(_NOBODY), _NOBODY, "resumed.id")
_refused("resumed-running", _C.NOT_PREEMPTED, _resume(1), 1, "resumed.id")
_refused("new-running", _C.DUPLICATE_REQUEST, _new(lambda s: replace(s.new(), id=1)), 1, "new.id")
_refused("new-preempted", _C.DUPLICATE_REQUEST, _new(lambda s: replace(s.new(), id=2)), 2, "new.id")
_refused(
    "new-finished-here", _C.DUPLICATE_REQUEST,
    lambda s: PlainStep(finished=[1], new=[replace(s.new(), id=1)]), 1, "new.id",
)  # fmt: skip
_refused("new-twice", _C.DUPLICATE_REQUEST, lambda s: PlainStep(new=[s.new(blocks=[])] * 2), 9, "new.id")
_refused("two-rows", _C.DUPLICATE_REQUEST, lambda scene: PlainStep(rows=[scene.next_row()] * 2), 1, "ids")
_refused("tokens-too-few", _C.TOKENS_DISAGREE, _resume(2, PROMPT), 2, "resumed.tokens")
_refused("tokens-too-many", _C.TOKENS_DISAGREE, _resume(2, PROMPT + 2), 2, "resumed.tokens")

# Tokens.
_refused("empty-prompt", _C.EMPTY_PROMPT, _new(lambda scene: scene.new([], [])), 9, "new.tokens")
_refused(
    "token-beyond-vocabulary", _C.TOKEN_OUT_OF_VOCABULARY,
    _new(lambda scene: scene.new([0, scene.facts.vocabulary])), 9, "new.tokens",
)  # fmt: skip
_refused("token-negative", _C.TOKEN_OUT_OF_VOCABULARY, _new(lambda scene: scene.new([0, -1])), 9, "new.tokens")
_refused("forced-negative", _C.TOKEN_OUT_OF_VOCABULARY, _row(flags=FORCED, forced=[-1]), 1, "forced")
_refused(
    "forced-beyond-vocabulary", _C.TOKEN_OUT_OF_VOCABULARY,
    lambda s: PlainStep(rows=[replace(s.next_row(), flags=FORCED, forced=[s.facts.vocabulary])]), 1, "forced",
)  # fmt: skip
_refused("too-many-logprobs", _C.BAD_SAMPLING, lambda s: _sampling(s, logprobs=s.facts.limits.logprobs + 1), 9)


@REFUSALS("15.prompt-too-long")
def _(bench: Bench) -> None:
    length = bench.facts.max_model_len + 1
    bench.need(4 * length < bench.facts.limits.frame_bytes - 1024, f"a frame that holds {length} tokens")
    scene = Scene(bench)
    scene.refuses(PlainStep(new=[scene.new(bench.prompt(length), [])]), _C.TOO_LONG, 9, "new.tokens")


@REFUSALS("15.row-too-long")
def _(bench: Bench) -> None:
    count = bench.facts.max_model_len - PROMPT
    bench.need_room(tokens=count)
    row = PlainRow(1, PROMPT, count, SAMPLE | FORCED, [], bench.prompt(count))
    Scene(bench).refuses(PlainStep(rows=[row]), _C.TOO_LONG, 1)


# Rows.
_refused("position-ahead", _C.BAD_POSITION, _row(position=PROMPT + 1), 1, "positions")
_refused("position-behind", _C.BAD_POSITION, _row(position=PROMPT - 1), 1, "positions")
_refused("position-negative", _C.BAD_POSITION, _row(position=-1), 1, "positions")
_refused("count-zero", _C.BAD_COUNT, _row(count=0), 1, "counts")
_refused("count-negative", _C.BAD_COUNT, _row(count=-1), 1, "counts")
_refused("count-beyond-known", _C.BAD_COUNT, lambda _: PlainStep(rows=[PlainRow(3, 1, PROMPT)]), 3, "counts")
_refused("row-flag-4", _C.BAD_ROW_FLAGS, _row(flags=4), 1, "row_flags")
_refused("row-flag-8", _C.BAD_ROW_FLAGS, _row(flags=8 | SAMPLE), 1, "row_flags")
_refused("row-flags-negative", _C.BAD_ROW_FLAGS, _row(flags=-1), 1, "row_flags")
_refused("sample-early", _C.BAD_SAMPLE, lambda _: PlainStep(rows=[PlainRow(3, 1, 1, SAMPLE)]), 3)
_refused("too-many-tokens", _C.TOO_MANY_TOKENS, lambda s: _row(count=s.facts.limits.tokens + 1)(s))
_refused(
    "too-many-rows", _C.TOO_MANY_ROWS, lambda s: PlainStep(rows=[PlainRow(1, 0, 1)] * (s.facts.limits.rows + 1))
)


@REFUSALS("15.too-many-requests")
def _(bench: Bench) -> None:
    """Preempted ones count too; as many as may live, do."""
    most = bench.facts.limits.live_requests
    bench.need(64 * most < bench.facts.limits.frame_bytes, f"a frame that holds {most} requests")
    scene = Scene(bench)
    starts = [PlainStart(100 + place, [0], [], 0) for place in range(most - 2)]
    scene.refuses(PlainStep(new=starts), _C.TOO_MANY_REQUESTS)
    drawn(scene.link, PlainStep(new=starts[1:]))


# Blocks.
_refused("block-beyond", _C.BLOCK_OUT_OF_RANGE, _new(lambda s: s.new(None, [s.facts.kv.num_blocks])), 9, "new.blocks")
_refused("block-negative", _C.BLOCK_OUT_OF_RANGE, _new(lambda s: s.new(None, [-1])), 9, "new.blocks")
_refused("block-owned", _C.BLOCK_OWNED, _new(lambda s: s.new(None, s.blocks[0][:1])), 9, "new.blocks")
_refused(
    "block-in-two-requests", _C.BLOCK_OWNED,
    lambda s: PlainStep(new=[s.new(), replace(s.new(), id=10)]), 10, "new.blocks",
)  # fmt: skip


def _with_room_for_two(
    name: str, code: RefusalCode, make: Callable[[Scene], PlainStep], request: int, field: str
) -> None:
    """Requests must be long enough to hold another block than the scene's."""

    @REFUSALS(f"15.{name}")
    def run(bench: Bench) -> None:
        bench.need_room(length=bench.blocks_for(PROMPT + 1) * bench.facts.kv.block_size + 1)
        scene = Scene(bench)
        scene.refuses(make(scene), code, request, field)


def _granting(make: Callable[[Scene], list[int]]) -> Callable[[Scene], PlainStep]:
    return lambda scene: PlainStep(rows=[replace(scene.next_row(), grants=make(scene))])


_refused(
    "grant-too-many", _C.TOO_MANY_BLOCKS,
    _granting(lambda s: s.free[:1] * (s.bench.blocks_per_request + 1)), 1, "grant_counts",
)  # fmt: skip
_with_room_for_two("grant-beyond", _C.BLOCK_OUT_OF_RANGE, _granting(lambda s: [s.facts.kv.num_blocks]), 1, "grants")
_with_room_for_two("grant-negative", _C.BLOCK_OUT_OF_RANGE, _granting(lambda _: [-1]), 1, "grants")
_with_room_for_two("grant-owned", _C.BLOCK_OWNED, _granting(lambda s: s.blocks[2][:1]), 1, "grants")
_with_room_for_two("grant-own-block", _C.BLOCK_OWNED, _granting(lambda s: s.blocks[0][:1]), 1, "grants")
_with_room_for_two("block-twice", _C.BLOCK_OWNED, _new(lambda s: s.new(None, s.free[:1] * 2)), 9, "new.blocks")
_refused(
    "too-many-blocks", _C.TOO_MANY_BLOCKS,
    _new(lambda s: s.new(None, s.free[:1] * (s.bench.blocks_per_request + 1))), 9, "new.blocks",
)  # fmt: skip
_refused(
    "blocks-missing", _C.BLOCKS_MISSING,
    lambda s: PlainStep(new=[s.new(None, [])], rows=[PlainRow(9, 0, 1)]), 9,
)  # fmt: skip
_refused("grants-fewer", _C.MALFORMED, lambda s: _members(s, grant_counts=[1]), None, "grants")
_refused("grants-more", _C.MALFORMED, lambda s: _members(s, grants=s.free[:1]), None, "grants")
_refused("grant-count-negative", _C.BAD_COUNT, lambda s: _members(s, grant_counts=[-1]), 1, "grant_counts")


# Shared prefixes.
def _prefix(name: str, code: RefusalCode, make: Callable[[Scene, int], PlainStart], field: str) -> None:
    """A request whose first block is in the cache already, or is said to be."""

    @REFUSALS(f"15.{name}")
    def run(bench: Bench) -> None:
        size = bench.facts.kv.block_size
        bench.need_prefixes()
        bench.need_room(length=2 * size + 1)
        scene = Scene(bench)
        scene.refuses(PlainStep(new=[make(scene, size)]), code, 9, field)


_prefix("prefix-unwritten", _C.BLOCK_UNWRITTEN, lambda s, n: s.new(s.bench.prompt(n + 1), s.free[:1], n), "new.blocks")
_prefix("prefix-beyond", _C.BLOCK_OUT_OF_RANGE, lambda s, n: s.new(s.bench.prompt(n + 1), [-1], n), "new.blocks")
_prefix("prefix-missing", _C.BLOCKS_MISSING, lambda s, n: s.new(s.bench.prompt(n + 1), [], n), "new.blocks")
_prefix(
    "prefix-granted-too", _C.BLOCK_OWNED,
    lambda s, n: s.new(s.bench.prompt(n + 1), s.blocks[0][:1] * 2, n), "new.blocks",
)  # fmt: skip
_prefix(
    "prefix-twice", _C.BLOCK_OWNED,
    lambda s, n: s.new(s.bench.prompt(2 * n + 1), s.blocks[0][:1] * 2, 2 * n), "new.blocks",
)  # fmt: skip
_prefix("computed-all", _C.BAD_COMPUTED, lambda s, n: s.new(s.bench.prompt(n), s.blocks[0][:1], n), "new.computed")


@REFUSALS("15.prefix-half-written")
def _(bench: Bench) -> None:
    """Request 3 has written one position of its block."""
    size = bench.facts.kv.block_size
    bench.need(size > 1, "blocks of more than one position")
    bench.need_prefixes()
    bench.need_room(length=size + 1)
    scene = Scene(bench)
    new = scene.new(bench.prompt(size + 1), scene.blocks[2][:1], size)
    scene.refuses(PlainStep(new=[new]), _C.BLOCK_UNWRITTEN, 9, "new.blocks")


@REFUSALS("15.computed-no-multiple")
def _(bench: Bench) -> None:
    bench.need(bench.facts.kv.alignment > 1, "prefixes of more than one position")
    scene = Scene(bench)
    scene.refuses(PlainStep(new=[scene.new(computed=1)]), _C.BAD_COMPUTED, 9, "new.computed")


# Bodies that cannot be read.
def _members(scene: Scene, **changes: list[int] | bytes) -> Step:
    """The next step, with packed members of other lengths."""
    packed = {name: value if isinstance(value, bytes) else pack(value) for name, value in changes.items()}
    step = PlainStep(rows=[scene.next_row()]).packed()
    return msgspec.structs.replace(step, **packed)


def _resized(member: str, value: list[int] | bytes) -> Callable[[Scene], Step]:
    return lambda scene: _members(scene, **{member: value})


def _sampling(scene: Scene, **changes: float) -> PlainStep:
    return PlainStep(new=[replace(scene.new(), sampling=msgspec.structs.replace(Sampling(), **changes))])


def _named(scene: Scene, name: int) -> PlainStep:
    return PlainStep(new=[replace(scene.new(), id=name)])


def _whatever(body: bytes, _: Scene) -> bytes:
    return body


for _member in ("positions", "counts", "row_flags", "grant_counts"):
    _refused(f"{_member}-short", _C.MALFORMED, _resized(_member, []), None, _member)
    _refused(f"{_member}-long", _C.MALFORMED, _resized(_member, [0, 0]), None, _member)
for _member in ("finished", "preempted", "ids", "grants", "forced"):
    _refused(f"{_member}-no-multiple-of-4", _C.MALFORMED, _resized(_member, b"abc"), None, _member)
_refused("forced-missing", _C.MALFORMED, _row(flags=FORCED), None, "forced")
_refused("forced-unasked", _C.MALFORMED, _row(forced=[0]), None, "forced")
for _name, _bad in (
    ("temperature-negative", {"temperature": -1.0}), ("temperature-101", {"temperature": 101.0}),
    ("temperature-nan", {"temperature": math.nan}), ("top-k-negative", {"top_k": -1}), ("top-p-0", {"top_p": 0.0}),
    ("top-p-2", {"top_p": 2.0}), ("top-p-nan", {"top_p": math.nan}), ("min-p-negative", {"min_p": -0.5}),
    ("min-p-2", {"min_p": 2.0}), ("seed-negative", {"seed": -1}), ("seed-2^53", {"seed": 2**53}),
    ("logprobs-below-1", {"logprobs": -2}),
):  # fmt: skip
    (_field,) = _bad
    _refused(f"sampling-{_name}", _C.MALFORMED, partial(_sampling, **_bad), 9, f"new.sampling.{_field}")
for _name, _id in (("id-negative", -1), ("id-2^31", INT32_MAX + 1)):
    _refused(_name, _C.MALFORMED, partial(_named, name=_id), None, "new.id")
for _name, _body in (
    ("body-empty", b""), ("body-not-msgpack", b"\xc1"), ("body-nil", b"\xc0"), ("body-map", b"\x80"),
    ("body-truncated", encode_body(Step())[:-1]), ("body-trailing", encode_body(Step()) + b"\xc0"),
    ("body-member-too-many", b"\x9c" + encode_body(Step())[1:] + b"\xc0"), ("body-deep", b"\x91" * 100_000),
    ("body-lying-array", b"\xdd\xff\xff\xff\xff"), ("body-lying-bin", b"\x93\x90\x90\xc6\xff\xff\xff\xff"),
    ("body-text-for-bin", b"\x93\x90\x90\xa4abcd"), ("body-list-for-bin", b"\x93\x90\x90\x91\x01"),
    ("body-ext", b"\x93\x90\x90\xd6\x01abcd"), ("body-float-for-int", b"\x91\x91\x95\xca\x3f\x80\x00\x00"),
    ("body-pickle", b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94K\x01a."),
):  # fmt: skip
    _refused(_name, _C.MALFORMED, partial(_whatever, _body))
