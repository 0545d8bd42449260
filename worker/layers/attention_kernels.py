"""Attention of one query a row over a paged KV cache, as a Triton kernel.

A program takes the query heads that share one KV head (padded to 16, what the matrix units want) of one row, over one
of SPLITS parts of the row's context; the split that arrives last merges them. What is read depends on positions alone,
so padding rows cost next to nothing. The bits of a row do not depend on other rows, only on the kernel's constants.
`OVERLAP` as in `triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.layers.triton_kernels import bring, follow


@triton.jit
def decode_attention(
    qkv, cache, out, partial, sums, arrived, positions, tables, width, slot_mapping, norm_weight, frequencies, scale,
    eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr, NORM: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """qkv [rows, (HEADS + 2 KV_HEADS) * DIM], out [rows, HEADS * DIM], cache [blocks, PAGE, 2, KV_HEADS, DIM],
    positions int32 [rows] of the query, tables int32 [rows, width[0]]. partial float32 [rows, KV_HEADS, SPLITS, 16,
    DIM], sums float32 [rows, KV_HEADS, SPLITS, 2, 16], arrived int32 [rows, KV_HEADS], zero before and after. PADDED:
    the power of two that the query heads of a KV head fit in. scale: of scores, log2(e) included.

    EARLY, where it is not 0: the heads are as the product left them, and what `place_heads` does is done here too, with
    its norm_weight, frequencies [DIM / 2], slot_mapping and eps. Then nothing that this step computes may be in what a
    row reads, its own token aside: so many blocks of the cache, 2 at most, are read while the kernel before still runs.
    AHEAD, where EARLY is 0: 0 or a power of two, so many positions of a split are brought into the second-level cache
    meanwhile; positions and tables are from before the kernel before, which `follow` makes good.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # What programs that run together read lies together: all heads of a position, then its neighbours.
    split, kv, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, d = tl.arange(0, 16), tl.arange(0, DIM)
    heads = (g < GROUP)[:, None]
    PLACE: tl.constexpr = EARLY > 0
    if not PLACE:
        if OVERLAP and AHEAD > 0:
            _bring_split(cache, positions, tables, width, split, kv, row, KV_HEADS, DIM, PAGE, SPLITS, AHEAD)
        follow(OVERLAP)
    position = tl.load(positions + row)
    length = position if PLACE else position + 1  # of what is in the cache
    share = tl.cdiv(tl.cdiv(length, SPLITS), 16) * 16
    begin = split * share
    end = tl.minimum(begin + share, length)
    table = tables + row * tl.load(width)
    token = qkv + row.to(tl.int64) * (HEADS + 2 * KV_HEADS) * DIM
    query = token + (kv * GROUP + g[:, None]) * DIM
    if PLACE:
        k, v, inside = _keys_and_values(cache, table, begin, end, kv, KV_HEADS, DIM, PAGE, BLOCK)
        if EARLY > 1:
            k1, v1, inside1 = _keys_and_values(cache, table, begin + BLOCK, end, kv, KV_HEADS, DIM, PAGE, BLOCK)
        slot = tl.load(slot_mapping + row).to(tl.int64)
        opposite = (d + DIM // 2) % DIM
        angle = position.to(tl.float32) * tl.load(frequencies + d % (DIM // 2))
        cos, sin = tl.cos(angle), tl.sin(angle) * tl.where(d < DIM // 2, -1.0, 1.0)
        query_norm, key_norm = norm_weight + kv * GROUP * DIM, norm_weight + (HEADS + kv) * DIM
        if NORM:  # a weight times a cosine is all that a norm leaves to do
            query_cos, query_sin = _weighed(query_norm, cos, sin, d, opposite)
            key_cos, key_sin = _weighed(key_norm, cos, sin, d, opposite)
        else:
            query_cos, query_sin, key_cos, key_sin = cos, sin, cos, sin
        follow(OVERLAP)
        new_v = tl.load(token + (HEADS + KV_HEADS + kv) * DIM + d)
        key = token + (HEADS + kv) * DIM
        straight, crossed = tl.load(key + d).to(tl.float32), tl.load(key + opposite).to(tl.float32)
        new_k = straight * key_cos + crossed * key_sin
        if NORM:
            new_k *= tl.rsqrt(tl.sum(straight * straight) / DIM + eps)
        new_k = new_k.to(new_v.dtype)
        straight = tl.load(query + d[None, :], mask=heads, other=0.0).to(tl.float32)
        crossed = tl.load(query + opposite[None, :], mask=heads, other=0.0).to(tl.float32)
        q = straight * query_cos[None, :] + crossed * query_sin[None, :]
        if NORM:
            q *= tl.rsqrt(tl.sum(straight * straight, 1) / DIM + eps)[:, None]
        q = q.to(new_v.dtype)
        # The new token is the first split's; the others begin with nothing.
        first = split == 0
        place = cache + slot * 2 * KV_HEADS * DIM + kv * DIM + d
        tl.store(place, new_k, mask=first & (d >= 0))
        tl.store(place + KV_HEADS * DIM, new_v, mask=first & (d >= 0))
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        largest = tl.where(first, score, float("-inf"))
        total = tl.where(first, tl.full((16,), 1.0, tl.float32), 0.0)
        acc = tl.where(first, tl.zeros((16, DIM), tl.float32) + new_v.to(tl.float32)[None, :], 0.0)
        largest, total, acc = _attend(q, k, v, inside, scale, largest, total, acc)
        if EARLY > 1:
            largest, total, acc = _attend(q, k1, v1, inside1, scale, largest, total, acc)
        begin += EARLY * BLOCK
    else:
        q = tl.load(query + d[None, :], mask=heads, other=0.0)
        largest = tl.full((16,), float("-inf"), tl.float32)
        total = tl.zeros((16,), tl.float32)
        acc = tl.zeros((16, DIM), tl.float32)
    for start in range(begin, end, BLOCK):
        k, v, inside = _keys_and_values(cache, table, start, end, kv, KV_HEADS, DIM, PAGE, BLOCK)
        largest, total, acc = _attend(q, k, v, inside, scale, largest, total, acc)
    if SPLITS == 1:
        target = out + (row * HEADS + kv * GROUP + g[:, None]).to(tl.int64) * DIM + d[None, :]
        tl.store(target, acc / total[:, None], mask=heads)
    else:
        group = row * KV_HEADS + kv
        mine = group * SPLITS + split
        tl.store(partial + mine * 16 * DIM + g[:, None] * DIM + d[None, :], acc, mask=heads)
        tl.store(sums + mine * 32 + g, largest)
        tl.store(sums + mine * 32 + 16 + g, total)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived + group, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            # All splits at once: one after the other, each would wait for the second-level cache anew.
            s, h = tl.arange(0, SPLITS), tl.arange(0, PADDED)
            there = group * SPLITS + s
            told = sums + there[:, None] * 32 + h[None, :]
            all_largest = tl.load(told, cache_modifier=".cg")
            top = tl.max(all_largest, 0)
            fades = tl.exp2(all_largest - top[None, :])
            whole = tl.sum(tl.load(told + 16, cache_modifier=".cg") * fades, 0)
            rows = there[:, None, None] * 16 + h[None, :, None]
            parts = tl.load(
                partial + rows * DIM + d[None, None, :], mask=(h < GROUP)[None, :, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            merged = tl.sum(parts * fades[:, :, None], 0) / whole[:, None]
            target = out + (row * HEADS + kv * GROUP + h[:, None]).to(tl.int64) * DIM + d[None, :]
            tl.store(target, merged, mask=(h < GROUP)[:, None])
            tl.store(arrived + group, 0)


@triton.jit
def _bring_split(
    cache, positions, tables, width, split, kv, row, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Its first positions' keys and values."""
    length = tl.load(positions + row) + 1
    at = split * tl.cdiv(tl.cdiv(length, SPLITS), 16) * 16 + tl.arange(0, AHEAD)
    block = tl.load(tables + row * tl.load(width) + at // PAGE, mask=at < length, other=0).to(tl.int64)
    LINES: tl.constexpr = DIM // 64 if DIM > 64 else 1  # of 128 bytes, in dtypes of 16 bits
    line = tl.arange(0, 2 * LINES)
    key_or_value = (line // LINES * KV_HEADS + kv) * DIM + line % LINES * 64
    bring(cache + (block * PAGE + at % PAGE)[:, None] * (2 * KV_HEADS * DIM) + key_or_value[None, :])


@triton.jit
def _weighed(weight, cos, sin, d, opposite):
    return cos * tl.load(weight + d).to(tl.float32), sin * tl.load(weight + opposite).to(tl.float32)


@triton.jit
def _keys_and_values(
    cache, table, start, end, kv, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Of positions start … start + BLOCK - 1: keys [DIM, BLOCK], values [BLOCK, DIM], and which are before `end`."""
    at, d = start + tl.arange(0, BLOCK), tl.arange(0, DIM)
    inside = at < end
    block = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64)
    base = cache + (block * PAGE + at % PAGE) * (2 * KV_HEADS * DIM) + kv * DIM
    k = tl.load(base[None, :] + d[:, None], mask=inside[None, :], other=0.0)
    v = tl.load(base[:, None] + KV_HEADS * DIM + d[None, :], mask=inside[:, None], other=0.0)
    return k, v, inside


@triton.jit
def _attend(q, k, v, inside, scale, largest, total, acc):
    """The running softmax [16] and its weighted values [16, DIM] with these keys and values added, of which there may
    be none."""
    score = tl.dot(q, k, input_precision="ieee") * scale
    score = tl.where(inside[None, :], score, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # of nothing yet: no NaN from -inf - -inf
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(largest - base)
    acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new_largest, total * fade + tl.sum(weight, 1), acc
