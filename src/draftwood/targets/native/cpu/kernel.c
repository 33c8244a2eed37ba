/* One forward of a Llama-family model on CPU threads: the packed batch through all layers, the head and argmax.
 *
 * vec.h: vectors. amx.h: tiles. pool.h: threads. model.h: records. run.h: state of a forward. formats.h: weights.
 * micro.h, integers.h, matmul.h: products. contexts.h: what each node attends to. attention_work.h,
 * attention_products.h, attention.h: attention. rows.h: norms, rotation, cache writes. toprows.h: top k. draw.h: sampling.
 *
 * The order of operations for a node depends only on its own context: see micro.h and attention.h. */
#define _GNU_SOURCE /* for the affinity of threads */
#include <math.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "attention.h"
#include "contexts.h"
#include "matmul.h"
#include "model.h"
#include "pool.h"
#include "rows.h"
#include "run.h"
#include "toprows.h"

/* ---- the forward ---- */

static Product new_product(const Run *run, const Matrix *matrix, const float *input, long input_stride, long rows,
                           int ending, const float *bias, float *out, long out_stride) {
    return (Product){.matrix = matrix, .input = input, .input_stride = input_stride,
                     .rows = rows, .ending = ending, .bias = bias, .out = out, .out_stride = out_stride,
                     .scratch = run->scratch, .scratch_stride = run->scratch_stride, .best = run->best, .parts = run->parts,
                     .prepared = run->prepared};
}

static void multiply(Run *run, const Matrix *matrix, const float *input, long input_stride, long rows, int ending,
                     const float *bias, float *out, long out_stride) {
    Product job = new_product(run, matrix, input, input_stride, rows, ending, bias, out, out_stride);
    run_products(&job, 1);
}

static void multiply_qkv(Run *run, const Layer *layer) {
    const Model *m = run->model;
    const long rows = run->batch->rows, stride = row_stride((m->heads + 2 * m->kv_heads) * m->head_dim);
    Product jobs[3];
    int count = 0;
    for (long column = 0; count < 3 && layer->qkv[count].outputs; column += layer->qkv[count++].outputs)
        jobs[count] = new_product(run, layer->qkv + count, run->normed, run->normed_stride, rows, STORE,
                                  layer->qkv_bias ? layer->qkv_bias + column : NULL, run->qkv + column, stride);
    run_products(jobs, count);
}

static void multiply_gate_up(Run *run, const Layer *layer) {
    const Matrix *gate = layer->gate_up, *up = gate + 1;
    const long rows = run->batch->rows, stride = row_stride(run->model->inner);
    multiply(run, gate, run->normed, run->normed_stride, rows, gate->joined ? GATED : STORE, NULL, run->gated, stride);
    if (up->outputs) multiply(run, up, run->normed, run->normed_stride, rows, GATE, NULL, run->gated, stride);
}

static void attend(Run *run) {
    const Model *m = run->model;
    const long plane = run->layer * m->kv_heads * m->slots * m->head_dim * cache_item_bytes(m);
    Attention job = {.model = m, .segment = run->batch->segment, .unit = run->unit,
                     .keys = (const char *)m->keys + plane, .values = (const char *)m->values + plane,
                     .qkv = run->qkv, .qkv_stride = row_stride((m->heads + 2 * m->kv_heads) * m->head_dim),
                     .out = run->mixed, .out_stride = row_stride(m->heads * m->head_dim),
                     .scratch = run->scratch, .scratch_stride = run->scratch_stride,
                     .partials = run->split > 1 ? run->partials : NULL, .split = run->split, .units = run->units};
    run_attention(&job);
}

/* Returns 0 if only the keys and values of the layer were needed. */
static int run_layer(Run *run, long index, int only_cache) {
    const Model *m = run->model;
    const Layer *layer = m->layer + index;
    const long rows = run->batch->rows, mixed_size = m->heads * m->head_dim;
    run->layer = index;
    run->norm_weight = layer->input_norm;
    if (index || !m->feature_norm) for_rows(run, tap_and_norm_row, rows);
    multiply_qkv(run, layer);
    for_rows(run, rotate_row, rows);
    if (only_cache) return 0;
    attend(run);
    multiply(run, &layer->o, run->mixed, row_stride(mixed_size), rows, ADD, layer->o_bias, run->hidden,
             run->hidden_stride);
    run->norm_weight = layer->post_norm;
    for_rows(run, norm_row, rows);
    multiply_gate_up(run, layer);
    multiply(run, &layer->down, run->gated, row_stride(m->inner), rows, ADD, NULL, run->hidden, run->hidden_stride);
    return 1;
}

static void top_wanted_row(Run *run, long row) {
    const Batch *b = run->batch;
    const long vocab = run->model->vocab;
    const TopResults to = top_results(b->top, b->wanted, b->top_k);
    find_top(b->logits + row * vocab, vocab, run->parts + row * parts_size(vocab), row, b->top_k, to);
    b->greedy_ids[row] = to.ids[row * b->top_k];
}

