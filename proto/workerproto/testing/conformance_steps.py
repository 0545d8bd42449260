"""Conformance: going on after a refusal, and what an accepted step must have done."""

from __future__ import annotations

from dataclasses import replace

from workerproto.codec import unpack, unpack_floats
from workerproto.messages import RefusalCode, Result, Sampling, Step
from workerproto.testing.conformance_bench import FORCED, PROMPT, SAMPLE, Bench, Rules, Scene, drawn
from workerproto.testing.conformance_link import require
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

STEPS = Rules()
_C = RefusalCode


def _same(tokens: list[int], expected: list[int], whose: str) -> None:
    require(tokens == expected, f"{whose} draws {tokens}, it should draw {expected}")


# Section 15: the way on.


@STEPS("15.refused-whole")
def _(bench: Bench) -> None:
    """The right parts of a refused step did not happen either: a finish, a preemption, a start, a grant."""
    scene = Scene(bench)
    wrong = PlainStep(finished=[3], preempted=[1], new=[scene.new()], rows=[PlainRow(9, 0, 0)])
    scene.refuses(wrong, _C.BAD_COUNT, 9, "counts")
    drawn(scene.link, PlainStep(finished=[3], new=[scene.new()], rows=[PlainRow(9, 0, PROMPT, SAMPLE)]))


@STEPS("15.resync-refused-again")
def _(bench: Bench) -> None:
    """A step with RESYNC is judged as any other: refused, it is the new primary refusal."""
    scene = Scene(bench)
    link, wrong = scene.link, PlainStep(finished=[999]).packed()
    link.expect_refused(_C.UNKNOWN_REQUEST, link.step(wrong))
    for _ in range(2):
        cause = link.step(wrong, resync=True)
        link.expect_refused(_C.UNKNOWN_REQUEST, cause)
    scene.goes_on(cause)
    link.works()


@STEPS("15.unexpected-resync")
def _(bench: Bench) -> None:
    """It is a primary refusal, whatever the step."""
    scene = Scene(bench)
    cause = scene.link.step(PlainStep(rows=[scene.next_row()]).packed(), resync=True)
    scene.link.expect_refused(_C.UNEXPECTED_RESYNC, cause)
    scene.goes_on(cause)


@STEPS("15.behind-a-refusal-nothing-is-read")
def _(bench: Bench) -> None:
    scene = Scene(bench)
    link = scene.link
    cause = link.step(b"\xc1")
    link.expect_refused(_C.MALFORMED, cause)
    for body in (b"\xc1", PlainStep(finished=[999]).packed(), Step()):
        link.expect_refused(_C.AFTER_REFUSAL, link.step(body), cause)
    scene.goes_on(cause)


@STEPS("15.in-flight-behind-a-refusal")
def _(bench: Bench) -> None:
    """Steps that were sent before the refusal was known, right as they are, do not happen."""
    credit = bench.facts.limits.steps_in_flight
    bench.need(credit > 1, "a credit of 2")
    scene = Scene(bench)
    link, step = scene.link, PlainStep(rows=[scene.next_row()]).packed()
    wrong = PlainStep(rows=[replace(scene.next_row(), position=PROMPT + 1)]).packed()
    sent = [link.step(wrong), *(link.step(step) for _ in range(credit - 1))]
    link.expect_refused(_C.BAD_POSITION, sent[0])
    for seq in sent[1:]:
        link.expect_refused(_C.AFTER_REFUSAL, seq, sent[0])
    scene.goes_on(sent[0])


# Section 12: what a step does.


@STEPS("12.step-without-rows")
def _(bench: Bench) -> None:
    link = bench.attached()
    for body in (Step(), b"\x90", b"\x92\x90\x90"):  # trailing members may be left out
        link.expect_result(link.step(body), 0)


