"""Ways to break one rule in one place of a valid step, each with the code of its refusal."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from workerproto.messages import HeaderFlag, RefusalCode, RowFlag, Sampling
from workerproto.steps import StepLimits
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep, SlowRules

Breaker = Callable[["Breakage"], bool]


def break_step(
    rng: random.Random, plain: PlainStep, rules: SlowRules, flags: int
) -> tuple[str, PlainStep, int, RefusalCode]:
    """(what was done, the step, its header flags, how it must be refused). `flags` are those with which it is valid.

    The step returned is `plain` itself where only the flags are wrong.
    """
    if rng.random() < 0.05:
        code = RefusalCode.AFTER_REFUSAL if flags else RefusalCode.UNEXPECTED_RESYNC
        return "resync", plain, flags ^ HeaderFlag.RESYNC, code
    while True:
        code, breaker = rng.choice(_BREAKERS)
        breakage = Breakage(rng, copy.deepcopy(plain), rules)
        if breaker(breakage):
            return f"{code}, {breaker.__name__}", breakage.step, flags, code


class Breakage:
    """What a breaker works with: it changes `step` and returns True, or returns False where it finds nothing to
    break.
    """

    def __init__(self, rng: random.Random, step: PlainStep, rules: SlowRules) -> None:
        self.rng = rng
        self.step = step
        self.rules = rules
        self.limits: StepLimits = rules.limits
        self.nobody = 2 * rules.limits.live_requests + rng.randrange(1000)

    def known_end(self, row: PlainRow) -> int:
        starts = {start.id: len(start.tokens) for start in self.step.new + self.step.resumed}
        return starts.get(row.id) or len(self.rules.requests[row.id].tokens)

    def num_blocks(self, row: PlainRow) -> int:
        starts = {start.id: len(start.blocks) for start in self.step.new + self.step.resumed}
        held = starts[row.id] if row.id in starts else len(self.rules.requests[row.id].blocks)
        return held + len(row.grants)

    def row(self, which: Callable[[PlainRow], bool] = lambda _: True) -> PlainRow | None:
        rows = [row for row in self.step.rows if which(row)]
        return self.rng.choice(rows) if rows else None

    def tokens_left(self) -> int:
        return self.limits.tokens - sum(row.count for row in self.step.rows)

    def add_new(self, **changes: object) -> bool:
        """One more request, valid but for the changes."""
        if len(self.rules.requests) - len(self.step.finished) + len(self.step.new) >= self.limits.live_requests:
            return False
        fields = {"id": self.nobody, "tokens": [1], "blocks": [], "computed": 0} | changes
        self.step.new.append(PlainStart(**fields))  # type: ignore[arg-type] # names are those of the fields
        return True

    def owned_blocks(self) -> list[int]:
        """Owned before the step and still owned in its middle."""
        gone = self.step.finished + self.step.preempted
        return [block for block, owners in enumerate(self.rules.owners) if owners - set(gone)]


def unknown_finished(b: Breakage) -> bool:
    b.step.finished.append(b.rng.choice([b.nobody, *b.step.finished]))
    return True


def unknown_preempted(b: Breakage) -> bool:
    waiting = [name for name, known in b.rules.requests.items() if not known.running]
    b.step.preempted.append(b.rng.choice([b.nobody, *b.step.finished, *b.step.preempted, *waiting]))
    return True


def unknown_resumed(b: Breakage) -> bool:
    b.step.resumed.append(PlainStart(b.nobody, [1], [], 0))
    return True


def unknown_row(b: Breakage) -> bool:
    if len(b.step.rows) >= b.limits.rows:
        return False
    b.step.rows.append(PlainRow(b.rng.choice([b.nobody, *b.step.finished, *b.step.preempted]), 0, 1))
    return True


def new_lives(b: Breakage) -> bool:
    taken = [*b.rules.requests, *(new.id for new in b.step.new)]
    return bool(taken) and b.add_new(id=b.rng.choice(taken))


def row_twice(b: Breakage) -> bool:
    row = b.row()
    if row is None or len(b.step.rows) >= b.limits.rows:
        return False
    b.step.rows.append(PlainRow(row.id, row.position + row.count, 1))
    return True


def resumes_running(b: Breakage) -> bool:
    gone = b.step.finished + b.step.preempted
    running = [name for name, known in b.rules.requests.items() if known.running and name not in gone]
    if not running:
        return False
    b.step.resumed.append(PlainStart(b.rng.choice(running), [1], [], 0))
    return True


def other_tokens(b: Breakage) -> bool:
    if not b.step.resumed:
        return False
    b.rng.choice(b.step.resumed).tokens.append(1)
    return True


def no_tokens(b: Breakage) -> bool:
    return b.add_new(tokens=[])


def long_prompt(b: Breakage) -> bool:
    return b.add_new(tokens=[1] * (b.limits.max_model_len + 1))


def odd_token(b: Breakage) -> bool:
    return b.add_new(tokens=[0, b.rng.choice([-1, b.limits.vocabulary, 2**31 - 1])])


def many_logprobs(b: Breakage) -> bool:
    return b.add_new(sampling=Sampling(logprobs=b.limits.logprobs + 1))


def computed_to_the_end(b: Breakage) -> bool:
    unit = b.limits.alignment
    return b.add_new(tokens=[1] * unit, computed=unit)


def computed_in_a_block(b: Breakage) -> bool:
    """Or in the middle of as many blocks as a prefix is a multiple of."""
    size, unit = b.limits.block_size, b.limits.alignment
    return b.add_new(tokens=[1] * (unit + 1), computed=b.rng.choice([1, size] if size < unit else [1]))


def moved_row(b: Breakage) -> bool:
    row = b.row()
    if row is None:
        return False
    row.position += b.rng.choice([-1, 1, 2**30])
    return True


def empty_row(b: Breakage) -> bool:
    row = b.row()
    if row is None:
        return False
    row.count = b.rng.choice([0, -1, -(2**31)])
    return True


def unknown_tokens(b: Breakage) -> bool:
    row = b.row(lambda row: not row.flags & RowFlag.FORCED)
    if row is None:
        return False
    more = b.known_end(row) - row.position + 1 - row.count
    row.count += more
    return b.tokens_left() >= 0


def odd_flag(b: Breakage) -> bool:
    row = b.row()
    if row is None:
        return False
    row.flags |= b.rng.choice([4, 8, 16, -(2**31)])
    return True


def early_sample(b: Breakage) -> bool:
    row = b.row(lambda row: not row.flags & RowFlag.FORCED and row.position + row.count < b.known_end(row))
    if row is None:
        return False
    row.flags |= RowFlag.SAMPLE
    return True


def odd_block(b: Breakage) -> bool:
    return b.add_new(blocks=[b.rng.choice([-1, b.limits.num_blocks, 2**31 - 1])])


def owned_block(b: Breakage) -> bool:
    owned = b.owned_blocks()
    return bool(owned) and b.add_new(blocks=[b.rng.choice(owned)])


def owned_grant(b: Breakage) -> bool:
    row, owned = b.row(lambda row: bool(row.grants)), b.owned_blocks()
    if row is None or not owned:
        return False
    row.grants[-1] = b.rng.choice(owned)
    return True


def block_twice(b: Breakage) -> bool:
    row = b.row(lambda row: bool(row.grants) and b.num_blocks(row) < b.limits.blocks_per_request)
    if row is None:
        return False
    row.grants.append(row.grants[0])
    return True


def unwritten_prefix(b: Breakage) -> bool:
    """Blocks that are nobody's, are not full, and are not granted in this step."""
    granted = {block for row in b.step.rows for block in row.grants}
    granted |= {block for start in b.step.new + b.step.resumed for block in start.blocks}
    size = b.limits.block_size
    rules = b.rules
    idle = [
        block
        for block in range(b.limits.num_blocks)
        if len(rules.cells[block]) < size and not rules.owners[block] and block not in granted
    ]
    unit = b.limits.alignment
    few = len(idle) < unit // size
    return not few and b.add_new(tokens=[1] * (unit + 1), blocks=b.rng.sample(idle, unit // size), computed=unit)


def missing_block(b: Breakage) -> bool:
    size = b.limits.block_size
    row = b.row(lambda row: bool(row.grants) and (b.num_blocks(row) - 1) * size < row.position + row.count)
    if row is None:
        return False
    row.grants.pop()
    return True


def missing_prefix(b: Breakage) -> bool:
    unit = b.limits.alignment
    return b.add_new(tokens=[1] * (unit + 1), computed=unit)


def many_blocks(b: Breakage) -> bool:
    return b.add_new(blocks=list(range(b.limits.blocks_per_request + 1)))


def many_tokens(b: Breakage) -> bool:
    row = b.row()
    if row is None:
        return False
    row.count += b.tokens_left() + b.rng.choice([1, 2**20])
    return True


def many_rows(b: Breakage) -> bool:
    if not b.step.rows:
        return False
    b.step.rows = (b.step.rows * b.limits.rows)[: b.limits.rows + 1]
    return len(b.step.rows) > b.limits.rows


def many_requests(b: Breakage) -> bool:
    live = len(b.rules.requests) - len(b.step.finished) + len(b.step.new)
    b.step.new += [PlainStart(b.nobody + place, [1], [], 0) for place in range(b.limits.live_requests - live + 1)]
    return True


def forced_missing(b: Breakage) -> bool:
    row = b.row()
    if row is None:
        return False
    row.forced = row.forced[1:] if row.forced else [1]
    return True


def odd_forced(b: Breakage) -> bool:
    row = b.row(lambda row: bool(row.forced))
    if row is None:
        return False
    row.forced[-1] = b.rng.choice([-1, b.limits.vocabulary])
    return True


_BREAKERS: list[tuple[RefusalCode, Breaker]] = [
    (RefusalCode.UNKNOWN_REQUEST, unknown_finished),
    (RefusalCode.UNKNOWN_REQUEST, unknown_preempted),
    (RefusalCode.UNKNOWN_REQUEST, unknown_resumed),
    (RefusalCode.UNKNOWN_REQUEST, unknown_row),
    (RefusalCode.DUPLICATE_REQUEST, new_lives),
    (RefusalCode.DUPLICATE_REQUEST, row_twice),
    (RefusalCode.NOT_PREEMPTED, resumes_running),
    (RefusalCode.TOKENS_DISAGREE, other_tokens),
    (RefusalCode.EMPTY_PROMPT, no_tokens),
    (RefusalCode.TOO_LONG, long_prompt),
    (RefusalCode.TOKEN_OUT_OF_VOCABULARY, odd_token),
    (RefusalCode.TOKEN_OUT_OF_VOCABULARY, odd_forced),
    (RefusalCode.BAD_SAMPLING, many_logprobs),
    (RefusalCode.BAD_COMPUTED, computed_to_the_end),
    (RefusalCode.BAD_COMPUTED, computed_in_a_block),
    (RefusalCode.BAD_POSITION, moved_row),
    (RefusalCode.BAD_COUNT, empty_row),
    (RefusalCode.BAD_COUNT, unknown_tokens),
    (RefusalCode.BAD_ROW_FLAGS, odd_flag),
    (RefusalCode.BAD_SAMPLE, early_sample),
    (RefusalCode.BLOCK_OUT_OF_RANGE, odd_block),
    (RefusalCode.BLOCK_OWNED, owned_block),
    (RefusalCode.BLOCK_OWNED, owned_grant),
    (RefusalCode.BLOCK_OWNED, block_twice),
    (RefusalCode.BLOCK_UNWRITTEN, unwritten_prefix),
    (RefusalCode.BLOCKS_MISSING, missing_block),
    (RefusalCode.BLOCKS_MISSING, missing_prefix),
    (RefusalCode.TOO_MANY_BLOCKS, many_blocks),
    (RefusalCode.TOO_MANY_TOKENS, many_tokens),
    (RefusalCode.TOO_MANY_ROWS, many_rows),
    (RefusalCode.TOO_MANY_REQUESTS, many_requests),
    (RefusalCode.MALFORMED, forced_missing),
]
