/* The top k entries of rows of logits, their probabilities, and the log of the sum of exponentials of each row.
 *
 * A row is divided into blocks, as wide as the groups of a product. Each block has a part: its maximum, and the sum of
 * its exponentials, scaled by a power of two near the maximum. Parts are computed while a block is in the first-level
 * cache: as soon as a product has written it, or in one pass over a given row. The k-th largest maximum is a lower bound
 * for the k-th largest entry, so only the few blocks that reach it are searched entry by entry. The order of operations
 * is fixed: results do not depend on other rows or the number of threads. NaN counts as -infinity. */
#ifndef DRAFTWOOD_TOPROWS_H
#define DRAFTWOOD_TOPROWS_H

#include <math.h>

#include "pool.h"
#include "vec.h"

#define MAX_LEADERS 64 /* the list is made for small k; MAX_TOP_K in toprows.py */
#define TOP_BLOCK GROUP_COLUMNS
#define LARGEST_LOGIT 1e6f /* beyond it log_total equals the maximum in float32 */
#define NO_OCTAVE -1e8f /* of a block that adds nothing to the sum */
#define LOG_2 0.6931471805599453

/* Blocks of a row, padded to full vectors. */
INLINE long num_parts(long vocab) { return round_up((vocab + TOP_BLOCK - 1) / TOP_BLOCK, VW); }

/* Floats of the parts of one row: maxima, sums and octaves. */
INLINE long parts_size(long vocab) { return 3 * num_parts(vocab); }

/* The largest entries so far, largest first. Ids arrive in ascending order, so a new entry goes after its equals. */
typedef struct {
    float value[MAX_LEADERS];
    int32_t id[MAX_LEADERS];
    long size, wanted;
} Leaders;

INLINE int is_leader(const Leaders *list, float value) {
    return list->size < list->wanted || value > list->value[list->wanted - 1];
}

static void insert_leader(Leaders *list, float value, long id) {
    long at = list->size < list->wanted ? list->size++ : list->wanted - 1;
    for (; at > 0 && list->value[at - 1] < value; at--) {
        list->value[at] = list->value[at - 1];
        list->id[at] = list->id[at - 1];
    }
    list->value[at] = value;
    list->id[at] = (int32_t)id;
}

static void note_leaders(Leaders *list, const float *x, long count, long first_id, float floor) {
    for (long c = 0; c < count; c++) {
        const float value = x[c] > -INFINITY ? x[c] : -INFINITY;
        if (value >= floor && is_leader(list, value)) insert_leader(list, value, first_id + c);
    }
}

/* The larger one; `known` if x is NaN. `known` is not NaN. */
INLINE vf max_number(vf x, vf known) {
#if VW == 4 && defined(__aarch64__)
    return (vf)vmaxnmq_f32((float32x4_t)x, (float32x4_t)known);
#else
    return max_vec(x, known); /* returns its second operand if the comparison fails */
#endif
}

/* Adds e^x / 2^octaves to four sums, with a relative error of 6e-6; x is clamped to `lowest`. Most of the time of a row
 * is spent here: exp_vec is more exact than necessary and takes twice as long. */
INLINE void add_powers(vf *sum, const vf *x, vf magic, vf lowest) {
    vf r[4], shifted[4], square[4], p[4];
    UNROLL for (int i = 0; i < 4; i++) r[i] = max_number(x[i], lowest);
    UNROLL for (int i = 0; i < 4; i++) shifted[i] = fma_vec(magic, r[i], splat(1.44269504f));
    UNROLL for (int i = 0; i < 4; i++) r[i] = fma_vec(r[i], shifted[i] - magic, splat(-0.69314718f));
    UNROLL for (int i = 0; i < 4; i++) square[i] = r[i] * r[i];
    UNROLL for (int i = 0; i < 4; i++) p[i] = fma_vec(splat(0.50005136f), r[i], splat(0.16753688f));
    UNROLL for (int i = 0; i < 4; i++) p[i] = fma_vec(p[i], square[i], splat(0.04127699f));
    UNROLL for (int i = 0; i < 4; i++) p[i] = fma_vec(r[i] + splat(1.0f), square[i], p[i]);
    UNROLL for (int i = 0; i < 4; i++) sum[i] = fma_vec(sum[i], p[i], (vf)((vu)shifted[i] << 23));
}

_Static_assert(TOP_BLOCK % (4 * VW) == 0, "a block is a number of steps of add_powers");

