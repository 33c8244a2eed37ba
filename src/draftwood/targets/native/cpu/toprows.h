/* The top k entries of rows of logits, and the log of the sum of exponentials of each row.
 *
 * A row is read once, in stretches that stay in the first-level cache: first for the maximum of each block, then for
 * the exponentials. The k-th largest block maximum is a lower bound for the k-th largest entry, so only the few blocks
 * that reach it are searched entry by entry. A row is one item with a fixed order of operations: its result does not
 * depend on the other rows or the number of threads. NaN counts as -infinity. */
#ifndef DRAFTWOOD_TOPROWS_H
#define DRAFTWOOD_TOPROWS_H

#include <math.h>

#include "pool.h"
#include "vec.h"

#define MAX_LEADERS 64 /* the list is made for small k; MAX_TOP_K in toprows.py */
#define MAX_STRETCHES 256
#define STRETCH_BLOCKS 16
#define BLOCK_STEP 64 /* entries of a block, or a multiple of it in a huge vocabulary */
#define LARGEST_LOGIT 1e6f /* beyond it log_total equals the maximum in float32 */

typedef struct {
    const float *logits; /* [rows][vocab], rows row_stride apart */
    const int64_t *chosen; /* row indices, or NULL: 0, 1, ... */
    long row_stride, vocab, block, k;
    int32_t *ids; /* [rows][k] */
    float *values; /* [rows][k] */
    float *log_total; /* [rows] */
} TopRows;

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

/* The first `count` floats; -infinity in the other lanes. */
INLINE vf load_part(const float *p, long count) {
    float lanes[VW];
    for (long i = 0; i < VW; i++) lanes[i] = i < count ? p[i] : -INFINITY;
    return load(lanes);
}

INLINE float block_maximum(const float *x, long count) {
    vf top[4];
    long c = 0;
    UNROLL for (int i = 0; i < 4; i++) top[i] = splat(-INFINITY);
    for (; c + 4 * VW <= count; c += 4 * VW)
        UNROLL for (int i = 0; i < 4; i++) top[i] = max_number(load(x + c + i * VW), top[i]);
    for (; c < count; c += VW) top[0] = max_number(load_part(x + c, count - c), top[0]);
    return max_lanes(max_vec(max_vec(top[0], top[1]), max_vec(top[2], top[3])));
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

/* The sum of e^x / 2^octaves; no x is above octaves * log(2) by more than half an octave. */
static float stretch_sum(const float *x, long count, float octaves) {
    /* Adding 1.5 * 2^23 rounds to an integer in the low bits: here the biased exponent of a power of two. */
    const vf magic = splat(12582912.0f + 127.0f - octaves), lowest = splat(octaves * 0.69314718f - 80.0f);
    vf sum[4], part[4];
    long c = 0;
    UNROLL for (int i = 0; i < 4; i++) sum[i] = splat(0.0f);
    for (; c + 4 * VW <= count; c += 4 * VW) {
        __builtin_prefetch(x + count + c); /* the next stretch */
        UNROLL for (int i = 0; i < 4; i++) part[i] = load(x + c + i * VW);
        add_powers(sum, part, magic, lowest);
    }
    if (c < count) {
        UNROLL for (int i = 0; i < 4; i++) part[i] = load_part(x + c + i * VW, count - c - i * VW);
        add_powers(sum, part, magic, lowest);
    }
    return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void top_of_row(void *context, long row, int thread) {
    const TopRows *job = context;
    const float *x = job->logits + (job->chosen ? job->chosen[row] : row) * job->row_stride;
    const long vocab = job->vocab, block = job->block, stretch = STRETCH_BLOCKS * block, k = job->k;
    float maxima[MAX_STRETCHES * STRETCH_BLOCKS], sums[MAX_STRETCHES], octaves[MAX_STRETCHES];
    Leaders blocks = {.wanted = k}, best = {.wanted = k};
    long b = 0, stretches = 0;
    (void)thread;
    for (long start = 0; start < vocab; start += stretch) {
        const long end = min_long(start + stretch, vocab);
        float top = -INFINITY;
        for (long c = start; c < end; c += block, b++) {
            maxima[b] = block_maximum(x + c, min_long(block, end - c));
            if (maxima[b] > top) top = maxima[b];
            if (is_leader(&blocks, maxima[b])) insert_leader(&blocks, maxima[b], b);
        }
        if (top < -LARGEST_LOGIT || top > LARGEST_LOGIT) continue;
        octaves[stretches] = rintf(top * 1.44269504f);
        sums[stretches] = stretch_sum(x + start, end - start, octaves[stretches]);
        stretches++;
    }
    const float maximum = blocks.value[0], floor = blocks.size == k ? blocks.value[k - 1] : -INFINITY;
    b = 0;
    for (long c = 0; c < vocab; c += block, b++)
        if (maxima[b] >= floor && is_leader(&best, maxima[b]))
            note_leaders(&best, x + c, min_long(block, vocab - c), c, floor);
    double total = 0.0;
    const float scale = rintf(maximum * 1.44269504f);
    for (long s = 0; s < stretches; s++) total += ldexp(sums[s], (int)(octaves[s] - scale));
    memcpy(job->ids + row * k, best.id, (size_t)k * sizeof(int32_t));
    memcpy(job->values + row * k, best.value, (size_t)k * sizeof(float));
    const int summed = maximum >= -LARGEST_LOGIT && maximum <= LARGEST_LOGIT;
    job->log_total[row] = summed ? (float)(scale * 0.6931471805599453 + log(total)) : maximum;
}

#endif
