"""The product kernel: a block of output features for a tile of rows, and what is fused in before it is written.

A row's result has the same bits in all tilings with the same parts of the input. The tensor cores add the products of a
part in steps of 16 inputs, in order; parts are added in order. All other sums are exact, so they do not depend on how
values are distributed over threads.
"""

# ruff: noqa: N803, N806 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from draftwood.targets.native.cuda.common import block_peaks, exact_sum, prefetch

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
            scale = tl.rsqrt(exact_sum(low * low + high * high, BO // 2) / D + eps)[None, :]
            low = ((low * scale).to(KIND).to(tl.float32) * low_norm.to(tl.float32)[:, None]).to(KIND).to(tl.float32)
            high = ((high * scale).to(KIND).to(tl.float32) * high_norm.to(tl.float32)[:, None]).to(KIND).to(tl.float32)
    c, s = own_cos.to(tl.float32), own_sin.to(tl.float32)
    is_query = head < HEADS
    base = tl.where(is_query, out, tl.where(head < HEADS + KV, keys, values))
    start = tl.where(is_query, head * D, ((head - HEADS) % KV).to(tl.int64) * head_stride) + at
    along = tl.where(is_query[:, None], (rows.to(tl.int64) * OUT)[None, :], (own_slots * D)[None, :])
    where = base[:, None] + (start[:, None] + along)  # [BO / 2, BM]
    kept = (is_query[:, None] | (own_slots >= 0)[None, :]) & (head < OUT // D)[:, None] & (rows < num_rows)[None, :]
    tl.store(where, (low * c - high * s).to(KIND), mask=kept)
    tl.store(where + HALF, (high * c + low * s).to(KIND), mask=kept)


@triton.jit
def _load_squares(squares, stride, rows, num_rows, COUNT: tl.constexpr, PAD: tl.constexpr):
    """The sums of squares over COUNT groups of features, [PAD, BM]."""
    parts = tl.arange(0, PAD)
    there = (parts[:, None] < COUNT) & (rows[None, :] < num_rows)
    return tl.load(squares + parts[:, None] * stride + rows[None, :], mask=there, other=0.0)


@triton.jit
def _load_hidden(states, rows, num_rows, features, OUT: tl.constexpr):
    """The hidden states of a block, [BO, BM]."""
    inside = (features[:, None] < OUT) & (rows[None, :] < num_rows)
    return tl.load(states + rows.to(tl.int64)[None, :] * OUT + features[:, None], mask=inside, other=0.0)


@triton.jit
def _store_squares(
    hidden, squares, stride, rows, num_rows, block,
    OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the sums of squares of ``hidden [BO, BM]`` over each GROUP features."""
    sums = exact_sum(tl.reshape(hidden * hidden, (BO // GROUP, GROUP, BM)), GROUP, 1)  # [BO / GROUP, BM]
    group = block * (BO // GROUP) + tl.arange(0, BO // GROUP)
    there = (group < tl.cdiv(OUT, GROUP))[:, None] & (rows < num_rows)[None, :]
    tl.store(squares + group[:, None] * stride + rows[None, :], sums, mask=there)


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
    low_norm, high_norm, rows, block, features, num_rows, eps, out, scaled, next_squares, square_stride, peaks,
    keys, values, head_stride, head_eps,
    IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr,
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
        norm_scale = tl.rsqrt(exact_sum(own_squares, PAD) / IN + eps) / SCALE  # [BM]
        acc = acc * norm_scale[None, :]
        more = more * norm_scale[None, :]
    if BIAS:
        acc = acc + own_bias.to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * more
    if RESIDUAL:
        acc = acc + own_hidden.to(tl.float32)
    where = rows.to(tl.int64)[None, :] * OUT + features[:, None]
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
        _store_squares(hidden, next_squares, square_stride, rows, num_rows, block, OUT, BM, BO, GROUP)
    if PEAKS:
        peak, total = block_peaks(tl.where(features[:, None] < OUT, acc, float("-inf")), BO)
        here = peaks + rows.to(tl.int64) * (2 * tl.cdiv(OUT, BO)) + block
        tl.store(here, peak, mask=row_inside)
        tl.store(here + tl.cdiv(OUT, BO), total, mask=row_inside)


@triton.jit
def _multiply(
    x, weight, feature_rows, inputs, rows, num_rows, first_row, first_feature, start,
    IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, PART: tl.constexpr,
    ROW_SCALE: tl.constexpr, GATED: tl.constexpr, TENSOR_COPY: tl.constexpr,
):  # fmt: skip
    """The products with PART inputs from ``start`` on: of gate and up if GATED, otherwise the second is zero."""
    acc = tl.zeros((BO, BM), tl.float32)
    more = tl.zeros((BO, BM), tl.float32)
    if TENSOR_COPY:
        for step in range(start, start + PART, BI):
            given = x.load([first_row, step]).T
            acc = _dot(weight.load([first_feature, step]), given, acc, ROW_SCALE)
            if GATED:
                more = _dot(weight.load([OUT + first_feature, step]), given, more, ROW_SCALE)
    else:
        w = weight + feature_rows[:, None] + start + inputs[None, :]  # [BO, BI]
        xs = x + rows[None, :] * IN + start + inputs[:, None]  # [BI, BM]
        for step in range(0, PART, BI):
            given = tl.load(xs + step, mask=rows[None, :] < num_rows, other=0.0)
            acc = _dot(tl.load(w + step), given, acc, ROW_SCALE)
            if GATED:
                more = _dot(tl.load(w + OUT * IN + step), given, more, ROW_SCALE)
    return acc, more


@triton.jit
def product_kernel(
    x, weight, scales, out, squares, bias, scaled, next_norm, next_squares, square_stride, peaks, parts, counters,
    cos, sin, positions, slots, keys, values, q_norm, k_norm, head_stride, eps, head_eps, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, SPLITS: tl.constexpr,
    SERIAL: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr,
    SCALE: tl.constexpr, ROW_SCALE: tl.constexpr, WEIGHT_SCALE: tl.constexpr, QUANTIZED: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PEAKS: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, QK_NORM: tl.constexpr,
    AHEAD: tl.constexpr, TENSOR_COPY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of output features for one tile of rows, over one of SPLITS parts of the input; if SERIAL, over all.

    With TENSOR_COPY, ``x`` and ``weight`` are tensor descriptors.
    """
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BM + tl.arange(0, BM)
    inputs = tl.arange(0, BI)
    features = _features(block, BO, D)
    PART: tl.constexpr = IN // SPLITS
    start = part * PART
    known = tl.minimum(features, OUT - 1)  # beyond the last feature: read that one again, write nothing
    feature_rows = known.to(tl.int64) * IN
    # Load what the end needs together with the weights, if there are registers for it.
    EARLY: tl.constexpr = BM <= 64
    EARLY_ANGLES: tl.constexpr = BM * BO <= 4096
    scale, more_scale = 1.0, 1.0
    own_squares, own_bias, own_hidden, own_norm = 0.0, 0.0, 0.0, 0.0
    own_cos, own_sin, own_slots, low_norm, high_norm = 0.0, 0.0, 0, 0.0, 0.0
    if QUANTIZED:
        scale = tl.load(scales + known) / WEIGHT_SCALE
        if GATED:
            more_scale = tl.load(scales + OUT + known) / WEIGHT_SCALE
    if BIAS:
        own_bias = tl.load(bias + known)  # [BO]
    if RESIDUAL:
        own_norm = tl.load(next_norm + known)  # [BO]
    if D > 0:
        own_slots = tl.load(slots + rows, mask=rows < num_rows, other=-1).to(tl.int64)  # [BM]
        if EARLY_ANGLES:
            own_cos, own_sin = _angles(cos, sin, positions, rows, num_rows, block, BO, D, HEADS + KV)  # [BO / 2, BM]
    if QK_NORM:  # a block is one head; for heads of values this is loaded but not used
        norm = tl.where(block < HEADS, q_norm, k_norm) + tl.arange(0, BO // 2)
        low_norm, high_norm = tl.load(norm), tl.load(norm + BO // 2)  # [BO / 2]
    if PDL:
        if AHEAD > 0:
            prefetch((weight + feature_rows + start).to(tl.int64), AHEAD)
            if GATED:
                prefetch((weight + OUT * IN + feature_rows + start).to(tl.int64), AHEAD)
        tl.extra.cuda.gdc_wait()
    if NORMED and EARLY:
        own_squares = _load_squares(squares, square_stride, rows, num_rows, COUNT, PAD)
    if RESIDUAL and EARLY:
        own_hidden = _load_hidden(out, rows, num_rows, features, OUT)
    if SERIAL:
        acc = tl.zeros((BO, BM), tl.float32)
        more = tl.zeros((BO, BM), tl.float32)
        for index in range(SPLITS):
            own, own_more = _multiply(
                x, weight, feature_rows, inputs, rows, num_rows, tile * BM, block * BO, index * PART,
                IN, OUT, BM, BO, BI, PART, ROW_SCALE, GATED, TENSOR_COPY,
            )  # fmt: skip
            acc += own
            if GATED:
                more += own_more
    else:
        acc, more = _multiply(
            x, weight, feature_rows, inputs, rows, num_rows, tile * BM, block * BO, start,
            IN, OUT, BM, BO, BI, PART, ROW_SCALE, GATED, TENSOR_COPY,
        )  # fmt: skip
    if PDL:  # not earlier: programs of the next kernel would take resources that this one still needs
        tl.extra.cuda.gdc_launch_dependents()
    last = True
    if SPLITS > 1 and not SERIAL:
        SIZE: tl.constexpr = BO * BM * (2 if GATED else 1)
        place = tl.arange(0, BO)[:, None] * BM + tl.arange(0, BM)[None, :]  # [BO, BM]
        shared = tile * tl.num_programs(1) + block
        mine = parts + (shared * SPLITS + part) * SIZE + place
        tl.store(mine, acc)
        if GATED:
            tl.store(mine + BO * BM, more)
        tl.debug_barrier()  # all warps have written their part before the arrival is counted
        last = tl.atomic_add(counters + shared, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = tl.zeros((BO, BM), tl.float32)
            more = tl.zeros((BO, BM), tl.float32)
            for other in tl.static_range(SPLITS):
                theirs = parts + (shared * SPLITS + other) * SIZE + place
                acc += tl.load(theirs, cache_modifier=".cg")
                if GATED:
                    more += tl.load(theirs + BO * BM, cache_modifier=".cg")
            tl.store(counters + shared, 0)
    if last:
        now_squares, now_hidden, now_cos, now_sin = own_squares, own_hidden, own_cos, own_sin
        if NORMED and not EARLY:
            now_squares = _load_squares(squares, square_stride, rows, num_rows, COUNT, PAD)
        if RESIDUAL and not EARLY:
            now_hidden = _load_hidden(out, rows, num_rows, features, OUT)
        if D > 0 and not EARLY_ANGLES:
            now_cos, now_sin = _angles(cos, sin, positions, rows, num_rows, block, BO, D, HEADS + KV)
        _finish(
            acc, more, scale, more_scale, now_squares, own_bias, now_hidden, own_norm, now_cos, now_sin, own_slots,
            low_norm, high_norm, rows, block, features, num_rows, eps, out, scaled, next_squares, square_stride, peaks,
            keys, values, head_stride, head_eps,
            IN, OUT, BM, BO, GROUP, PAD, SCALE, QUANTIZED, NORMED, GATED, BIAS, RESIDUAL, PEAKS,
            D, HEADS, KV, QK_NORM,
        )  # fmt: skip