static void run_head(Run *run) {
    const Batch *b = run->batch;
    const long wanted = b->wanted;
    for (long s = 0, next = 0; s < b->segments; s++)
        for (long i = b->segment[s].size - b->segment[s].wanted; i < b->segment[s].size; i++)
            run->wanted_rows[next++] = b->segment[s].start + i;
    for (long i = 0; i < run->threads * wanted; i++) run->best[i] = (Best){-INFINITY, INT64_MAX};
    for_rows(run, norm_wanted_row, wanted);
    multiply(run, &run->model->head, run->normed, run->normed_stride, wanted, LOGITS, NULL, b->logits,
             run->model->vocab);
    if (run->parts) {
        for_rows(run, top_wanted_row, wanted);
        return;
    }
    for (long row = 0; row < wanted; row++) {
        Best best = run->best[row];
        for (int t = 1; t < run->threads; t++) {
            const Best *other = run->best + t * wanted + row;
            note_best(&best, &other->value, 1, other->id);
        }
        b->greedy_ids[row] = best.id == INT64_MAX ? 0 : best.id; /* all NaN */
    }
}

static void fit_product(Run *run, const Matrix *matrix) {
    if (!matrix->outputs) return;
    run->scratch_stride = max_long(run->scratch_stride, product_scratch(matrix));
    run->prepared_bytes = max_long(run->prepared_bytes, prepared_bytes(matrix));
}

static int prepare(Run *run) {
    const Model *m = run->model;
    Cursor cursor = {0};
    measure_contexts(run);
    run->hidden_stride = row_stride(m->hidden);
    run->normed_stride = m->feature_norm ? row_stride(2 * m->hidden) : run->hidden_stride;
    run->half = m->head_dim / 2;
    run->units = count_units(m, run->batch);
    run->scratch_stride = attention_scratch(m);
    run->prepared_bytes = 0;
    fit_product(run, &m->head);
    fit_product(run, &m->fuse);
    for (long i = 0; i < m->layers; i++) {
        const Layer *layer = m->layer + i;
        for (int j = 0; j < 3; j++) fit_product(run, layer->qkv + j);
        for (int j = 0; j < 2; j++) fit_product(run, layer->gate_up + j);
        fit_product(run, &layer->o);
        fit_product(run, &layer->down);
    }
    run->scratch_stride = round_up(run->scratch_stride, ALIGN_FLOATS);
    lay_out(run, &cursor); /* only measures */
    if (!arena_grow(cursor.used + SPLIT_BYTES)) return 0;
    cursor = (Cursor){arena.base, 0};
    lay_out(run, &cursor);
    run->partials = (float *)(cursor.base + cursor.used);
    list_scattered(run);
    list_units(run);
    choose_split(run);
    return 1;
}

/* The child of a node that carries a token, or 0. */
static long child_with(const Batch *b, const Segment *s, long node, int64_t token) {
    for (long child = node + 1; child < s->size; child++)
        if (b->parents[s->first + child] == node && b->token_ids[s->start + child] == token) return child;
    return 0;
}

/* Draws the tokens along the path through the tree of a segment that they make; after each node if it is not a whole
 * tree. */
static void draw_item(void *context, long item, int thread) {
    const Run *run = context;
    const Batch *b = run->batch;
    const Segment *s = b->segment + item;
    const long vocab = run->model->vocab;
    long row = 0, first = 0; /* of logits; of draws */
    for (long i = 0; i < item; i++) row += b->segment[i].wanted;
    while (first < b->draws && (long)b->draw[first].row < row) first++;
    if (!s->wanted || first == b->draws || (long)b->draw[first].row != row) return;
    const int is_tree = s->wanted == s->size && !s->after;
    for (long node = 0, next = 1; next && node < s->wanted; node = next) {
        const long at = row + node;
        b->drawn[at] = (int32_t)draw_token(b->logits + at * vocab, vocab, b->draw + first + node,
                                           run->drawing + thread * draw_floats(vocab));
        next = is_tree ? child_with(b, s, node, b->drawn[at]) : node + 1;
    }
}

static void run_all(Run *run) {
    const Batch *b = run->batch;
    const long layers = run->model->layers;
    int last_tapped = 0;
    for (long t = 0; t < b->taps; t++) last_tapped |= b->tap_layers[t] == layers;
    if (b->given) {
        const Matrix *fuse = &run->model->fuse;
        multiply(run, fuse, b->given, fuse->inputs, b->rows, STORE, run->model->fuse_bias, run->fused,
                 run->hidden_stride);
    }
    for_rows(run, embed_row, b->rows);
    for (long i = 0; i < layers; i++)
        if (!run_layer(run, i, i == layers - 1 && !b->wanted && !last_tapped)) return;
    run->layer = layers;
    for_rows(run, tap_row, b->rows);
    run_head(run);
    if (b->draws) pool_run(draw_item, run, b->segments);
}

