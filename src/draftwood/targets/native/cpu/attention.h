/* Attention of tree nodes over their own contexts.
 *
 * The context of a node is a list of positions j = 0, 1, ...: the prefix, its ancestors, itself. It is split into
 * blocks of BLOCK positions by j alone. Each block gives a partial result (maximum, sum, weighted values). Those of a
 * node are merged in ascending order. The result does not depend on slots or on other nodes.
 *
 * A *unit* is work that shares keys: one segment, one key head, some neighbouring rows with all query heads of the key
 * head. Positions that lie side by side in the cache are scored and weighed for all rows of a unit at once; the *tail* of
 * a node, its ancestors elsewhere in the cache, follows for itself: the chain of sums goes on where it ended. If there are few units, they are split by blocks, and the partial results are merged in a separate phase. */
#ifndef DRAFTWOOD_ATTENTION_H
#define DRAFTWOOD_ATTENTION_H

#include <math.h>

#include "matmul.h"
#include "model.h"

#define BLOCK 64
#define UNIT_QUERIES 48 /* query vectors of a unit, unless one row has more */
#define SPLIT_BYTES (8L << 20) /* maximum size of the partial results */

typedef struct {
    int64_t length; /* of the context, the node included */
    int64_t contiguous; /* leading positions j whose slot is base + j */
    const int32_t *scattered; /* slots of the other positions, relative to base */
} Context;

typedef struct {
    long segment, row, rows; /* rows of the packed batch */
    const Context *context; /* [rows] */
    long first_block, end_block;
    long partial; /* index of its first partial result */
} Unit;

typedef struct {
    const Model *model;
    const Segment *segment;
    const Unit *unit; /* each entry stands for kv_heads units */
    const char *keys, *values; /* of this layer */
    const float *qkv;
    long qkv_stride;
    float *out; /* [rows][heads * head_dim] */
    long out_stride;
    float *scratch; /* per thread */
    long scratch_stride;
    float *partials; /* NULL: units are not split */
    long split; /* items per unit */
    long units;
} Attention;

INLINE long padded_head(const Model *m) { return round_up(m->head_dim, PANEL); }
INLINE long unit_rows(const Model *m) { return max_long(1, UNIT_QUERIES / (m->heads / m->kv_heads)); }
INLINE long unit_queries(const Model *m) { return unit_rows(m) * (m->heads / m->kv_heads); }
INLINE long partial_size(const Model *m) { return padded_head(m) + ALIGN_FLOATS; } /* values, then maximum and sum */

/* Whether attention uses AMX tiles. */
INLINE int attends_in_tiles(const Model *m) {
    return m->cache_type == BFLOAT16 && amx_granted() && m->head_dim % WIDE_COLUMNS == 0;
}

/* Order of dimensions in the workspace: as in the cache, or for bfloat16 the even ones of a panel first. */
INLINE long dim_order(const Model *m) { return attends_in_tiles(m) ? FLOAT32 : m->cache_type; }

/* Workspace of a thread. With tiles, keys and values are right-hand sides, queries and narrow weights are bfloat16, and
 * there is space for a whole tile of queries after the last one. */
typedef struct {
    float *keys; /* [BLOCK][padded head] */
    float *values; /* [BLOCK][padded head] */
    float *queries; /* [queries][padded head], scaled */
    float *weights; /* [queries][BLOCK] */
    float *tail_weights; /* [queries][BLOCK] */
    float *columns; /* [padded head][COLUMNS]: keys, transposed */
    float *partial; /* [queries][partial size] */
    float *merged; /* [queries][partial size] */
    float *mixed; /* [TILE_ROWS][WIDE_COLUMNS], with tiles; also a query before it is rounded to bfloat16 */
    bf16 *narrow_weights; /* [queries][BLOCK], with tiles */
} Workspace;

INLINE long workspace_queries(const Model *m) { return unit_queries(m) + (attends_in_tiles(m) ? TILE_ROWS : 0); }