@STEPS("12.finish-frees-in-the-same-step")
def _(bench: Bench) -> None:
    """Blocks of what finishes, or is preempted, are granted anew by a later part of the step."""
    scene = Scene(bench)
    new = scene.new(None, scene.blocks[0])
    tokens = drawn(scene.link, PlainStep(finished=[1, 2], new=[new], rows=[PlainRow(9, 0, PROMPT, SAMPLE)]))
    _same(tokens, scene.expected[:1], "request 9")
    other = PlainStart(10, bench.prompt(), scene.blocks[2], 0)
    tokens = drawn(scene.link, PlainStep(preempted=[3], new=[other], rows=[PlainRow(10, 0, PROMPT, SAMPLE)]))
    _same(tokens, scene.expected[:1], "request 10")


@STEPS("12.id-is-free-from-the-next-step")
def _(bench: Bench) -> None:
    scene = Scene(bench)
    drawn(scene.link, PlainStep(finished=[1, 2]))
    _same(bench.generate(scene.link, bench.prompt(), scene.blocks[0], 1), scene.expected[:1], "request 1")
    seq = scene.link.step(PlainStep(rows=[PlainRow(2, PROMPT, 1)]).packed())
    scene.link.expect_refused(_C.UNKNOWN_REQUEST, seq)


@STEPS("12.finish-in-flight")
def _(bench: Bench) -> None:
    """The result of a step that was sent before the finish still has its token."""
    bench.need(bench.facts.limits.steps_in_flight > 1, "a credit of 2")
    scene = Scene(bench)
    sent = [scene.link.step(step.packed()) for step in (PlainStep(rows=[scene.next_row()]), PlainStep(finished=[1]))]
    tokens = unpack(scene.link.expect_result(sent[0], 1).tokens).tolist()
    _same(tokens, scene.expected[1:], "request 1")
    scene.link.expect_result(sent[1], 0)


@STEPS("12.preempt-and-resume")
def _(bench: Bench) -> None:
    """A resumed request goes on from the tokens that it is given, in other blocks, and as if nothing had happened."""
    size = PROMPT + 1
    bench.need_room(tokens=size)
    scene = Scene(bench)
    expected = scene.expected
    known = bench.prompt() + expected[:1]
    blocks = scene.blocks[1][::-1]
    resumed = PlainStep(resumed=[PlainStart(2, known, blocks, 0)], rows=[PlainRow(2, 0, size, SAMPLE)])
    _same(drawn(scene.link, resumed), expected[1:2], "request 2, resumed,")
    at_once = PlainStep(
        preempted=[1], resumed=[PlainStart(1, known, scene.blocks[0], 0)], rows=[PlainRow(1, 0, size, SAMPLE)]
    )
    _same(drawn(scene.link, at_once), expected[1:2], "request 1, preempted and resumed in one step,")


@STEPS("12.forced-tokens")
def _(bench: Bench) -> None:
    """Forced to the token that it drew, a request goes on as it would have; forced to others, it goes beyond them."""
    scene = Scene(bench)
    bench.need_room(length=PROMPT + 4, tokens=3)
    row = PlainRow(1, PROMPT, 1, SAMPLE | FORCED, [], scene.expected[:1])
    _same(drawn(scene.link, PlainStep(rows=[row])), scene.expected[1:], "request 1, forced to its own token,")
    beyond = PlainRow(3, 1, PROMPT, SAMPLE | FORCED, [], bench.prompt(PROMPT, 3))
    drawn(scene.link, PlainStep(rows=[beyond]))
    seq = scene.link.step(PlainStep(rows=[PlainRow(3, 1, 1)]).packed())
    refused = scene.link.expect_refused(_C.BAD_POSITION, seq)
    require(refused.bound == str(PROMPT + 1), f"request 3 is at {refused.bound}, not at {PROMPT + 1}")


