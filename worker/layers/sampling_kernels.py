"""Triton kernels that draw tokens from 16-bit scores exactly as `worker.execution.sampler` does, without a sort.

A row's weights are integers, so their sums are exact in any order. A 16-bit score has one of 65536 values, and all that
the filters ask (the k-th largest weight, the mass above a weight) follows from how often each occurs: one pass counts,
then everything is decided on the counts. Two passes over the scores draw. `OVERLAP` as in `triton_kernels`.

table: int64 [slots, 8], a row `pack_sampling` of the slot's request. largest: float32 [rows, PARTS], maxima of a row's
parts, NaN read as -inf. LOW, HIGH: the least and greatest finite score; what is not finite is read as in `sampler`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.layers.triton_kernels import follow

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
VALUES = tl.constexpr(65536)
_ONE = tl.constexpr(float(1 << 40))
_TO_INTEGER = tl.constexpr(float(1 << 52))  # added and taken away again, rounds to even what is below 2**51


@triton.jit
def _entry(table, slots, row):
    """Of the row's slot: temperature, top_p, min_p, to be read by `_float`; top_k, seed."""
    return table + tl.load(slots + row).to(tl.int64) * 8


@triton.jit
def _float(entry):
    return tl.load(entry).to(tl.float64, bitcast=True)


@triton.jit
def _filtered(entry, VOCAB: tl.constexpr):
    top_k = tl.load(entry + 3)
    return (_float(entry) > 0) & ((_float(entry + 1) < 1) | ((top_k > 0) & (top_k < VOCAB)))


@triton.jit
def _finite(score, LOW: tl.constexpr, HIGH: tl.constexpr):
    value = score.to(tl.float32)
    return tl.where(value == value, tl.minimum(tl.maximum(value, LOW), HIGH), LOW)