INLINE long attention_scratch(const Model *m) {
    const long tiles = attends_in_tiles(m) ? workspace_queries(m) * BLOCK + TILE_ROWS * WIDE_COLUMNS : 0;
    const long per_query = padded_head(m) + 2 * BLOCK + 2 * partial_size(m);
    return 3 * BLOCK * padded_head(m) + workspace_queries(m) * per_query + tiles;
}

INLINE Workspace workspace(const Attention *job, int thread) {
    const Model *m = job->model;
    const long head = padded_head(m), queries = workspace_queries(m);
    Workspace w;
    w.keys = job->scratch + thread * job->scratch_stride;
    w.values = w.keys + BLOCK * head;
    w.queries = w.values + BLOCK * head;
    w.weights = w.queries + queries * head;
    w.tail_weights = w.weights + queries * BLOCK;
    w.columns = w.tail_weights + queries * BLOCK;
    w.partial = w.columns + BLOCK * head;
    w.merged = w.partial + queries * partial_size(m);
    w.mixed = w.merged + queries * partial_size(m);
    w.narrow_weights = (bf16 *)(w.mixed + TILE_ROWS * WIDE_COLUMNS);
    return w;
}

/* Keys and values of one block, in the workspace or in the cache. */
typedef struct {
    const char *keys, *values; /* [count][padded head] of `type`, or right-hand sides of amx.h */
    long type, count;
} Tile;

/* Index of dimension d of a head in the workspace. */
INLINE long place_of_dim(long d, long type) {
    if (type == FLOAT32) return d;
    return d / PANEL * PANEL + (d % PANEL) / 2 + (d % 2 ? VW : 0);
}

/* Expands a cached row to float32, padded with zeros. */
INLINE void expand_row(const char *from, long head_dim, long type, float *to) {
    long d = 0;
    for (; d + PANEL <= head_dim; d += PANEL, to += PANEL) {
        vf low, high;
        if (type == BFLOAT16) {
            load_bf16_pair((const bf16 *)from + d, &low, &high);
        } else {
            low = load((const float *)from + d);
            high = load((const float *)from + d + VW);
        }
        store(to, low);
        store(to + VW, high);
    }
    if (d == head_dim) return;
    store(to, splat(0.0f));
    store(to + VW, splat(0.0f));
    for (; d < head_dim; d++)
        to[place_of_dim(d, type) % PANEL] =
            type == BFLOAT16 ? from_bf16(((const bf16 *)from)[d]) : ((const float *)from)[d];
}

INLINE long slot_at(const Context *context, long j) {
    return j < context->contiguous ? j : context->scattered[j - context->contiguous];
}

/* Packs positions first .. first + count - 1 of a context as right-hand sides: keys as columns, values as inputs. */
static Tile pack_tiles(const Attention *job, const Workspace *w, const char *keys, const char *values,
                       const Context *context, long first, long count) {
    const long dim = job->model->head_dim, side = BLOCK * WIDE_COLUMNS;
    const bf16 *rows[BLOCK];
    for (long i = 0; i < BLOCK; i++)
        rows[i] = i < count ? (const bf16 *)keys + slot_at(context, first + i) * dim : NULL;
    for (long i = 0; i < BLOCK; i += TILE_COLUMNS)
        amx_pack_keys(rows + i, dim, (bf16 *)w->keys + i / TILE_COLUMNS * TILE_NUMBERS);
    for (long i = 0; i < BLOCK; i++)
        rows[i] = i < count ? (const bf16 *)values + slot_at(context, first + i) * dim : NULL;
    for (long i = 0; i < BLOCK; i += 2)
        amx_pack_values(rows[i], rows[i + 1], dim, side, (bf16 *)w->values + place_in_tiles(i, 0));
    return (Tile){(const char *)w->keys, (const char *)w->values, BFLOAT16, count};
}

