/* One forward of a Llama-family decoder on CPU threads: the whole packed batch through all layers, the head and argmax.
 *
 * vec.h vectors - pool.h threads - model.h records - pack.h weights - matmul.h products - attention.h attention
 *
 * Every number a node gets is computed in an order that depends on the node's own context alone: see matmul.h and
 * attention.h. Row-wise work (norms, rotation) is per row anyway. */
#include <math.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "attention.h"
#include "matmul.h"
#include "model.h"
#include "pack.h"
#include "pool.h"

#define ROWS_PER_ITEM 8 /* of row-wise work */
#define HUGE_PAGE (2L << 20)

typedef struct {
    const Model *model;
    const Batch *batch;
    int threads;
    long hidden_stride, half;
    float *hidden, *normed; /* [rows][hidden stride] */
    float *qkv, *mixed, *gated; /* [rows][stride of their width] */
    float *cosine, *sine; /* [rows][half] */
    int64_t *wanted_rows; /* [wanted] */
    Context *context; /* [rows] */
    int32_t *bends; /* [num_bends] */
    long num_bends;
    Unit *unit; /* [units] */
    long units, split, partial_count;
    float *partials, *scratch;
    long scratch_stride;
    Best *best; /* [threads][wanted] */
    long layer; /* the row-wise phases' layer */
    const float *norm_weight;
} Run;

/* ---- memory: one grow-only arena, used by one forward at a time ---- */

static struct {
    char *base;
    size_t size;
} arena;

typedef struct {
    char *base; /* NULL while measuring */
    size_t used;
} Cursor;

static void *take(Cursor *cursor, size_t bytes) {
    void *at = cursor->base ? cursor->base + cursor->used : NULL;
    cursor->used += (bytes + 63) & ~(size_t)63;
    return at;
}

static float *take_floats(Cursor *cursor, long count) { return take(cursor, (size_t)count * sizeof(float)); }

static void lay_out(Run *run, Cursor *cursor) {
    const Model *m = run->model;
    const long rows = run->batch->rows;
    run->hidden = take_floats(cursor, rows * run->hidden_stride);
    run->normed = take_floats(cursor, rows * run->hidden_stride);
    run->qkv = take_floats(cursor, rows * row_stride((m->heads + 2 * m->kv_heads) * m->head_dim));
    run->mixed = take_floats(cursor, rows * row_stride(m->heads * m->head_dim));
    run->gated = take_floats(cursor, rows * row_stride(m->inner));
    run->cosine = take_floats(cursor, rows * run->half);
    run->sine = take_floats(cursor, rows * run->half);
    run->wanted_rows = take(cursor, (size_t)run->batch->wanted * sizeof(int64_t));
    run->bends = take(cursor, (size_t)run->num_bends * sizeof(int32_t));
    run->unit = take(cursor, (size_t)run->units * sizeof(Unit));
    run->scratch = take_floats(cursor, run->threads * run->scratch_stride);
    run->best = take(cursor, (size_t)(run->threads * run->batch->wanted) * sizeof(Best));
}

static int arena_grow(size_t size) {
    if (size <= arena.size) return 1;
    free(arena.base);
    arena.size = (size + (size_t)HUGE_PAGE - 1) & ~((size_t)HUGE_PAGE - 1);
    arena.base = aligned_alloc((size_t)HUGE_PAGE, arena.size);
    if (!arena.base) arena.size = 0;
    return arena.base != NULL;
}

/* ---- what each node may see ---- */

/* Lengths and straight parts; the bends need memory that depends on these. */
static void measure_contexts(Run *run) {
    const Batch *b = run->batch;
    run->num_bends = 0;
    for (long s = 0; s < b->segments; s++) {
        const Segment *segment = b->segment + s;
        for (long i = 0; i < segment->size; i++) {
            const long parent = b->parents[segment->start + i];
            Context *own = run->context + segment->start + i;
            const Context root = {segment->prefix, segment->prefix, NULL};
            const Context *up = parent < 0 ? &root : run->context + segment->start + parent;
            const int straight = up->straight == up->length && segment->prefix + i == up->length;
            own->length = up->length + 1;
            own->straight = straight ? own->length : up->straight;
            run->num_bends += own->length - own->straight;
        }
    }
}

static void trace_bends(Run *run) {
    const Batch *b = run->batch;
    int32_t *next = run->bends;
    for (long s = 0; s < b->segments; s++) {
        const Segment *segment = b->segment + s;
        for (long i = 0; i < segment->size; i++) {
            Context *own = run->context + segment->start + i;
            const long parent = b->parents[segment->start + i], count = own->length - own->straight;
            own->bends = next;
            if (!count) continue;
            if (count > 1) memcpy(next, run->context[segment->start + parent].bends, (size_t)(count - 1) * sizeof(*next));
            next[count - 1] = (int32_t)(segment->prefix + i);
            next += count;
        }
    }
}

