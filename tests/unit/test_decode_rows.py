"""The quick way for steps that only decode comes to what the general rules come to: two validators side by side."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from workerproto.codec import encode_body, pack, unpack
from workerproto.decode_rows import DecodeRows, _Place, _Rows
from workerproto.messages import HeaderFlag, New, Resume, RowFlag, Sampling, Step
from workerproto.steps import AcceptedStep, Refusal, StepLimits
from workerproto.testing.random_walk import snapshot
from workerproto.validate import StepValidator

SAMPLE, FORCED = int(RowFlag.SAMPLE), int(RowFlag.FORCED)
FEW_ROWS = StepLimits(
    num_blocks=40, block_size=4, vocabulary=50, max_model_len=24, tokens=30, rows=3, live_requests=8, logprobs=0
)
FEW_TOKENS = StepLimits(
    num_blocks=44, block_size=2, vocabulary=50, max_model_len=16, tokens=3, rows=7, live_requests=7, logprobs=0
)
COLUMNS = ("ids", "positions", "counts", "row_flags", "grant_counts")


class _Nothing(DecodeRows):
    def accept(self, sequence: int, step: Step) -> None:
        return None


class _Counted(DecodeRows):
    accepted = granted = followed = stayed = 0

    def accept(self, sequence: int, step: Step) -> AcceptedStep | None:
        accepted = super().accept(sequence, step)
        self.accepted += accepted is not None
        self.granted += accepted is not None and len(accepted.grants) > 0
        return accepted

    def _follow(self, step: Step, last: _Rows, place: _Place) -> tuple[_Rows | None, _Place | None]:
        rows, place_now = super()._follow(step, last, place)
        self.followed += rows is not None and rows.slots is last.slots
        self.stayed += place_now is not None
        return rows, place_now


class _Validator(StepValidator):
    def __init__(self, limits: StepLimits, way: type[DecodeRows]) -> None:
        self._way = way
        super().__init__(limits)

    def _forget(self) -> None:
        super()._forget()
        self._decode_rows = self._way(self.limits, self._slot_of, self.table, self._blocks)


class Row(NamedTuple):
    id: int
    position: int
    tokens: int = 1
    flags: int = SAMPLE
    grants: tuple[int, ...] = ()


class Walk:
    """Steps from chance and from what the general validator holds. Most decode, some of those are then changed."""

    def __init__(self, limits: StepLimits, seed: int) -> None:
        self.rng = random.Random(seed)
        self.limits = limits
        self.quick = _Validator(limits, _Counted)
        self.general = _Validator(limits, _Nothing)
        self.seen: Counter[str] = Counter()
        self.sequence = 0
        self.next_id = 0
        self.last: list[int] = []

    @property
    def counted(self) -> _Counted:
        way = self.quick._decode_rows
        assert isinstance(way, _Counted)
        return way

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.01:
            self.quick._blocks.forget_written()
            self.general._blocks.forget_written()
        room = self.limits.live_requests - self.general.live_requests
        if rng.random() < 0.2:
            name, step = "mixed", self._mixed(room)
        else:
            name, step = "decode", self.decode()
            if rng.random() < 0.5:
                name = rng.choice(list(CHANGES))
                step = CHANGES[name](self, step)
        self.check(name, step)

    def check(self, name: str, step: Step) -> None:
        """Both judge it, and hold the same afterwards."""
        self.sequence += 1
        body = encode_body(step)
        flags = HeaderFlag.RESYNC if self.general._refused_by else HeaderFlag(0)
        told = [_told(validator, self.sequence, int(flags), body) for validator in (self.quick, self.general)]
        assert told[0] == told[1], f"{name}: {step}"
        assert snapshot(self.quick) == snapshot(self.general), f"{name}: {step}"
        assert np.array_equal(self.quick.table.blocks, self.general.table.blocks), f"{name}: {step}"
        assert self.quick.digest == self.general.digest
        assert self.quick.used_blocks == self.general.used_blocks
        self.seen[f"{name}: {told[0][0]}"] += 1

    def free(self) -> list[int]:
        free = [block for block, owners in enumerate(self.general._blocks._owners) if not owners]
        self.rng.shuffle(free)
        return free

    def decode(self) -> Step:
        """Rows for some of those that run and can decode, now and then also for one that cannot; or once more for those
        that had one.
        """
        rng, table, free = self.rng, self.general.table, self.free()
        rows: list[Row] = []
        running = list(self.general._slot_of.items())
        rng.shuffle(running)
        most = min(self.limits.rows, self.limits.tokens)
        again = self.last if rng.random() < 0.8 else []
        for request, slot in [(request, self.general._slot_of.get(request, 0)) for request in again] or running[:most]:
            computed, known = int(table.computed[slot]), int(table.known_end[slot])
            can = known - computed == 1 and known < self.limits.max_model_len
            lacks = computed // self.limits.block_size >= table.num_blocks[slot]
            if (again or rng.random() < (0.9 if can else 0.03)) and (free or not lacks):
                rows.append(Row(request, computed, grants=(free.pop(),) if lacks else ()))
        self.last = [row.id for row in rows]
        return packed(rows)

    def _mixed(self, room: int) -> Step:
        """Requests come and go, and compute their prompts, in part or whole."""
        rng, table, free = self.rng, self.general.table, self.free()
        size, longest = self.limits.block_size, self.limits.max_model_len
        slots, waiting = self.general._slot_of, self.general._preempted
        over = [request for request, slot in slots.items() if table.known_end[slot] == longest]
        finished = [request for request in [*slots, *waiting] if rng.random() < (0.7 if request in over else 0.03)]
        preempted = [request for request in slots if request not in finished and rng.random() < 0.06]
        gone = {*finished, *preempted}
        rows: list[Row] = []
        tokens = self.limits.tokens
        for request, slot in sorted(slots.items(), key=lambda each: table.computed[each[1]] - table.known_end[each[1]]):
            computed, known = int(table.computed[slot]), int(table.known_end[slot])
            count = min(known - computed, tokens, rng.choice([1, longest, longest]))
            lacks = -(-(computed + count) // size) - int(table.num_blocks[slot])
            if request not in gone and count > 0 and lacks <= len(free) and len(rows) < self.limits.rows:
                samples = computed + count == known < longest and rng.random() < 0.9
                rows.append(Row(request, computed, count, SAMPLE * samples, tuple(free.pop() for _ in range(lacks))))
                tokens -= count
        new, resumed = [], []
        for _ in range(min(room, rng.randrange(5))):
            blocks = [free.pop() for _ in range(min(len(free), rng.randrange(3)))]
            new.append(New(self.new_id(), pack([1] * rng.randint(1, 6)), pack(blocks), 0, Sampling()))
        for request, kept in waiting.items():
            if request not in gone and rng.random() < 0.5:
                resumed.append(Resume(request, pack([1] * kept.known_end), b"", 0))
        return packed(rows, new=new, resumed=resumed, finished=pack(finished), preempted=pack(preempted))

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id


def packed(rows: list[Row], **other: Any) -> Step:
    return Step(
        **other,
        ids=pack([row.id for row in rows]),
        positions=pack([row.position for row in rows]),
        counts=pack([row.tokens for row in rows]),
        row_flags=pack([row.flags for row in rows]),
        grant_counts=pack([len(row.grants) for row in rows]),
        grants=pack([block for row in rows for block in row.grants]),
    )


def _told(validator: StepValidator, sequence: int, flags: int, body: bytes) -> tuple[object, ...]:
    """What the check of a step comes to, in plain values."""
    try:
        accepted = validator.check(sequence, flags, body)
    except Refusal as refusal:
        r = refusal
        return r.code, str(r), r.field, r.value, r.bound, r.request, r.cause
    fields = [getattr(accepted, field) for field in AcceptedStep.__struct_fields__ if field != "started"]
    started = [(start.id, start.slot, start.tokens.tolist(), *start[3:]) for start in accepted.started]
    return "accepted", started, [(f.dtype.str, f.tolist()) if isinstance(f, np.ndarray) else f for f in fields]


def _values(step: Step, member: str) -> list[int]:
    values: list[int] = unpack(getattr(step, member)).tolist()
    return values


def _put(member: str, *choices: int) -> Callable[[Walk, Step], Step]:
    """One value of a member is another."""

    def change(walk: Walk, step: Step) -> Step:
        values = _values(step, member)
        if values:
            place = walk.rng.randrange(len(values))
            values[place] = walk.rng.choice(choices)
        return msgspec.structs.replace(step, **{member: pack(values)})

    return change


def _moved(walk: Walk, step: Step) -> Step:
    positions = _values(step, "positions")
    if positions:
        positions[walk.rng.randrange(len(positions))] += walk.rng.choice([-1, 1])
    return msgspec.structs.replace(step, positions=pack(positions))


def _more(member: str, *choices: int) -> Callable[[Walk, Step], Step]:
    """One value more."""

    def change(walk: Walk, step: Step) -> Step:
        return msgspec.structs.replace(step, **{member: pack([*_values(step, member), walk.rng.choice(choices)])})

    return change


def _less(*members: str) -> Callable[[Walk, Step], Step]:
    """One byte or value less of each of the members."""

    def change(walk: Walk, step: Step) -> Step:
        cut = walk.rng.choice([1, 4])
        return msgspec.structs.replace(step, **{member: bytes(getattr(step, member))[:-cut] for member in members})

    return change


def _twice(walk: Walk, step: Step) -> Step:
    """The last row stands there in place of the first, too."""
    if len(step.ids) < 8:
        return step
    columns = {member: _values(step, member) for member in COLUMNS[:4]}
    return msgspec.structs.replace(step, **{m: pack([*each[-1:], *each[1:]]) for m, each in columns.items()})


def _all(walk: Walk, _: Step) -> Step:
    """A row for each that could decode; these may be too many."""
    rows, free = [], walk.free()
    table, limits = walk.general.table, walk.limits
    for request, slot in walk.general._slot_of.items():
        computed, known = int(table.computed[slot]), int(table.known_end[slot])
        lacks = computed // limits.block_size >= table.num_blocks[slot]
        if known - computed == 1 and known < limits.max_model_len and (free or not lacks):
            rows.append(Row(request, computed, grants=(free.pop(),) if lacks else ()))
    return packed(rows)


def _all_short(walk: Walk, step: Step) -> Step:
    """A row for each that could decode, counts and flags for no more than may be."""
    step, most = _all(walk, step), 4 * min(walk.limits.rows, walk.limits.tokens)
    return msgspec.structs.replace(step, counts=bytes(step.counts)[:most], row_flags=bytes(step.row_flags)[:most])


def _odd_grants(_: Walk, step: Step) -> Step:
    return msgspec.structs.replace(step, grants=bytes(step.grants) + b"1")


def _grant_ahead(walk: Walk, step: Step) -> Step:
    """A row is granted a block that it does not need yet, or one too many."""
    counts, grants, free = _values(step, "grant_counts"), _values(step, "grants"), walk.free()
    free = [block for block in free if block not in grants]
    if not counts or not free:
        return step
    counts[-1] += 1
    return msgspec.structs.replace(step, grant_counts=pack(counts), grants=pack([*grants, free[0]]))


def _grant_elsewhere(walk: Walk, step: Step) -> Step:
    """What one row is granted, its neighbour is."""
    counts = _values(step, "grant_counts")
    return msgspec.structs.replace(step, grant_counts=pack(counts[1:] + counts[:1]))


def _grant_again(walk: Walk, step: Step) -> Step:
    """A block granted twice, where two are."""
    grants = _values(step, "grants")
    return msgspec.structs.replace(step, grants=pack(grants[1:] + grants[-1:]))


def _grant_owned(walk: Walk, step: Step) -> Step:
    owned = [block for block, owners in enumerate(walk.general._blocks._owners) if owners]
    return _put("grants", *owned)(walk, step) if owned else step


def _goes(member: str) -> Callable[[Walk, Step], Step]:
    """Somebody finishes or is preempted, who has a row or not, or does not even live."""

    def change(walk: Walk, step: Step) -> Step:
        return msgspec.structs.replace(step, **{member: pack([walk.rng.choice([10**6, *walk.general._sampling])])})

    return change


def _starts(walk: Walk, step: Step) -> Step:
    return msgspec.structs.replace(step, new=[New(walk.new_id(), pack([1, 2]), b"", 0, Sampling())])


def _resumes(walk: Walk, step: Step) -> Step:
    request = walk.rng.choice([10**6, *walk.general._preempted])
    known = walk.general._preempted[request].known_end if request != 10**6 else 1
    return msgspec.structs.replace(step, resumed=[Resume(request, pack([1] * known), b"", 0)])


CHANGES: dict[str, Callable[[Walk, Step], Step]] = {
    "unknown": _put("ids", -1, 10**6),
    "twice": _twice,
    "moved": _moved,
    "count": _put("counts", 0, 2, -1),
    "flags": _put("row_flags", 0, FORCED, SAMPLE | FORCED, 4, SAMPLE | 8),
    "forced": _more("forced", 1),
    "all rows": _all,
    "all rows, short": _all_short,
    "shorter": _less(*COLUMNS),
    "shorter ids": _less("ids"),
    "shorter positions": _less("positions"),
    "shorter counts": _less("counts"),
    "shorter flags": _less("row_flags"),
    "shorter grant_counts": _less("grant_counts"),
    "shorter grants": _less("grants"),
    "more ids": _more("ids", 10**6),
    "more grants": _more("grants", *range(20)),
    "odd grants": _odd_grants,
    "grant count": _put("grant_counts", -1, 0, 1, 2),
    "grant ahead": _grant_ahead,
    "grant elsewhere": _grant_elsewhere,
    "grant again": _grant_again,
    "grant owned": _grant_owned,
    "grant out of range": _put("grants", -1, -20, 20, 40, 2**31 - 1),
    "finishes": _goes("finished"),
    "preempted": _goes("preempted"),
    "starts": _starts,
    "resumes": _resumes,
}


@pytest.mark.parametrize("limits", [FEW_ROWS, FEW_TOKENS], ids=["few rows", "few tokens"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_quick_way_walks_with_the_general_rules(limits: StepLimits, seed: int) -> None:
    steps = 6_000
    walk = Walk(limits, seed)
    for _ in range(steps):
        walk.step()
    assert walk.counted.accepted > steps / 4, walk.seen
    assert walk.counted.granted > steps / 20, walk.seen
    assert walk.counted.followed > steps / 10, walk.seen
    assert walk.counted.stayed > steps / 40, walk.seen
    for name in CHANGES:
        assert any(what.startswith(f"{name}: ") and not what.endswith("accepted") for what in walk.seen), name