/* Gathers positions first .. first + count - 1 of a context, in keys or values, zero-padded to a multiple of 4. */
static void gather_rows(const Model *m, const char *cache, const Context *context, long first, long count, float *to) {
    const long head = padded_head(m), bytes = m->head_dim * cache_item_bytes(m);
    for (long i = 0; i < count; i++) {
        const char *from = cache + slot_at(context, first + i) * bytes;
        if (m->cache_type == BFLOAT16) expand_row(from, m->head_dim, BFLOAT16, to + i * head);
        else expand_row(from, m->head_dim, FLOAT32, to + i * head);
    }
    memset(to + count * head, 0, (size_t)((round_up(count, 4) - count) * head) * sizeof(float));
}

/* Whether a full contiguous block can be read in place: expanding it only pays off for many queries. */
INLINE int in_place(const Attention *job, const Unit *unit, long block) {
    const Model *m = job->model;
    const long queries = unit->rows * (m->heads / m->kv_heads), panels = m->head_dim / PANEL;
    const long block_end = job->segment[unit->segment].base + (block + 1) * BLOCK; /* products load one row ahead */
    if (m->head_dim % PANEL || block_end >= m->slots) return 0;
    return m->cache_type == FLOAT32 || (queries <= MAX_ROWS && panels % WIDE_PANELS(queries) == 0);
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
        if (tile->type == BFLOAT16) score(queries, BFLOAT16, x, tile->keys, head, count, to);                     \
        else score(queries, FLOAT32, x, tile->keys, head, count, to);                                             \
        break;

#define TRANSPOSED_QUERIES 9 /* from this many on keys are transposed to score them */
#define COLUMNS 32 /* keys transposed at a time: they stay in the first-level cache */

INLINE int scores_columns(const Model *m, long queries) {
    return VW == 16 && queries >= TRANSPOSED_QUERIES && (m->head_dim == 64 || m->head_dim == 128);
}

#if VW == 16
/* 16 keys of the cache, the last one again after `count`, as columns[padded head][COLUMNS] in the workspace's order. */
INLINE void take_columns(const char *keys, const long type, long row_bytes, long count, float *columns) {
    for (long at = 0; at < row_bytes; at += 64) {
        vi v[16];
        UNROLL for (int i = 0; i < 16; i++) v[i] = *(const vi_any *)(keys + min_long(i, count - 1) * row_bytes + at);
        transpose_16(v);
        UNROLL for (int i = 0; i < 16; i++) {
            float *to = columns + (type == BFLOAT16 ? at / 2 + i : at / 4 + i) * COLUMNS;
            store(to, (vf)(type == BFLOAT16 ? v[i] << 16 : v[i]));
            if (type == BFLOAT16) store(to + VW * COLUMNS, (vf)(v[i] & (int32_t)0xffff0000));
        }
    }
}

/* Scores of one or two queries over 32 keys in columns: per lane of `score` a chain, then lane by lane what sum_lanes
 * adds. So both give the same bits, but here nothing is summed across lanes. */
INLINE void score_columns(const int queries, const float *query, const float *columns, const long head, float *out) {
    vf pending[5][2][2]; /* sums of 1, 2, 4, 8 and 16 lanes that wait for their partner */
    UNROLL for (int i = 0; i < VW; i++) {
        const int lane = (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3;
        vf sum[2][2];
        UNROLL for (int q = 0; q < queries; q++) sum[q][0] = sum[q][1] = splat(0.0f);
        UNROLL for (long d = lane; d < head; d += VW) {
            const vf first = load(columns + d * COLUMNS), second = load(columns + d * COLUMNS + VW);
            UNROLL for (int q = 0; q < queries; q++) {
                const vf x = splat(query[q * head + d]);
                FMA_INTO(sum[q][0], x, first);
                FMA_INTO(sum[q][1], x, second);
            }
        }
        int level = 0; /* sums are joined as digits carry in a binary counter */
        UNROLL for (int digit = 0; digit < 4; digit++) {
            if (level < digit || !(i >> digit & 1)) continue;
            level = digit + 1;
            UNROLL for (int q = 0; q < queries; q++)
                UNROLL for (int h = 0; h < 2; h++) sum[q][h] = pending[digit][q][h] + sum[q][h];
        }
        UNROLL for (int q = 0; q < queries; q++) /* one lane after the other: all at once would not fit in registers */
            __asm__ volatile("" : "+v"(sum[q][0]), "+v"(sum[q][1]));
        UNROLL for (int q = 0; q < queries; q++)
            UNROLL for (int h = 0; h < 2; h++) pending[level][q][h] = sum[q][h];
    }
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int h = 0; h < 2; h++) store(out + q * BLOCK + h * VW, pending[4][q][h]);
}

INLINE void score_pairs(long queries, const float *query, const float *columns, const long head, float *out) {
    long q = 0;
    for (; q + 2 <= queries; q += 2) score_columns(2, query + q * head, columns, head, out + q * BLOCK);
    if (q < queries) score_columns(1, query + q * head, columns, head, out + q * BLOCK);
}

/* Scores over keys that lie side by side in the cache. */
static void score_transposed(const Model *m, long queries, const float *query, const char *keys, long count,
                             float *columns, float *out) {
    const long row_bytes = m->head_dim * cache_item_bytes(m);
    for (long j = 0; j < count; j += COLUMNS, out += COLUMNS) {
        for (long i = 0; i < COLUMNS && j + i < count; i += VW) {
            const char *from = keys + (j + i) * row_bytes;
            if (m->cache_type == BFLOAT16) take_columns(from, BFLOAT16, row_bytes, count - j - i, columns + i);
            else take_columns(from, FLOAT32, row_bytes, count - j - i, columns + i);
        }
        if (m->head_dim == 64) score_pairs(queries, query, columns, 64, out);
        else score_pairs(queries, query, columns, 128, out);
    }
}
#else
static void score_transposed(const Model *m, long queries, const float *query, const char *keys, long count,
                             float *columns, float *out) {
    (void)m, (void)queries, (void)query, (void)keys, (void)count, (void)columns, (void)out;
}
#endif

static void score_all(long queries, const float *query, const Tile *tile, long head, long count, float *out) {
    for (long q = 0; q < queries; q += 4) {
        const float *x = query + q * head;
        float *to = out + q * BLOCK;
        switch (min_long(4, queries - q)) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) }
    }
}