static long count_units(const Model *m, const Batch *b) {
    long units = 0;
    for (long s = 0; s < b->segments; s++) units += (b->segment[s].size + unit_rows(m) - 1) / unit_rows(m);
    return units;
}

static void list_units(Run *run) {
    const Model *m = run->model;
    Unit *unit = run->unit;
    long partials = 0;
    for (long s = 0; s < run->batch->segments; s++) {
        const Segment *segment = run->batch->segment + s;
        for (long row = 0; row < segment->size; row += unit_rows(m), unit++) {
            long shortest = INT64_MAX, longest = 0;
            unit->segment = s;
            unit->row = segment->start + row;
            unit->rows = min_long(unit_rows(m), segment->size - row);
            for (long r = 0; r < unit->rows; r++) {
                shortest = min_long(shortest, run->context[unit->row + r].length);
                longest = max_long(longest, run->context[unit->row + r].length);
            }
            unit->first_block = m->window ? max_long(0, shortest - m->window) / BLOCK : 0;
            unit->end_block = (longest + BLOCK - 1) / BLOCK;
            unit->partial = partials;
            partials += (unit->end_block - unit->first_block) * unit->rows * m->heads;
        }
    }
    run->partial_count = partials;
}

/* Few units would leave threads idle: then each is cut into runs of blocks. */
static void choose_split(Run *run) {
    const Model *m = run->model;
    const long items = run->units * m->kv_heads, wished = 4 * run->threads;
    const long bytes = run->partial_count * partial_size(m) * (long)sizeof(float);
    run->split = 1;
    if (run->threads > 1 && items < wished && bytes <= SPLIT_BYTES) run->split = (wished + items - 1) / items;
}

/* ---- row-wise phases ---- */

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

static void embed_row(Run *run, long row) {
    const Model *m = run->model;
    const long token = run->batch->token_ids[row];
    float *to = run->hidden + row * run->hidden_stride;
    if (!m->embed)
        unpack_row(&m->head, m->weight_type, token, to);
    else if (m->weight_type == BFLOAT16)
        for (long i = 0; i < m->hidden; i++) to[i] = from_bf16(((const bf16 *)m->embed)[token * m->hidden + i]);
    else
        memcpy(to, (const float *)m->embed + token * m->hidden, (size_t)m->hidden * sizeof(float));
    /* What stands behind the real columns meets padded weights, which are zero: it must be finite. */
    memset(to + m->hidden, 0, (size_t)(run->hidden_stride - m->hidden) * sizeof(float));
    memset(run->normed + row * run->hidden_stride, 0, (size_t)run->hidden_stride * sizeof(float));
    const long mixed = m->heads * m->head_dim, mixed_stride = row_stride(mixed);
    memset(run->mixed + row * mixed_stride + mixed, 0, (size_t)(mixed_stride - mixed) * sizeof(float));
    for (long i = 0; i < run->half; i++) {
        const float angle = (float)run->batch->positions[row] * m->inverse_frequencies[i];
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
             run->normed + row * run->hidden_stride);
}

static void tap_and_norm_row(Run *run, long row) {
    tap_row(run, row);
    norm_row(run, row);
}

/* The wanted rows stand close together in `normed`. */
static void norm_wanted_row(Run *run, long row) {
    rms_norm(run->hidden + run->wanted_rows[row] * run->hidden_stride, run->model->norm, run->model->hidden,
             run->model->norm_eps, run->normed + row * run->hidden_stride);
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
    return b->segment[s].base + b->segment[s].prefix + row - b->segment[s].start;
}

/* Norms and turns the row's queries and keys; its keys and values go to the cache. */
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

/* ---- the forward ---- */

static void multiply(Run *run, const Matrix *matrix, const float *input, long input_stride, long rows, int ending,
                     const float *bias, float *out, long out_stride) {
    Product job = {.matrix = matrix, .type = run->model->weight_type, .input = input, .input_stride = input_stride,
                   .rows = rows, .ending = ending, .bias = bias, .out = out, .out_stride = out_stride,
                   .scratch = run->scratch, .scratch_stride = run->scratch_stride, .best = run->best};
    run_product(&job);
}

static void attend(Run *run) {
    const Model *m = run->model;
    const long plane = run->layer * m->kv_heads * m->slots * m->head_dim * type_size(m->cache_type);
    Attention job = {.model = m, .segment = run->batch->segment, .context = run->context, .unit = run->unit,
                     .keys = (const char *)m->keys + plane, .values = (const char *)m->values + plane,
                     .qkv = run->qkv, .qkv_stride = row_stride((m->heads + 2 * m->kv_heads) * m->head_dim),
                     .out = run->mixed, .out_stride = row_stride(m->heads * m->head_dim),
                     .scratch = run->scratch, .scratch_stride = run->scratch_stride,
                     .partials = run->split > 1 ? run->partials : NULL, .split = run->split, .units = run->units};
    run_attention(&job);
}