@STEPS("12.grants")
def _(bench: Bench) -> None:
    """Blocks may come with the rows that need them."""
    scene = Scene(bench)
    rows = [PlainRow(9, 0, PROMPT, SAMPLE, scene.blocks[0])]
    tokens = drawn(scene.link, PlainStep(finished=[1], new=[scene.new(None, [])], rows=rows))
    _same(tokens, scene.expected[:1], "request 9")


@STEPS("12.chunked-prompt")
def _(bench: Bench) -> None:
    """A prompt may be computed in parts; the last one draws."""
    scene = Scene(bench)
    drawn(scene.link, PlainStep(rows=[PlainRow(3, 1, 1)]))
    drawn(scene.link, PlainStep(rows=[PlainRow(3, 2, 1, SAMPLE)]))
    scene.link.works()


@STEPS("12.shared-prefix")
def _(bench: Bench) -> None:
    """A written block is shared while its owner runs, and after; it is owned as long as one of them lives."""
    size = bench.facts.kv.block_size
    bench.need_prefixes()
    bench.need_room(blocks=3, length=size + 2, tokens=size)
    link, prompt = bench.attached(), bench.prompt(size + 1)
    drawn(link, PlainStep(new=[PlainStart(1, prompt, [0], 0)], rows=[PlainRow(1, 0, size)]))
    took = []
    for name, finished in ((2, [1]), (3, [2])):
        start = PlainStart(name, prompt, [0, name - 1], size)
        took.append(drawn(link, PlainStep(new=[start], rows=[PlainRow(name, size, 1, SAMPLE)])))
        drawn(link, PlainStep(finished=finished))
    _same(took[1], took[0], "the second sharer")
    seq = link.step(PlainStep(new=[PlainStart(4, prompt, [0], 0)]).packed())
    link.expect_refused(_C.BLOCK_OWNED, seq)
    drawn(link, PlainStep(finished=[3], new=[PlainStart(4, prompt, [0], 0)]), resync=True)
    seq = link.step(PlainStep(new=[PlainStart(5, prompt, [0], size)]).packed())
    link.expect_refused(_C.BLOCK_UNWRITTEN, seq)  # granted anew, nothing in it counts as written


@STEPS("12.prefix-of-the-same-step")
def _(bench: Bench) -> None:
    """A prefix may be written by another row of the step that shares it."""
    size = bench.facts.kv.block_size
    bench.need_prefixes()
    bench.need_room(blocks=2, length=size + 2, tokens=size + 1, rows=2, live=2)
    link, prompt = bench.attached(), bench.prompt(size + 1)
    starts = [PlainStart(1, prompt, [0], 0), PlainStart(2, prompt, [0, 1], size)]
    drawn(link, PlainStep(new=starts, rows=[PlainRow(2, size, 1, SAMPLE), PlainRow(1, 0, size)]))


@STEPS("6.tokens-in-row-order")
def _(bench: Bench) -> None:
    """Rows stand in any order, and tokens in theirs."""
    bench.need_room(blocks=2 * bench.blocks_for(PROMPT), length=PROMPT + 1, tokens=2 * PROMPT, rows=2, live=2)
    each = bench.blocks_for(PROMPT)
    starts = [PlainStart(name, bench.prompt(PROMPT, 7 * name), list(range(name * each, (name + 1) * each)), 0)
              for name in (0, 1)]  # fmt: skip
    tokens = []
    for order in ((0, 1), (1, 0)):
        link = bench.attached()
        tokens.append(drawn(link, PlainStep(new=starts, rows=[PlainRow(n, 0, PROMPT, SAMPLE) for n in order])))
        link.bye()
    _same(tokens[1], tokens[0][::-1], "the step with its rows exchanged")