/* One pass scores 16 queries over a whole block. */
static void score_in_tiles(long queries, const bf16 *query, const Tile *tile, long head, float *out) {
    for (long q = 0; q < queries; q += TILE_ROWS)
        amx_multiply(query + q * head, head, (const bf16 *)tile->keys, head, out + q * BLOCK, BLOCK, NULL);
}

/* Weighted sum of the values of a tile: out[queries][padded head]. */
static void weigh(long queries, const float *weights, const Tile *tile, long head, long count, float *out,
                  long stride) {
    if (tile->type == FLOAT32) {
        multiply_f32(weights, BLOCK, queries, tile->values, head * sizeof(float), head / PANEL, count, out, stride,
                     NULL);
        return;
    }
    const long wide = WIDE_PANELS(queries), row_bytes = head * sizeof(bf16), panel_bytes = PANEL * sizeof(bf16);
    for (long p = 0; p < head / PANEL; p += wide) {
        const char *at = tile->values + p * panel_bytes;
        bf16_wide[queries - 1](weights, BLOCK, at, row_bytes, panel_bytes, count, out + p * PANEL, stride,
                               at + BLOCK * row_bytes, NULL);
    }
}

/* The same with AMX tiles, 16 queries and 64 dimensions at a time. */
static void weigh_in_tiles(const Workspace *w, long queries, const Tile *tile, long head, float *out, long stride) {
    for (long q = 0; q < queries; q++) narrow_row(w->weights + q * BLOCK, BLOCK, BLOCK, w->narrow_weights + q * BLOCK);
    for (long q = 0; q < queries; q += TILE_ROWS) {
        for (long d = 0; d < head; d += WIDE_COLUMNS) {
            amx_multiply(w->narrow_weights + q * BLOCK, BLOCK, (const bf16 *)tile->values + d * BLOCK, BLOCK, w->mixed,
                         WIDE_COLUMNS, NULL);
            for (long r = 0; r < min_long(TILE_ROWS, queries - q); r++)
                memcpy(out + (q + r) * stride + d, w->mixed + r * WIDE_COLUMNS, WIDE_COLUMNS * sizeof(float));
        }
    }
}