/* The part of one block, `block` of a row of `vocab` logits; `parts` are those of the row. */
static void note_part(float *parts, long vocab, long block, const float *x, long count) {
    const long stride = num_parts(vocab);
    float padded[TOP_BLOCK];
    if (count < TOP_BLOCK) {
        for (long c = 0; c < TOP_BLOCK; c++) padded[c] = c < count ? x[c] : -INFINITY;
        x = padded;
    }
    vf top = splat(-INFINITY);
    UNROLL for (long c = 0; c < TOP_BLOCK; c += VW) top = max_number(load(x + c), top);
    const float maximum = max_lanes(top);
    const int counts = maximum >= -LARGEST_LOGIT && maximum <= LARGEST_LOGIT;
    const float octaves = counts ? rintf(maximum * 1.44269504f) : NO_OCTAVE;
    float total = 0.0f;
    if (counts) {
        /* Adding 1.5 * 2^23 rounds to an integer in the low bits: here the biased exponent of a power of two. */
        const vf magic = splat(12582912.0f + 127.0f - octaves), lowest = splat(octaves * 0.69314718f - 80.0f);
        vf sum[4], four[4];
        UNROLL for (int i = 0; i < 4; i++) sum[i] = splat(0.0f);
        for (long c = 0; c < TOP_BLOCK; c += 4 * VW) {
            UNROLL for (int i = 0; i < 4; i++) four[i] = load(x + c + i * VW);
            add_powers(sum, four, magic, lowest);
        }
        total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    parts[block] = maximum;
    parts[stride + block] = total;
    parts[2 * stride + block] = octaves;
}

/* The log of the sum of exponentials of a row, from its parts. */
static float log_of_sum(const float *parts, long vocab, float maximum) {
    const long blocks = (vocab + TOP_BLOCK - 1) / TOP_BLOCK, stride = num_parts(vocab);
    const float *sums = parts + stride, *octaves = parts + 2 * stride;
    if (!(maximum >= -LARGEST_LOGIT && maximum <= LARGEST_LOGIT)) return maximum;
    const float scale = rintf(maximum * 1.44269504f);
    vf total = splat(0.0f);
    for (long b = 0; b < blocks; b += VW) {
        const vi exponent = __builtin_convertvector(load(octaves + b) - splat(scale), vi) + 127;
        total += load(sums + b) * (vf)((exponent & (exponent > 0)) << 23);
    }
    return (float)(scale * LOG_2 + log((double)sum_lanes(total)));
}

/* Results of all rows, one kind after the other. */
typedef struct {
    int32_t *ids; /* [rows][k] */
    float *values, *probs; /* [rows][k] */
    float *log_total; /* [rows] */
} TopResults;

INLINE TopResults top_results(void *memory, long rows, long k) {
    float *from = memory;
    return (TopResults){(int32_t *)memory, from + rows * k, from + 2 * rows * k, from + 3 * rows * k};
}

INLINE float prob_of(float value, float log_total) {
    const float log_prob = value - log_total;
    return isfinite(log_total) && log_prob > -87.0f ? exp_one(log_prob) : 0.0f;
}

/* Finds the top entries of a row x from its parts. */
static void find_top(const float *x, long vocab, float *parts, long row, long k, TopResults to) {
    const long blocks = (vocab + TOP_BLOCK - 1) / TOP_BLOCK, stride = num_parts(vocab);
    Leaders tops = {.wanted = k}, best = {.wanted = k};
    for (long b = blocks; b < stride; b++) {
        parts[b] = -INFINITY;
        parts[stride + b] = 0.0f;
        parts[2 * stride + b] = NO_OCTAVE;
    }
    for (long b = 0; b < blocks; b++)
        if (is_leader(&tops, parts[b])) insert_leader(&tops, parts[b], b);
    const float floor = tops.size == k ? tops.value[k - 1] : -INFINITY;
    for (long b = 0; b < blocks; b++)
        if (parts[b] >= floor && is_leader(&best, parts[b]))
            note_leaders(&best, x + b * TOP_BLOCK, min_long(TOP_BLOCK, vocab - b * TOP_BLOCK), b * TOP_BLOCK, floor);
    const float log_total = log_of_sum(parts, vocab, tops.value[0]);
    for (long i = 0; i < k; i++) {
        to.ids[row * k + i] = best.id[i];
        to.values[row * k + i] = best.value[i];
        to.probs[row * k + i] = prob_of(best.value[i], log_total);
    }
    to.log_total[row] = log_total;
}

/* ---- rows that are given ---- */

typedef struct {
    const float *logits; /* [rows][vocab], rows row_stride apart */
    const int64_t *chosen; /* row indices, or NULL: 0, 1, ... */
    long row_stride, vocab, k;
    float *parts; /* [threads] parts of a row */
    TopResults to;
} TopRows;

static void top_of_row(void *context, long row, int thread) {
    const TopRows *job = context;
    const float *x = job->logits + (job->chosen ? job->chosen[row] : row) * job->row_stride;
    float *parts = job->parts + thread * parts_size(job->vocab);
    for (long start = 0; start < job->vocab; start += TOP_BLOCK)
        note_part(parts, job->vocab, start / TOP_BLOCK, x + start, min_long(TOP_BLOCK, job->vocab - start));
    find_top(x, job->vocab, parts, row, job->k, job->to);
}

#endif
