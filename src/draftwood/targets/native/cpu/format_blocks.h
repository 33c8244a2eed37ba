/* Quantised weights, multiplied as the integers they are stored as.
 *
 * A packed group holds strips of STRIP columns. A strip holds, stretch by stretch of inputs (the block of the file
 * format), the scales of all columns and then the codes. Codes lie in lines of four inputs of every column, so that one
 * vector of weights meets four inputs of a row in every lane. Four bits: line j holds step j of a block of 32 in the low
 * halves of its bytes and step j + 4 in the high halves. The fifth bits of all steps are one more line, the fifth and
 * sixth bits two more. So weights are unpacked once per block, in registers, and meet all rows there.
 *
 * An output is a chain of fused multiply-adds over the blocks in ascending order. The integers in between are exact, so
 * outputs depend neither on the number of rows nor on the path. */
#ifndef DRAFTWOOD_FORMAT_BLOCKS_H
#define DRAFTWOOD_FORMAT_BLOCKS_H

#include "blocks.h"
#include "format.h"
#include "integers.h"

#if TOTALS_STAY
#define STRIP (SUBS * VW) /* columns */
#else
#define STRIP 32 /* columns */
#endif
#define LINE (4 * STRIP) /* bytes */
#define BLOCKS_AHEAD 8 /* blocks to prefetch ahead */
#define BYTES_AHEAD 512 /* the same, where a block is small */

_Static_assert(GROUP_COLUMNS % STRIP == 0 && STRIP % (SUBS * VW) == 0, "strips fill groups, vectors fill strips");

typedef struct {
    int elements, bytes; /* of a block in the file */
    int bits; /* of a code in lines: 4, 5, 6 or 8 */
    int offset; /* subtracted from codes that are not negative */
    int scales; /* how they are stored: see blocks.h */
    const int8_t *table; /* values of the codes, or NULL */
    void (*read)(const uint8_t *from, BlockContent *to);
} BlockKind;

/* All functions below are inlined into one copy per format, where `kind` is constant. */
INLINE int lines_of(const BlockKind *kind) { return kind->bits == 8 ? 8 : kind->bits; }

INLINE int scale_bytes(const BlockKind *kind) { /* of a stretch of one strip */
    const int by_scales[] = {2, 4, 2 + 8, 2 + 16, 4 + 16, 1};
    return by_scales[kind->scales] * STRIP;
}

INLINE long stretch_bytes(const BlockKind *kind) {
    return scale_bytes(kind) + kind->elements / QBLOCK * lines_of(kind) * LINE;
}

INLINE long strip_bytes(const BlockKind *kind, long inputs) { return inputs / kind->elements * stretch_bytes(kind); }

/* ---- packing ---- */

/* Puts 32 codes of one column into their lines; `to` is the column's place in the first line. */
INLINE void place_codes(const BlockKind *kind, const uint8_t *codes, uint8_t *to) {
    for (int k = 0; k < QBLOCK; k++) {
        const int j = k / 4, i = k % 4, code = codes[k];
        if (kind->bits == 8) {
            to[j * LINE + i] = (uint8_t)code;
            continue;
        }
        to[j % 4 * LINE + i] |= (uint8_t)((code & 15) << (j / 4 * 4));
        if (kind->bits == 5) to[4 * LINE + i] |= (uint8_t)(code >> 4 << j);
        if (kind->bits == 6) to[(4 + j / 4) * LINE + i] |= (uint8_t)(code >> 4 << (j % 4 * 2));
    }
}

INLINE int take_code(const BlockKind *kind, const uint8_t *lines, int k) {
    const int j = k / 4, i = k % 4;
    if (kind->bits == 8) return (int8_t)lines[j * LINE + i];
    int code = lines[j % 4 * LINE + i] >> (j / 4 * 4) & 15;
    if (kind->bits == 5) code |= (lines[4 * LINE + i] >> j & 1) << 4;
    if (kind->bits == 6) code |= (lines[(4 + j / 4) * LINE + i] >> (j % 4 * 2) & 3) << 4;
    return kind->table ? kind->table[code] : code;
}

