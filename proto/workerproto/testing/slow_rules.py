"""The rules of a step once more, from the text of the spec, in plain Python, one request after the other.

Slow, and independent of `workerproto.validate` on purpose: the two must agree on every step (see `random_walk`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from workerproto.codec import pack
from workerproto.messages import New, Resume, RowFlag, Sampling, Step
from workerproto.steps import StepLimits
from workerproto.testing.fake_model import next_token


class Broken(Exception):
    """A rule is broken. Half of the step may have been carried out."""


@dataclass
class PlainStart:
    """A new or resumed request."""

    id: int
    tokens: list[int]
    blocks: list[int]
    computed: int
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen


@dataclass
class PlainRow:
    id: int
    position: int
    count: int
    flags: int = 0
    grants: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)


@dataclass
class PlainStep:
    """A step before it is packed."""

    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    new: list[PlainStart] = field(default_factory=list)
    resumed: list[PlainStart] = field(default_factory=list)
    rows: list[PlainRow] = field(default_factory=list)

    def packed(self) -> Step:
        rows = self.rows
        return Step(
            [New(s.id, pack(s.tokens), pack(s.blocks), s.computed, s.sampling) for s in self.new],
            [Resume(s.id, pack(s.tokens), pack(s.blocks), s.computed) for s in self.resumed],
            pack(self.finished),
            pack(self.preempted),
            pack([row.id for row in rows]),
            pack([row.position for row in rows]),
            pack([row.count for row in rows]),
            pack([row.flags for row in rows]),
            pack([len(row.grants) for row in rows]),
            pack([block for row in rows for block in row.grants]),
            pack([token for row in rows for token in row.forced]),
        )


@dataclass
class PlainSample:
    """Masks before they are packed. rows: places in the step. allowed: tokens, one set for each of them."""

    rows: list[int]
    allowed: list[set[int]]


@dataclass
class Known:
    """A live request. tokens: known, or sampled by now (their number is the spec's `known_end`)."""

    tokens: list[int]
    sampling: Sampling
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    running: bool = True


class SlowRules:
    """requests: by id. owners: ids that hold a block. granted_to: the one of them that may write it. cells: what is
    written in a block, from its first position on.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.requests: dict[int, Known] = {}
        self.owners: list[set[int]] = [set() for _ in range(limits.num_blocks)]
        self.granted_to = [-1] * limits.num_blocks
        self.cells: list[list[int]] = [[] for _ in range(limits.num_blocks)]

    def copy(self) -> SlowRules:
        twin = SlowRules(self.limits)
        twin.requests = {
            name: replace(known, tokens=known.tokens[:], blocks=known.blocks[:])
            for name, known in self.requests.items()
        }
        twin.owners = [set(owners) for owners in self.owners]
        twin.granted_to = self.granted_to[:]
        twin.cells = [cells[:] for cells in self.cells]
        return twin

    def apply(self, step: PlainStep, sample: PlainSample | None = None) -> list[int]:
        """Carry the step out and return the tokens it samples, within the masks of `sample`. Raises Broken."""
        before = set(self.requests)
        for name in step.finished:
            _require(name in self.requests, "finished: unknown")
            self._release(name)
            del self.requests[name]
        for name in step.preempted:
            _require(name in self.requests and self.requests[name].running, "preempted: not running")
            self._release(name)
            self.requests[name].running = False
        for new in step.new:
            _require(new.id not in before and new.id not in self.requests, "new: the id is taken")
            _require(-1 <= new.sampling.logprobs <= self.limits.logprobs, "new: logprobs")
            self.requests[new.id] = Known(new.tokens[:], new.sampling, running=False)
            self._start(new)
        for resume in step.resumed:
            _require(resume.id in self.requests and not self.requests[resume.id].running, "resumed: not preempted")
            known = self.requests[resume.id]
            _require(len(resume.tokens) == len(known.tokens), "resumed: tokens")
            known.tokens = resume.tokens[:]
            self._start(resume)
        _require(len(self.requests) <= self.limits.live_requests, "requests")
        self._judge_whole(step)
        for row in step.rows:
            self._judge_row(row)
        for row in step.rows:
            self._write(row)
        for started in step.new + step.resumed:
            for block in started.blocks[: started.computed // self.limits.block_size]:
                _require(len(self.cells[block]) == self.limits.block_size, "a prefix that nothing has written")
        if sample is not None:
            self.judge_sample(step, sample)
        allowed = {} if sample is None else dict(zip(sample.rows, sample.allowed, strict=True))
        drawing = [place for place, row in enumerate(step.rows) if row.flags & RowFlag.SAMPLE]
        return [self._sample(step.rows[place], allowed.get(place)) for place in drawing]

    def judge_sample(self, step: PlainStep, sample: PlainSample) -> None:
        """Raises Broken."""
        for place, allowed in zip(sample.rows, sample.allowed, strict=True):
            _require(0 <= place < len(step.rows), "mask: no such row")
            _require(step.rows[place].flags & RowFlag.SAMPLE, "mask: of a row that draws nothing")
            _require(sample.rows.count(place) == 1, "mask: a row twice")
            _require(allowed, "mask: nothing is allowed")

    def _release(self, name: int) -> None:
        for block in self.requests[name].blocks:
            self.owners[block].discard(name)
        self.requests[name].blocks = []

    def _start(self, start: PlainStart) -> None:
        limits = self.limits
        _require(0 < len(start.tokens) <= limits.max_model_len, "length")
        _require(all(0 <= token < limits.vocabulary for token in start.tokens), "vocabulary")
        _require(start.computed % limits.alignment == 0 and 0 <= start.computed < len(start.tokens), "computed")
        shared = start.computed // limits.block_size
        _require(shared <= len(start.blocks) <= limits.blocks_per_request, "number of blocks")
        known = self.requests[start.id]
        known.computed, known.running = start.computed, True
        for place, block in enumerate(start.blocks):
            _require(0 <= block < limits.num_blocks and block not in known.blocks, "block")
            if place >= shared:
                self._grant(block, start.id)
            self.owners[block].add(start.id)
            known.blocks.append(block)

    def _grant(self, block: int, name: int) -> None:
        _require(0 <= block < self.limits.num_blocks and not self.owners[block], "a granted block has an owner")
        self.granted_to[block] = name
        self.cells[block] = []

    def _judge_whole(self, step: PlainStep) -> None:
        names = [row.id for row in step.rows]
        _require(len(names) <= self.limits.rows and len(set(names)) == len(names), "rows")
        _require(sum(row.count for row in step.rows) <= self.limits.tokens, "tokens")

    def _judge_row(self, row: PlainRow) -> None:
        limits, known = self.limits, self.requests.get(row.id)
        _require(known is not None and known.running, "row: not running")
        assert known is not None
        end, forced, samples = row.position + row.count, row.flags & RowFlag.FORCED, row.flags & RowFlag.SAMPLE
        _require(row.flags in (0, 1, 2, 3) and row.count >= 1, "row: flags, count")
        _require(row.position == known.computed, "row: position")
        _require(forced or end <= len(known.tokens), "row: beyond what is known")
        _require(len(row.forced) == (row.count if forced else 0), "row: forced")
        _require(all(0 <= token < limits.vocabulary for token in row.forced), "row: vocabulary")
        length = max(end, len(known.tokens))
        _require(not samples or end == length, "row: samples early")
        _require(length + (1 if samples else 0) <= limits.max_model_len, "row: length")
        for block in row.grants:
            self._grant(block, row.id)
            self.owners[block].add(row.id)
            known.blocks.append(block)
        _require(len(known.blocks) <= limits.blocks_per_request, "row: too many blocks")
        _require(len(known.blocks) * limits.block_size >= end, "row: too few blocks")

    def _write(self, row: PlainRow) -> None:
        known, size = self.requests[row.id], self.limits.block_size
        end = row.position + row.count
        known.tokens[row.position : end] = row.forced or known.tokens[row.position : end]
        for position in range(row.position, end):
            block = known.blocks[position // size]
            assert self.granted_to[block] == row.id, "the rules must not let a row write what it merely shares"
            assert len(self.cells[block]) == position % size, "the rules must not let a row leave a hole"
            self.cells[block].append(known.tokens[position])
        known.computed = end

    def _sample(self, row: PlainRow, allowed: set[int] | None) -> int:
        known = self.requests[row.id]
        token = next_token(np.array(known.tokens, np.int32), self.limits.vocabulary, known.sampling)
        while allowed is not None and token not in allowed:
            token = (token + 1) % self.limits.vocabulary
        known.tokens.append(token)
        return token


def _require(holds: object, rule: str) -> None:
    if not holds:
        raise Broken(rule)
