"""Messages of the rankd wire, version 1.

Two ways to write a body, both msgpack. What is sent rarely (handshake, control, answers to mistakes) is a map, so that
a person can read it. What is sent every step is an array whose long members are packed little-endian int32 or float32
in msgpack *bin*: one copy, whatever the number of rows (see `workerproto.codec` for the header that stands in front).

`proto/SPEC.md` is normative; the bounds below are the ones it states. Integers never reach 2**53, so that a language
whose only number is a double can speak this wire; ids, tokens and blocks are int32.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag, StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from workerproto.fields import (
    EMPTY,
    INT32_MAX,
    INTEGER_MAX,
    ArrayBody,
    Balance,
    Count,
    Id,
    MapBody,
    Name,
    Packed,
    Text,
)
from workerproto.operations import Control


class Kind(IntEnum):
    """The `kind` byte of the header."""

    HELLO = 1
    WELCOME = 2
    ERROR = 3
    PING = 4
    PONG = 5
    BYE = 6
    EVENT = 7
    STEP = 16
    SAMPLE = 17
    CONTROL = 18
    RESULT = 32
    REFUSED = 33
    DONE = 34


ORDERED_KINDS = frozenset({Kind.STEP, Kind.SAMPLE, Kind.CONTROL})
"""Kinds that take a sequence number of the lease; every other kind carries sequence 0."""


class HeaderFlag(IntFlag):
    """Bits of the header's `flags`. 4 (extra frames) and 8 (dummy step) are kept free and refused."""

    SAMPLE_FOLLOWS = 1
    RESYNC = 2


class RowFlag(IntFlag):
    """Bits of a row's flags. 4 (drafts) and 8 (pooling) are kept free and refused."""

    SAMPLE = 1
    FORCED = 2


class ErrorCode(StrEnum):
    """First tier: the coordinator's answer to a frame's header. The frame counts as never sent."""

    BAD_FRAMES = "BAD_FRAMES"
    BAD_HEADER = "BAD_HEADER"
    BAD_VERSION = "BAD_VERSION"
    BAD_KIND = "BAD_KIND"
    BAD_FLAGS = "BAD_FLAGS"
    BAD_BODY = "BAD_BODY"
    TOO_LARGE = "TOO_LARGE"
    BAD_LEASE = "BAD_LEASE"
    LEASE_HELD = "LEASE_HELD"
    LEASE_ENDED = "LEASE_ENDED"
    BAD_EPOCH = "BAD_EPOCH"
    BAD_SEQUENCE = "BAD_SEQUENCE"
    SAMPLE_DUE = "SAMPLE_DUE"
    NO_STEP_OPEN = "NO_STEP_OPEN"
    NO_CREDIT = "NO_CREDIT"
    NOT_READY = "NOT_READY"
    BARRIER = "BARRIER"