/* The scales of a stretch: 16-bit scales of all columns, 16-bit minima, then bytes part by part. */
INLINE void place_scales(const BlockKind *kind, const BlockContent *block, long column, uint8_t *to) {
    const int has_minimum = kind->scales == HALF_MIN || kind->scales == SUPER_MIN;
    if (kind->scales == EXPONENT) {
        to[column] = (uint8_t)block->scale;
        return;
    }
    memcpy(to + 2 * column, &block->scale, 2);
    to += 2 * STRIP;
    if (has_minimum) memcpy(to + 2 * column, &block->minimum, 2);
    to += has_minimum ? 2 * STRIP : 0;
    if (kind->scales == HALF || kind->scales == HALF_MIN) return;
    const int parts = kind->scales == SUPER_16 ? 16 : 8;
    for (int part = 0; part < parts; part++) to[part * STRIP + column] = block->scales[part];
    for (int part = 0; part < parts && has_minimum; part++) to[(parts + part) * STRIP + column] = block->minima[part];
}

INLINE uint8_t *block_strip(const BlockKind *kind, const Matrix *m, long column) {
    return (uint8_t *)m->data + column / STRIP * strip_bytes(kind, m->inputs);
}

/* Returns whether all scales are finite. */
INLINE int blocks_pack(const BlockKind *kind, const Matrix *m, const void *from, long group) {
    const long stretches = m->inputs / kind->elements, group_strips = GROUP_COLUMNS / STRIP;
    uint8_t *first = block_strip(kind, m, group * GROUP_COLUMNS);
    int finite = 1;
    memset(first, 0, (size_t)(group_strips * strip_bytes(kind, m->inputs)));
    for (long column = 0; column < GROUP_COLUMNS; column++) {
        const long row = source_row(m, group, column), c = column % STRIP;
        if (row < 0) continue;
        const uint8_t *raw = (const uint8_t *)from + row * stretches * kind->bytes;
        uint8_t *to = first + column / STRIP * strip_bytes(kind, m->inputs);
        for (long s = 0; s < stretches; s++, raw += kind->bytes, to += stretch_bytes(kind)) {
            BlockContent block = {.minimum = 0};
            kind->read(raw, &block);
            if (kind->scales == EXPONENT)
                finite &= block.scale != 255;
            else
                finite &= half_is_finite(block.scale) && half_is_finite(block.minimum);
            place_scales(kind, &block, c, to);
            for (int b = 0; b < kind->elements / QBLOCK; b++)
                place_codes(kind, block.codes + b * QBLOCK, to + scale_bytes(kind) + b * lines_of(kind) * LINE + 4 * c);
        }
    }
    return finite;
}

/* Scale and minimum of weight k in a stretch; `at`: the stretch. */
INLINE void take_scale(const BlockKind *kind, const uint8_t *at, long column, int k, float *scale, float *minimum) {
    *minimum = 0.0f;
    if (kind->scales == EXPONENT) {
        *scale = exponent_to_float(at[column]);
        return;
    }
    const uint16_t *halves = (const uint16_t *)at;
    *scale = half_to_float(halves[column]);
    if (kind->scales == HALF_MIN) *minimum = half_to_float(halves[STRIP + column]);
    if (kind->scales == SUPER) *scale *= (float)(int8_t)at[(2 + k / 32) * STRIP + column];
    if (kind->scales == SUPER_16) *scale *= (float)(int8_t)at[(2 + k / 16) * STRIP + column];
    if (kind->scales == SUPER_MIN) {
        *scale *= (float)at[(4 + k / 32) * STRIP + column];
        *minimum = -(half_to_float(halves[STRIP + column]) * (float)at[(4 + 8 + k / 32) * STRIP + column]);
    }
}

