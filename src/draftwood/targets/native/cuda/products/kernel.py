"""The product kernel: a block of output features for a few rows, and what is fused in before it is written."""

# ruff: noqa: N803, N806 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from draftwood.targets.native.cuda.common import block_peaks, prefetch

# In a block of heads, SLAB dimensions of the first half are followed by their SLAB partners of the second half: one
# thread then holds both dimensions of a pair.
SLAB = tl.constexpr(8)


@triton.jit
def _features(block, BO: tl.constexpr, D: tl.constexpr):
    """The output features of a block, [BO]. With D > 0 (heads that are rotated) in slabs of dimensions and partners."""
    at = tl.arange(0, BO)
    if D == 0:
        return block * BO + at
    pair = block * (BO // 2) + at // (2 * SLAB) * SLAB + at % SLAB
    return pair // (D // 2) * D + pair % (D // 2) + at // SLAB % 2 * (D // 2)


@triton.jit
def _pairs(block, BO: tl.constexpr, D: tl.constexpr):
    """For each pair of dimensions in a block: its head, and the index of its first dimension in the head; [BO / 2]."""
    pair = block * (BO // 2) + tl.arange(0, BO // 2)
    return pair // (D // 2), pair % (D // 2)


@triton.jit
def _angles(cos, sin, positions, rows, num_rows, block, BO: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr):
    """Cosines and sines of a block's pairs, [BO / 2, BM]. Heads from number ROTATED on are not rotated: 1 and 0."""
    head, at = _pairs(block, BO, D)
    place = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.int64)
    where = place[None, :] * (D // 2) + at[:, None]
    mask = (head < ROTATED)[:, None] & (rows < num_rows)[None, :]
    return tl.load(cos + where, mask=mask, other=1.0), tl.load(sin + where, mask=mask, other=0.0)


@triton.jit
def _store_heads(
    acc, own_cos, own_sin, own_slots, low_norm, high_norm, rows, num_rows, block, out, keys, values, head_stride, eps,
    OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
    QK_NORM: tl.constexpr,
):  # fmt: skip
    """Norm (if QK_NORM) and rotate queries and keys. Store queries in ``out``, keys and values in the rows' slots."""
    HALF: tl.constexpr = D // 2
    KIND: tl.constexpr = out.dtype.element_ty
    rounded = acc.to(KIND).to(tl.float32)  # as a separate projection would have written it
    low, high = tl.split(tl.permute(tl.reshape(rounded, (BO // (2 * SLAB), 2, SLAB, BM)), (0, 2, 3, 1)))
    low = tl.reshape(low, (BO // 2, BM))
    high = tl.reshape(high, (BO // 2, BM))
    head, at = _pairs(block, BO, D)
    if QK_NORM:  # noqa: SIM102 - a compile-time condition
        if block < HEADS + KV:  # with QK_NORM a block is one head
            scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / D + eps)[None, :]
            low = ((low * scale).to(KIND).to(tl.float32) * low_norm.to(tl.float32)[:, None]).to(KIND).to(tl.float32)
            high = ((high * scale).to(KIND).to(tl.float32) * high_norm.to(tl.float32)[:, None]).to(KIND).to(tl.float32)
    c, s = own_cos.to(tl.float32), own_sin.to(tl.float32)
    is_query = head < HEADS
    base = tl.where(is_query, out, tl.where(head < HEADS + KV, keys, values))
    start = tl.where(is_query, head * D, ((head - HEADS) % KV).to(tl.int64) * head_stride) + at
    along = tl.where(is_query[:, None], (rows * OUT)[None, :], (own_slots * D)[None, :])
    where = base[:, None] + (start[:, None] + along)  # [BO / 2, BM]
    kept = (is_query[:, None] | (own_slots >= 0)[None, :]) & (head < OUT // D)[:, None] & (rows < num_rows)[None, :]
    tl.store(where, (low * c - high * s).to(KIND), mask=kept)
    tl.store(where + HALF, (high * c + low * s).to(KIND), mask=kept)


@triton.jit
def _squares(squares, rows, num_rows, BM: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr):
    """The sums of squares over the COUNT blocks in which the rows were computed, [PAD, BM]."""
    parts = tl.arange(0, PAD)
    there = (parts[:, None] < COUNT) & (rows[None, :] < num_rows)
    return tl.load(squares + parts[:, None] * BM + rows[None, :], mask=there, other=0.0)


@triton.jit
def _dot(weights, given, acc, ROW_SCALE: tl.constexpr):
    """Add ``weights [BO, BI]`` times ``given [BI, BM]`` to ``acc``.

    Converting two float8 to float16 takes one instruction, to bfloat16 four, on a unit that is slower than loading the
    weights. So the rows are converted to float16 too, scaled by ROW_SCALE so that they do not overflow.
    """
    if weights.dtype == tl.float8e4nv:
        return tl.dot(weights.to(tl.float16), (given.to(tl.float32) * ROW_SCALE).to(tl.float16), acc)
    return tl.dot(weights.to(given.dtype), given, acc)


@triton.jit
def _finish(
    acc, more, scale, more_scale, own_squares, own_bias, own_hidden, own_norm, own_cos, own_sin, own_slots,
    low_norm, high_norm, rows, block, features, num_rows, eps, out, scaled, block_squares, peaks,
    keys, values, head_stride, head_eps,
    IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
    SCALE: tl.constexpr, QUANTIZED: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PEAKS: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Apply everything that is fused in to a finished block [BO, BM], and write it."""
    row_inside = rows < num_rows
    inside = (features[:, None] < OUT) & row_inside[None, :]
    if QUANTIZED:
        acc = acc * scale[:, None]
        if GATED:
            more = more * more_scale[:, None]
    if NORMED:
        norm_scale = tl.rsqrt(tl.sum(own_squares, axis=0) / IN + eps) / SCALE  # [BM]
        acc = acc * norm_scale[None, :]
        more = more * norm_scale[None, :]
    if BIAS:
        acc = acc + own_bias.to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * more
    if RESIDUAL:
        acc = acc + own_hidden.to(tl.float32)
    where = rows[None, :] * OUT + features[:, None]
    result = acc.to(out.dtype.element_ty)
    if D > 0:
        _store_heads(
            acc, own_cos, own_sin, own_slots, low_norm, high_norm, rows, num_rows, block, out, keys, values,
            head_stride, head_eps, OUT, BM, BO, D, HEADS, KV, QK_NORM,
        )  # fmt: skip
    else:
        tl.store(out + where, result, mask=inside)
    if RESIDUAL:
        hidden = tl.where(inside, result.to(tl.float32), 0.0)
        tl.store(
            scaled + where, (hidden * own_norm.to(tl.float32)[:, None] * SCALE).to(out.dtype.element_ty), mask=inside
        )
        tl.store(block_squares + block * BM + rows, tl.sum(hidden * hidden, axis=0), mask=row_inside)
    if PEAKS:
        peak, total = block_peaks(tl.where(features[:, None] < OUT, acc, float("-inf")))
        here = peaks + rows * (2 * tl.cdiv(OUT, BO)) + block
        tl.store(here, peak, mask=row_inside)
        tl.store(here + tl.cdiv(OUT, BO), total, mask=row_inside)


@triton.jit
def product_kernel(
    x, weight, scales, out, squares, bias, scaled, next_norm, block_squares, peaks, parts, counters,
    cos, sin, positions, slots, keys, values, q_norm, k_norm, head_stride, eps, head_eps, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, SPLITS: tl.constexpr,
    COUNT: tl.constexpr, PAD: tl.constexpr, SCALE: tl.constexpr, ROW_SCALE: tl.constexpr, QUANTIZED: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PEAKS: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, QK_NORM: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of output features, over one of SPLITS parts of the input."""
    block, part = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BM)
    inputs = tl.arange(0, BI)
    features = _features(block, BO, D)
    PART: tl.constexpr = IN // SPLITS
    UP: tl.constexpr = OUT * IN  # offset from the weights of gate to those of up
    start = part * PART
    known = tl.minimum(features, OUT - 1)  # beyond the last feature: read that one again, write nothing
    feature_rows = known.to(tl.int64) * IN
    w = weight + feature_rows[:, None] + start + inputs[None, :]  # [BO, BI]
    # What the end needs is loaded here, so that it arrives together with the weights.
    scale, more_scale = 1.0, 1.0
    own_squares, own_bias, own_hidden, own_norm = 0.0, 0.0, 0.0, 0.0
    own_cos, own_sin, own_slots, low_norm, high_norm = 0.0, 0.0, 0, 0.0, 0.0
    if QUANTIZED:
        scale = tl.load(scales + known)
        if GATED:
            more_scale = tl.load(scales + OUT + known)
        if weight.dtype.element_ty == tl.float8e4nv:
            scale /= ROW_SCALE
            more_scale /= ROW_SCALE
    if BIAS:
        own_bias = tl.load(bias + known)  # [BO]
    if RESIDUAL:
        own_norm = tl.load(next_norm + known)  # [BO]
    if D > 0:
        own_cos, own_sin = _angles(cos, sin, positions, rows, num_rows, block, BO, D, HEADS + KV)  # [BO / 2, BM]
        own_slots = tl.load(slots + rows, mask=rows < num_rows, other=-1).to(tl.int64)  # [BM]
    if QK_NORM:  # a block is one head; for heads of values this is loaded but not used
        norm = tl.where(block < HEADS, q_norm, k_norm) + tl.arange(0, BO // 2)
        low_norm, high_norm = tl.load(norm), tl.load(norm + BO // 2)  # [BO / 2]
    if PDL:
        if AHEAD > 0:
            address = (weight + feature_rows + start).to(tl.int64)
            prefetch(address, AHEAD)
            if GATED:
                prefetch((weight + UP + feature_rows + start).to(tl.int64), AHEAD)
        tl.extra.cuda.gdc_wait()
    if NORMED:
        own_squares = _squares(squares, rows, num_rows, BM, COUNT, PAD)
    if RESIDUAL:
        inside = (features[:, None] < OUT) & (rows[None, :] < num_rows)
        own_hidden = tl.load(out + rows[None, :] * OUT + features[:, None], mask=inside, other=0.0)  # [BO, BM]
    acc = tl.zeros((BO, BM), tl.float32)
    more = tl.zeros((BO, BM), tl.float32)
    xs = x + rows[None, :] * IN + start + inputs[:, None]  # [BI, BM]
    for step in range(0, PART, BI):
        given = tl.load(xs + step, mask=rows[None, :] < num_rows, other=0.0)
        acc = _dot(tl.load(w + step), given, acc, ROW_SCALE)
        if GATED:
            more = _dot(tl.load(w + UP + step), given, more, ROW_SCALE)
    if PDL:  # not earlier: programs of the next kernel would take resources that this one still needs
        tl.extra.cuda.gdc_launch_dependents()
    last = True
    if SPLITS > 1:
        SIZE: tl.constexpr = BO * BM * (2 if GATED else 1)
        place = tl.arange(0, BO)[:, None] * BM + rows[None, :]  # [BO, BM]
        mine = parts + (block * SPLITS + part) * SIZE + place
        tl.store(mine, acc)
        if GATED:
            tl.store(mine + BO * BM, more)
        tl.debug_barrier()  # all warps have written their part before the arrival is counted
        last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = tl.zeros((BO, BM), tl.float32)
            more = tl.zeros((BO, BM), tl.float32)
            for other in tl.static_range(SPLITS):
                theirs = parts + (block * SPLITS + other) * SIZE + place
                acc += tl.load(theirs, cache_modifier=".cg")
                if GATED:
                    more += tl.load(theirs + BO * BM, cache_modifier=".cg")
            tl.store(counters + block, 0)
    if last:
        _finish(
            acc, more, scale, more_scale, own_squares, own_bias, own_hidden, own_norm, own_cos, own_sin, own_slots,
            low_norm, high_norm, rows, block, features, num_rows, eps, out, scaled, block_squares, peaks,
            keys, values, head_stride, head_eps,
            IN, OUT, BM, BO, SCALE, QUANTIZED, NORMED, GATED, BIAS, RESIDUAL, PEAKS, D, HEADS, KV, QK_NORM,
        )  # fmt: skip