class RefusalCode(StrEnum):
    """Second tier: the ranks' answer to a step or a Control. Its sequence is consumed and nothing in it happened."""

    MALFORMED = "MALFORMED"
    AFTER_REFUSAL = "AFTER_REFUSAL"
    UNEXPECTED_RESYNC = "UNEXPECTED_RESYNC"
    UNKNOWN_REQUEST = "UNKNOWN_REQUEST"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    NOT_PREEMPTED = "NOT_PREEMPTED"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    TOO_LONG = "TOO_LONG"
    TOKEN_OUT_OF_VOCABULARY = "TOKEN_OUT_OF_VOCABULARY"
    BAD_SAMPLING = "BAD_SAMPLING"
    BAD_COMPUTED = "BAD_COMPUTED"
    BAD_POSITION = "BAD_POSITION"
    BAD_COUNT = "BAD_COUNT"
    BAD_ROW_FLAGS = "BAD_ROW_FLAGS"
    BAD_SAMPLE = "BAD_SAMPLE"
    TOKENS_DISAGREE = "TOKENS_DISAGREE"
    BLOCK_OUT_OF_RANGE = "BLOCK_OUT_OF_RANGE"
    BLOCK_OWNED = "BLOCK_OWNED"
    BLOCK_UNWRITTEN = "BLOCK_UNWRITTEN"
    BLOCKS_MISSING = "BLOCKS_MISSING"
    TOO_MANY_BLOCKS = "TOO_MANY_BLOCKS"
    TOO_MANY_TOKENS = "TOO_MANY_TOKENS"
    TOO_MANY_ROWS = "TOO_MANY_ROWS"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    SAMPLE_DUE = "SAMPLE_DUE"
    BAD_STEP = "BAD_STEP"
    BAD_MASK = "BAD_MASK"
    REQUESTS_LIVE = "REQUESTS_LIVE"
    ASLEEP = "ASLEEP"
    NOT_ASLEEP = "NOT_ASLEEP"
    UPDATING = "UPDATING"
    NOT_UPDATING = "NOT_UPDATING"
    WEIGHTS_INVALID = "WEIGHTS_INVALID"
    AWAITING_KV = "AWAITING_KV"
    KV_CONFIGURED = "KV_CONFIGURED"
    BAD_ARGUMENT = "BAD_ARGUMENT"
    NOT_POSSIBLE = "NOT_POSSIBLE"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"


class Hello(MapBody, frozen=True):
    """Attach with the lease in the header. `takeover` ends the lease of whoever holds the gang."""

    client: Name = ""
    features: list[Name] = msgspec.field(default_factory=list)
    takeover: bool = False


class Cache(MapBody, frozen=True):
    """The KV cache as configured. `available_bytes` has one member a rank, in rank order; `hash_block_size` and
    `alignment` are positions.
    """

    num_blocks: Count
    block_size: Count
    dtype: Name
    layout: Name
    block_bytes: list[Count]
    available_bytes: list[Count]
    hash_block_size: Count
    alignment: Count


class Limits(MapBody, frozen=True):
    """What a scheduler must keep to; validity of a step depends on these and on the stream before it alone."""

    steps_in_flight: Count
    tokens: Count
    rows: Count
    live_requests: Count
    frame_bytes: Count
    logprobs: Count


class Facts(MapBody, frozen=True):
    """What is known once the gang is READY. `memory`: each rank's ledger in bytes, whose lines but `total` sum to
    `total`; an empty map of a rank that keeps none, an empty list before READY.
    """

    model: Name
    vocabulary: Count
    max_model_len: Count
    weights_id: Name
    weights_valid: bool
    kv: Cache
    tp: Count
    pp: Count
    limits: Limits
    memory: list[dict[Name, Balance]]


class Welcome(MapBody, frozen=True):
    """The lease is held. `facts` is null until the gang is READY; it then comes by Event."""

    state: Name
    lease_timeout_ms: Count
    features: list[Name] = msgspec.field(default_factory=list)
    requests_dropped: Count = 0
    facts: Facts | None = None


class Error(MapBody, frozen=True):
    """First tier. `expected_seq` is the next sequence of the lease, where the sender holds one."""

    code: ErrorCode
    seq: Count = 0
    expected_seq: Count | None = None
    field: Name = ""
    value: Name = ""
    bound: Name = ""
    message: Text = ""


class Bye(MapBody, frozen=True):
    """The end of a lease: from the scheduler a good-bye, from the coordinator a notice."""

    code: Name = ""
    message: Text = ""


class Fault(MapBody, frozen=True):
    """The first cause of a failure; `code` is the gang's exit code."""

    code: Count
    rank: Count | None = None
    phase: Name = ""
    step: Count | None = None
    signal: Name | None = None
    message: Text = ""
    traceback: Text = ""


class Event(MapBody, frozen=True):
    """The gang changed state. After FAILED nothing of that epoch follows: every later step's effect is lost."""

    state: Name
    epoch: Count
    last_answered: Count = 0
    facts: Facts | None = None
    fault: Fault | None = None