INLINE void blocks_unpack_row(const BlockKind *kind, const Matrix *m, long row, float *to) {
    const long column = row % STRIP;
    const uint8_t *at = block_strip(kind, m, row);
    for (long first = 0; first < m->inputs; first += kind->elements, at += stretch_bytes(kind)) {
        for (int k = 0; k < kind->elements; k++) {
            const uint8_t *lines = at + scale_bytes(kind) + k / QBLOCK * lines_of(kind) * LINE + 4 * column;
            float scale, minimum;
            take_scale(kind, at, column, k, &scale, &minimum);
            to[first + k] = scale * (float)(take_code(kind, lines, k % QBLOCK) - kind->offset) + minimum;
        }
    }
}

/* ---- products ---- */

INLINE int is_signed(const BlockKind *kind) { return kind->bits == 8 || kind->table != NULL; }

/* `lifted`: signed codes get 128 added. */
INLINE void unpack_codes(const BlockKind *kind, const char *at, const int lifted, vu w[STEPS]) {
    if (kind->bits == 8) {
        UNROLL for (int j = 0; j < STEPS; j++) w[j] = *(const vu_any *)(at + j * LINE);
    } else {
        UNROLL for (int j = 0; j < 4; j++) {
            const vu both = *(const vu_any *)(at + j * LINE);
            w[j] = both & 0x0f0f0f0f;
            w[4 + j] = high_halves(both);
        }
    }
    if (kind->bits == 5) {
        const vu high = *(const vu_any *)(at + 4 * LINE);
        UNROLL for (int j = 0; j < STEPS; j++) w[j] |= (j < 4 ? high << (4 - j) : high >> (j - 4)) & 0x10101010;
    }
    if (kind->bits == 6) {
        UNROLL for (int j = 0; j < STEPS; j++) {
            const vu high = *(const vu_any *)(at + (4 + j / 4) * LINE);
            w[j] |= (j % 4 < 2 ? high << (4 - j % 4 * 2) : high >> (j % 4 * 2 - 4)) & 0x30303030;
        }
    }
    if (kind->table) {
        UNROLL for (int j = 0; j < STEPS; j++) w[j] = look_up(kind->table, w[j]);
    }
    if (lifted && is_signed(kind)) {
        UNROLL for (int j = 0; j < STEPS; j++) w[j] ^= 0x80808080;
    }
}

/* Scales (of each half, SUPER_16) and minima of VW columns in block b of a stretch; `at`: the stretch. */
INLINE void load_scales(const BlockKind *kind, const char *at, long column, int b, vf scale[2], vf *minimum) {
    const uint8_t *bytes = (const uint8_t *)at;
    scale[0] = scale[1] = *minimum = splat(0.0f);
    if (kind->scales == EXPONENT) {
        scale[0] = load_exponents(bytes + column);
        return;
    }
    scale[0] = load_halves((const uint16_t *)at + column);
    if (kind->scales == HALF_MIN) *minimum = load_halves((const uint16_t *)at + STRIP + column);
    if (kind->scales == SUPER) scale[0] *= to_floats(load_signed_bytes((const int8_t *)bytes + (2 + b) * STRIP + column));
    if (kind->scales == SUPER_16) {
        const int8_t *parts = (const int8_t *)bytes + (2 + 2 * b) * STRIP + column;
        scale[1] = scale[0] * to_floats(load_signed_bytes(parts + STRIP));
        scale[0] *= to_floats(load_signed_bytes(parts));
    }
    if (kind->scales == SUPER_MIN) {
        scale[0] *= to_floats(load_unsigned_bytes(bytes + (4 + b) * STRIP + column));
        *minimum = -(load_halves((const uint16_t *)at + STRIP + column) *
                     to_floats(load_unsigned_bytes(bytes + (4 + 8 + b) * STRIP + column)));
    }
}

/* The weights of a block: SUBS * VW columns of 32 inputs, unpacked. */
typedef struct {
    vu w[SUBS][STEPS];
    vf scale[SUBS][2], lift[SUBS][2], minimum[SUBS];
} Unpacked;

INLINE int start_index(int offset) {
    return offset == 8 ? TIMES_8 : offset == 16 ? TIMES_16 : offset == 32 ? FIRST_TIMES_32 : TIMES_128;
}

