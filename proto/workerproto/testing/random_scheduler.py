"""Valid steps of every shape, from chance and the state of the rules."""

from __future__ import annotations

import random
from dataclasses import dataclass

from workerproto.messages import RowFlag, Sampling
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep, SlowRules

LAG = 3
"""Steps between a sample and the scheduler's knowing it: a preempted request resumes with all its tokens."""


@dataclass
class RandomScheduler:
    """Makes one valid step of any shape. It reads the rules' state and changes nothing."""

    rng: random.Random
    rules: SlowRules
    sampled_at: dict[int, int]
    now: int

    def step(self) -> PlainStep:
        plain, rng, rules = PlainStep(), self.rng, self.rules
        self._limits = rules.limits
        self._unit = rules.limits.alignment // rules.limits.block_size  # blocks
        self._tokens, self._rows = rng.randint(1, rules.limits.tokens), rules.limits.rows
        owners = [len(holders) for holders in rules.owners]
        size = self._limits.block_size
        self._written = {block: tuple(cells) for block, cells in enumerate(rules.cells) if len(cells) == size}
        running = [name for name, known in rules.requests.items() if known.running]
        rng.shuffle(running)
        gone = [name for name in rules.requests if rng.random() < 0.08]
        plain.finished = gone
        plain.preempted = [name for name in running if name not in gone and rng.random() < 0.08]
        for name in plain.finished + plain.preempted:
            for block in rules.requests[name].blocks:
                owners[block] -= 1
        self._free = [block for block, holders in enumerate(owners) if not holders]
        rng.shuffle(self._free)
        staying = [name for name in running if name not in plain.finished + plain.preempted]
        plain.rows = [row for name in staying if (row := self._row_of(name))]
        self._start_new(plain)
        self._resume(plain)
        rng.shuffle(plain.rows)
        return plain

    def _row_of(self, name: int) -> PlainRow | None:
        known = self.rules.requests[name]
        if self.rng.random() < 0.2:
            return None
        return self._row(name, known.tokens, known.computed, known.blocks)

    def _row(self, name: int, tokens: list[int], computed: int, blocks: list[int]) -> PlainRow | None:
        rng, limits = self.rng, self._limits
        forced = rng.random() < 0.05
        most = min((limits.max_model_len if forced else len(tokens)) - computed, self._tokens)
        if most < 1 or not self._rows:
            return None
        count = most if rng.random() < 0.6 else rng.randint(1, most)
        end = computed + count
        samples = end >= len(tokens) and end < limits.max_model_len and rng.random() < 0.95
        needed = max(0, -(-end // limits.block_size) - len(blocks))
        spare = rng.randrange(2) if len(blocks) + needed < limits.blocks_per_request else 0
        if needed > len(self._free):
            return None
        grants = [self._free.pop() for _ in range(min(needed + spare, len(self._free)))]
        inputs = [rng.randrange(limits.vocabulary) for _ in range(count)] if forced else []
        self._tokens -= count
        self._rows -= 1
        self._will_write(tokens, computed, end, blocks, inputs)
        for block in grants:
            self._written.pop(block, None)
        return PlainRow(name, computed, count, samples * RowFlag.SAMPLE + forced * RowFlag.FORCED, grants, inputs)

    def _will_write(
        self, tokens: list[int], computed: int, end: int, blocks: list[int], inputs: list[int]
    ) -> None:
        """Blocks that were granted before this step's rows, and are full after it, can be shared in this step."""
        size = self._limits.block_size
        content = tokens[:computed] + (inputs or tokens[computed:end])
        for place in range(computed // size, min(end // size, len(blocks))):
            self._written[blocks[place]] = tuple(content[place * size : (place + 1) * size])

    def _start_new(self, plain: PlainStep) -> None:
        rng, limits = self.rng, self._limits
        room = limits.live_requests - len(self.rules.requests) + len(plain.finished)
        ids = [name for name in range(2 * limits.live_requests) if name not in self.rules.requests]
        for name in rng.sample(ids, min(len(ids), room, rng.choice((0, 0, 1, 1, 2, 3)))):
            tokens: list[int] = []
            shared: list[int] = []
            while self._written and rng.random() < 0.6 and len(tokens) + limits.block_size < limits.max_model_len:
                block = rng.choice(list(self._written))
                if block in shared:
                    break
                shared.append(block)
                tokens += self._written[block]
            del shared[len(shared) // self._unit * self._unit :]
            del tokens[len(shared) * limits.block_size :]
            length = rng.randint(len(tokens) + 1, limits.max_model_len)
            tokens += [rng.randrange(limits.vocabulary) for _ in range(length - len(tokens))]
            logprobs = rng.randint(-1, limits.logprobs)
            sampling = Sampling(rng.choice((0.0, 1.0)), seed=rng.randrange(2**40), logprobs=logprobs)
            start = PlainStart(name, tokens, shared, len(shared) * limits.block_size, sampling)
            plain.new.append(self._start(plain, start))

    def _resume(self, plain: PlainStep) -> None:
        for name, known in self.rules.requests.items():
            waits = not known.running and name not in plain.finished
            if not waits or self.now - self.sampled_at.get(name, -LAG) < LAG or self.rng.random() < 0.6:
                continue
            size, shared = self._limits.block_size, []
            for first in range(0, len(known.tokens) - size, size):
                wanted = tuple(known.tokens[first : first + size])
                found = [b for b, cells in self._written.items() if cells == wanted and b not in shared]
                if not found:
                    break
                shared.append(found[0])
            del shared[len(shared) // self._unit * self._unit :]
            plain.resumed.append(self._start(plain, PlainStart(name, known.tokens[:], shared, len(shared) * size)))

    def _start(self, plain: PlainStep, start: PlainStart) -> PlainStart:
        """Take the shared blocks out of the free ones, grant some more, which may stay empty, and perhaps begin."""
        self._free = [block for block in self._free if block not in start.blocks]
        room = self._limits.blocks_per_request - len(start.blocks)
        for _ in range(min(len(self._free), room, self.rng.randrange(4))):
            block = self._free.pop()
            self._written.pop(block, None)
            start.blocks.append(block)
        row = self._row(start.id, start.tokens, start.computed, start.blocks)
        plain.rows += [row] if row else []
        return start