/* Softmax of the scores of some rows of the unit in place, not normalised, over the first `count` positions of a block:
 * positions that a row does not see get 0. Maxima first and then exponentials, of all queries: neighbouring chains of
 * operations overlap. */
static void exponentiate_rows(const Attention *job, const Unit *unit, long row, long rows, long block, long count,
                              float *scores, float *partial) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), size = partial_size(m), first = block * BLOCK;
    const long padded = round_up(count, VW);
    const vf nothing = splat(-INFINITY);
    partial += row * group * size + head; /* maximum and sum */
    for (long q = 0; q < rows * group; q++) {
        const long length = unit->context[row + q / group].length;
        const long low = m->window ? max_long(0, length - m->window - first) : 0;
        float *own = scores + q * BLOCK;
        for (long j = 0; j < min_long(low, count); j++) own[j] = -INFINITY;
        for (long j = max_long(min_long(count, length - first), 0); j < padded; j++) own[j] = -INFINITY;
        vf top = nothing;
        for (long j = 0; j < padded; j += VW) top = max_vec(top, load(own + j));
        partial[q * size] = max_lanes(top);
    }
    for (long q = 0; q < rows * group; q++) {
        float *own = scores + q * BLOCK;
        const vf shift = splat(partial[q * size]);
        vf total = splat(0.0f);
        for (long j = 0; j < padded; j += VW) {
            const vf s = load(own + j), e = zero_where_equal(s, nothing, exp_vec(s - shift));
            store(own + j, e);
            total += e;
        }
        partial[q * size + 1] = sum_lanes(total);
    }
}

static void prefetch_block(const Model *m, const char *keys, const char *values, long block) {
    const long bytes = BLOCK * m->head_dim * cache_item_bytes(m);
    for (long line = 0; line < bytes; line += 64) {
        __builtin_prefetch(keys + block * bytes + line, 0, 2);
        __builtin_prefetch(values + block * bytes + line, 0, 2);
    }
}

/* ---- a block with vectors ---- */

/* Positions of a row in a block: those side by side in the cache, and all of them. The others are its tail. */
typedef struct {
    long contiguous, count;
} Extent;

INLINE Extent extent_of(const Context *context, long first) {
    const long count = max_long(0, min_long(first + BLOCK, context->length) - first);
    return (Extent){max_long(0, min_long(count, context->contiguous - first)), count};
}

static void score_tail(const Attention *job, const Workspace *w, const Unit *unit, const char *keys, long row,
                       long block, Extent extent) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), count = extent.count - extent.contiguous;
    const float *query = w->queries + row * group * head;
    float *scores = w->weights + row * group * BLOCK + extent.contiguous;
    gather_rows(m, keys, unit->context + row, block * BLOCK + extent.contiguous, count, w->keys);
    for (long q = 0; q < group; q += 4) {
        const Tile tile = {(const char *)w->keys, NULL, FLOAT32, count};
        float few[4 * BLOCK]; /* padded scores would reach into the next query's */
        const long queries = min_long(4, group - q);
        score_all(queries, query + q * head, &tile, head, round_up(count, 4), few);
        for (long i = 0; i < queries; i++)
            memcpy(scores + (q + i) * BLOCK, few + i * BLOCK, (size_t)count * sizeof(float));
    }
}

/* Moves the weights of a tail out of the way: the shared positions are weighed for all rows at once. */
static void set_tail_aside(const Workspace *w, long group, long row, Extent extent) {
    const size_t bytes = (size_t)(extent.count - extent.contiguous) * sizeof(float);
    for (long q = row * group; q < (row + 1) * group; q++) {
        memcpy(w->tail_weights + q * BLOCK, w->weights + q * BLOCK + extent.contiguous, bytes);
        memset(w->weights + q * BLOCK + extent.contiguous, 0, bytes);
    }
}

