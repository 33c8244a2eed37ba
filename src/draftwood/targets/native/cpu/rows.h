/* Row-wise work: embedding, norms, rotation, cache writes, taps. */
#ifndef DRAFTWOOD_ROWS_H
#define DRAFTWOOD_ROWS_H

#include <math.h>

#include "formats.h"
#include "pool.h"
#include "run.h"

#define ROWS_PER_ITEM 8

INLINE float mean_square(const float *x, long n) {
    vf sum = splat(0.0f);
    long i = 0;
    for (; i + VW <= n; i += VW) sum = fma_vec(sum, load(x + i), load(x + i));
    float total = sum_lanes(sum);
    for (; i < n; i++) total += x[i] * x[i];
    return total / (float)n;
}

INLINE void rms_norm(const float *x, const float *weight, long n, double eps, float *out) {
    const float scale = 1.0f / sqrtf(mean_square(x, n) + (float)eps);
    for (long i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

typedef void (*RowFn)(Run *run, long row);
typedef struct {
    Run *run;
    RowFn fn;
    long rows;
} RowPhase;

static void row_item(void *context, long item, int thread) {
    (void)thread;
    const RowPhase *phase = context;
    const long end = min_long((item + 1) * ROWS_PER_ITEM, phase->rows);
    for (long row = item * ROWS_PER_ITEM; row < end; row++) phase->fn(phase->run, row);
}

static void for_rows(Run *run, RowFn fn, long rows) {
    RowPhase phase = {run, fn, rows};
    pool_run(row_item, &phase, (rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}

/* Norms the token in `hidden` and its feature, side by side. The feature becomes the hidden state. */
static void join_feature(Run *run, long row, float *hidden) {
    const Model *m = run->model;
    const Batch *b = run->batch;
    const float *feature = b->given ? run->fused + row * run->hidden_stride : b->features + row * m->hidden;
    float *normed = run->normed + row * run->normed_stride;
    rms_norm(hidden, m->layer->input_norm, m->hidden, m->norm_eps, normed);
    rms_norm(feature, m->feature_norm, m->hidden, m->norm_eps, normed + m->hidden);
    memcpy(hidden, m->norm_before_residual ? normed + m->hidden : feature, (size_t)m->hidden * sizeof(float));
}

static void embed_row(Run *run, long row) {
    const Model *m = run->model;
    const long token = run->batch->token_ids[row];
    float *to = run->hidden + row * run->hidden_stride;
    const Matrix *table = m->embed.data ? &m->embed : &m->head;
    const Format *format = format_of(table);
    (table == &m->head || m->embed_packed ? format->unpack_row : format->load_row)(table, token, to);
    /* The padding columns are multiplied by padded weights, which are zero: they must be finite. */
    memset(to + m->hidden, 0, (size_t)(run->hidden_stride - m->hidden) * sizeof(float));
    memset(run->normed + row * run->normed_stride, 0, (size_t)run->normed_stride * sizeof(float));
    if (m->feature_norm) join_feature(run, row, to);
    const long mixed = m->heads * m->head_dim, mixed_stride = row_stride(mixed);
    memset(run->mixed + row * mixed_stride + mixed, 0, (size_t)(mixed_stride - mixed) * sizeof(float));
    for (long i = 0; i < run->half; i++) {
        const float angle = (float)run->positions[row] * m->inverse_frequencies[i];
        run->cosine[row * run->half + i] = cosf(angle);
        run->sine[row * run->half + i] = sinf(angle);
    }
}

static void tap_row(Run *run, long row) {
    const Batch *b = run->batch;
    const long hidden = run->model->hidden;
    for (long t = 0; t < b->taps; t++)
        if (b->tap_layers[t] == run->layer)
            memcpy(b->tapped + (row * b->taps + t) * hidden, run->hidden + row * run->hidden_stride,
                   (size_t)hidden * sizeof(float));
}

static void norm_row(Run *run, long row) {
    rms_norm(run->hidden + row * run->hidden_stride, run->norm_weight, run->model->hidden, run->model->norm_eps,
             run->normed + row * run->normed_stride);
}

static void tap_and_norm_row(Run *run, long row) {
    tap_row(run, row);
    norm_row(run, row);
}

/* The rows with logits are contiguous in `normed`. */
static void norm_wanted_row(Run *run, long row) {
    rms_norm(run->hidden + run->wanted_rows[row] * run->hidden_stride, run->model->norm, run->model->hidden,
             run->model->norm_eps, run->normed + row * run->normed_stride);
}

INLINE void rotate_head(float *x, const float *cosine, const float *sine, long half) {
    for (long i = 0; i < half; i++) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cosine[i] - second * sine[i];
        x[half + i] = second * cosine[i] + first * sine[i];
    }
}

INLINE void write_cache(void *cache, long type, long at, const float *from, long count) {
    if (type == BFLOAT16)
        for (long i = 0; i < count; i++) ((bf16 *)cache)[at + i] = to_bf16(from[i]);
    else
        memcpy((float *)cache + at, from, (size_t)count * sizeof(float));
}

static long slot_of(const Batch *b, long row) {
    long s = 0;
    while (row >= b->segment[s].start + b->segment[s].size) s++;
    return b->segment[s].base + b->segment[s].prefix + b->segment[s].after + row - b->segment[s].start;
}

/* Normalises and rotates the queries and keys of a row; writes its keys and values to the cache. */
static void rotate_row(Run *run, long row) {
    const Model *m = run->model;
    const Layer *layer = m->layer + run->layer;
    const long dim = m->head_dim, slot = slot_of(run->batch, row);
    float *x = run->qkv + row * row_stride((m->heads + 2 * m->kv_heads) * dim);
    for (long h = 0; h < m->heads + m->kv_heads; h++) {
        const float *norm = h < m->heads ? layer->q_norm : layer->k_norm;
        if (norm) rms_norm(x + h * dim, norm, dim, m->norm_eps, x + h * dim);
        rotate_head(x + h * dim, run->cosine + row * run->half, run->sine + row * run->half, run->half);
    }
    for (long h = 0; h < m->kv_heads; h++) {
        const long at = ((run->layer * m->kv_heads + h) * m->slots + slot) * dim;
        write_cache(m->keys, m->cache_type, at, x + (m->heads + h) * dim, dim);
        write_cache(m->values, m->cache_type, at, x + (m->heads + m->kv_heads + h) * dim, dim);
    }
}

#endif