/* ---- packing weights ---- */

typedef struct {
    const Matrix *to;
    const void *from;
    _Atomic int damaged;
} Packing;

static void pack_item(void *context, long group, int thread) {
    (void)thread;
    Packing *job = context;
    if (!format_of(job->to)->pack(job->to, job->from, group)) job->damaged = 1;
}

/* ---- what Python calls ---- */

/* Returns 0, 1 if there is not enough memory, or 2 if a token has no embedding. */
int draftwood_forward(const Model *model, const Batch *batch, int threads) {
    Run run = {.model = model, .batch = batch};
    for (long row = 0; row < batch->rows; row++)
        if (batch->token_ids[row] < 0 || batch->token_ids[row] >= model->tokens) return 2;
    run.threads = pool_begin(threads);
    run.context = malloc((size_t)batch->nodes * sizeof(Context));
    const int ready = run.context && prepare(&run);
    if (ready) run_all(&run);
    free(run.context);
    pool_end();
    return !ready;
}

/* Draws tokens after given rows of logits. Returns 0, or 1 if there is not enough memory. */
int draftwood_draw(const float *logits, int64_t vocab, const Draw *draw, int64_t draws, int32_t *drawn) {
    float *memory = aligned_alloc(64, (size_t)round_up(draw_floats(vocab) * (long)sizeof(float), 64));
    for (long i = 0; memory && i < draws; i++)
        drawn[i] = (int32_t)draw_token(logits + (long)draw[i].row * vocab, vocab, draw + i, memory);
    free(memory);
    return !memory;
}

int64_t draftwood_packed_bytes(const Matrix *matrix) {
    const Format *format = format_of(matrix);
    return num_groups(matrix) * format->group_bytes(padded_inputs(format, matrix));
}

/* Requests huge pages if the system has them. Call it before the memory is first touched. */
void draftwood_advise(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t mask = ~(uintptr_t)(HUGE_PAGE - 1);
    const uintptr_t begin = ((uintptr_t)memory + HUGE_PAGE - 1) & mask;
    const uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) & mask;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

/* Gives memory that was freed while a model was loaded back to the system, if the C library keeps it. */
void draftwood_release(void) {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

/* Returns 0, or 1 if a scale of the weights is not finite. */
int draftwood_pack(const Matrix *to, const void *from, int threads) {
    Packing job = {to, from, 0};
    pool_begin(threads);
    pool_run(pack_item, &job, num_groups(to));
    pool_end();
    return job.damaged;
}

/* Moves rows of a cache [planes][slots][row]: the rows `from` (ascending) of every plane to first, first + 1, ... The
 * rows are no longer in the CPU caches, so those of later planes are prefetched. */
void draftwood_move_rows(char *cache, int64_t planes, int64_t plane_bytes, int64_t row_bytes, const int64_t *from,
                         int64_t first, int64_t count) {
    enum { AHEAD = 8 };
    for (long plane = 0; plane < planes; plane++, cache += plane_bytes) {
        for (long i = 0; plane + AHEAD < planes && i < count; i++) {
            const char *source = cache + AHEAD * plane_bytes + from[i] * row_bytes;
            char *target = cache + AHEAD * plane_bytes + (first + i) * row_bytes;
            for (long line = 0; line < row_bytes; line += 64) {
                __builtin_prefetch(source + line);
                __builtin_prefetch(target + line, 1);
            }
        }
        for (long i = 0; i < count; i++)
            memcpy(cache + (first + i) * row_bytes, cache + from[i] * row_bytes, (size_t)row_bytes);
    }
}

/* See toprows.h. `chosen`: row indices, or NULL for the first rows; `results`: memory for top_results. Requires
 * 1 <= k <= MAX_LEADERS and k <= vocab. Returns 0, or 1 if there is not enough memory. */
int draftwood_top_rows(const float *logits, const int64_t *chosen, int64_t rows, int64_t row_stride, int64_t vocab,
                       int64_t k, void *results, int threads) {
    threads = pool_begin((int)min_long(threads, rows));
    TopRows job = {.logits = logits, .chosen = chosen, .row_stride = row_stride, .vocab = vocab, .k = k,
                   .parts = malloc((size_t)(threads * parts_size(vocab)) * sizeof(float)),
                   .to = top_results(results, rows, k)};
    if (job.parts) pool_run(top_of_row, &job, rows);
    pool_end();
    free(job.parts);
    return !job.parts;
}

const char *draftwood_describe(void) {
    if (amx_granted()) return "AMX";
#if VW == 16 && UNSIGNED_WEIGHTS
    return "AVX-512-VNNI";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif UNSIGNED_WEIGHTS
    return "AVX-VNNI";
#elif defined(__AVX__)
    return "AVX2";
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return "NEON with matrix products";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "NEON with dot products";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "128-bit vectors";
#endif
}
