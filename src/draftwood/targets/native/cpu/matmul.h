/* Products of activation rows with a packed matrix, and what is done to their results on the way out.
 *
 * Every output element is one chain of fused multiply-adds over the inputs in ascending order, whatever the number of
 * rows and whichever micro-kernel computes it: that makes a row's result independent of the batch it travels in. */
#ifndef DRAFTWOOD_MATMUL_H
#define DRAFTWOOD_MATMUL_H

#include <math.h>

#include "model.h"
#include "pool.h"

#define MAX_CHUNK 64 /* rows that one item multiplies: their inputs stay in the second-level cache */
#define CHUNK_BYTES (384 * 1024)
#define MAX_RUN 16 /* groups that one item of few rows multiplies */
#define RUNS_PER_THREAD 3
#define NARROW_ROWS 8 /* rows that one item rounds */
#define PREFETCH_BYTES 1024 /* ahead of a single row's product, which waits for memory alone */

/* Where a micro-kernel finds its weights. SPILL: bfloat16, leaving the expanded panel behind for the next rows. */
enum { FROM_F32, FROM_BF16, FROM_BF16_SPILL };

/* Four inputs of one row, and acc += weights * input[LANE]. */
#if VW == 4 && defined(__aarch64__)
typedef float32x4_t Inputs;
#define LOAD_INPUTS(p) vld1q_f32(p)
#define FMA_INPUT(acc, w, x, LANE) FMA_LANE_INTO(acc, w, x, LANE)
#else
typedef const float *Inputs;
#define LOAD_INPUTS(p) (p)
#define FMA_INPUT(acc, w, x, LANE) FMA_INTO(acc, w, splat((x)[LANE]))
#endif

#define LOAD_WEIGHTS(low, high, K)                                                             \
    UNROLL for (int p = 0; p < panels; p++) {                                                  \
        const char *at = weights + (K) * row_bytes + p * panel_bytes;                          \
        if (source == FROM_F32) {                                                              \
            low[p] = load((const float *)at);                                                  \
            high[p] = load((const float *)at + VW);                                            \
        } else {                                                                               \
            load_bf16_pair((const bf16 *)at, &low[p], &high[p]);                               \
        }                                                                                      \
    }

/* One k: multiplies `low` and `high`, having fetched the next k's weights: a load ahead hides its latency. */
#define STEP(LANE, low, high, next_low, next_high)                                             \
    LOAD_WEIGHTS(next_low, next_high, k + LANE + 1)                                            \
    UNROLL for (int p = 0; p < panels; p++) {                                                  \
        if (source == FROM_BF16_SPILL) {                                                       \
            store(spill + (k + LANE) * PANEL, low[p]);                                         \
            store(spill + (k + LANE) * PANEL + VW, high[p]);                                   \
        }                                                                                      \
        UNROLL for (int r = 0; r < rows; r++) {                                                \
            FMA_INPUT(acc[r][p][0], low[p], x[r], LANE);                                       \
            FMA_INPUT(acc[r][p][1], high[p], x[r], LANE);                                      \
        }                                                                                      \
    }

/* out[rows][panels * PANEL] = input[rows][inputs] times the panels; inputs is a multiple of 4. */
INLINE void micro(const int rows, const int panels, const int source, const float *input, long input_stride,
                  const char *weights, long row_bytes, long panel_bytes, long inputs, float *out, long out_stride,
                  const char *ahead, float *spill) {
    vf acc[MAX_ROWS][GROUP][2]; /* fixed bounds: an array of variable size would not stay in registers */
    vf low[GROUP], high[GROUP], next_low[GROUP], next_high[GROUP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = splat(0.0f);
    LOAD_WEIGHTS(low, high, 0)
    for (long k = 0; k < inputs; k += 4) {
        Inputs x[MAX_ROWS];
        UNROLL for (int r = 0; r < rows; r++) x[r] = LOAD_INPUTS(input + r * input_stride + k);
        if (source != FROM_F32 || ahead) /* each pass over a group fetches its share of the lines to come */
            UNROLL for (int i = 0; i < 4 * panels / GROUP; i++) {
                __builtin_prefetch(ahead + (k + i) * row_bytes, 0, panels == GROUP ? 3 : 2);
                if (source == FROM_F32) __builtin_prefetch(ahead + (k + i) * row_bytes + 64, 0, 2);
            }
        STEP(0, low, high, next_low, next_high)
        STEP(1, next_low, next_high, low, high)
        STEP(2, low, high, next_low, next_high)
        STEP(3, next_low, next_high, low, high)
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int p = 0; p < panels; p++) {
            store(out + r * out_stride + p * PANEL, acc[r][p][0]);
            store(out + r * out_stride + p * PANEL + VW, acc[r][p][1]);
        }
    }
}

