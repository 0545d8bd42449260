"""A request as the scheduler sees it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from workerproto.messages import Sampling

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Params:
    """What a user asks of a generation. `stop_tokens` end it, and are part of what comes out."""

    max_tokens: int = 16
    sampling: Sampling = GREEDY
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, it must be at least 1")


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """tokens: int32, the prompt, then what has come back. computed: positions scheduled, in flight included. pending:
    samples in flight. blocks: those held, in order of position. hashes: of the full blocks of `tokens`, chained.
    longest: length at which it ends. cached: blocks of it that the pool has been told the content of.
    """

    id: int
    tokens: array[int]
    params: Params
    longest: int
    prompt_length: int = 0
    state: State = State.WAITING
    computed: int = 0
    pending: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cached: int = 0
    finish_reason: str = ""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    def begin_anew(self, name: int) -> None:
        """Under another id, with nothing computed and no block."""
        self.id, self.state, self.computed, self.pending, self.blocks, self.cached = name, State.WAITING, 0, 0, [], 0

    @property
    def known_end(self) -> int:
        """Tokens known or being sampled: what the ranks count too."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions that can be computed now and are worth it."""
        return 0 if self.known_end >= self.longest else self.known_end - self.computed

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_length and self.remaining == 1