/* Unpacks SUBS * VW columns of block b of a stretch. */
INLINE void unpack_block(const BlockKind *kind, const char *stretch, const char *lines, int b, long column,
                         const int lifted, Unpacked *u) {
    UNROLL for (int s = 0; s < SUBS; s++) {
        unpack_codes(kind, lines + 4 * (column + s * VW), lifted, u->w[s]);
        load_scales(kind, stretch, column + s * VW, b, u->scale[s], &u->minimum[s]);
        UNROLL for (int h = 0; h < 2; h++) u->lift[s][h] = lift_of(u->scale[s][h]);
    }
}

/* Adds the sum of a block (with two sums: of half h), which started from start_of(...), and its minimum to `total`. */
INLINE vf add_scaled(const BlockKind *kind, const Unpacked *u, int s, int h, const InputBlock *x, vi sum, vf total) {
    if (kind->scales == HALF_MIN || kind->scales == SUPER_MIN) /* does not wait for the sum */
        total = fma_vec(total, u->minimum[s], splat(x->scaled_sum));
    return fma_vec(total, scale_sum(sum, u->scale[s][h], u->lift[s][h]), splat(x->scale));
}

/* What a sum starts from, so that the offset of the weights is subtracted. */
INLINE vi start_of(const BlockKind *kind, const InputBlock *x, int h, const int lifted) {
    const int offset = !is_signed(kind) ? kind->offset : lifted ? 128 : 0;
    return splat_int(offset ? x->starts[start_index(offset) + h] : START);
}

