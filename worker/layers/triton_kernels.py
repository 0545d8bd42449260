"""Triton kernels for what stands between the matrix products of a decoder on CUDA.

Each fuses what would otherwise be a pass over device memory, and a launch, of its own: at small batches a step is
bound by the number of kernels, not by what they compute. Sizes are compile-time constants; nothing that varies from
step to step is an argument that Triton would specialize on, so a kernel is compiled once a model and never in a step.
All arithmetic is float32; results are rounded to the model dtype where the unfused operations would round.

OVERLAP (Hopper and later): a kernel may start while the one before it ends (programmatic dependent launch), and waits
for it before it writes, and before it reads what that one may write. Every kernel waits before it lets the next start,
so what those before that one wrote is complete; weights, the packet and the context in the cache are read early.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait for what the kernel before wrote, and let the next one get ready."""
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def bring(addresses):
    """Into the second-level cache, the 128 bytes around each: a hint, so it may be given before `follow` for what the
    kernel before still writes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses.to(tl.uint64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def rms_norm(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = x / rms(x) * weight; one program a row of [T, SIZE]."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    value = tl.load(x + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    value = value * scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, value, mask=inside)


@triton.jit
def add_rms_norm(x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """x += residual, in place; out = x / rms(x) * weight."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    value = tl.load(x + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + row * SIZE + i, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    value = value * scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, value, mask=inside)


@triton.jit
def silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """[T, 2 * WIDTH] -> [T, WIDTH]: silu of the first half times the second; a program a row and block of columns."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def place_heads(
    qkv, norm_weight, frequencies, positions, slot_mapping, cache, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalize (NORM) and rotate queries and keys; queries stay in qkv, keys and values go to the cache.

    A program takes BLOCK heads of one token of qkv [T, (HEADS + 2 KV_HEADS) * 2 HALF]. cache [slots, 2, KV_HEADS,
    2 HALF]. norm_weight [HEADS + KV_HEADS, 2 HALF]. A head's second half is the imaginary part of its first.
    frequencies: float32 [HALF], or if TABLE the tokens' cosines and sines, [T, 2, HALF].
    """
    DIM: tl.constexpr = 2 * HALF
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, HALF)
    there = (head < HEADS + 2 * KV_HEADS)[:, None]
    rotated = (head < HEADS + KV_HEADS)[:, None]
    source = qkv + token * (HEADS + 2 * KV_HEADS) * DIM + head[:, None] * DIM + i[None, :]
    real = tl.load(source, mask=there, other=0.0).to(tl.float32)
    imaginary = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    first, second = real, imaginary
    if NORM:
        scale = tl.rsqrt(tl.sum(real * real + imaginary * imaginary, 1) / DIM + eps)[:, None]
        weight = norm_weight + head[:, None] * DIM + i[None, :]
        first = real * scale * tl.load(weight, mask=rotated, other=0.0).to(tl.float32)
        second = imaginary * scale * tl.load(weight + HALF, mask=rotated, other=0.0).to(tl.float32)
    if TABLE:
        cos = tl.load(frequencies + token * DIM + i)[None, :]
        sin = tl.load(frequencies + token * DIM + HALF + i)[None, :]
    else:
        angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + i)
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    real = tl.where(rotated, first * cos - second * sin, real)
    imaginary = tl.where(rotated, second * cos + first * sin, imaginary)
    query = (head < HEADS)[:, None]
    tl.store(source, real, mask=query)
    tl.store(source + HALF, imaginary, mask=query)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    target = cache + slot * 2 * KV_HEADS * DIM + (head - HEADS)[:, None] * DIM + i[None, :]
    tl.store(target, real, mask=there & ~query)
    tl.store(target + HALF, imaginary, mask=there & ~query)


@triton.jit(do_not_specialize=["count"])
def copy_packet(packet, out, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = packet, int32 [count], which lies in pinned memory of the host."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    value = tl.load(packet + i, mask=inside, other=0)
    follow(OVERLAP)  # until now the step before may have read what is overwritten
    tl.store(out + i, value, mask=inside)


@triton.jit(do_not_specialize=["count"])
def choose_inputs(known, slots, last_tokens, out, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = known where it is not negative, else the slot's last sampled token. All int32 [count]."""
    follow(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token = tl.load(known + i, mask=inside, other=0)
    slot = tl.load(slots + i, mask=inside, other=0)
    sampled = tl.load(last_tokens + slot, mask=inside & (token < 0), other=0)
    tl.store(out + i, tl.where(token < 0, sampled, token), mask=inside)


@triton.jit
def argmax_parts(
    logits, values, ids, bad, VOCAB: tl.constexpr, STRIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The largest logit of each CHUNK of a row [VOCAB], its lowest index, and whether any was not finite."""
    follow(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.full((BLOCK,), 2147483647, tl.int32)
    unsound = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, CHUNK, BLOCK):
        i = part * CHUNK + start + tl.arange(0, BLOCK)
        inside = i < VOCAB
        value = tl.load(logits + row * STRIDE + i, mask=inside, other=0.0).to(tl.float32)
        unsound = unsound | (inside & ~(tl.abs(value) < float("inf"))).to(tl.int32)
        value = tl.where(inside & (value == value), value, float("-inf"))
        better = (value > best) | ((value == best) & inside & (i < where))
        best, where = tl.where(better, value, best), tl.where(better, i, where)
    largest = tl.max(best)
    out = row * tl.num_programs(1) + part
    tl.store(values + out, largest)
    tl.store(ids + out, tl.min(tl.where(best == largest, where, 2147483647)))
    tl.store(bad + out, tl.max(unsound))


@triton.jit
def argmax_whole(values, ids, bad, tokens, nonfinite, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """A row's parts made one: the token, and 1 if the row held a NaN or an infinity."""
    follow(OVERLAP)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < PARTS
    value = tl.load(values + row * PARTS + i, mask=inside, other=float("-inf"))
    index = tl.load(ids + row * PARTS + i, mask=inside, other=2147483647)
    tl.store(tokens + row, tl.min(tl.where(value == tl.max(value), index, 2147483647)))
    tl.store(nonfinite + row, tl.max(tl.load(bad + row * PARTS + i, mask=inside, other=0)))


@triton.jit(do_not_specialize=["count"])
def deliver(
    tokens, nonfinite, slots, header, last_tokens, outbox, count, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sampled tokens int32 [count] to where the next step reads them, by slot, and to the outbox of this step.

    header[1] names the outbox among those of the steps in flight, int32 [·, 2, ROWS]: tokens, then rows not finite.
    """
    follow(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token = tl.load(tokens + i, mask=inside, other=0)
    tl.store(last_tokens + tl.load(slots + i, mask=inside, other=0), token, mask=inside)
    box = outbox + tl.load(header + 1) * 2 * ROWS
    tl.store(box + i, token, mask=inside)
    tl.store(box + ROWS + i, tl.load(nonfinite + i, mask=inside, other=0), mask=inside)
