/* Attention of tree nodes over their own contexts.
 *
 * The context of a node is a list of positions j = 0, 1, ...: the prefix, its ancestors, itself. It is split into
 * blocks of BLOCK positions by j alone. Each block gives a partial result (maximum, sum, weighted values). Those of a
 * node are merged in ascending order. The result does not depend on slots or on other nodes.
 *
 * A *unit* is work that shares keys: one segment, one key head, some neighbouring rows with all query heads of the key
 * head. Positions that lie side by side in the cache are scored and weighed for all rows of a unit at once; the *tail*
 * of a node, its ancestors elsewhere in the cache, follows for itself: the chain of sums goes on where it ended. If
 * there are few units, they are split by blocks, and the partial results are merged in a separate phase. */
#ifndef DRAFTWOOD_ATTENTION_H
#define DRAFTWOOD_ATTENTION_H

#include "attention_products.h"

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
    for (long r = 0, q = 0; r < rows; r++) {
        const long length = unit->context[row + r].length;
        const long low = m->window ? min_long(max_long(0, length - m->window - first), count) : 0;
        const long end = max_long(min_long(count, length - first), 0);
        for (long g = 0; g < group; g++, q++) {
            float *own = scores + q * BLOCK;
            for (long j = 0; j < low; j++) own[j] = -INFINITY;
            for (long j = end; j < padded; j++) own[j] = -INFINITY;
            vf top = nothing;
            for (long j = 0; j < padded; j += VW) top = max_vec(top, load(own + j));
            partial[q * size] = max_lanes(top);
        }
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
    const Span tail = {unit->context + row, block * BLOCK + extent.contiguous, count, 0};
    float *scores = w->weights + row * group * BLOCK + extent.contiguous;
    float *found = w->tail_weights; /* free until later; what follows the scores would reach into the next query's */
    score_span(m, w, group, w->queries + row * group * head, keys, &tail, NULL, found);
    for (long q = 0; q < group; q++)
        memcpy(scores + q * BLOCK, found + q * BLOCK, (size_t)count * sizeof(float));
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
    for (long r = 0; r < unit->rows; r++) {
        const Extent extent = extent_of(unit->context + r, first);
        if (extent.contiguous > extent_of(longest, first).contiguous) longest = unit->context + r;
        count = max_long(count, extent.count);
        tails += extent.contiguous < extent.count;
    }
    const long num_shared = extent_of(longest, first).contiguous;
    const Span shared = {longest, first, num_shared, m->slots - job->segment[unit->segment].base};
    const long next = block + 1 < unit->end_block ? (first + BLOCK) * m->head_dim * cache_item_bytes(m) : 0;
    if (num_shared) score_span(m, w, queries, w->queries, keys, &shared, next ? keys + next : NULL, w->weights);
    for (long r = 0; r < unit->rows && tails; r++) {
        const Extent extent = extent_of(unit->context + r, first);
        if (extent.contiguous < extent.count) score_tail(job, w, unit, keys, r, block, extent);
    }
    exponentiate_rows(job, unit, 0, unit->rows, block, max_long(count, round_up(num_shared, 4)), w->weights, partial);
    for (long r = 0; r < unit->rows && tails; r++)
        set_tail_aside(w, group, r, extent_of(unit->context + r, first));
    if (num_shared) {
        weigh_span(m, w, queries, w->weights, values, &shared, next ? values + next : NULL, partial, size);
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
    exponentiate_rows(job, unit, row, rows, block, tile_inputs(tile), w->weights, partial);
    weigh_in_tiles(w, queries, tile, head, partial + query * size, size);
}

/* One block for all rows of a unit: rows whose block is contiguous share its keys, the others gather their own after
 * those that they share, because tiles sum in an order of their own. */
static void attend_unit_tiles(const Attention *job, const Workspace *w, const Unit *unit, const char *keys,
                              const char *values, long block, float *partial) {
    const Model *m = job->model;
    const long group = m->heads / m->kv_heads, head = padded_head(m), size = partial_size(m), first = block * BLOCK;
    long shared_end = 0;
    const Context *longest = NULL;
    if (block + 1 < unit->end_block) {
        const long next = (block + 1) * BLOCK * m->head_dim * cache_item_bytes(m);
        prefetch_block(m, keys + next);
        prefetch_block(m, values + next);
    }
    for (long r = 0; r < unit->rows; r++) {
        const Context *context = unit->context + r;
        const long end = min_long(first + BLOCK, context->length);
        if (end <= context->contiguous && end > shared_end) {
            shared_end = end;
            longest = context;
        }
    }
    Tile tile = {0};
    long side_by_side = max_long(0, shared_end - first); /* positions in the workspace that are so in the cache */
    if (side_by_side) tile = pack_tiles(job, w, keys, values, longest, first, side_by_side, 0);
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
            const long own = max_long(0, context->contiguous - first);
            tile = pack_tiles(job, w, keys, values, context, first, end - first, min_long(side_by_side, own));
            side_by_side = own;
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