/* Adds the products of some rows with a block to out[rows][GROUP_COLUMNS]. */
INLINE void multiply_rows(const BlockKind *kind, const int rows, const Unpacked *u, const char *input, long input_bytes,
                          float *out) {
    const int largest = is_signed(kind) ? 128 : (1 << kind->bits) - 1;
    const int halves = kind->scales == SUPER_16 ? 2 : 1, steps = STEPS / halves;
    const int8_t *values[MAX_TOGETHER];
    vf total[MAX_TOGETHER][SUBS];
    UNROLL for (int r = 0; r < rows; r++) {
        values[r] = ((const InputBlock *)(input + r * input_bytes))->values;
        UNROLL for (int s = 0; s < SUBS; s++) total[r][s] = load(out + r * GROUP_COLUMNS + s * VW);
    }
    UNROLL for (int h = 0; h < halves; h++) {
        vi sum[MAX_TOGETHER][SUBS];
        UNROLL for (int r = 0; r < rows; r++) {
            const InputBlock *x = (const InputBlock *)(input + r * input_bytes);
            UNROLL for (int s = 0; s < SUBS; s++) sum[r][s] = start_of(kind, x, h, UNSIGNED_WEIGHTS);
        }
        add_products(rows, sum, u->w, h * steps, steps, values, largest);
        UNROLL for (int r = 0; r < rows; r++) {
            const InputBlock *x = (const InputBlock *)(input + r * input_bytes);
            UNROLL for (int s = 0; s < SUBS; s++) total[r][s] = add_scaled(kind, u, s, h, x, sum[r][s], total[r][s]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int s = 0; s < SUBS; s++) store(out + r * GROUP_COLUMNS + s * VW, total[r][s]);
}

/* Adds the products of all rows with block b of a stretch. */
INLINE void multiply_block(const BlockKind *kind, const GroupProduct *p, const char *input, const char *stretch,
                           const char *lines, int b, long column, float *out) {
    Unpacked u;
    unpack_block(kind, stretch, lines, b, column, UNSIGNED_WEIGHTS, &u);
    const long bytes = p->input_bytes;
    for (long left = p->rows, rows; left; left -= rows) { /* in parts of nearly equal size */
        const long parts = (left + MAX_TOGETHER - 1) / MAX_TOGETHER;
        rows = (left + parts - 1) / parts;
        if (rows == MAX_TOGETHER) multiply_rows(kind, MAX_TOGETHER, &u, input, bytes, out);
        if (MAX_TOGETHER > 3 && rows == 3) multiply_rows(kind, 3, &u, input, bytes, out);
        if (MAX_TOGETHER > 2 && rows == 2) multiply_rows(kind, 2, &u, input, bytes, out);
        if (rows == 1) multiply_rows(kind, 1, &u, input, bytes, out);
        input += rows * bytes;
        out += rows * GROUP_COLUMNS;
    }
}

#if TOTALS_STAY
/* One strip times a few rows. Their totals and the sums of a block stay in registers beside the weights. Sums and
 * products are loaded with what they begin with, row by row: copying a register would cost as much as a product. */
INLINE void multiply_strip(const BlockKind *kind, const int rows, const char *input, long input_bytes, const char *at,
                           long inputs, float *out) {
    const int halves = kind->scales == SUPER_16 ? 2 : 1, steps = STEPS / halves, blocks = kind->elements / QBLOCK;
    const int has_minimum = kind->scales == HALF_MIN || kind->scales == SUPER_MIN;
    const int has_offset = !is_signed(kind) && kind->offset;
    static const vi start = {START, START, START, START};
    vf total[MAX_TOGETHER];
    UNROLL for (int r = 0; r < rows; r++) total[r] = splat(0.0f);
    for (long k = 0; k < inputs; k += kind->elements, at += stretch_bytes(kind)) {
        const char *lines = at + scale_bytes(kind);
        for (int b = 0; b < blocks; b++, lines += lines_of(kind) * LINE, input += sizeof(InputBlock)) {
            Unpacked u;
            __builtin_prefetch(lines + BYTES_AHEAD);
            __builtin_prefetch(lines + BYTES_AHEAD + 64);
            unpack_block(kind, at, lines, b, 0, 0, &u);
            UNROLL for (int h = 0; h < halves; h++) {
                const vf lift = u.lift[0][h]; /* in memory */
                vi sum[MAX_TOGETHER];
                UNROLL for (int r = 0; r < rows; r++) {
                    const InputBlock *x = (const InputBlock *)(input + r * input_bytes);
                    if (has_offset)
                        sum[r] = start_of(kind, x, h, 0);
                    else
                        LOAD_ANEW(sum[r], start);
                    add_row_products(&sum[r], u.w, h * steps, steps, x->values);
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    const vf scales = load(&((const InputBlock *)(input + r * input_bytes))->scale); /* and scaled_sum */
                    vf product;
                    LOAD_ANEW(product, lift);
                    FMA_INTO(product, (vf)sum[r], u.scale[0][h]);
                    if (has_minimum) FMA_LANE_INTO(total[r], u.minimum[0], scales, 1);
                    FMA_LANE_INTO(total[r], product, scales, 0);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) store(out + r * GROUP_COLUMNS, total[r]);
}

INLINE void blocks_multiply(const BlockKind *kind, const GroupProduct *p) {
    for (long column = 0; column < GROUP_COLUMNS; column += STRIP) {
        const char *at = p->weights + column / STRIP * strip_bytes(kind, p->inputs);
        for (long row = 0, rows; row < p->rows; row += rows) { /* in parts of nearly equal size */
            const long left = p->rows - row, parts = (left + MAX_TOGETHER - 1) / MAX_TOGETHER;
            const char *input = p->input + row * p->input_bytes;
            float *out = p->out + row * GROUP_COLUMNS + column;
            rows = (left + parts - 1) / parts;
#define STRIP_TIMES(n) \
    case n: multiply_strip(kind, n, input, p->input_bytes, at, p->inputs, out); break;
            switch (rows) {
                STRIP_TIMES(1) STRIP_TIMES(2) STRIP_TIMES(3) STRIP_TIMES(4)
                STRIP_TIMES(5) STRIP_TIMES(6) STRIP_TIMES(7) STRIP_TIMES(8)
            }
#undef STRIP_TIMES
        }
    }
}
#else
INLINE void blocks_multiply(const BlockKind *kind, const GroupProduct *p) {
    const long blocks = kind->elements / QBLOCK, block_bytes = lines_of(kind) * LINE;
    const long step = stretch_bytes(kind) / blocks; /* scales included */
    const char *at = p->weights;
    memset(p->out, 0, (size_t)(p->rows * GROUP_COLUMNS) * sizeof(float));
    for (long strip = 0; strip < GROUP_COLUMNS; strip += STRIP) {
        const char *input = p->input;
        for (long k = 0; k < p->inputs; k += kind->elements, at += stretch_bytes(kind)) {
            const char *lines = at + scale_bytes(kind);
            for (int b = 0; b < blocks; b++, lines += block_bytes, input += sizeof(InputBlock)) {
                for (long i = 0; i < step; i += 64) __builtin_prefetch(lines + BLOCKS_AHEAD * step + i);
                for (long column = 0; column < STRIP; column += SUBS * VW)
                    multiply_block(kind, p, input, at, lines, b, column, p->out + strip + column);
            }
        }
    }
}
#endif

/* The extra block keeps equal columns of neighbouring rows off one cache set. */
static long blocks_prepared_bytes(long inputs) { return (inputs / QBLOCK + 1) * (long)sizeof(InputBlock); }

static void blocks_prepare(const float *row, long inputs, void *to) {
    for (long k = 0; k < inputs; k += QBLOCK) quantize_block(row + k, (InputBlock *)to + k / QBLOCK);
}

#define BLOCK_FORMAT(NAME, name, ...)                                                                          \
    static const BlockKind NAME##_KIND = __VA_ARGS__;                                                          \
    static long name##_group_bytes(long inputs) {                                                              \
        return GROUP_COLUMNS / STRIP * strip_bytes(&NAME##_KIND, inputs);                                      \
    }                                                                                                          \
    static int name##_pack(const Matrix *m, const void *from, long group) {                                    \
        return blocks_pack(&NAME##_KIND, m, from, group);                                                      \
    }                                                                                                          \
    static void name##_unpack_row(const Matrix *m, long row, float *to) {                                      \
        blocks_unpack_row(&NAME##_KIND, m, row, to);                                                           \
    }                                                                                                          \
    static void name##_multiply(const GroupProduct *p) { blocks_multiply(&NAME##_KIND, p); }                   \
    static const Format NAME = {.input_step = QBLOCK, .streamed_rows = 8, .group_bytes = name##_group_bytes,   \
                                .pack = name##_pack, .unpack_row = name##_unpack_row,                          \
                                .prepared_bytes = blocks_prepared_bytes, .prepare = blocks_prepare,            \
                                .multiply = name##_multiply};

BLOCK_FORMAT(Q4_0, q4_0, {32, 18, 4, 8, HALF, NULL, read_q4_0})
BLOCK_FORMAT(Q4_1, q4_1, {32, 20, 4, 0, HALF_MIN, NULL, read_q4_1})
BLOCK_FORMAT(Q5_0, q5_0, {32, 22, 5, 16, HALF, NULL, read_q5_0})
BLOCK_FORMAT(Q5_1, q5_1, {32, 24, 5, 0, HALF_MIN, NULL, read_q5_1})
BLOCK_FORMAT(Q8_0, q8_0, {32, 34, 8, 0, HALF, NULL, read_q8_0})
BLOCK_FORMAT(Q4_K, q4_k, {256, 144, 4, 0, SUPER_MIN, NULL, read_q4_k})
BLOCK_FORMAT(Q5_K, q5_k, {256, 176, 5, 0, SUPER_MIN, NULL, read_q5_k})
BLOCK_FORMAT(Q6_K, q6_k, {256, 210, 6, 32, SUPER_16, NULL, read_q6_k})
BLOCK_FORMAT(IQ4_NL, iq4_nl, {32, 18, 4, 0, HALF, IQ4_VALUES, read_q4_0})
BLOCK_FORMAT(IQ4_XS, iq4_xs, {256, 136, 4, 0, SUPER, IQ4_VALUES, read_iq4_xs})
BLOCK_FORMAT(MXFP4, mxfp4, {32, 17, 4, 0, EXPONENT, FP4_VALUES, read_mxfp4})

#endif
