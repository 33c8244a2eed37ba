/* Products of activation rows with a packed matrix, shared among threads, and what is done with their results. */
#ifndef DRAFTWOOD_MATMUL_H
#define DRAFTWOOD_MATMUL_H

#include <math.h>

#include "formats.h"
#include "pool.h"
#include "toprows.h"

#define CHUNK_BYTES (384 * 1024) /* float32 inputs of one item at most */
#define MAX_RUN 16 /* groups of one item at most, if it has few rows */
#define RUNS_PER_THREAD 3
#define PREPARED_ROWS 8 /* rows that one item prepares */

/* out = y; out += y; out = silu(gate) * up; out = silu(out) * y; out = y and its argmax */
enum { STORE, ADD, GATED, GATE, LOGITS };

typedef struct {
    float value;
    int64_t id;
} Best;

typedef struct {
    const Matrix *matrix;
    const Format *format;
    const float *input;
    long input_stride, rows;
    long chunk, run; /* rows and groups of one item */
    int ending;
    const float *bias; /* or NULL */
    float *out;
    long out_stride;
    float *scratch; /* per thread: product_scratch(matrix) */
    long scratch_stride;
    char *prepared; /* [rows + MAX_CHUNK] inputs as the format reads them, if it prepares them */
    long prepared_bytes; /* of one row; 0: the format reads float32 */
    Best *best; /* LOGITS: [threads][rows] */
    float *parts; /* LOGITS: [rows] parts of the logits (toprows.h) instead of their argmax, or NULL */
} Product;

/* Floats: the results of a group [MAX_CHUNK][GROUP_COLUMNS], then the format's own. */
INLINE long product_scratch(const Matrix *m) {
    const Format *format = format_of(m);
    const long own = format->scratch_floats ? format->scratch_floats(padded_inputs(format, m)) : 0;
    return MAX_CHUNK * GROUP_COLUMNS + own;
}

INLINE long prepared_bytes(const Matrix *m) {
    const Format *format = format_of(m);
    return format->prepared_bytes ? format->prepared_bytes(padded_inputs(format, m)) : 0;
}

/* Updates the best logit of a row, ties to the lower id. Groups arrive in any order. */
INLINE void note_best(Best *best, const float *tile, long count, long first_id) {
    long c = 0;
    vf top = splat(-INFINITY);
    for (; c + VW <= count; c += VW) top = max_vec(top, load(tile + c));
    if (max_lanes(top) < best->value && c == count) return; /* the usual case */
    for (c = 0; c < count; c++) {
        if (tile[c] > best->value || (tile[c] == best->value && first_id + c < best->id)) {
            best->value = tile[c];
            best->id = first_id + c;
        }
    }
}

INLINE vf silu_vec(vf x) { return x / (splat(1.0f) + exp_vec(-x)); }

INLINE void finish_gated(const float *tile, float *out, long count) {
    for (long c = 0; c < count; c += VW) {
        const float *pair = tile + c / PANEL * 2 * PANEL + c % PANEL; /* gate and up panels alternate */
        store(out + c, silu_vec(load(pair)) * load(pair + PANEL));
    }
}

INLINE void finish_gate(const float *tile, float *out, long count) {
    for (long c = 0; c < count; c += VW) store(out + c, silu_vec(load(out + c)) * load(tile + c));
}

INLINE void finish_linear(const float *tile, float *out, const float *bias, long count, int add) {
    for (long c = 0; c < count; c += VW) {
        vf y = load(tile + c);
        if (bias) y += load(bias + c);
        store(out + c, add ? load(out + c) + y : y);
    }
}

static void finish(const Product *job, const float *tile, long row, long rows, long group, int thread) {
    const long width = job->ending == GATED ? GROUP_COLUMNS / 2 : GROUP_COLUMNS;
    const long column = group * width, outputs = job->matrix->outputs;
    const long real = min_long(width, outputs - column);
    const long padded = min_long(width, round_up(outputs, ALIGN_FLOATS) - column); /* zeros stay zeros */
    const float *bias = job->bias ? job->bias + column : NULL;
    for (long r = 0; r < rows; r++, tile += GROUP_COLUMNS) {
        float *out = job->out + (row + r) * job->out_stride + column;
        if (job->ending == GATED) {
            finish_gated(tile, out, padded);
        } else if (job->ending == GATE) {
            finish_gate(tile, out, padded);
        } else if (job->ending == LOGITS) {
            memcpy(out, tile, (size_t)real * sizeof(float));
            if (job->parts)
                note_part(job->parts + (row + r) * parts_size(outputs), outputs, group, tile, real);
            else
                note_best(job->best + thread * job->rows + row + r, tile, real, column);
        } else {
            finish_linear(tile, out, bias, padded, job->ending == ADD);
        }
    }
}

