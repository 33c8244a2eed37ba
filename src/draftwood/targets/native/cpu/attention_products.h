/* The two products of attention: scores, which are queries times keys, and weighted sums of values.
 *
 * A score is one chain of multiply-adds over the dimensions for AVX-512, and one per lane otherwise; a sum is one chain
 * over the positions. A chain does not depend on what else is computed, so neither do its bits. */
#ifndef DRAFTWOOD_ATTENTION_PRODUCTS_H
#define DRAFTWOOD_ATTENTION_PRODUCTS_H

#include "attention_work.h"

/* Some positions of a context, at most BLOCK. */
typedef struct {
    const Context *context;
    long first, count;
    long room; /* slots from the base of the segment to the end of the cache */
} Span;

INLINE int is_contiguous(const Span *span) { return span->first + span->count <= span->context->contiguous; }

#if VW == 16
/* ---- AVX-512: rows times lines, with all sums in registers ---- */

#define MIX_ROWS 6
#define MIX_VECTORS 4
#define MIX_COLUMNS (MIX_VECTORS * VW)

/* out[rows][vectors] = sums over k, in ascending order, of x[row][k] times line k. Meanwhile `ahead` is fetched, two
 * cache lines per step of `ahead_bytes`. */
INLINE void mix(const int rows, const int vectors, const int type, const float *x, long x_stride, const char *line,
                long line_bytes, long count, float *out, long out_stride, const char *ahead, long ahead_bytes) {
    vf sum[MIX_ROWS][MIX_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = splat(0.0f);
    for (long k = 0; k < count; k++, line += line_bytes, ahead += ahead_bytes) {
        vf own[MIX_VECTORS];
        UNROLL for (int i = 0; i < vectors; i += 2) {
            if (type == BFLOAT16) {
                load_bf16_pair((const bf16 *)line + i * VW, own + i, own + i + 1);
            } else {
                own[i] = load((const float *)line + i * VW);
                own[i + 1] = load((const float *)line + i * VW + VW);
            }
        }
        __builtin_prefetch(ahead, 0, 3);
        __builtin_prefetch(ahead + 64, 0, 3);
        UNROLL for (int r = 0; r < rows; r++) {
            const vf factor = splat(x[r * x_stride + k]);
            UNROLL for (int i = 0; i < vectors; i++) FMA_INTO(sum[r][i], factor, own[i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) store(out + r * out_stride + i * VW, sum[r][i]);
}

typedef void Mix(const float *x, long x_stride, const char *line, long line_bytes, long count, float *out,
                 long out_stride, const char *ahead, long ahead_bytes);

#define MIX(name, rows, vectors, type)                                                                                 \
    static void name##_##rows##_##vectors(const float *x, long x_stride, const char *line, long line_bytes,            \
                                          long count, float *out, long out_stride, const char *ahead,                  \
                                          long ahead_bytes) {                                                          \
        mix(rows, vectors, type, x, x_stride, line, line_bytes, count, out, out_stride, ahead, ahead_bytes);           \
    }
#define MIXES(rows)                                                                                                    \
    MIX(mix_f32, rows, 2, FLOAT32) MIX(mix_f32, rows, 4, FLOAT32)                                                      \
    MIX(mix_bf16, rows, 2, BFLOAT16) MIX(mix_bf16, rows, 4, BFLOAT16)
MIXES(1) MIXES(2) MIXES(3) MIXES(4) MIXES(5) MIXES(6)
#define MIX_SIZES(name, vectors)                                                                                       \
    {name##_1_##vectors, name##_2_##vectors, name##_3_##vectors, name##_4_##vectors, name##_5_##vectors,               \
     name##_6_##vectors}
static Mix *const mixes[2][2][MIX_ROWS] = {{MIX_SIZES(mix_f32, 2), MIX_SIZES(mix_f32, 4)},
                                           {MIX_SIZES(mix_bf16, 2), MIX_SIZES(mix_bf16, 4)}};

/* The same for any number of rows and pairs of vectors. `ahead`: as for `mix`, or NULL. */
static void mix_all(long rows, long vectors, long type, const float *x, long x_stride, const char *lines,
                    long line_bytes, long count, float *out, long out_stride, const char *ahead, long ahead_bytes) {
    const long bytes = type == BFLOAT16 ? 2 : 4;
    for (long i = 0; i < vectors; i += MIX_VECTORS) {
        for (long row = 0, size; row < rows; row += size) {
            const long left = rows - row, blocks = (left + MIX_ROWS - 1) / MIX_ROWS, column = i * VW;
            const int fetches = ahead && row == 0;
            size = (left + blocks - 1) / blocks; /* nearly equal sizes */
            mixes[type][vectors - i > 2][size - 1](x + row * x_stride, x_stride, lines + column * bytes, line_bytes,
                                                   count, out + row * out_stride + column, out_stride,
                                                   fetches ? ahead + column * bytes : lines, fetches ? ahead_bytes : 0);
        }
    }
}

/* 16 keys side by side as columns[padded head][BLOCK] in the workspace's order of dimensions. */
INLINE void take_columns(const char *keys, const long type, long row_bytes, float *columns) {
    for (long at = 0; at < row_bytes; at += 64) {
        vi v[16];
        UNROLL for (int i = 0; i < 16; i++) v[i] = *(const vi_any *)(keys + i * row_bytes + at);
        transpose_16(v);
        UNROLL for (int i = 0; i < 16; i++) {
            float *to = columns + (type == BFLOAT16 ? at / 2 + i : at / 4 + i) * BLOCK;
            store(to, (vf)(type == BFLOAT16 ? v[i] << 16 : v[i]));
            if (type == BFLOAT16) store(to + VW * BLOCK, (vf)(v[i] & (int32_t)0xffff0000));
        }
    }
}

/* out[queries][BLOCK]: scores of a span, and anything after it up to a multiple of PANEL. `ahead`: keys that are needed
 * next, or NULL. */
static void score_span(const Model *m, const Workspace *w, long queries, const float *query, const char *keys,
                       const Span *span, const char *ahead, float *out) {
    const long head = padded_head(m), row_bytes = m->head_dim * cache_item_bytes(m);
    for (long j = 0; j < round_up(span->count, PANEL); j += VW) {
        const Span few = {span->context, span->first + j, min_long(VW, span->count - j), span->room};
        if (few.count == VW && is_contiguous(&few) && m->head_dim % PANEL == 0) {
            const char *from = keys + few.first * row_bytes;
            if (m->cache_type == BFLOAT16) take_columns(from, BFLOAT16, row_bytes, w->columns + j);
            else take_columns(from, FLOAT32, row_bytes, w->columns + j);
        } else {
            if (few.count > 0) gather_rows(m, keys, span->context, few.first, few.count, w->keys);
            take_columns((const char *)w->keys, FLOAT32, head * (long)sizeof(float), w->columns + j);
        }
    }
    mix_all(queries, round_up(span->count, PANEL) / VW, FLOAT32, query, head, (const char *)w->columns,
            BLOCK * (long)sizeof(float), head, out, BLOCK, ahead, BLOCK * cache_item_bytes(m));
}

/* out[queries][padded head]: values of a contiguous span, weighted. `ahead`: values that are needed next, or NULL. */
static void weigh_span(const Model *m, const Workspace *w, long queries, const float *weights, const char *values,
                       const Span *span, const char *ahead, float *out, long stride) {
    const long head = padded_head(m), row_bytes = m->head_dim * cache_item_bytes(m);
    if (m->head_dim % PANEL == 0) {
        mix_all(queries, head / VW, m->cache_type, weights, BLOCK, values + span->first * row_bytes, row_bytes,
                span->count, out, stride, ahead, row_bytes);
    } else {
        gather_rows(m, values, span->context, span->first, span->count, w->values);
        mix_all(queries, head / VW, FLOAT32, weights, BLOCK, (const char *)w->values, head * (long)sizeof(float),
                span->count, out, stride, NULL, 0);
    }
}
#else
/* ---- narrower vectors ---- */

/* Keys or values, [count][padded head] of `type`. */
typedef struct {
    const char *rows;
    long type;
} Lines;

/* A full block is read in place: expanding it only pays off for many queries. */
static Lines lines_in(const Model *m, long queries, const char *cache, const Span *span, float *workspace) {
    const long panels = m->head_dim / PANEL, end = span->first + span->count;
    const int few = queries <= MAX_ROWS && panels % WIDE_PANELS(queries) == 0;
    if (span->count == BLOCK && is_contiguous(span) && m->head_dim % PANEL == 0 && (m->cache_type == FLOAT32 || few) &&
        end < span->room) /* products load one row ahead */
        return (Lines){cache + span->first * m->head_dim * cache_item_bytes(m), m->cache_type};
    gather_rows(m, cache, span->context, span->first, span->count, workspace);
    return (Lines){(const char *)workspace, FLOAT32};
}

/* Sums the lanes of four vectors, each in the order of sum_lanes. */
INLINE void sum_lanes_4(const vf v[4], float *to) {
#if VW == 4 && defined(__aarch64__)
    float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    vst1q_f32(to, vpaddq_f32(low, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
#else
    for (int i = 0; i < 4; i++) to[i] = sum_lanes(v[i]);
#endif
}

/* Scores of `queries` (at most 4) over `count` keys, a multiple of 4. */
INLINE void score(const int queries, const int type, const float *query, const char *keys, long head, long count,
                  float *out) {
    for (long j = 0; j < count; j += 4) {
        vf acc[4][4];
        UNROLL for (int q = 0; q < queries; q++)
            UNROLL for (int i = 0; i < 4; i++) acc[q][i] = splat(0.0f);
        for (long d = 0; d < head; d += PANEL) {
            vf low[4], high[4];
            UNROLL for (int i = 0; i < 4; i++) {
                if (type == BFLOAT16) {
                    load_bf16_pair((const bf16 *)keys + (j + i) * head + d, &low[i], &high[i]);
                } else {
                    low[i] = load((const float *)keys + (j + i) * head + d);
                    high[i] = load((const float *)keys + (j + i) * head + d + VW);
                }
            }
            UNROLL for (int q = 0; q < queries; q++) {
                const vf x = load(query + q * head + d);
                UNROLL for (int i = 0; i < 4; i++) FMA_INTO(acc[q][i], x, low[i]);
            }
            UNROLL for (int q = 0; q < queries; q++) {
                const vf x = load(query + q * head + d + VW);
                UNROLL for (int i = 0; i < 4; i++) FMA_INTO(acc[q][i], x, high[i]);
            }
        }
        UNROLL for (int q = 0; q < queries; q++) sum_lanes_4(acc[q], out + q * BLOCK + j);
    }
}

#define SCORE(queries)                                                                                            \
    case queries:                                                                                                 \
        if (keys.type == BFLOAT16) score(queries, BFLOAT16, x, keys.rows, head, count, to);                     \
        else score(queries, FLOAT32, x, keys.rows, head, count, to);                                             \
        break;

/* out[queries][BLOCK]: scores of a span, and anything after it up to a multiple of 4. `ahead`: keys that are needed
 * next, or NULL. */
static void score_span(const Model *m, const Workspace *w, long queries, const float *query, const char *cache,
                       const Span *span, const char *ahead, float *out) {
    const long head = padded_head(m), count = round_up(span->count, 4);
    if (ahead) prefetch_block(m, ahead);
    const Lines keys = lines_in(m, queries, cache, span, w->keys);
    for (long q = 0; q < queries; q += 4) {
        const float *x = query + q * head;
        float *to = out + q * BLOCK;
        switch (min_long(4, queries - q)) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) }
    }
}

/* out[queries][padded head]: values of a span, weighted. `ahead`: values that are needed next, or NULL. */
static void weigh_span(const Model *m, const Workspace *w, long queries, const float *weights, const char *cache,
                       const Span *span, const char *ahead, float *out, long stride) {
    const long head = padded_head(m), count = round_up(span->count, 4);
    if (ahead) prefetch_block(m, ahead);
    const Lines values = lines_in(m, queries, cache, span, w->values);
    if (values.type == FLOAT32) {
        multiply_f32(weights, BLOCK, queries, values.rows, head * sizeof(float), head / PANEL, count, out, stride,
                     NULL);
        return;
    }
    const long wide = WIDE_PANELS(queries), row_bytes = head * sizeof(bf16), panel_bytes = PANEL * sizeof(bf16);
    for (long p = 0; p < head / PANEL; p += wide) {
        const char *at = values.rows + p * panel_bytes;
        bf16_wide[queries - 1](weights, BLOCK, at, row_bytes, panel_bytes, count, out + p * PANEL, stride,
                               at + BLOCK * row_bytes, NULL);
    }
}
#endif

/* ---- AMX tiles ---- */

/* One pass scores 16 queries over a block. */
static void score_in_tiles(long queries, const bf16 *query, const Tile *tile, long head, float *out) {
    for (long q = 0; q < queries; q += TILE_ROWS)
        amx_multiply(query + q * head, head, (const bf16 *)tile->keys, head, tile_columns(tile), out + q * BLOCK, BLOCK,
                     NULL);
}

/* The same with AMX tiles, 16 queries and 64 dimensions at a time. */
static void weigh_in_tiles(const Workspace *w, long queries, const Tile *tile, long head, float *out, long stride) {
    const long inputs = tile_inputs(tile);
    for (long q = 0; q < queries; q++) narrow_row(w->weights + q * BLOCK, inputs, inputs, w->narrow_weights + q * BLOCK);
    for (long q = 0; q < queries; q += TILE_ROWS) {
        for (long d = 0; d < head; d += WIDE_COLUMNS) {
            amx_multiply(w->narrow_weights + q * BLOCK, BLOCK, (const bf16 *)tile->values + d * BLOCK, inputs,
                         WIDE_COLUMNS / TILE_COLUMNS, w->mixed, WIDE_COLUMNS, NULL);
            for (long r = 0; r < min_long(TILE_ROWS, queries - q); r++)
                memcpy(out + (q + r) * stride + d, w->mixed + r * WIDE_COLUMNS, WIDE_COLUMNS * sizeof(float));
        }
    }
}

#endif
