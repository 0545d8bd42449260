"""A random walk over steps that tells a right validator from a wrong one.

    random_walk(seed=1, steps=10_000, limits)

A random scheduler makes valid steps of every shape that the spec allows; the validator must accept each, and hold what
`SlowRules` holds afterwards; the tokens of a model that reads through its block table must be the right ones. In
between, a step is broken in one place at random: the validator must refuse it whenever the slow rules do, must be
exactly as it was before, must refuse what follows AFTER_REFUSAL, and must go on with RESYNC. Some steps wait for
masks, which are broken in the same way, and leave the step to wait.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from workerproto.codec import encode_body, unpack
from workerproto.masks import Masks
from workerproto.messages import HeaderFlag, RefusalCode, RowFlag
from workerproto.steps import Refusal, StepLimits
from workerproto.testing.breakage import break_step
from workerproto.testing.fake_model import FakeModel
from workerproto.testing.random_samples import body_of, break_sample, random_sample
from workerproto.testing.random_scheduler import LAG, RandomScheduler
from workerproto.testing.slow_rules import Broken, PlainSample, PlainStep, SlowRules
from workerproto.validate import StepValidator

LIMITS = StepLimits(
    num_blocks=24, block_size=4, vocabulary=50, max_model_len=24, tokens=40, rows=5, live_requests=8, logprobs=3
)
"""Small, so that blocks are short, ids return, and every bound is met often."""


def random_walk(
    seed: int, steps: int, limits: StepLimits = LIMITS, breakage: float = 0.3, waiting: float = 0.2
) -> Counter[str]:
    """Walk, and return how often each thing happened. Raises AssertionError where validator and rules disagree.

    breakage: share of steps that are preceded by a broken one, and of Samples. waiting: share of steps that wait for a
    Sample.
    """
    rng = random.Random(seed)
    walk = _Walk(rng, limits, breakage)
    for _ in range(steps):
        plain = RandomScheduler(rng, walk.rules, walk.sampled_at, walk.now).step()
        while rng.random() < breakage:
            walk.try_broken(plain)
        walk.accept(plain, random_sample(rng, plain, limits.vocabulary) if rng.random() < waiting else None)
    return walk.seen


OF_NO_REQUEST = {
    RefusalCode.MALFORMED, RefusalCode.AFTER_REFUSAL, RefusalCode.UNEXPECTED_RESYNC, RefusalCode.NOT_IMPLEMENTED,
    RefusalCode.TOO_MANY_TOKENS, RefusalCode.TOO_MANY_ROWS, RefusalCode.TOO_MANY_REQUESTS, RefusalCode.SAMPLE_DUE,
    RefusalCode.BAD_STEP, RefusalCode.BAD_MASK,
}  # fmt: skip
"""Codes of which a refusal may name no request: the fault is in the step as a whole, or whose it is cannot be read."""


EMPTY = encode_body(PlainStep().packed())


class _Walk:
    def __init__(self, rng: random.Random, limits: StepLimits, breakage: float) -> None:
        self.seen: Counter[str] = Counter()
        self.rules = SlowRules(limits)
        self.sampled_at: dict[int, int] = {}
        self.now = 0
        self._rng = rng
        self._breakage = breakage
        self._validator = StepValidator(limits)
        self._model = FakeModel(limits)
        self._resync = 0
        self._cause = 0

    def accept(self, plain: PlainStep, sample: PlainSample | None) -> None:
        """The step is valid: validator, model and rules must come to the same."""
        _count(plain, self.rules, self.seen)
        tokens = self.rules.apply(plain, sample)
        self.now += 1
        flags = self._resync | (0 if sample is None else int(HeaderFlag.SAMPLE_FOLLOWS))
        accepted = self._validator.check(self.now, flags, encode_body(plain.packed()))
        self._resync = 0
        masks = None if sample is None else self._give(sample, plain, self.now)
        result = self._model.execute(accepted, self._validator.table, masks)
        assert unpack(result.tokens).tolist() == tokens, f"step {self.now}: {plain}"
        for row in plain.rows:
            if row.flags & RowFlag.SAMPLE:
                self.sampled_at[row.id] = self.now
        self._compare()

    def _give(self, sample: PlainSample, plain: PlainStep, step: int) -> Masks:
        """The step waits: whatever else comes, it waits until these masks do."""
        rng, validator, vocabulary = self._rng, self._validator, self.rules.limits.vocabulary
        while rng.random() < self._breakage:
            name, broken, body, code = break_sample(rng, sample, plain, step, vocabulary)
            if broken is not None:
                try:
                    self.rules.judge_sample(plain, broken)
                except Broken:
                    pass
                else:
                    raise AssertionError(f"{name} breaks no rule of masks: {broken}")
            self._refuse(code, validator.check_sample, body, step)
            self.seen[f"refused: mask, {name}"] += 1
            for flags, code in rng.choice([[], [(0, RefusalCode.AFTER_REFUSAL)], [(2, RefusalCode.SAMPLE_DUE)]]):
                self._refuse(code, validator.check, flags, EMPTY)
            self._resync = HeaderFlag.RESYNC
        before = snapshot(validator)
        assert validator.check_sample(self.now + 1, b"another step's", step + 1) is None
        assert snapshot(validator) == before
        self.now += 1
        masks = validator.check_sample(self.now, body_of(sample, step, vocabulary, rng), step)
        assert masks is not None
        self.seen["masks"] += len(sample.rows)
        return masks

    def try_broken(self, plain: PlainStep) -> None:
        """Break the step in one place, then send it and what follows."""
        name, broken, flags, code = break_step(self._rng, plain, self.rules, self._resync)
        if broken is not plain:
            try:
                self.rules.copy().apply(broken)
            except Broken:
                pass
            else:
                raise AssertionError(f"{name} breaks no rule: {broken}")
        body, behind = encode_body(broken.packed()), encode_body(plain.packed())
        self._refuse(code, self._validator.check, flags, body)
        self.seen[f"refused: {name}"] += 1
        for _ in range(self._rng.randrange(LAG)):  # steps that were in flight behind it
            self._refuse(RefusalCode.AFTER_REFUSAL, self._validator.check, 0, behind)
        self._resync = HeaderFlag.RESYNC

    def _refuse(self, code: RefusalCode, check: Callable[..., object], *what: object) -> None:
        """What `check` does with the next sequence is refused, and nothing is left of it."""
        self.now += 1
        seq, before, refused = self.now, snapshot(self._validator), None
        try:
            check(seq, *what)
        except Refusal as refusal:
            refused = refusal
        assert refused is not None, f"step {seq} is accepted, it should be refused {code}"
        assert refused.code is code, f"step {seq} is refused {refused.code}, not {code}: {refused}"
        assert snapshot(self._validator) == before, f"step {seq}, refused {code}, left something behind"
        self._cause = self._cause if code is RefusalCode.AFTER_REFUSAL else seq
        assert refused.cause == self._cause
        named = refused.field, refused.value, refused.bound
        assert all(named), f"step {seq} is refused {code} with field, value, bound {named}"
        assert (refused.request is None) <= (code in OF_NO_REQUEST), f"step {seq}, refused {code}, names no request"

    def _compare(self) -> None:
        held = {name: known for name, known in self.rules.requests.items() if known.running}
        validator, table = self._validator, self._validator.table
        assert validator.live_requests == len(self.rules.requests)
        assert validator.used_blocks == sum(map(bool, self.rules.owners))
        slots = validator._slot_of
        assert slots.keys() == held.keys()
        for name, known in held.items():
            slot = slots[name]
            assert table.blocks[slot, : table.num_blocks[slot]].tolist() == known.blocks
            assert int(table.computed[slot]) == known.computed
            assert int(table.known_end[slot]) == len(known.tokens)


def snapshot(validator: StepValidator) -> tuple[object, ...]:
    """All that a validator knows but its digest and the refusal it stands at."""
    table, blocks = validator.table, validator._blocks
    return (
        validator.open,
        table.num_blocks.tolist(),
        table.computed.tolist(),
        table.known_end.tolist(),
        [row[:held].tolist() for row, held in zip(table.blocks, table.num_blocks, strict=True)],
        blocks._owners.tolist(),
        blocks._written.tolist(),
        dict(validator._slot_of),
        dict(validator._sampling),
        dict(validator._preempted),
        list(validator._free_slots),
    )


def _count(plain: PlainStep, rules: SlowRules, seen: Counter[str]) -> None:
    size = rules.limits.block_size
    shared = [block for start in plain.new + plain.resumed for block in start.blocks[: start.computed // size]]
    released = {block for name in plain.finished + plain.preempted for block in rules.requests[name].blocks}
    granted = [block for start in plain.new + plain.resumed for block in start.blocks[start.computed // size :]]
    granted += [block for row in plain.rows for block in row.grants]
    seen["steps"] += 1
    seen["rows"] += len(plain.rows)
    seen["finished"] += len(plain.finished)
    seen["preempted"] += len(plain.preempted)
    seen["resumed"] += len(plain.resumed)
    seen["new"] += len(plain.new)
    seen["blocks shared"] += len(shared)
    seen["blocks shared that this step writes"] += sum(len(rules.cells[block]) < size for block in shared)
    seen["blocks granted"] += len(granted)
    seen["blocks granted that this step releases"] += len(released.intersection(granted))
    seen["forced"] += sum(bool(row.flags & RowFlag.FORCED) for row in plain.rows)
    seen["chunks"] += sum(row.flags == 0 and row.count > 1 for row in plain.rows)
    seen["without rows"] += not plain.rows
