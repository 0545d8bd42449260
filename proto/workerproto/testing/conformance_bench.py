"""What the rules of the conformance suite stand on: the list of rules, the worker's facts, and a scene to disturb."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import NamedTuple

from workerproto.codec import unpack
from workerproto.curve import CurveKeys
from workerproto.messages import Facts, RefusalCode, RowFlag, Sampling, Step
from workerproto.testing.conformance_link import Link, NotProvoked, require
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

PROMPT = 3  # tokens of the scene's prompts
GREEDY = Sampling()
SAMPLE, FORCED = int(RowFlag.SAMPLE), int(RowFlag.FORCED)


class Rule(NamedTuple):
    """`name` is the number of a section of the spec, a dot, and what is asked of it."""

    name: str
    run: Callable[[Bench], None]


class Rules(list[Rule]):
    """Filled by decorating functions: `@rules("9.lease-held")`."""

    def __call__(self, name: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
        def add(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
            self.append(Rule(name, run))
            return run

        return add


class Bench:
    """One rule's links to the worker, all closed at its end."""

    def __init__(
        self, endpoint: str, limit_s: float, lease_timeout_s: float, facts: Facts, reference: list[int],
        keys: CurveKeys | None = None,
    ) -> None:  # fmt: skip
        self.limit_s = limit_s
        self.lease_timeout_s = lease_timeout_s
        self.facts = facts
        self.reference = reference
        """Greedy continuation of `prompt()`, filled by the first who needs it."""
        self._endpoint = endpoint
        self._keys = keys
        self._links = ExitStack()

    def close(self) -> None:
        self._links.close()

    def link(self) -> Link:
        """A new socket, not attached."""
        return self._links.enter_context(closing(Link(self._endpoint, self.limit_s, self._keys)))

    def attached(self) -> Link:
        link = self.link()
        link.attach()
        return link

    def prompt(self, length: int = PROMPT, salt: int = 0) -> list[int]:
        return [(5 * place + 1 + salt) % self.facts.vocabulary for place in range(length)]

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.facts.kv.block_size)

    @property
    def blocks_per_request(self) -> int:
        return self.blocks_for(self.facts.max_model_len)

    def need(self, holds: bool, what: str) -> None:
        """Raises NotProvoked for a worker that is too small for the rule."""
        if not holds:
            raise NotProvoked(f"needs {what}")

    def need_prefixes(self) -> None:
        """Prefixes of one block."""
        kv = self.facts.kv
        self.need(kv.alignment == kv.block_size, "an alignment of one block")

    def need_room(self, *, blocks: int = 0, length: int = 0, tokens: int = 0, rows: int = 1, live: int = 1) -> None:
        facts, limits = self.facts, self.facts.limits
        self.need(facts.kv.num_blocks >= blocks, f"{blocks} blocks")
        self.need(facts.max_model_len >= length, f"requests of {length} tokens")
        self.need(limits.tokens >= tokens, f"steps of {tokens} tokens")
        self.need(limits.rows >= rows, f"steps of {rows} rows")
        self.need(limits.live_requests >= live, f"{live} live requests")

    def generate(
        self, link: Link, prompt: list[int], blocks: list[int], count: int, sampling: Sampling = GREEDY, name: int = 1
    ) -> list[int]:
        """Start a request and draw `count` tokens, one answer after the other. It stays."""
        start = PlainStep(
            new=[PlainStart(name, prompt, blocks, 0, sampling)], rows=[PlainRow(name, 0, len(prompt), SAMPLE)]
        )
        tokens = drawn(link, start)
        for position in range(len(prompt), len(prompt) + count - 1):
            tokens += drawn(link, PlainStep(rows=[PlainRow(name, position, 1, SAMPLE)]))
        return tokens

    def continuation(self, count: int) -> list[int]:
        """`count` greedy tokens after `prompt()`; drawn under a lease of its own, the first time."""
        if len(self.reference) < count:
            self.need_room(blocks=self.blocks_for(PROMPT + count - 1), length=PROMPT + count, tokens=PROMPT)
            link = self.attached()
            blocks = list(range(self.blocks_for(PROMPT + count - 1)))
            self.reference[:] = self.generate(link, self.prompt(), blocks, count)
            link.bye()
        return self.reference[:count]


def drawn(link: Link, step: PlainStep, *, resync: bool = False) -> list[int]:
    """Send a step that must be accepted, and return its tokens."""
    samples = sum(bool(row.flags & SAMPLE) for row in step.rows)
    tokens: list[int] = unpack(link.expect_result(link.step(step.packed(), resync=resync), samples).tokens).tolist()
    return tokens


class Scene:
    """A lease with three requests on `prompt()`: 1 has drawn a token; 2 has, and is preempted; 3 has computed one
    position of its prompt. `blocks` of each, by place; `free`: blocks that nothing has ever owned.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench, self.facts = bench, bench.facts
        each = bench.blocks_for(PROMPT + 1)
        bench.need_room(blocks=4 * each + 1, length=PROMPT + 2, tokens=PROMPT, live=4)
        self.expected = bench.continuation(2)
        self.blocks = [list(range(place * each, (place + 1) * each)) for place in range(3)]
        self.free = list(range(3 * each, min(self.facts.kv.num_blocks, 7 * each + 4)))
        self.link = bench.attached()
        prompt = bench.prompt()
        for name in (1, 2):
            first = bench.generate(self.link, prompt, self.blocks[name - 1], 1, name=name)
            again = first == self.expected[:1]
            require(again, f"request {name} draws {first}, the same prompt drew {self.expected[:1]}")
        rows = [PlainRow(3, 0, 1)]
        drawn(self.link, PlainStep(preempted=[2], new=[PlainStart(3, prompt, self.blocks[2], 0)], rows=rows))

    def new(self, tokens: list[int] | None = None, blocks: list[int] | None = None, computed: int = 0) -> PlainStart:
        """Request 9, which is right unless made wrong."""
        tokens = self.bench.prompt() if tokens is None else tokens
        blocks = self.free[: self.bench.blocks_for(PROMPT)] if blocks is None else blocks
        return PlainStart(9, tokens, blocks, computed)

    def next_row(self) -> PlainRow:
        """The row with which request 1 goes on."""
        return PlainRow(1, PROMPT, 1, SAMPLE)

    def refuses(
        self, step: PlainStep | Step | bytes, code: RefusalCode, request: int | None = None, field: str = ""
    ) -> None:
        """The step is refused for this reason, and all is as before. `field` is not looked at where empty."""
        body = step.packed() if isinstance(step, PlainStep) else step
        seq = self.link.step(body)
        refused = self.link.expect_refused(code, seq)
        require(refused.request == request, f"{code} names request {refused.request}, not {request}")
        require(not field or refused.field == field, f"{code} names field {refused.field!r}, not {field!r}")
        named = refused.field, refused.value, refused.bound
        require(all(named), f"{code} names field, value and bound {named}: one of them is empty")
        self.goes_on(seq)

    def goes_on(self, cause: int) -> None:
        """Behind the refusal of `cause` a right step is refused until it has RESYNC; then it is right."""
        step = PlainStep(rows=[self.next_row()])
        behind = self.link.step(step.packed())
        self.link.expect_refused(RefusalCode.AFTER_REFUSAL, behind, cause)
        tokens = drawn(self.link, step, resync=True)
        require(tokens == self.expected[1:], f"after it request 1 draws {tokens}, it should draw {self.expected[1:]}")