@STEPS("8.steps-in-flight")
def _(bench: Bench) -> None:
    """Rows are sent before the tokens that they begin with are known: the ranks feed them by themselves."""
    credit = min(bench.facts.limits.steps_in_flight, 8)
    bench.need_room(length=PROMPT + credit + 1)
    expected = bench.continuation(credit)
    link, blocks = bench.attached(), list(range(bench.blocks_for(PROMPT + credit)))
    steps = [PlainStep(new=[PlainStart(1, bench.prompt(), blocks, 0)], rows=[PlainRow(1, 0, PROMPT, SAMPLE)])]
    steps += [PlainStep(rows=[PlainRow(1, PROMPT + place, 1, SAMPLE)]) for place in range(credit - 1)]
    sent = [link.step(step.packed()) for step in steps]
    tokens = [int(unpack(link.expect_result(seq, 1).tokens)[0]) for seq in sent]
    _same(tokens, expected, "with its steps in flight at once, the request")


# Section 13: what is drawn.


@STEPS("13.same-request-same-tokens")
def _(bench: Bench) -> None:
    """Greedy and seeded, under two leases; every token is one of the vocabulary."""
    count, vocabulary = 4, bench.facts.vocabulary
    blocks = list(range(bench.blocks_for(PROMPT + count)))
    bench.need_room(blocks=len(blocks), length=PROMPT + count, tokens=PROMPT)
    for sampling in (Sampling(), Sampling(1.0, seed=2**53 - 1), Sampling(100.0, 5, 0.9, 0.01, 1)):
        took = []
        for _ in range(2):
            link = bench.attached()
            took.append(bench.generate(link, bench.prompt(), blocks, count, sampling))
            link.bye()
        _same(took[1], took[0], f"the second time, with temperature {sampling.temperature:g}, the request")
        require(all(0 <= token < vocabulary for token in took[0]), f"{took[0]} are not all in 0 … {vocabulary - 1}")


@STEPS("6.logprobs")
def _(bench: Bench) -> None:
    """The sampled token first, then the likeliest, in order; the greedy token is the likeliest."""
    blocks = list(range(bench.blocks_for(PROMPT)))
    bench.need_room(blocks=len(blocks), length=PROMPT + 1, tokens=PROMPT)
    for asked in sorted({0, 1, bench.facts.limits.logprobs} & set(range(bench.facts.limits.logprobs + 1))):
        link = bench.attached()
        start = PlainStart(1, bench.prompt(), blocks, 0, Sampling(logprobs=asked))
        step = PlainStep(new=[start], rows=[PlainRow(1, 0, PROMPT, SAMPLE)])
        _judge_logprobs(link.expect_result(link.step(step.packed()), 1), 1 + min(asked, bench.facts.vocabulary))
        link.bye()


def _judge_logprobs(result: Result, wanted: int) -> None:
    ids, values = unpack(result.logprob_ids).tolist(), unpack_floats(result.logprob_values).tolist()
    ranks, token = unpack(result.logprob_ranks).tolist(), int(unpack(result.tokens)[0])
    require(len(ids) == len(values) == wanted, f"{len(ids)} ids and {len(values)} values came, not {wanted}")
    require(ids[0] == token, f"the first id is {ids[0]}, the token is {token}")
    require(ranks == [1], f"the greedy token has ranks {ranks}, not [1]")
    require(values[1:] == sorted(values[1:], reverse=True), f"the likeliest are not in order: {values[1:]}")
    require(all(value <= 1e-3 for value in values), f"a probability is above 1: {values}")


@STEPS("6.no-logprobs")
def _(bench: Bench) -> None:
    """None where none was asked for."""
    link = bench.attached()
    blocks = list(range(bench.blocks_for(PROMPT)))
    bench.need_room(blocks=len(blocks), length=PROMPT + 1, tokens=PROMPT)
    step = PlainStep(new=[PlainStart(1, bench.prompt(), blocks, 0)], rows=[PlainRow(1, 0, PROMPT, SAMPLE)])
    result = link.expect_result(link.step(step.packed()), 1)
    came = [len(member) for member in (result.logprob_ids, result.logprob_values, result.logprob_ranks)]
    require(came == [0, 0, 0], f"logprobs came that nobody asked for: {came} bytes")
