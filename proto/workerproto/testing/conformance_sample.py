"""Conformance, grammars: a step that waits for masks, and what they do."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from workerproto.codec import Header, encode_body, pack, unpack
from workerproto.fields import Packed
from workerproto.masks import words_of
from workerproto.messages import Error, ErrorCode, HeaderFlag, Kind, RefusalCode, Refused, Sample, Step
from workerproto.testing.conformance_bench import PROMPT, SAMPLE, Bench, Rules
from workerproto.testing.conformance_link import Link, require, told
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

SAMPLES = Rules()


def mask(vocabulary: int, *tokens: int) -> list[int]:
    """Of one row: these tokens alone are allowed."""
    words = np.zeros(words_of(vocabulary), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    found: list[int] = words.view(np.int32).tolist()
    return found


class _Open:
    """A lease on which a step waits: request 1 and 3 draw a token after `prompt()`, 2 computes and draws none."""

    def __init__(self, bench: Bench) -> None:
        self.vocabulary = bench.facts.vocabulary
        each = bench.blocks_for(PROMPT + 2)
        bench.need_room(blocks=3 * each, length=PROMPT + 3, tokens=3 * PROMPT, rows=3, live=3)
        self.greedy = bench.continuation(2)
        self.link = bench.attached()
        starts = [
            PlainStart(name, bench.prompt(), list(range((name - 1) * each, name * each)), 0) for name in (1, 2, 3)
        ]
        rows = [PlainRow(1, 0, PROMPT, SAMPLE), PlainRow(2, 0, PROMPT), PlainRow(3, 0, PROMPT, SAMPLE)]
        self.seq = _waiting(self.link, PlainStep(new=starts, rows=rows).packed())

    @property
    def other(self) -> int:
        """A token that is not drawn without a mask."""
        return (self.greedy[0] + 1) % self.vocabulary

    def sample(self, rows: list[int], masks: list[int], step: int | None = None) -> int:
        return _sample(self.link, self.seq if step is None else step, pack(rows), pack(masks))

    def draws(self, tokens: list[int]) -> None:
        drawn = unpack(self.link.expect_result(self.seq, 2).tokens).tolist()
        require(drawn == tokens, f"requests 1 and 3 draw {drawn}, not {tokens}")

    def goes_on(self) -> None:
        """Request 1 reads its token, whatever it is."""
        row = PlainStep(rows=[PlainRow(1, PROMPT, 1, SAMPLE)])
        self.link.expect_result(self.link.step(row.packed()), 1)


def _waiting(link: Link, step: Step | bytes) -> int:
    seq, link.next_seq = link.next_seq, link.next_seq + 1
    link.send(Kind.STEP, step, seq=seq, flags=HeaderFlag.SAMPLE_FOLLOWS)
    return seq


def _sample(link: Link, step: int, rows: Packed, masks: Packed) -> int:
    seq, link.next_seq = link.next_seq, link.next_seq + 1
    link.send(Kind.SAMPLE, Sample(step, rows, masks), seq=seq)
    return seq


@SAMPLES("8.masks-are-kept-to")
def _(bench: Bench) -> None:
    scene = _Open(bench)
    bench.need(scene.vocabulary > 1, "two tokens")
    scene.sample([0], mask(scene.vocabulary, scene.other))
    scene.draws([scene.other, scene.greedy[0]])
    scene.goes_on()


@SAMPLES("8.rows-without-masks")
def _(bench: Bench) -> None:
    scene = _Open(bench)
    scene.sample([], [])
    scene.draws([scene.greedy[0]] * 2)
    scene.goes_on()


@SAMPLES("8.steps-before-are-answered-meanwhile")
def _(bench: Bench) -> None:
    bench.need(bench.facts.limits.steps_in_flight > 1, "two steps in flight")
    link = bench.attached()
    before, waiting = link.step(Step()), _waiting(link, Step())
    link.expect_result(before, 0)
    link.expect_silence()
    _sample(link, waiting, pack([]), pack([]))
    link.expect_result(waiting, 0)


@SAMPLES("8.nothing-but-its-sample-comes-next")
def _(bench: Bench) -> None:
    link = bench.attached()
    waiting = _waiting(link, Step())
    link.send(Kind.STEP, Step(), seq=link.next_seq)
    link.expect_error(ErrorCode.SAMPLE_DUE, seq=link.next_seq, expected_seq=link.next_seq)
    _sample(link, waiting, pack([]), pack([]))
    link.expect_result(waiting, 0)
    link.works()


@SAMPLES("8.sample-for-no-step")
def _(bench: Bench) -> None:
    link = bench.attached()
    link.works()
    link.send(Kind.SAMPLE, Sample(1), seq=link.next_seq)
    link.expect_error(ErrorCode.NO_STEP_OPEN, seq=link.next_seq, expected_seq=link.next_seq)
    link.works()


@SAMPLES("8.sample-of-a-refused-step")
def _(bench: Bench) -> None:
    """Sent before its refusal was known: it takes its sequence, and has no answer."""
    link = bench.attached()
    waiting = _waiting(link, b"\xc1")
    _sample(link, waiting, pack([0]), pack([]))
    link.expect_refused(RefusalCode.MALFORMED, waiting)
    link.expect_silence()
    link.expect_result(link.step(Step(), resync=True), 0)


@SAMPLES("8.refused-step-needs-no-sample")
def _(bench: Bench) -> None:
    link = bench.attached()
    link.expect_refused(RefusalCode.MALFORMED, _waiting(link, b"\xc1"))
    link.expect_result(link.step(Step(), resync=True), 0)


def _refused(name: str, code: RefusalCode, rows: list[int], words: int | None, step: int = 0, value: int = -1) -> None:
    """It is refused, and the step waits for another. words: in all, None for as many as are right."""

    @SAMPLES(name)
    def run(bench: Bench) -> None:
        scene = _Open(bench)
        count = len(rows) * words_of(scene.vocabulary) if words is None else words
        link = scene.link
        wrong = scene.sample(rows, [value] * count, scene.seq + step)
        link.expect_refused(code, wrong)
        scene.sample([0, 2], 2 * mask(scene.vocabulary, scene.other))
        scene.draws([scene.other] * 2)
        behind = link.step(Step())
        link.expect_refused(RefusalCode.AFTER_REFUSAL, behind, wrong)
        link.expect_result(link.step(Step(), resync=True), 0)


_refused("8.sample-names-its-step", RefusalCode.BAD_STEP, [], None, step=1)
_refused("8.mask-of-nothing", RefusalCode.BAD_MASK, [0], None, value=0)
_refused("8.mask-of-no-row", RefusalCode.BAD_MASK, [3], None)
_refused("8.mask-of-a-negative-row", RefusalCode.BAD_MASK, [-1], None)
_refused("8.mask-of-a-row-that-draws-nothing", RefusalCode.BAD_MASK, [1], None)
_refused("8.two-masks-of-a-row", RefusalCode.BAD_MASK, [0, 0], None)
_refused("8.masks-too-short", RefusalCode.BAD_MASK, [0], 0)


@SAMPLES("8.sample-not-msgpack")
def _(bench: Bench) -> None:
    link = bench.attached()
    waiting = _waiting(link, Step())
    seq, link.next_seq = link.next_seq, link.next_seq + 1
    link.send(Kind.SAMPLE, b"\xc1", seq=seq)
    link.expect_refused(RefusalCode.MALFORMED, seq)
    _sample(link, waiting, pack([]), pack([]))
    link.expect_result(waiting, 0)


@SAMPLES("8.steps-behind-a-refused-sample")
def _(bench: Bench) -> None:
    """Sent before its refusal was known: refused, or in error once it is."""
    bench.need(bench.facts.limits.steps_in_flight > 1, "two steps in flight")
    link = bench.attached()
    waiting = _waiting(link, Step())
    seq, behind = link.next_seq, link.next_seq + 1
    link.send(Kind.SAMPLE, b"\xc1", seq=seq)
    link.send(Kind.STEP, encode_body(Step()), seq=behind)
    link.send(Kind.PING)
    came = [link.receive() for _ in range(2)]
    if any(isinstance(message, Error) for _, message in came):
        came.append(link.receive())
    words = [told(header, message) for header, message in came]
    errors = [(message.code, message.seq) for _, message in came if isinstance(message, Error)]
    refused = [(message.code, header.seq) for header, message in came if header and isinstance(message, Refused)]
    require(refused == [(RefusalCode.MALFORMED, seq)], f"{words} came, not Refused {seq} MALFORMED")
    taken = not errors
    require(taken or errors == [(ErrorCode.SAMPLE_DUE, behind)], f"{words} came, not Error SAMPLE_DUE of {behind}")
    link.next_seq = behind + taken
    _sample(link, waiting, pack([]), pack([]))
    link.expect_result(waiting, 0)
    if taken:
        link.expect_refused(RefusalCode.AFTER_REFUSAL, behind, seq)
    link.expect_result(link.step(Step(), resync=True), 0)


@SAMPLES("8.two-wait-and-the-first-sample-is-refused")
def _(bench: Bench) -> None:
    """The second step and its Sample were sent before that was known: it is refused, and its Sample dropped; or both
    are in error. Either way it is the first that waits.
    """
    bench.need(bench.facts.limits.steps_in_flight > 1, "two steps in flight")
    link = bench.attached()
    first = _waiting(link, Step())
    refused, link.next_seq = link.next_seq, link.next_seq + 1
    link.send(Kind.SAMPLE, b"\xc1", seq=refused)
    second = _waiting(link, Step())
    _sample(link, second, pack([]), pack([]))
    link.send(Kind.PING)
    came: list[tuple[Header | None, Struct | None]] = []
    while len([header for header, message in came if header and not isinstance(message, Error)]) < 2:  # Refused, Pong
        came.append(link.receive())
        require(came[-1][0] is not None, "nothing came, and not both of Refused and Pong before")
    words = [told(header, message) for header, message in came]
    errors = [message.seq for _, message in came if isinstance(message, Error)]
    known = [(message.code, header.seq) for header, message in came if header and isinstance(message, Refused)]
    require(known == [(RefusalCode.MALFORMED, refused)], f"{words} came, not Refused {refused} MALFORMED")
    require(errors in ([], [second, second + 1]), f"{words} came, not Errors for {second} and its Sample, or none")
    link.next_seq -= len(errors)
    _sample(link, first, pack([]), pack([]))
    link.expect_result(first, 0)
    if not errors:
        link.expect_refused(RefusalCode.AFTER_REFUSAL, second, refused)
    link.expect_result(link.step(Step(), resync=True), 0)


@SAMPLES("9.lease-ends-while-a-step-waits")
def _(bench: Bench) -> None:
    scene = _Open(bench)
    scene.link.bye()
    link = bench.link()
    dropped = link.attach().requests_dropped
    require(dropped == 3, f"{dropped} requests were dropped, not 3")
    link.works()
