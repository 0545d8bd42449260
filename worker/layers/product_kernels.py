"""Products of few rows as Triton kernels, bound by reading the weight, with what stands before and behind them in a
decoder: the norm of their inputs, the gate of the MLP, the sum with the residual stream. `OVERLAP` as in
`triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.layers.triton_kernels import bring, follow

# `KIND`: a product as it is, what `silu_mul` makes of it, or (of few rows) added to what is there.
PLAIN, GATED, ADDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def few_rows_product(
    x, weight, out, norm_weight, eps, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    NORM: tl.constexpr, KIND: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [ROWS, OUTPUTS] = x [ROWS, INPUTS], or if NORM its RMS norm, times weight [OUTPUTS, INPUTS] transposed, on
    the plain float units.

    Half as many outputs if GATED. The weight's first piece is fetched while the kernel before still runs, as is what an
    ADDED product is added to, which no kernel still under way may write. Blocks divide sizes.
    """
    block = tl.program_id(0)
    o = _outputs(block, OUTPUTS, KIND, BLOCK_OUT)
    i, r = tl.arange(0, BLOCK_IN), tl.arange(0, ROWS)
    first = tl.load(weight + o[:, None] * INPUTS + i[None, :]).to(tl.float32)
    if KIND == ADDED:
        # Not from the first-level cache: it may hold the sector as it was before the neighbours' outputs were written.
        before = tl.load(out + r[None, :] * OUTPUTS + o[:, None], cache_modifier=".cg").to(tl.float32)
    follow(OVERLAP)
    part = tl.load(x + r[:, None] * INPUTS + i[None, :]).to(tl.float32)
    squares = part * part
    if NORM:  # its scale is a factor of the sum, and left for the end
        part *= tl.load(norm_weight + i[None, :]).to(tl.float32)
    total = first[None, :, :] * part[:, None, :]
    for start in range(BLOCK_IN, INPUTS, BLOCK_IN):
        more = tl.load(weight + o[:, None] * INPUTS + start + i[None, :]).to(tl.float32)
        part = tl.load(x + r[:, None] * INPUTS + start + i[None, :]).to(tl.float32)
        if NORM:
            squares += part * part
            part *= tl.load(norm_weight + start + i[None, :]).to(tl.float32)
        total += more[None, :, :] * part[:, None, :]
    total = tl.trans(tl.sum(total, 2))
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)[None, :]
    if KIND == ADDED:
        total += before
    _store_product(out, total, block, r, ROWS, OUTPUTS, KIND, BLOCK_OUT)


@triton.jit(do_not_specialize=["rows"])
def some_rows_product(
    x, weight, out, partial, arrived, rows, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, MOST_ROWS: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `few_rows_product` on the matrix units, which take the weight's rows where they expect the larger side.

    The inputs are cut into SPLITS, so that few outputs keep all multiprocessors reading; the split that arrives last
    sums them in their order. rows: at most MOST_ROWS, a power of two from 16. partial float32
    [OUTPUTS / BLOCK_OUT, SPLITS, BLOCK_OUT, MOST_ROWS], arrived int32 [OUTPUTS / BLOCK_OUT], zero before and after. (A
    norm in here kept the inputs out of the asynchronous copies: 14.6 us for 7.3 of 4096 x 1024 on an H200.) AHEAD, 0 or
    a power of two: so many further blocks of the weight are brought into the second-level cache before the kernel
    ahead has ended; SPLITS * BLOCK_IN * (1 + AHEAD) are at most INPUTS.
    """
    block, split = tl.program_id(0), tl.program_id(1)
    o = _outputs(block, OUTPUTS, KIND, BLOCK_OUT)
    i, r = tl.arange(0, BLOCK_IN), tl.arange(0, MOST_ROWS)
    inside = (r < rows)[None, :]
    share: tl.constexpr = INPUTS // SPLITS
    weights = weight + o[:, None] * INPUTS + split * share + i[None, :]
    inputs = x + r[None, :] * INPUTS + split * share + i[:, None]
    first = tl.load(weights)
    if OVERLAP and AHEAD > 0:
        line = tl.arange(0, AHEAD * BLOCK_IN * 2 // 128) * 64  # 128 bytes of a dtype of 16 bits
        bring(weight + o[:, None] * INPUTS + split * share + BLOCK_IN + line[None, :])
    follow(OVERLAP)
    total = tl.dot(first, tl.load(inputs, mask=inside, other=0.0))
    for start in range(BLOCK_IN, share, BLOCK_IN):
        total = tl.dot(tl.load(weights + start), tl.load(inputs + start, mask=inside, other=0.0), total)
    if SPLITS == 1:
        _store_product(out, total, block, r, rows, OUTPUTS, KIND, BLOCK_OUT)
    else:
        part = tl.arange(0, BLOCK_OUT)[:, None] * MOST_ROWS + r[None, :]
        tl.store(partial + (block * SPLITS + split) * BLOCK_OUT * MOST_ROWS + part, total)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            whole = tl.zeros((BLOCK_OUT, MOST_ROWS), tl.float32)
            for other in tl.static_range(SPLITS):
                its = partial + (block * SPLITS + other) * BLOCK_OUT * MOST_ROWS + part
                whole += tl.load(its, cache_modifier=".cg")
            _store_product(out, whole, block, r, rows, OUTPUTS, KIND, BLOCK_OUT)
            tl.store(arrived + block, 0)


@triton.jit
def _outputs(block, OUTPUTS: tl.constexpr, KIND: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """A block's rows of the weight, int64 [BLOCK_OUT]; of a GATED product half of them gates, then their ups."""
    j = tl.arange(0, BLOCK_OUT)
    o = block * BLOCK_OUT + j
    if KIND == GATED:
        o = block * (BLOCK_OUT // 2) + j % (BLOCK_OUT // 2) + j // (BLOCK_OUT // 2) * (OUTPUTS // 2)
    return o.to(tl.int64)


@triton.jit
def _store_product(
    out, total, block, r, rows, OUTPUTS: tl.constexpr, KIND: tl.constexpr, BLOCK_OUT: tl.constexpr
):  # fmt: skip
    """total [BLOCK_OUT, rows as many as r] of the rows that `_outputs` names."""
    inside = (r < rows)[None, :]
    if KIND == GATED:
        pairs = tl.reshape(total.to(out.dtype.element_ty), (2, BLOCK_OUT // 2, r.shape[0]))
        gate, up = tl.split(tl.permute(pairs, (1, 2, 0)))
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        o = block * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
        tl.store(out + r[None, :] * (OUTPUTS // 2) + o[:, None], gate * tl.sigmoid(gate) * up, mask=inside)
    else:
        o = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        tl.store(out + r[None, :] * OUTPUTS + o[:, None], total, mask=inside)