static void product_group(const Product *job, long row, long rows, long group, int thread) {
    const Matrix *m = job->matrix;
    const long inputs = padded_inputs(job->format, m), group_bytes = job->format->group_bytes(inputs);
    const char *weights = (const char *)m->data + group * group_bytes;
    const int prepared = job->prepared_bytes > 0;
    const long input_bytes = prepared ? job->prepared_bytes : job->input_stride * (long)sizeof(float);
    float *tile = job->scratch + thread * job->scratch_stride;
    const GroupProduct product = {
        .input = (prepared ? job->prepared : (const char *)job->input) + row * input_bytes, .input_bytes = input_bytes,
        .rows = rows, .weights = weights, .inputs = inputs, .out = tile,
        .next = weights + (job->run > 1 ? 1 : pool.threads) * group_bytes, .scratch = tile + MAX_CHUNK * GROUP_COLUMNS};
    job->format->multiply(&product);
    finish(job, tile, row, rows, group, thread);
}

typedef struct {
    Product *job;
    int count;
} Products;

INLINE long product_runs(const Product *job) { return (num_groups(job->matrix) + job->run - 1) / job->run; }

INLINE long product_items(const Product *job) {
    return product_runs(job) * ((job->rows + job->chunk - 1) / job->chunk);
}

static void product_item(void *context, long item, int thread) {
    const Product *job = ((const Products *)context)->job;
    for (; item >= product_items(job); job++) item -= product_items(job);
    const long groups = num_groups(job->matrix), runs = product_runs(job);
    const long row = item / runs * job->chunk, rows = min_long(job->chunk, job->rows - row);
    const long first = item % runs * job->run, end = min_long(groups, first + job->run);
    if (job->format->begin) job->format->begin();
    for (long group = first; group < end; group++) product_group(job, row, rows, group, thread);
}

static void prepare_item(void *context, long item, int thread) {
    (void)thread;
    const Product *job = context;
    const long end = min_long((item + 1) * PREPARED_ROWS, job->rows);
    for (long row = item * PREPARED_ROWS; row < end; row++)
        job->format->prepare(job->input + row * job->input_stride, job->matrix->inputs,
                             job->prepared + row * job->prepared_bytes);
}

/* Few rows are bound by memory and take long runs of groups; many rows are split finely. */
static void plan_product(Product *job, long groups) {
    const long most = max_long(16, min_long(MAX_CHUNK, CHUNK_BYTES / (job->matrix->inputs * 4)));
    const long chunks = (job->rows + most - 1) / most;
    const long longest = max_long(1, min_long(MAX_RUN, groups / (RUNS_PER_THREAD * pool.threads)));
    job->chunk = (job->rows + chunks - 1) / chunks;
    job->run = job->rows > job->format->streamed_rows ? 1 : longest;
    job->prepared_bytes = prepared_bytes(job->matrix);
}

/* Runs products of the same inputs: together, if their formats prepare inputs in the same way. */
static void run_products(Product *job, int count) {
    if (!job->rows) return;
    for (int i = 0; i < count; i++) job[i].format = format_of(job[i].matrix);
    for (int first = 0, end; first < count; first = end) {
        long groups = 0, items = 0;
        for (end = first; end < count && job[end].format->prepare == job[first].format->prepare; end++)
            groups += num_groups(job[end].matrix);
        for (int i = first; i < end; i++) {
            plan_product(job + i, groups);
            items += product_items(job + i);
        }
        Products products = {job + first, end - first};
        if (job[first].format->prepare)
            pool_run(prepare_item, job + first, (job->rows + PREPARED_ROWS - 1) / PREPARED_ROWS);
        pool_run(product_item, &products, items);
    }
}

#endif
