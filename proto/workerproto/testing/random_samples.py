"""Grammars' masks at random, right ones and such that are wrong in one place."""

from __future__ import annotations

import random

import numpy as np

from workerproto.codec import encode_body, pack
from workerproto.messages import RefusalCode, RowFlag, Sample
from workerproto.testing.slow_rules import PlainSample, PlainStep


def random_sample(rng: random.Random, step: PlainStep, vocabulary: int) -> PlainSample:
    """For some of the rows that draw, in any order."""
    drawing = [place for place, row in enumerate(step.rows) if row.flags & RowFlag.SAMPLE]
    rows = rng.sample(drawing, rng.randint(0, len(drawing)))
    return PlainSample(rows, [set(rng.sample(range(vocabulary), rng.randint(1, vocabulary))) for _ in rows])


def body_of(sample: PlainSample, step: int, vocabulary: int, rng: random.Random) -> bytes:
    """As on the wire; bits beyond the vocabulary are set or not, since nobody looks at them."""
    words = -(-vocabulary // 32)
    bits = np.full((len(sample.rows), words * 32), rng.randrange(2), bool)
    for row, allowed in enumerate(sample.allowed):
        bits[row, :vocabulary] = [token in allowed for token in range(vocabulary)]
    masks = np.packbits(bits, axis=1, bitorder="little").tobytes()
    return encode_body(Sample(step, pack(sample.rows), masks))


def break_sample(
    rng: random.Random, sample: PlainSample, step: PlainStep, seq: int, vocabulary: int
) -> tuple[str, PlainSample | None, bytes, RefusalCode]:
    """(what is wrong, the Sample, its bytes, why it must be refused); None for one that is only wrong as bytes."""
    idle = [place for place, row in enumerate(step.rows) if not row.flags & RowFlag.SAMPLE]
    any_token = {rng.randrange(vocabulary)}
    as_bytes = [
        ("not msgpack", b"\xc1", RefusalCode.MALFORMED),
        ("cut short", body_of(sample, seq, vocabulary, rng)[:-1], RefusalCode.MALFORMED),
        ("rows of three bytes", encode_body(Sample(seq, b"abc")), RefusalCode.MALFORMED),
        ("another step's", body_of(sample, seq + 1, vocabulary, rng), RefusalCode.BAD_STEP),
        ("a word too many", encode_body(Sample(seq, pack([]), pack([-1]))), RefusalCode.BAD_MASK),
    ]
    as_rows = [
        ("no row", [len(step.rows)], [any_token]),
        ("a negative row", [-1], [any_token]),
        *[("a row that draws nothing", [place], [any_token]) for place in idle[:1]],
        *[("a row twice", [row, row], [any_token] * 2) for row in sample.rows[:1]],
        *[("nothing allowed", [row], [set[int]()]) for row in sample.rows[:1]],
    ]
    choice = rng.randrange(len(as_bytes) + len(as_rows))
    if choice < len(as_bytes):
        name, body, code = as_bytes[choice]
        return name, None, body, code
    name, rows, allowed = as_rows[choice - len(as_bytes)]
    broken = PlainSample(rows, allowed)
    return name, broken, body_of(broken, seq, vocabulary, rng), RefusalCode.BAD_MASK