class Sampling(ArrayBody, frozen=True):
    """How a request's tokens are drawn.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. A draw depends on (logits, seed, position of the new
    token) alone. logprobs: -1 none, 0 the sampled token's, n also those of the n likeliest.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=INTEGER_MAX)] = 0
    logprobs: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = -1


class New(ArrayBody, frozen=True):
    """A request that starts. Its first `computed / block_size` blocks are shared prefix, the others are granted to
    it.
    """

    id: Id
    tokens: Packed
    blocks: Packed
    computed: Id
    sampling: Sampling


class Resume(ArrayBody, frozen=True):
    """A preempted request that goes on, with every token known by now; its sampling is the one it came with."""

    id: Id
    tokens: Packed
    blocks: Packed
    computed: Id


class Step(ArrayBody, frozen=True):
    """One forward pass. The last nine members are packed int32; `positions`, `counts`, `row_flags` and `grant_counts`
    have one value a row, `grants` has sum(grant_counts) and `forced` the inputs of the FORCED rows, in row order."""

    new: list[New] = msgspec.field(default_factory=list)
    resumed: list[Resume] = msgspec.field(default_factory=list)
    finished: Packed = EMPTY
    preempted: Packed = EMPTY
    ids: Packed = EMPTY
    positions: Packed = EMPTY
    counts: Packed = EMPTY
    row_flags: Packed = EMPTY
    grant_counts: Packed = EMPTY
    grants: Packed = EMPTY
    forced: Packed = EMPTY


class Sample(ArrayBody, frozen=True):
    """A grammar's masks for the step of sequence `step`, which carries SAMPLE_FOLLOWS. rows: int32, indices of the rows
    that are masked. masks: for each of them ceil(vocabulary / 32) words, whose bits allow tokens.
    """

    step: Count
    rows: Packed = EMPTY
    masks: Packed = EMPTY


class Result(ArrayBody, frozen=True):
    """The answer to an accepted step.

    tokens: int32, one a SAMPLE row, in row order. nonfinite: SAMPLE rows whose logits held a NaN or an infinity.
    For each SAMPLE row whose request asked for logprobs n >= 0, in row order: 1 + n ids (int32) and natural-log
    probabilities (float32) of the model's own distribution, the sampled token first, then the n likeliest; and in
    `logprob_ranks` one int32, the sampled token's place among all, 1 the likeliest. timings_us: int32, microseconds on
    the output rank: validate, wait for input, forward, sample.
    """

    tokens: Packed = EMPTY
    nonfinite: Count = 0
    logprob_ids: Packed = EMPTY
    logprob_values: Packed = EMPTY
    logprob_ranks: Packed = EMPTY
    timings_us: Packed = EMPTY


class Refused(MapBody, frozen=True):
    """Second tier. `cause_seq` is the sequence of the primary refusal: the step's own, or with AFTER_REFUSAL an
    earlier one.
    """

    code: RefusalCode
    cause_seq: Count
    request: Id | None = None
    field: Name = ""
    value: Name = ""
    bound: Name = ""
    message: Text = ""


Report = dict[str, msgspec.Raw]
"""What one rank says of an operation; the names are the operation's."""


class Done(MapBody, frozen=True):
    """The answer to a Control: one report a rank, in rank order."""

    op: Name
    report: list[Report] = msgspec.field(default_factory=list)


Message = Hello | Welcome | Error | Bye | Event | Step | Sample | Control | Result | Refused | Done

BODIES: dict[Kind, Any] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.ERROR: Error,
    Kind.BYE: Bye,
    Kind.EVENT: Event,
    Kind.STEP: Step,
    Kind.SAMPLE: Sample,
    Kind.CONTROL: Control,
    Kind.RESULT: Result,
    Kind.REFUSED: Refused,
    Kind.DONE: Done,
}
"""The type of each kind's body; CONTROL has one for each operation. PING and PONG have none: their second frame is
empty.
"""
