"""What a step is once it has been read: bounds, the accepted form, the refusal, and the table of who runs where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from workerproto.codec import Int32Array
from workerproto.messages import Facts, RefusalCode, Refused, RowFlag, Sampling

_SAMPLE = int(RowFlag.SAMPLE)  # an operation with an IntFlag makes another one, which takes microseconds


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of a gang, all from Welcome's facts. tokens and rows are per step; live_requests counts preempted ones
    too. alignment: positions, of which `computed` is a multiple; 0 for the block size.
    """

    num_blocks: int
    block_size: int
    vocabulary: int
    max_model_len: int
    tokens: int
    rows: int
    live_requests: int
    logprobs: int
    alignment: int = 0

    def __post_init__(self) -> None:
        if not self.alignment:
            object.__setattr__(self, "alignment", self.block_size)

    @classmethod
    def from_facts(cls, facts: Facts) -> StepLimits:
        """The bounds that a scheduler reads off Welcome or Event."""
        return cls(
            facts.kv.num_blocks,
            facts.kv.block_size,
            facts.vocabulary,
            facts.max_model_len,
            facts.limits.tokens,
            facts.limits.rows,
            facts.limits.live_requests,
            facts.limits.logprobs,
            facts.kv.alignment,
        )

    @property
    def blocks_per_request(self) -> int:
        """Blocks that the longest request fills."""
        return -(-self.max_model_len // self.block_size)


class Refusal(ValueError):
    """A step is refused whole. `cause` is the sequence of the primary refusal that it follows from (or is). `request`
    is None where none is at fault, or what the step names cannot be one (`value` then has the number).
    """

    def __init__(
        self,
        code: RefusalCode,
        message: str,
        field: str,
        value: object = "",
        bound: object = "",
        request: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.value = str(value) or "nothing"
        self.bound = str(bound)
        self.request = request if request is not None and request >= 0 else None
        self.cause = 0

    def as_message(self) -> Refused:
        """The answer on the wire, within its bounds."""
        return Refused(
            self.code, self.cause, self.request, self.field, self.value[:256], self.bound[:256], str(self)[:4096]
        )


class StartedRequest(NamedTuple):
    """A new or resumed request as a runner needs it: all its tokens (int32), and the slot that is its own from now
    on.
    """

    id: int
    slot: int
    tokens: Int32Array
    computed: int
    sampling: Sampling


class AcceptedStep(Struct, frozen=True):
    """A step after its check. int32 arrays, to be read only, steps may share them; one entry a row unless said
    otherwise.

    freed_slots: slots given up by finished and preempted requests (one of them may already be a started request's
    again). started: new, then resumed requests. slots: the row's slot, stable while the request runs. positions: first
    position computed. counts: tokens computed. flags: RowFlag bits. forced: inputs of the FORCED rows, `counts[row]`
    each, in row order. grant_counts, grants: blocks appended to the rows' requests, already in the table.
    """

    sequence: int
    freed_slots: Int32Array
    started: list[StartedRequest]
    slots: Int32Array
    positions: Int32Array
    counts: Int32Array
    flags: Int32Array
    forced: Int32Array
    grant_counts: Int32Array
    grants: Int32Array

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def sampled_rows(self) -> Int32Array:
        """Indices of the SAMPLE rows, ascending: the order of a Result's tokens."""
        return (self.flags & _SAMPLE).nonzero()[0].astype(np.int32)


class RequestTable:
    """State by slot, read by batch builders after a step is accepted.

    blocks: int32 [live_requests, blocks_per_request], of which the first num_blocks[slot] are meant. computed:
    positions scheduled, those in flight included. known_end: tokens known or being sampled. The last three are int32
    [live_requests].
    """

    def __init__(self, limits: StepLimits) -> None:
        slots = limits.live_requests
        self.blocks: Int32Array = np.zeros((slots, limits.blocks_per_request), np.int32)
        self.num_blocks: Int32Array = np.zeros(slots, np.int32)
        self.computed: Int32Array = np.zeros(slots, np.int32)
        self.known_end: Int32Array = np.zeros(slots, np.int32)
