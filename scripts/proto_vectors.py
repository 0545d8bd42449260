"""What the golden vectors of the wire are made of: frames, exchanges with a gang, refused steps, and draws.

Everything is written by hand here and turned into bytes by the codec; `generate_proto.py` pins the bytes in
`proto/vectors/`, where tests hold the code to them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from workerproto.codec import Header, pack
from workerproto.messages import (
    Bye,
    Cache,
    Done,
    Error,
    ErrorCode,
    Event,
    Facts,
    Fault,
    HeaderFlag,
    Hello,
    Kind,
    Limits,
    Message,
    New,
    RefusalCode,
    Refused,
    Result,
    Resume,
    RowFlag,
    Sample,
    Sampling,
    Step,
    Welcome,
)
from workerproto.operations import (
    ConfigureKv,
    Drain,
    Part,
    Profile,
    Sleep,
    UpdateBegin,
    UpdateChunk,
    UpdateFinish,
    Wake,
)
from workerproto.steps import StepLimits

LEASE = 0x0A0B0C0D
OTHER_LEASE = 0x01020304
SAMPLE, FORCED = int(RowFlag.SAMPLE), int(RowFlag.FORCED)
RESYNC = int(HeaderFlag.RESYNC)


class Frame(NamedTuple):
    """A valid message. `raw` is a body that is right but that this codec would write longer."""

    name: str
    header: Header
    body: Message | None
    raw: bytes | None = None


class Row(NamedTuple):
    """One row of a step, with the blocks granted for it."""

    id: int
    position: int
    num_tokens: int
    flags: int = 0
    grants: tuple[int, ...] = ()


def step(
    *rows: Row,
    new: list[New] | None = None,
    resumed: list[Resume] | None = None,
    finished: tuple[int, ...] = (),
    preempted: tuple[int, ...] = (),
    forced: tuple[int, ...] = (),
) -> Step:
    ids, positions, counts, flags, grants = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return Step(
        new or [],
        resumed or [],
        pack(finished),
        pack(preempted),
        pack(ids),
        pack(positions),
        pack(counts),
        pack(flags),
        pack([len(granted) for granted in grants]),
        pack([block for granted in grants for block in granted]),
        pack(forced),
    )


def new(
    name: int, tokens: tuple[int, ...], blocks: tuple[int, ...], computed: int = 0, sampling: Sampling | None = None
) -> New:
    return New(name, pack(tokens), pack(blocks), computed, sampling or Sampling())


def resume(name: int, tokens: tuple[int, ...], blocks: tuple[int, ...], computed: int = 0) -> Resume:
    return Resume(name, pack(tokens), pack(blocks), computed)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


_CACHE = Cache(64, 16, "bfloat16", "NHD", [184320, 184320], [1 << 30, 1 << 29], 16, 32)
_LEDGERS = [
    {"total": 1 << 31, "free": 1 << 29, "weights": 162826752, "kv_cache": 11980800, "unexplained": 1435805184 + each}
    for each in (0, -(1 << 20))
]
_LEDGERS[1]["free"] += 1 << 20
FACTS = Facts(
    "SmolLM2-135M-Instruct", 49152, 8192, "9f3c", True, _CACHE, 1, 2, Limits(4, 2048, 256, 1024, 1 << 24, 20), _LEDGERS
)


def valid_frames() -> list[Frame]:
    """At least one of every kind."""

    def to_gang(kind: Kind, seq: int = 0, flags: int = 0) -> Header:
        return Header(kind, flags, 0 if kind is Kind.HELLO else 1, LEASE, seq)

    plain, drawn = Sampling(), Sampling(0.8, 40, 0.95, 0.05, 2**53 - 1, 2)
    sampled = Row(7, 3, 1, SAMPLE)
    return [
        Frame("hello", to_gang(Kind.HELLO), Hello("my-scheduler", [], False)),
        Frame("hello, all defaults", to_gang(Kind.HELLO), Hello(), b"\x80"),
        Frame("hello, takeover", to_gang(Kind.HELLO), Hello("second", ["drafts"], True)),
        Frame("welcome of a gang that loads", to_gang(Kind.WELCOME), Welcome("LOADING", 10000)),
        Frame("welcome of a ready gang", to_gang(Kind.WELCOME), Welcome("READY", 10000, ["drafts"], 3, FACTS)),
        Frame(
            "error",
            to_gang(Kind.ERROR),
            Error(ErrorCode.BAD_SEQUENCE, 9, 7, "seq", "9", "7", "sequence 9 came, 7 is next"),
        ),
        Frame("error, least", to_gang(Kind.ERROR), Error(ErrorCode.BAD_HEADER), b"\x81\xa4code\xaaBAD_HEADER"),
        Frame("ping", to_gang(Kind.PING), None),
        Frame("pong", to_gang(Kind.PONG), None),
        Frame("bye of a scheduler", to_gang(Kind.BYE), Bye()),
        Frame("bye of a gang", to_gang(Kind.BYE), Bye("TAKEOVER", "client 'second' took over")),
        Frame("event, ready", to_gang(Kind.EVENT), Event("READY", 1, 0, FACTS)),
        Frame(
            "event, failed",
            to_gang(Kind.EVENT),
            Event("FAILED", 1, 41, None, Fault(70, 1, "step", 57, "SIGSEGV", "was killed by SIGSEGV", "Traceback: …")),
        ),
        Frame("step without rows", to_gang(Kind.STEP, 1), Step(), b"\x90"),
        Frame("step, prompt", to_gang(Kind.STEP, 2),
              step(Row(7, 0, 3, SAMPLE), new=[new(7, (5, 6, 8), (0,), 0, drawn)])),
        Frame("step, decode", to_gang(Kind.STEP, 3), step(sampled, Row(8, 16, 1, SAMPLE, (12,)))),
        Frame(
            "step, everything",
            to_gang(Kind.STEP, 4, RESYNC),
            step(
                Row(9, 16, 2),
                Row(10, 0, 2, SAMPLE | FORCED, (5, 6)),
                new=[new(9, tuple(range(18)), (3, 4), 16, plain), new(10, (1, 2), ())],
                resumed=[resume(11, tuple(range(100, 117)), (8,), 16)],
                finished=(7,),
                preempted=(8,),
                forced=(30, 31),
            ),
        ),
        Frame("sample", to_gang(Kind.SAMPLE, 5), Sample(4, pack([0]), pack([-1, 1]))),
        Frame("drain", to_gang(Kind.CONTROL, 6), Drain()),
        Frame("configure_kv", to_gang(Kind.CONTROL, 1), ConfigureKv(4096, "NHD", 16, 64)),
        Frame("configure_kv, the rest left to the gang", to_gang(Kind.CONTROL, 1), ConfigureKv(4096)),
        Frame("sleep", to_gang(Kind.CONTROL, 6), Sleep(2, [Part.KV_CACHE])),
        Frame("sleep, all at level 1", to_gang(Kind.CONTROL, 6), Sleep(), b"\x81\xa2op\xa5sleep"),
        Frame("wake", to_gang(Kind.CONTROL, 7), Wake([Part.WEIGHTS, Part.RUNTIME])),
        Frame("update_begin", to_gang(Kind.CONTROL, 8), UpdateBegin(True)),
        Frame("update_chunk", to_gang(Kind.CONTROL, 9), UpdateChunk("/models/step-100", "sha256:0123")),
        Frame("update_finish", to_gang(Kind.CONTROL, 10), UpdateFinish("policy, step 100")),
        Frame("profile", to_gang(Kind.CONTROL, 11), Profile(True, 10)),
        Frame("result without rows", to_gang(Kind.RESULT, 1), Result(), b"\x90"),
        Frame("result", to_gang(Kind.RESULT, 3), Result(pack([17, 4095]), 0, timings_us=pack([40, 0, 7600, 210]))),
        Frame(
            "result, logprobs",
            to_gang(Kind.RESULT, 2),
            Result(pack([17]), 1, pack([17, 4, 17]), floats(-1.5, -0.5, -1.5), pack([2]), pack([40, 0, 7600, 210])),
        ),
        Frame(
            "refused",
            to_gang(Kind.REFUSED, 5),
            Refused(
                RefusalCode.BLOCK_OWNED, 5, 9, "new.blocks", "3", "a block without owner",
                "request 9 is granted block 3, which has an owner",
            ),
        ),
        Frame("refused, a bound", to_gang(Kind.REFUSED, 5),
              Refused(RefusalCode.BAD_POSITION, 5, 9, "positions", "17", "16", "request 9 is elsewhere")),
        Frame("refused behind it", to_gang(Kind.REFUSED, 6),
              Refused(RefusalCode.AFTER_REFUSAL, 5, None, "header.flags", "0", "2")),
        Frame("done", to_gang(Kind.DONE, 6), Done("drain", [{}, {}])),
    ]  # fmt: skip


LIMITS = StepLimits(
    num_blocks=8, block_size=4, vocabulary=100, max_model_len=16, tokens=12, rows=3, live_requests=4, logprobs=2
)


class Story(NamedTuple):
    """Steps of a fresh gang with `LIMITS`: header flags and body, in sequence from 1. The last one is the one meant."""

    name: str
    steps: list[tuple[int, Step | bytes]]


def stories() -> list[Story]:
    """What a validator accepts and refuses. Every refusal code ends at least one story."""
    four = (11, 12, 13, 14)
    begin = (0, step(Row(1, 0, 4, SAMPLE), new=[new(1, four, (0,))]))
    half = (0, step(Row(1, 0, 2), new=[new(1, four, (0,))]))
    stop = (0, step(preempted=(1,)))
    refused = (0, step(finished=(9,)))

    def one(name: str, *steps: tuple[int, Step | bytes]) -> Story:
        return Story(name, list(steps))

    def only(name: str, wrong: Step | bytes, flags: int = 0) -> Story:
        return Story(name, [begin, (flags, wrong)])

    accepted = [
        one("a step without rows", (0, step())),
        one("prompt, then the token that it sampled", begin, (0, step(Row(1, 4, 1, SAMPLE, (5,))))),
        one("a prompt in two chunks", half, (0, step(Row(1, 2, 2, SAMPLE)))),
        one("a block freed and granted in one step", begin, (0, step(finished=(1,), new=[new(2, (3,), (0,))]))),
        one("an id used again in the next step", begin, (0, step(finished=(1,))), (0, step(new=[new(1, four, (0,))]))),
        one("a prefix written by this very step", (0, step(
            Row(1, 0, 4, SAMPLE), Row(2, 4, 1, SAMPLE), new=[new(1, four, (0,)), new(2, (*four, 9), (0, 1), 4)]))),
        one("a prefix that outlived its owner", begin, (0, step(finished=(1,))),
            (0, step(Row(2, 4, 1, SAMPLE), new=[new(2, (*four, 9), (0, 1), 4)]))),
        one("preempted and resumed", begin, stop,
            (0, step(Row(1, 0, 5, SAMPLE), resumed=[resume(1, (*four, 50), (6, 7))]))),
        one("preempted and resumed in one step", begin,
            (0, step(preempted=(1,), resumed=[resume(1, (*four, 50), (0, 7), 4)]))),
        one("forced tokens go on beyond what is known", begin,
            (0, step(Row(1, 4, 3, FORCED | SAMPLE, (5,)), forced=(1, 2, 3)))),
        one("goes on by RESYNC", refused, (RESYNC, step())),
    ]  # fmt: skip
    wrong = [
        only("not msgpack", b"\xc1"),
        only("a packed member of 3 bytes", b"\x93\x90\x90\xc4\x03\x01\x00\x00"),
        only("rows of different number", b"\x96\x90\x90\xc4\x00\xc4\x00\xc4\x04\x01\x00\x00\x00\xc4\x00"),
        only("fewer grants than counted", Step(
            ids=pack([1]), positions=pack([4]), counts=pack([1]), row_flags=pack([0]), grant_counts=pack([1]))),
        only("more forced tokens than its rows compute", step(Row(1, 4, 1, FORCED, (5,)), forced=(1, 2))),
        one("behind a refused step", refused, (0, step())),
        only("RESYNC where nothing was refused", step(), RESYNC),
        one("RESYNC for the second time", refused, (RESYNC, step()), (RESYNC, step())),
        only("finishes what never was", step(finished=(9,))),
        only("finishes one twice", step(finished=(1, 1))),
        only("finished and scheduled at once", step(Row(1, 4, 1, SAMPLE, (5,)), finished=(1,))),
        only("a negative id", step(finished=(-1,))),
        only("resumes what never was", step(resumed=[resume(9, (1,), (5,))])),
        only("an id that lives", step(new=[new(1, (3,), (5,))])),
        only("an id that is finished in this step", step(finished=(1,), new=[new(1, (3,), (5,))])),
        only("two rows of one request", step(Row(1, 4, 1, 0, (5,)), Row(1, 5, 1))),
        only("resumes what runs", step(resumed=[resume(1, four, (5,))])),
        only("no prompt", step(new=[new(2, (), (5,))])),
        only("a prompt of 17 tokens", step(new=[new(2, (1,) * 17, (5,))])),
        one("samples beyond max_model_len", (0, step(new=[new(2, (1,) * 16, (1, 2, 3, 4))])), (0, step(Row(2, 0, 12))),
            (0, step(Row(2, 12, 4, SAMPLE)))),
        only("a token that is not in the vocabulary", step(new=[new(2, (100,), (5,))])),
        only("a negative forced token", step(Row(1, 4, 1, FORCED, (5,)), forced=(-1,))),
        only("3 logprobs where 2 are given", step(new=[new(2, (3,), (5,), 0, Sampling(logprobs=3))])),
        only("computed amid a block", step(new=[new(2, four, (0,), 2)])),
        only("nothing left to compute", step(new=[new(2, four, (0,), 4)])),
        only("a position passed over", step(Row(1, 5, 1, SAMPLE, (5,)))),
        only("a row without tokens", step(Row(1, 4, 0))),
        only("computes what nobody knows", step(Row(1, 4, 2, 0, (5,)))),
        only("a row flag kept free", step(Row(1, 4, 1, 4, (5,)))),
        one("samples amid the prompt", half, (0, step(Row(1, 2, 1, SAMPLE)))),
        one("resumes with a token too few", begin, stop, (0, step(resumed=[resume(1, four, (5,))]))),
        only("a block that is not there", step(new=[new(2, (3,), (8,))])),
        only("a block with an owner", step(new=[new(2, (3,), (0,))])),
        only("one block twice", step(new=[new(2, (3,), (5, 5))])),
        only("a block granted to two", step(new=[new(2, (3,), (5,)), new(3, (3,), (5,))])),
        only("a prefix that nothing has written", step(new=[new(2, (*four, 9), (5, 6), 4)])),
        one("a prefix written by half", half, (0, step(new=[new(2, (*four, 9), (0, 6), 4)]))),
        only("no block for what it computes", step(Row(1, 4, 1, SAMPLE))),
        only("fewer blocks than its prefix has", step(new=[new(2, (*four, *four, 9), (0,), 8)])),
        only("more blocks than the longest request", step(new=[new(2, (3,), (1, 2, 3, 4, 5))])),
        only("13 tokens where 12 may be", step(Row(2, 0, 13), new=[new(2, (1,) * 13, (1, 2, 3, 4))])),
        only("4 rows where 3 may be", step(*[Row(name, 0, 1, SAMPLE) for name in (2, 3, 4, 5)])),
        only("5 requests where 4 may live", step(new=[new(name, (3,), ()) for name in (2, 3, 4, 5)])),
        one("a step while another waits for its Sample", (int(HeaderFlag.SAMPLE_FOLLOWS), step()), (0, step())),
    ]  # fmt: skip
    return accepted + wrong