static void weigh_tail(const Attention *job, const Workspace *w, const Unit *unit, const char *values, long row,
                       long block, Extent extent, float *partial) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), count = extent.count - extent.contiguous;
    gather_rows(m, values, unit->context + row, block * BLOCK + extent.contiguous, count, w->values);
    for (long q = row * group; q < (row + 1) * group; q++) {
        const float *weights = w->tail_weights + q * BLOCK;
        float *out = partial + q * partial_size(m);
        for (long d = 0; d < head; d += PANEL) {
            vf low = load(out + d), high = load(out + d + VW);
            for (long i = 0; i < count; i++) {
                FMA_INTO(low, splat(weights[i]), load(w->values + i * head + d));
                FMA_INTO(high, splat(weights[i]), load(w->values + i * head + d + VW));
            }
            store(out + d, low);
            store(out + d + VW, high);
        }
    }
}

/* One block for all rows of a unit. */
static void attend_unit_block(const Attention *job, const Workspace *w, const Unit *unit, const char *keys,
                              const char *values, long block, float *partial) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), size = partial_size(m), first = block * BLOCK;
    const long queries = unit->rows * group;
    const Context *longest = unit->context;
    long count = 0, tails = 0;
    if (block + 1 < unit->end_block) prefetch_block(m, keys, values, block + 1);
    for (long r = 0; r < unit->rows; r++) {
        const Extent extent = extent_of(unit->context + r, first);
        if (extent.contiguous > extent_of(longest, first).contiguous) longest = unit->context + r;
        count = max_long(count, extent.count);
        tails += extent.contiguous < extent.count;
    }
    const long shared = extent_of(longest, first).contiguous;
    const long padded = round_up(shared, 4), row_bytes = m->head_dim * cache_item_bytes(m);
    const char *own_keys = keys + first * row_bytes, *own_values = values + first * row_bytes;
    Tile tile = {(const char *)w->keys, (const char *)w->values, FLOAT32, shared};
    if (shared == BLOCK && in_place(job, unit, block)) tile = (Tile){own_keys, own_values, m->cache_type, BLOCK};
    else gather_rows(m, values, longest, first, shared, w->values);
    if (scores_columns(m, queries)) {
        score_transposed(m, queries, w->queries, own_keys, shared, w->columns, w->weights);
    } else {
        if (tile.keys == (const char *)w->keys) gather_rows(m, keys, longest, first, shared, w->keys);
        score_all(queries, w->queries, &tile, head, padded, w->weights);
    }
    for (long r = 0; r < unit->rows && tails; r++) {
        const Extent extent = extent_of(unit->context + r, first);
        if (extent.contiguous < extent.count) score_tail(job, w, unit, keys, r, block, extent);
    }
    exponentiate_rows(job, unit, 0, unit->rows, block, max_long(count, padded), w->weights, partial);
    for (long r = 0; r < unit->rows && tails; r++)
        set_tail_aside(w, group, r, extent_of(unit->context + r, first));
    if (shared) {
        weigh(queries, w->weights, &tile, head, padded, partial, size);
    } else {
        for (long q = 0; q < queries; q++) memset(partial + q * size, 0, (size_t)head * sizeof(float));
    }
    for (long r = 0; r < unit->rows && tails; r++) {
        const Extent extent = extent_of(unit->context + r, first);
        if (extent.contiguous < extent.count) weigh_tail(job, w, unit, values, r, block, extent, partial);
    }
}

/* ---- a block with AMX tiles ---- */

/* Computes the partial results of some rows of the unit for one block. */
static void attend_tile(const Attention *job, const Workspace *w, const Unit *unit, long row, long rows, long block,
                        const Tile *tile, float *partial) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), size = partial_size(m);
    const long query = row * group, queries = rows * group;
    score_in_tiles(queries, (const bf16 *)w->queries + query * head, tile, head, w->weights);
    exponentiate_rows(job, unit, row, rows, block, BLOCK, w->weights, partial);
    weigh_in_tiles(w, queries, tile, head, partial + query * size, size);
}