/* Returns 0 where nobody asks for what comes after the layer's keys and values. */
static int run_layer(Run *run, long index, int only_cache) {
    const Model *m = run->model;
    const Layer *layer = m->layer + index;
    const long rows = run->batch->rows, mixed_size = m->heads * m->head_dim;
    const long qkv_stride = row_stride(mixed_size + 2 * m->kv_heads * m->head_dim);
    run->layer = index;
    run->norm_weight = layer->input_norm;
    for_rows(run, tap_and_norm_row, rows);
    multiply(run, &layer->qkv, run->normed, run->hidden_stride, rows, STORE, layer->qkv_bias, run->qkv, qkv_stride);
    for_rows(run, rotate_row, rows);
    if (only_cache) return 0;
    attend(run);
    multiply(run, &layer->o, run->mixed, row_stride(mixed_size), rows, ADD, layer->o_bias, run->hidden, run->hidden_stride);
    run->norm_weight = layer->post_norm;
    for_rows(run, norm_row, rows);
    multiply(run, &layer->gate_up, run->normed, run->hidden_stride, rows, GATED, NULL, run->gated, row_stride(m->inner));
    multiply(run, &layer->down, run->gated, row_stride(m->inner), rows, ADD, NULL, run->hidden, run->hidden_stride);
    return 1;
}

static void run_head(Run *run) {
    const Batch *b = run->batch;
    const long wanted = b->wanted;
    for (long s = 0, next = 0; s < b->segments; s++)
        for (long i = b->segment[s].size - b->segment[s].wanted; i < b->segment[s].size; i++)
            run->wanted_rows[next++] = b->segment[s].start + i;
    for (long i = 0; i < run->threads * wanted; i++) run->best[i] = (Best){-INFINITY, INT64_MAX};
    for_rows(run, norm_wanted_row, wanted);
    multiply(run, &run->model->head, run->normed, run->hidden_stride, wanted, LOGITS, NULL, b->logits, run->model->vocab);
    for (long row = 0; row < wanted; row++) {
        Best best = run->best[row];
        for (int t = 1; t < run->threads; t++) note_best(&best, &run->best[t * wanted + row].value, 1, run->best[t * wanted + row].id);
        b->greedy_ids[row] = best.id == INT64_MAX ? 0 : best.id; /* a row of NaN has no best */
    }
}

static int prepare(Run *run) {
    const Model *m = run->model;
    Cursor cursor = {0};
    measure_contexts(run);
    run->hidden_stride = row_stride(m->hidden);
    run->half = m->head_dim / 2;
    run->units = count_units(m, run->batch);
    const long inputs = max_long(max_long(m->hidden, m->inner), m->heads * m->head_dim);
    run->scratch_stride = round_up(max_long(product_scratch(inputs), attention_scratch(m)), ALIGN_FLOATS);
    lay_out(run, &cursor); /* measures */
    if (!arena_grow(cursor.used + SPLIT_BYTES)) return 0;
    cursor = (Cursor){arena.base, 0};
    lay_out(run, &cursor);
    run->partials = (float *)(cursor.base + cursor.used);
    trace_bends(run);
    list_units(run);
    choose_split(run);
    return 1;
}

static void run_all(Run *run) {
    const Batch *b = run->batch;
    const long layers = run->model->layers;
    int last_tapped = 0;
    for (long t = 0; t < b->taps; t++) last_tapped |= b->tap_layers[t] == layers;
    for_rows(run, embed_row, b->rows);
    for (long i = 0; i < layers; i++)
        if (!run_layer(run, i, i == layers - 1 && !b->wanted && !last_tapped)) return;
    run->layer = layers;
    for_rows(run, tap_row, b->rows);
    run_head(run);
}

/* ---- what Python calls ---- */

/* Returns 0, or 1 when memory ran out. */
int draftwood_forward(const Model *model, const Batch *batch, int threads) {
    Run run = {.model = model, .batch = batch};
    run.threads = pool_begin(threads);
    run.context = malloc((size_t)batch->rows * sizeof(Context));
    const int ready = run.context && prepare(&run);
    if (ready) run_all(&run);
    free(run.context);
    pool_end();
    return !ready;
}

int64_t draftwood_packed_bytes(const Matrix *matrix, int64_t type) {
    return num_groups(matrix) * GROUP * padded_inputs(matrix) * PANEL * type_size(type);
}

/* Asks for huge pages, where the system has them, before the memory is first touched. */
void draftwood_advise(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t mask = ~(uintptr_t)(HUGE_PAGE - 1);
    const uintptr_t begin = ((uintptr_t)memory + HUGE_PAGE - 1) & mask, end = ((uintptr_t)memory + (uintptr_t)bytes) & mask;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

void draftwood_pack(const Matrix *to, const void *from, int64_t type, int threads) {
    Packing job = {to, from, type};
    pool_begin(threads);
    pool_run(pack_group, &job, num_groups(to));
    pool_end();
}

const char *draftwood_describe(void) {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX__)
    return "AVX2";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "128-bit vectors";
#endif
}
