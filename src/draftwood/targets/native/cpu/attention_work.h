/* Attention's contexts, units of work and workspace, and how keys and values get there from the cache. */
#ifndef DRAFTWOOD_ATTENTION_WORK_H
#define DRAFTWOOD_ATTENTION_WORK_H

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
    float *columns; /* [padded head][BLOCK]: keys, transposed */
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

/* Keys and values of the first positions of a block in the workspace, as right-hand sides of amx.h. Positions that
 * follow are zeros as far as products reach: they do not change a sum. */
typedef struct {
    const char *keys, *values;
    long count; /* positions */
} Tile;

INLINE long tile_columns(const Tile *tile) { return (tile->count + TILE_COLUMNS - 1) / TILE_COLUMNS; } /* of keys */
INLINE long tile_inputs(const Tile *tile) { return round_up(tile->count, TILE_INPUTS); } /* for values */

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

/* The rows of positions first + i of a context, for `begin` <= i < `end`; NULL from `count` on. */
INLINE void list_rows(const bf16 *cache, long dim, const Context *context, long first, long begin, long count, long end,
                      const bf16 **rows) {
    for (long i = begin; i < end; i++) rows[i] = i < count ? cache + slot_at(context, first + i) * dim : NULL;
}

/* Packs positions first .. first + count - 1 of a context as right-hand sides: keys as columns, values as inputs. The
 * first `kept` of them are there already. */
static Tile pack_tiles(const Attention *job, const Workspace *w, const char *keys, const char *values,
                       const Context *context, long first, long count, long kept) {
    const Tile tile = {(const char *)w->keys, (const char *)w->values, count};
    const long dim = job->model->head_dim, side = BLOCK * WIDE_COLUMNS, columns = tile_columns(&tile) * TILE_COLUMNS;
    const bf16 *rows[BLOCK];
    kept -= kept % TILE_COLUMNS;
    list_rows((const bf16 *)keys, dim, context, first, kept, count, columns, rows);
    for (long i = kept; i < columns; i += TILE_COLUMNS)
        amx_pack_keys(rows + i, dim, (bf16 *)w->keys + i / TILE_COLUMNS * TILE_NUMBERS);
    list_rows((const bf16 *)values, dim, context, first, kept, count, tile_inputs(&tile), rows);
    for (long i = kept; i < tile_inputs(&tile); i += 2)
        amx_pack_values(rows[i], rows[i + 1], dim, side, (bf16 *)w->values + place_in_tiles(i, 0));
    return tile;
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

/* A block of keys or values. */
static void prefetch_block(const Model *m, const char *block) {
    for (long at = 0; at < BLOCK * m->head_dim * cache_item_bytes(m); at += 64) __builtin_prefetch(block + at, 0, 2);
}

#endif