/* One block for all rows of a unit: rows whose block is contiguous share its keys, the others gather their own, because
 * tiles sum in an order of their own. */
static void attend_unit_tiles(const Attention *job, const Workspace *w, const Unit *unit, const char *keys,
                              const char *values, long block, float *partial) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), size = partial_size(m), first = block * BLOCK;
    long shared_end = 0;
    const Context *longest = NULL;
    if (block + 1 < unit->end_block) prefetch_block(m, keys, values, block + 1);
    for (long r = 0; r < unit->rows; r++) {
        const Context *context = unit->context + r;
        const long end = min_long(first + BLOCK, context->length);
        if (end <= context->contiguous && end > shared_end) {
            shared_end = end;
            longest = context;
        }
    }
    Tile tile = {0};
    if (shared_end > first) tile = pack_tiles(job, w, keys, values, longest, first, shared_end - first);
    for (long r = 0, run; r < unit->rows; r += run) { /* runs of rows that share keys */
        for (run = 0; r + run < unit->rows; run++) {
            const Context *context = unit->context + r + run;
            if (min_long(first + BLOCK, context->length) > context->contiguous || context->length <= first) break;
        }
        if (run) attend_tile(job, w, unit, r, run, block, &tile, partial);
        else run = 1;
    }
    for (long r = 0; r < unit->rows; r++) {
        const Context *context = unit->context + r;
        const long end = min_long(first + BLOCK, context->length);
        if (end <= first) {
            for (long q = r * group; q < (r + 1) * group; q++) partial[q * size + head + 1] = 0.0f;
        } else if (end > context->contiguous) {
            tile = pack_tiles(job, w, keys, values, context, first, end - first);
            attend_tile(job, w, unit, r, 1, block, &tile, partial);
        }
    }
}

/* ---- units ---- */

static void merge_clear(float *merged, long queries, long head, long size) {
    memset(merged, 0, (size_t)(queries * size) * sizeof(float));
    for (long q = 0; q < queries; q++) merged[q * size + head] = -INFINITY;
}

static void merge(float *merged, const float *partial, long queries, long head, long size) {
    for (long q = 0; q < queries; q++, merged += size, partial += size) {
        const float sum = partial[head + 1];
        if (sum == 0.0f) continue; /* no position of the block is visible */
        const float lead = merged[head] - partial[head], scale = exp_one(lead < 0.0f ? lead : -lead);
        const float old_scale = lead < 0.0f ? scale : 1.0f, new_scale = lead < 0.0f ? 1.0f : scale;
        const vf old_vec = splat(old_scale), new_vec = splat(new_scale);
        for (long d = 0; d < head; d += VW)
            store(merged + d, fma_vec(load(merged + d) * old_vec, load(partial + d), new_vec));
        if (lead < 0.0f) merged[head] = partial[head];
        merged[head + 1] = merged[head + 1] * old_scale + sum * new_scale;
    }
}

/* Scales a head and converts it to the order of the workspace; `order` converts back. */
INLINE void arrange(const float *from, long head_dim, long type, float factor, float *to) {
    long d = 0;
    if (type == BFLOAT16)
        for (; d + PANEL <= head_dim; d += PANEL)
            for (long i = 0; i < VW; i++) {
                to[d + i] = from[d + 2 * i] * factor;
                to[d + VW + i] = from[d + 2 * i + 1] * factor;
            }
    for (; d < head_dim; d++) to[place_of_dim(d, type)] = from[d] * factor;
}

INLINE void order(const float *from, long head_dim, long type, float factor, float *to) {
    long d = 0;
    if (type == BFLOAT16)
        for (; d + PANEL <= head_dim; d += PANEL)
            for (long i = 0; i < VW; i++) {
                to[d + 2 * i] = from[d + i] * factor;
                to[d + 2 * i + 1] = from[d + VW + i] * factor;
            }
    for (; d < head_dim; d++) to[d] = from[place_of_dim(d, type)] * factor;
}