/* Few rows take several panels at once: enough independent chains to hide the latency of a multiply-add. */
#if MAX_ROWS == 8
#define WIDE_PANELS(rows) ((rows) == 1 ? GROUP : (rows) <= 4 ? 2 : 1)
#else
#define WIDE_PANELS(rows) ((rows) <= 3 ? 2 : 1)
#endif

typedef void Micro(const float *input, long input_stride, const char *weights, long row_bytes, long panel_bytes,
                   long inputs, float *out, long out_stride, const char *ahead, float *spill);

#define MICRO(name, rows, panels, source)                                                                              \
    static void name(const float *input, long input_stride, const char *weights, long row_bytes, long panel_bytes,     \
                     long inputs, float *out, long out_stride, const char *ahead, float *spill) {                      \
        micro(rows, panels, source, input, input_stride, weights, row_bytes, panel_bytes, inputs, out, out_stride,     \
              ahead, spill);                                                                                           \
    }
#define MICROS(rows)                                          \
    MICRO(f32_wide_##rows, rows, WIDE_PANELS(rows), FROM_F32)  \
    MICRO(f32_one_##rows, rows, 1, FROM_F32)                   \
    MICRO(bf16_wide_##rows, rows, WIDE_PANELS(rows), FROM_BF16) \
    MICRO(bf16_spill_##rows, rows, 1, FROM_BF16_SPILL)
MICROS(1) MICROS(2) MICROS(3) MICROS(4) MICROS(5) MICROS(6)
#if MAX_ROWS == 8
MICROS(7) MICROS(8)
#define FOR_ROWS(kind) {kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6, kind##_7, kind##_8}
#else
#define FOR_ROWS(kind) {kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6}
#endif
static Micro *const f32_wide[MAX_ROWS] = FOR_ROWS(f32_wide);
static Micro *const f32_one[MAX_ROWS] = FOR_ROWS(f32_one);
static Micro *const bf16_wide[MAX_ROWS] = FOR_ROWS(bf16_wide);
static Micro *const bf16_spill[MAX_ROWS] = FOR_ROWS(bf16_spill);

/* The size of the first of the nearly equal blocks that `rows` rows are cut into. */
INLINE long next_block(long rows) {
    long blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return (rows + blocks - 1) / blocks;
}

/* out[rows][panels * PANEL] from float32 weights, all rows. Attention's values go through it too. */
static void multiply_f32(const float *input, long input_stride, long rows, const char *weights, long row_bytes,
                         long panels, long inputs, float *out, long out_stride, const char *next) {
    const long panel_bytes = PANEL * sizeof(float);
    for (long row = 0, block; row < rows; row += block) {
        block = next_block(rows - row);
        const float *x = input + row * input_stride;
        const long wide = WIDE_PANELS(block);
        const int fetch = next && row == 0 && wide < GROUP; /* a single pass needs no help */
        for (long p = 0; p < panels;) {
            const int fits = p + wide <= panels;
            (fits ? f32_wide : f32_one)[block - 1](x, input_stride, weights + p * panel_bytes, row_bytes, panel_bytes,
                                                   inputs, out + row * out_stride + p * PANEL, out_stride,
                                                   fetch ? next + p * (4 / GROUP) * row_bytes : NULL, NULL);
            p += fits ? wide : 1;
        }
    }
}

/* out[rows][GROUP_COLUMNS] from one group of bfloat16 weights. */
static void multiply_bf16(const float *input, long input_stride, long rows, const char *weights, long inputs,
                          float *out, const char *next, float *spill) {
    const long row_bytes = GROUP_COLUMNS * sizeof(bf16), panel_bytes = PANEL * sizeof(bf16);
    const long wide = WIDE_PANELS(next_block(rows));
    const char *ahead = wide == GROUP ? weights + PREFETCH_BYTES : next;
    if (rows <= MAX_ROWS) {
        for (long p = 0; p < GROUP; p += wide)
            bf16_wide[rows - 1](input, input_stride, weights + p * panel_bytes, row_bytes, panel_bytes, inputs,
                                out + p * PANEL, GROUP_COLUMNS, ahead + p / wide * (4 * wide / GROUP) * row_bytes,
                                NULL);
        return;
    }
    const long first = next_block(rows);
    for (long p = 0; p < GROUP; p++) {
        bf16_spill[first - 1](input, input_stride, weights + p * panel_bytes, row_bytes, panel_bytes, inputs,
                              out + p * PANEL, GROUP_COLUMNS, ahead + p * (4 / GROUP) * row_bytes, spill);
        for (long row = first, block; row < rows; row += block) {
            block = next_block(rows - row);
            f32_one[block - 1](input + row * input_stride, input_stride, (const char *)spill, PANEL * sizeof(float), 0,
                               inputs, out + row * GROUP_COLUMNS + p * PANEL, GROUP_COLUMNS, NULL, NULL);
        }
    }
}

/* out[rows][GROUP_COLUMNS] from one group of weights in tiles; whole tiles of rows are read and written. */
static void multiply_in_tiles(const bf16 *input, long input_stride, long rows, const bf16 *weights, long inputs,
                              float *out, const char *next) {
    for (long row = 0; row < rows; next = NULL) {
        const bf16 *from = input + row * input_stride;
        float *to = out + row * GROUP_COLUMNS;
        if (rows - row > TILE_ROWS) {
            amx_multiply_32(from, input_stride, weights, inputs, to, GROUP_COLUMNS, next);
            row += 2 * TILE_ROWS;
        } else {
            amx_multiply(from, input_stride, weights, inputs, to, GROUP_COLUMNS, next);
            row += TILE_ROWS;
        }
    }
}

enum { STORE, ADD, GATED, LOGITS }; /* what becomes of a product: out = y; out += y; out = silu(gate) * up; logits */

typedef struct {
    float value;
    int64_t id;
} Best;

typedef struct {
    const Matrix *matrix;
    long type;
    const float *input;
    long input_stride, rows;
    long chunk, run; /* an item: so many rows, so many groups */
    int ending;
    const float *bias; /* or NULL */
    float *out;
    long out_stride;
    float *scratch; /* per thread: tile [MAX_CHUNK][GROUP_COLUMNS], then one expanded panel */
    long scratch_stride;
    bf16 *narrowed; /* room for the input in bfloat16, [rows + MAX_CHUNK][narrowed stride], where products run in tiles */
    long narrowed_stride;
    Best *best; /* LOGITS: [threads][rows] */
} Product;

INLINE long product_scratch(long max_inputs) {
    return MAX_CHUNK * GROUP_COLUMNS + (round_up(max_inputs, 4) + 1) * PANEL;
}

/* The best logit of a row so far, ties to the lower id; groups arrive in any order. */
INLINE void note_best(Best *best, const float *tile, long count, long first_id) {
    long c = 0;
    vf top = splat(-INFINITY);
    for (; c + VW <= count; c += VW) top = max_vec(top, load(tile + c));
    if (max_lanes(top) < best->value && c == count) return; /* as nearly always */
    for (c = 0; c < count; c++) {
        if (tile[c] > best->value || (tile[c] == best->value && first_id + c < best->id)) {
            best->value = tile[c];
            best->id = first_id + c;
        }
    }
}

INLINE void finish_gated(const float *tile, float *out, long count) {
    for (long c = 0; c < count; c += VW) {
        const float *pair = tile + c / PANEL * 2 * PANEL + c % PANEL; /* a gate panel, then its up panel */
        vf gate = load(pair), up = load(pair + PANEL);
        store(out + c, gate / (splat(1.0f) + exp_vec(-gate)) * up);
    }
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
        } else if (job->ending == LOGITS) {
            memcpy(out, tile, (size_t)real * sizeof(float));
            note_best(job->best + thread * job->rows + row + r, tile, real, column);
        } else {
            finish_linear(tile, out, bias, padded, job->ending == ADD);
        }
    }
}

static void product_group(const Product *job, long row, long rows, long group, int thread) {
    const Matrix *m = job->matrix;
    const long inputs = padded_inputs(m, job->type), group_bytes = inputs * GROUP_COLUMNS * type_size(job->type);
    const char *weights = (const char *)m->data + group * group_bytes;
    const float *input = job->input + row * job->input_stride;
    const long ahead = (job->run > 1 ? 1 : pool.threads) * group_bytes; /* this thread's next group, most likely */
    float *tile = job->scratch + thread * job->scratch_stride;
    if (in_tiles(job->type))
        multiply_in_tiles(job->narrowed + row * job->narrowed_stride, job->narrowed_stride, rows, (const bf16 *)weights,
                          inputs, tile, weights + ahead);
    else if (job->type == BFLOAT16)
        multiply_bf16(input, job->input_stride, rows, weights, inputs, tile, weights + ahead,
                      tile + MAX_CHUNK * GROUP_COLUMNS);
    else
        multiply_f32(input, job->input_stride, rows, weights, GROUP_COLUMNS * sizeof(float), GROUP, inputs, tile,
                     GROUP_COLUMNS, weights + ahead);
    finish(job, tile, row, rows, group, thread);
}

static void product_item(void *context, long item, int thread) {
    const Product *job = context;
    const long groups = num_groups(job->matrix), runs = (groups + job->run - 1) / job->run;
    const long row = item / runs * job->chunk, rows = min_long(job->chunk, job->rows - row);
    const long first = item % runs * job->run, end = min_long(groups, first + job->run);
    if (in_tiles(job->type)) amx_configure();
    for (long group = first; group < end; group++) product_group(job, row, rows, group, thread);
}

static void narrow_item(void *context, long item, int thread) {
    (void)thread;
    const Product *job = context;
    const long inputs = job->matrix->inputs, end = min_long((item + 1) * NARROW_ROWS, job->rows);
    for (long row = item * NARROW_ROWS; row < end; row++)
        narrow_row(job->input + row * job->input_stride, round_up(inputs, ALIGN_FLOATS),
                   padded_inputs(job->matrix, job->type), job->narrowed + row * job->narrowed_stride);
}

/* Few rows wait for memory, which is fastest read in long runs; many rows are shared out finely. */
static void run_product(Product *job) {
    const long groups = num_groups(job->matrix);
    const long most = max_long(16, min_long(MAX_CHUNK, CHUNK_BYTES / (job->matrix->inputs * 4)));
    const long chunks = (job->rows + most - 1) / most;
    if (!chunks) return;
    job->chunk = (job->rows + chunks - 1) / chunks;
    const long few = in_tiles(job->type) ? MAX_CHUNK : 2;
    if (in_tiles(job->type)) pool_run(narrow_item, job, (job->rows + NARROW_ROWS - 1) / NARROW_ROWS);
    job->run = job->rows > few ? 1 : max_long(1, min_long(MAX_RUN, groups / (RUNS_PER_THREAD * pool.threads)));
    const long runs = (groups + job->run - 1) / job->run;
    pool_run(product_item, job, runs * ((job->rows + job->chunk - 1) / job->chunk));
}

#endif
