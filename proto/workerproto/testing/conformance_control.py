"""Conformance, operations: the barrier, and what is not allowed. What would change the gang is not tried."""

from __future__ import annotations

from collections.abc import Callable

from workerproto.codec import encode_body, pack
from workerproto.messages import Error, ErrorCode, Kind, RefusalCode, Refused, Result, Step
from workerproto.operations import ConfigureKv, Control, Part, Sleep, UpdateBegin, UpdateChunk, UpdateFinish, Wake
from workerproto.testing.conformance_bench import PROMPT, Bench, Rules, drawn
from workerproto.testing.conformance_link import Link, require, told
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

OPERATIONS = Rules()


def control(link: Link, operation: Control | bytes) -> int:
    """Send it and return its sequence."""
    seq, link.next_seq = link.next_seq, link.next_seq + 1
    link.send(Kind.CONTROL, operation, seq=seq)
    return seq


def _refused(name: str, code: RefusalCode, operation: Control | bytes, live: bool = False) -> None:
    """It is refused for this reason, and the next step needs no RESYNC. `live`: while a request holds a block."""

    @OPERATIONS(name)
    def run(bench: Bench) -> None:
        link = bench.attached()
        if live:
            bench.need_room(blocks=bench.blocks_for(PROMPT), length=PROMPT + 1, tokens=PROMPT)
            start = PlainStart(1, bench.prompt(), list(range(bench.blocks_for(PROMPT))), 0)
            drawn(link, PlainStep(new=[start], rows=[PlainRow(1, 0, PROMPT)]))
        refused = link.expect_refused(code, control(link, operation))
        require(refused.request is None, f"{code} names request {refused.request}, and it is of none")
        require(refused.field, f"{code} names no field")
        link.works()


_refused("22.unknown-op", RefusalCode.MALFORMED, b"\x81\xa2op\xa5dance")
_refused("22.no-op", RefusalCode.MALFORMED, b"\x80")
_refused("22.not-a-map", RefusalCode.MALFORMED, b"\x91\xa5drain")
_refused("22.unknown-argument", RefusalCode.MALFORMED, b"\x82\xa2op\xa4wake\xa1x\x01")
_refused("22.argument-bound", RefusalCode.MALFORMED, b"\x82\xa2op\xa5sleep\xa5level\x03")
_refused("22.unknown-part", RefusalCode.MALFORMED, b"\x82\xa2op\xa4wake\xa5parts\x91\xa3all")
_refused("22.configure-again", RefusalCode.KV_CONFIGURED, ConfigureKv(1))
_refused("22.wake-the-awake", RefusalCode.NOT_ASLEEP, Wake())
_refused("22.wake-a-part-that-is-awake", RefusalCode.NOT_ASLEEP, Wake([Part.KV_CACHE]))
_refused("22.chunk-without-begin", RefusalCode.NOT_UPDATING, UpdateChunk("nothing"))
_refused("22.finish-without-begin", RefusalCode.NOT_UPDATING, UpdateFinish("nothing"))
_refused("22.sleep-over-requests", RefusalCode.REQUESTS_LIVE, Sleep(), live=True)
_refused("22.sleep-of-the-cache-over-requests", RefusalCode.REQUESTS_LIVE, Sleep(2, [Part.KV_CACHE]), live=True)
_refused("22.update-over-requests", RefusalCode.REQUESTS_LIVE, UpdateBegin(), live=True)


@OPERATIONS("22.steps-before-are-answered-first")
def _(bench: Bench) -> None:
    link = bench.attached()
    steps = [link.step(Step()) for _ in range(bench.facts.limits.steps_in_flight)]
    operation = control(link, Wake())  # takes no credit
    for seq in steps:
        link.expect_result(seq, 0)
    link.expect_refused(RefusalCode.NOT_ASLEEP, operation)
    link.works()


@OPERATIONS("22.nothing-is-taken-behind-it")
def _(bench: Bench) -> None:
    """A step sent behind it is in error with its sequence free, or comes late enough to be taken."""
    link = bench.attached()
    before, operation = link.step(Step()), control(link, Wake())
    behind = link.next_seq
    link.send(Kind.STEP, encode_body(Step()), seq=behind)
    answers = [link.receive() for _ in range(3)]
    kinds = [told(header, message) for header, message in answers]
    in_order = [header.seq for header, message in answers if header and isinstance(message, Result | Refused)]
    errors = [(message.code, message.seq) for _, message in answers if isinstance(message, Error)]
    require(in_order[:2] == [before, operation], f"{kinds} came, not the answers to {before} and {operation} in order")
    taken = in_order[2:] == [behind]
    require(taken or errors == [(ErrorCode.BARRIER, behind)], f"{kinds} came, and no Error BARRIER for {behind}")
    link.next_seq += taken
    link.works()


@OPERATIONS("22.refusals-stay-apart")
def _(bench: Bench) -> None:
    """A refusal that was pending stays so behind a refused operation."""
    link = bench.attached()
    wrong = link.step(Step(finished=pack([1])))
    link.expect_refused(RefusalCode.UNKNOWN_REQUEST, wrong)
    link.expect_refused(RefusalCode.NOT_ASLEEP, control(link, Wake()))
    behind = link.step(Step())
    link.expect_refused(RefusalCode.AFTER_REFUSAL, behind, wrong)
    link.expect_result(link.step(Step(), resync=True), 0)


def _in_error(name: str, code: ErrorCode, send: Callable[[Link], None]) -> None:
    @OPERATIONS(name)
    def run(bench: Bench) -> None:
        link = bench.attached()
        send(link)
        link.expect_error(code, seq=None, expected_seq=1)
        link.works()


_in_error("22.sequence-gap", ErrorCode.BAD_SEQUENCE, lambda link: link.send(Kind.CONTROL, Wake(), seq=2))
_in_error("22.flags", ErrorCode.BAD_FLAGS, lambda link: link.send(Kind.CONTROL, Wake(), seq=1, flags=2))