static void load_queries(const Attention *job, const Workspace *w, const Unit *unit, long kv_head) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m);
    const float scale = (float)(1.0 / sqrt((double)m->head_dim));
    memset(w->queries, 0, (size_t)(unit->rows * group * head) * sizeof(float));
    for (long q = 0; q < unit->rows * group; q++) {
        const long at = (unit->row + q / group) * job->qkv_stride + (kv_head * group + q % group) * m->head_dim;
        if (attends_in_tiles(m)) {
            arrange(job->qkv + at, m->head_dim, FLOAT32, scale, w->mixed);
            narrow_row(w->mixed, head, head, (bf16 *)w->queries + q * head);
        } else {
            arrange(job->qkv + at, m->head_dim, m->cache_type, scale, w->queries + q * head);
        }
    }
}

static void store_mixed(const Attention *job, const Unit *unit, long kv_head, const float *merged) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), size = partial_size(m);
    for (long q = 0; q < unit->rows * group; q++, merged += size) {
        const long at = (unit->row + q / group) * job->out_stride + (kv_head * group + q % group) * m->head_dim;
        order(merged, m->head_dim, dim_order(m), 1.0f / merged[head + 1], job->out + at);
    }
}

INLINE float *partial_at(const Attention *job, const Unit *unit, long kv_head, long block) {
    const long queries = unit->rows * (job->model->heads / job->model->kv_heads);
    const long blocks = unit->end_block - unit->first_block;
    const long index = unit->partial + (kv_head * blocks + block - unit->first_block) * queries;
    return job->partials + index * partial_size(job->model);
}

static void attention_item(void *context, long item, int thread) {
    const Attention *job = context;
    const Model *m = job->model;
    const long part = item % job->split, kv_head = item / job->split % m->kv_heads;
    const Unit *unit = job->unit + item / job->split / m->kv_heads;
    const long blocks = unit->end_block - unit->first_block;
    const long begin = unit->first_block + blocks * part / job->split;
    const long end = unit->first_block + blocks * (part + 1) / job->split;
    if (begin == end) return;
    const long queries = unit->rows * (m->heads / m->kv_heads), head = padded_head(m), size = partial_size(m);
    const long plane = (kv_head * m->slots + job->segment[unit->segment].base) * m->head_dim * cache_item_bytes(m);
    const Workspace w = workspace(job, thread);
    if (attends_in_tiles(m)) amx_configure();
    load_queries(job, &w, unit, kv_head);
    if (!job->partials) merge_clear(w.merged, queries, head, size);
    for (long block = begin; block < end; block++) {
        float *partial = job->partials ? partial_at(job, unit, kv_head, block) : w.partial;
        (attends_in_tiles(m) ? attend_unit_tiles : attend_unit_block)(job, &w, unit, job->keys + plane,
                                                                      job->values + plane, block, partial);
        if (!job->partials) merge(w.merged, partial, queries, head, size);
    }
    if (!job->partials) store_mixed(job, unit, kv_head, w.merged);
}

static void merge_item(void *context, long item, int thread) {
    const Attention *job = context;
    const Model *m = job->model;
    const long kv_head = item % m->kv_heads;
    const Unit *unit = job->unit + item / m->kv_heads;
    const long queries = unit->rows * (m->heads / m->kv_heads), head = padded_head(m), size = partial_size(m);
    const Workspace w = workspace(job, thread);
    merge_clear(w.merged, queries, head, size);
    for (long block = unit->first_block; block < unit->end_block; block++)
        merge(w.merged, partial_at(job, unit, kv_head, block), queries, head, size);
    store_mixed(job, unit, kv_head, w.merged);
}

static void run_attention(Attention *job) {
    pool_run(attention_item, job, job->units * job->model->kv_heads * job->split);
    if (job->partials) pool_run(merge_item, job, job->units * job->model->kv_heads);
}

#endif