@triton.jit
def _largest(largest, row, PARTS: tl.constexpr, BLOCK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    i = tl.arange(0, BLOCK)
    return _finite(tl.max(tl.load(largest + row * PARTS + i, mask=i < PARTS, other=float("-inf"))), LOW, HIGH)


@triton.jit
def _largest_of_part(
    largest, row, first, PARTS: tl.constexpr, PART: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """Of the part that holds score number `first`: what it says of a block makes reading the block needless."""
    return _finite(tl.load(largest + row * PARTS + tl.minimum(first // PART, PARTS - 1)), LOW, HIGH)


@triton.jit
def _weight(value, top, temperature):
    """int64, the likeliest being 2**40."""
    value = tl.minimum(value, top)  # of values above the largest there is none, but they are asked about
    scaled = tl.exp((value.to(tl.float64) - top.to(tl.float64)) / temperature) * _ONE
    return ((scaled + _TO_INTEGER) - _TO_INTEGER).to(tl.int64)


@triton.jit
def _least(min_p):
    """The least weight that is kept."""
    return tl.maximum(tl.ceil(min_p * _ONE).to(tl.int64), 1)


@triton.jit
def _value_of(key, DTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Scores in descending order are keys in ascending order."""
    bits = tl.where(key < 32768, 32767 - key, key).to(tl.uint16)
    return _finite(bits.to(DTYPE, bitcast=True), LOW, HIGH)


@triton.jit
def count_values(
    scores, table, slots, largest, counts, VOCAB: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """counts int32 [rows, VALUES], zero before: how often each score occurs, of those not too small to be drawn, and of
    those not below the k-th largest of the parts' maxima, which alone can be among the k largest."""
    follow(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = _entry(table, slots, row)
    temperature = _float(entry)
    if _filtered(entry, VOCAB):
        top = _largest(largest, row, PARTS, PARTS_BLOCK, LOW, HIGH)
        bound = top - temperature.to(tl.float32) * 28.5  # 41 ln 2, and some
        top_k = tl.load(entry + 3)
        if (top_k > 0) & (top_k <= PARTS):
            p = tl.arange(0, PARTS_BLOCK)
            maxima = tl.load(largest + row * PARTS + p, mask=p < PARTS, other=float("-inf"))
            maxima = tl.sort(maxima, descending=True)
            bound = tl.maximum(bound, tl.max(tl.where(p == top_k - 1, maxima, float("-inf"))))
        for start in range(0, CHUNK, BLOCK):
            first = part * CHUNK + start
            if _largest_of_part(largest, row, first, PARTS, PART, LOW, HIGH) >= bound:
                i = first + tl.arange(0, BLOCK)
                value = _finite(tl.load(scores + row * STRIDE + i, mask=i < VOCAB, other=LOW), LOW, HIGH)
                bits = value.to(scores.dtype.element_ty).to(tl.uint16, bitcast=True).to(tl.int32)
                key = tl.where(bits < 32768, 32767 - bits, bits)
                tl.atomic_add(
                    counts + row * VALUES + key, 1, mask=(i < VOCAB) & (value >= bound), sem="relaxed"
                )


@triton.jit
def sum_values(
    table, slots, largest, counts, numbers, masses, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """numbers, masses int64 [rows, VALUES / BLOCK]: of each block of values, how many scores, and their weights' sum;
    of those that min-p keeps."""
    follow(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = _entry(table, slots, row)
    temperature, min_p = _float(entry), _float(entry + 2)
    if _filtered(entry, VOCAB):
        top = _largest(largest, row, PARTS, PARTS_BLOCK, LOW, HIGH)
        key = part * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(counts + row * VALUES + key).to(tl.int64)
        number, mass = tl.max(count) * 0, tl.max(count) * 0
        if tl.max(count) > 0:
            weight = _weight(_value_of(key, DTYPE, LOW, HIGH), top, temperature)
            kept = weight >= _least(min_p)
            number, mass = tl.sum(tl.where(kept, count, 0)), tl.sum(tl.where(kept, count * weight, 0))
        out = row * (VALUES // BLOCK) + part
        tl.store(numbers + out, number)
        tl.store(masses + out, mass)


@triton.jit
def _weight_at(
    counts, row, blocks, goal, least, top, temperature, BLOCK: tl.constexpr, DTYPE: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The weight with which the running number (or mass) of scores, in descending order, reaches `goal`; and the block
    of values it is in. blocks: the number (or mass) of each block; their sum is at least `goal`."""
    before = tl.cumsum(blocks)
    block = tl.sum((before < goal).to(tl.int32))
    done = tl.sum(tl.where(before < goal, blocks, 0))
    key = block * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + row * VALUES + key).to(tl.int64)
    weight = _weight(_value_of(key, DTYPE, LOW, HIGH), top, temperature)
    count = tl.where(weight >= least, count, 0)
    running = done + tl.cumsum(count * weight if BY_MASS else count)
    return tl.max(tl.where(running >= goal, weight, 0)), block


@triton.jit
def find_thresholds(
    table, slots, largest, counts, numbers, masses, thresholds, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """thresholds int64 [rows]: the least weight that passes min-p, then top-k, then top-p; one program a row."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    entry = _entry(table, slots, row)
    temperature, top_p, min_p, top_k = _float(entry), _float(entry + 1), _float(entry + 2), tl.load(entry + 3)
    if temperature > 0:
        least = _least(min_p)
        limited = (top_k > 0) & (top_k < VOCAB)
        if limited | (top_p < 1):
            top = _largest(largest, row, PARTS, PARTS_BLOCK, LOW, HIGH)
            b = tl.arange(0, VALUES // BLOCK)
            number = tl.load(numbers + row * (VALUES // BLOCK) + b)
            mass = tl.load(masses + row * (VALUES // BLOCK) + b)
            total = tl.sum(mass)
            if limited & (tl.sum(number) >= top_k):
                kth, block = _weight_at(
                    counts, row, number, top_k, least, top, temperature, BLOCK, DTYPE, LOW, HIGH, False
                )
                least = tl.maximum(least, kth)
                # What ties with it is kept, however many values it takes, near zero maybe whole blocks of them.
                total = tl.sum(tl.where(b < block, mass, 0))
                tied = block < VALUES // BLOCK
                while tied:
                    key = block * BLOCK + tl.arange(0, BLOCK)
                    count = tl.load(counts + row * VALUES + key).to(tl.int64)
                    weight = _weight(_value_of(key, DTYPE, LOW, HIGH), top, temperature)
                    total += tl.sum(tl.where(weight >= least, count * weight, 0))
                    block += 1
                    tied = (tl.min(weight) >= least) & (block < VALUES // BLOCK)
            if top_p < 1:
                goal = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
                last, block = _weight_at(
                    counts, row, mass, goal, least, top, temperature, BLOCK, DTYPE, LOW, HIGH, True
                )
                least = tl.maximum(least, last)
        tl.store(thresholds + row, least)


@triton.jit
def sum_chunks(
    scores, table, slots, largest, thresholds, sums, VOCAB: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """sums int64 [rows, chunks]: of the weights that pass, in each CHUNK of a row of scores [VOCAB]."""
    follow(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = _entry(table, slots, row)
    temperature = _float(entry)
    if temperature > 0:
        top = _largest(largest, row, PARTS, PARTS_BLOCK, LOW, HIGH)
        least = tl.load(thresholds + row)
        total = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, CHUNK, BLOCK):
            first = part * CHUNK + start
            if _weight(_largest_of_part(largest, row, first, PARTS, PART, LOW, HIGH), top, temperature) >= least:
                i = first + tl.arange(0, BLOCK)
                value = _finite(tl.load(scores + row * STRIDE + i, mask=i < VOCAB, other=LOW), LOW, HIGH)
                weight = _weight(value, top, temperature)
                total += tl.where((i < VOCAB) & (weight >= least), weight, 0)
        tl.store(sums + row * tl.num_programs(1) + part, tl.sum(total))


@triton.jit
def _uniform(seed, position):
    """As `random_draw.uniforms`: Philox4x32-10 of (seed, position), 53 bits of it."""
    zero = (position * 0).to(tl.uint32)
    high, low, _, _ = tl.philox_impl(
        position.to(tl.uint32), zero, zero, zero, (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    bits = (high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)
    return bits.to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def pick(
    scores, table, slots, largest, thresholds, sums, positions, places, tokens, VOCAB: tl.constexpr,
    STRIDE: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, PLACED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """tokens int32 [rows], of the rows that are drawn: the first at which the running sum of the weights that pass
    exceeds floor(uniform * sum). positions int32: of the row's input, or if PLACED of `places[row]`."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    entry = _entry(table, slots, row)
    temperature, seed = _float(entry), tl.load(entry + 4)
    if temperature > 0:
        top = _largest(largest, row, PARTS, PARTS_BLOCK, LOW, HIGH)
        least = tl.load(thresholds + row)
        place = tl.load(places + row).to(tl.int64) if PLACED else row
        uniform = _uniform(seed, tl.load(positions + place) + 1)
        c = tl.arange(0, CHUNKS_BLOCK)
        chunks = tl.load(sums + row * CHUNKS + c, mask=c < CHUNKS, other=0)
        total = tl.sum(chunks)
        point = tl.minimum(tl.floor(total.to(tl.float64) * uniform).to(tl.int64), total - 1)
        passed = tl.cumsum(chunks) <= point
        chunk = tl.sum(passed.to(tl.int32))
        running = tl.sum(tl.where(passed, chunks, 0))
        found = 2147483647
        for start in range(0, CHUNK, BLOCK):
            i = chunk * CHUNK + start + tl.arange(0, BLOCK)
            value = _finite(tl.load(scores + row * STRIDE + i, mask=i < VOCAB, other=LOW), LOW, HIGH)
            weight = _weight(value, top, temperature)
            weight = tl.where((i < VOCAB) & (weight >= least), weight, 0)
            beyond = running + tl.cumsum(weight) > point
            found = tl.minimum(found, tl.min(tl.where(beyond, i, 2147483647)))
            running += tl.sum(weight)
        tl.store(tokens + row, found)
