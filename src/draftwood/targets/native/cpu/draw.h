/* Draws tokens after rows of logits, from the distribution that `sampling.Warper` describes.
 *
 * The weight of a token is e^((logit - best) / temperature); tokens in the order of their ids share the interval from 0
 * to 1 by their weights, and the random number falls into one of them. Sums are float64 and run over the row alone, so a
 * draw depends on nothing but its row, its rule and its number. A token that is less likely than e^-87 times the best
 * one is never drawn. NaN counts as -infinity.
 *
 * Top-k and top-p keep the tokens from some logit up. That logit is found by bisection, among candidates: the tokens
 * from a lower bound up, which follows from the best ones of parts of the row, or from the share that may be left out. */
#ifndef DRAFTWOOD_DRAW_H
#define DRAFTWOOD_DRAW_H

#include <float.h>
#include <math.h>

#include "integers.h"
#include "model.h"

#define DRAW_BLOCK 512 /* tokens that are summed together */
#define PEAK_BLOCK 64 /* tokens with a peak */
#define LOWEST_SHARE -87.0f /* exponent below which a weight is 0 */
#define MARGIN 0.01 /* by which bounds are lowered, since exp and log are rounded */
#define UNUSABLE -1 /* the best logit is not finite */

typedef double vd __attribute__((vector_size(8 * VW)));

INLINE long draw_blocks(long vocab) { return (vocab + DRAW_BLOCK - 1) / DRAW_BLOCK; }
INLINE long num_peaks(long vocab) { return (vocab + PEAK_BLOCK - 1) / PEAK_BLOCK; }

/* Of one row: the weights of all tokens, and keys, weights and ids of candidates. */
INLINE long draw_floats(long vocab) {
    const long blocks = draw_blocks(vocab);
    return 4 * blocks * DRAW_BLOCK + 2 * round_up(blocks, ALIGN_FLOATS) + round_up(num_peaks(vocab), ALIGN_FLOATS);
}

typedef struct {
    const float *logits;
    long vocab, blocks;
    float best, temperature;
    float *weights; /* [blocks * DRAW_BLOCK], 0 beyond the vocabulary */
    double *sums; /* [blocks] of weights */
    int32_t *peaks; /* [num_peaks], padded: the keys of the best logits of PEAK_BLOCK tokens */
} WeighedRow;

typedef struct {
    int32_t *keys, *ids; /* by ascending id, padded to full vectors with keys below all others */
    float *weights;
    long count, padded;
} Candidates;

/* Integers that sort like floats. */
INLINE vi keys_of(vf v) { return (vi)v ^ (((vi)v >> 31) & 0x7fffffff); }

INLINE int32_t key_of(float x) { return keys_of(splat(x))[0]; }

INLINE double sum_doubles(vd v) {
    double sum = 0.0;
    for (int i = 0; i < VW; i++) sum += v[i];
    return sum;
}

INLINE vf load_logits(const WeighedRow *row, long at) {
    float last[VW];
    const float *from = row->logits + at;
    if (at + VW > row->vocab) {
        for (int i = 0; i < VW; i++) last[i] = at + i < row->vocab ? from[i] : -INFINITY;
        from = last;
    }
    const vf v = load(from);
    return select_vec(v == v, v + splat(0.0f), splat(-INFINITY)); /* 0 instead of -0, which has another key */
}

/* Fills in the best logit and the peaks. */
static void find_peaks(WeighedRow *row) {
    const long count = num_peaks(row->vocab);
    row->best = -INFINITY;
    for (long b = 0; b < count; b++) {
        vf peak = splat(-INFINITY);
        for (long i = b * PEAK_BLOCK; i < (b + 1) * PEAK_BLOCK && i < row->vocab; i += VW)
            peak = max_vec(peak, load_logits(row, i));
        const float highest = max_lanes(peak);
        row->peaks[b] = key_of(highest);
        row->best = highest > row->best ? highest : row->best;
    }
    for (long b = count; b < round_up(count, ALIGN_FLOATS); b++) row->peaks[b] = INT32_MIN;
}

static void weigh(WeighedRow *row) {
    for (long b = 0; b < row->blocks; b++) {
        vd sum = {0};
        for (long i = b * DRAW_BLOCK; i < (b + 1) * DRAW_BLOCK; i += VW) {
            vf weight = splat(0.0f);
            if (i < row->vocab) {
                const vf exponent = (load_logits(row, i) - splat(row->best)) / splat(row->temperature);
                weight = select_vec(exponent >= splat(LOWEST_SHARE), exp_vec(exponent), weight);
            }
            store(row->weights + i, weight);
            sum += __builtin_convertvector(weight, vd);
        }
        row->sums[b] = sum_doubles(sum);
    }
}

static double total_weight(const WeighedRow *row) {
    double total = 0.0;
    for (long b = 0; b < row->blocks; b++) total += row->sums[b];
    return total;
}

INLINE int has_top_k(const WeighedRow *row, const Draw *draw) {
    return draw->top_k > 0.0 && draw->top_k < (double)row->vocab;
}

/* How many entries have a key of at least `lowest`, or what they weigh together. */
static double amount_from(const int32_t *keys, const float *weights, long padded, int32_t lowest) {
    vd sum = {0};
    for (long i = 0; i < padded; i += VW) {
        const vi reached = *(const vi_any *)(keys + i) >= splat_int(lowest);
        const vf own = weights ? load(weights + i) : splat(1.0f);
        sum += __builtin_convertvector((vf)((vi)own & reached), vd);
    }
    return sum_doubles(sum);
}

/* The highest key between `low` and `high` from which on the amount reaches the goal; `low` if none does. */
static int32_t narrow(const int32_t *keys, const float *weights, long padded, double goal, int32_t low, int32_t high) {
    while (low < high) {
        const int32_t middle = (int32_t)(low + ((int64_t)high - low + 1) / 2);
        if (amount_from(keys, weights, padded, middle) >= goal)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void collect(const WeighedRow *row, int32_t lowest, Candidates *to) {
    long count = 0;
    for (long b = 0; b < num_peaks(row->vocab); b++) {
        if (row->peaks[b] < lowest) continue;
        for (long first = b * PEAK_BLOCK; first < (b + 1) * PEAK_BLOCK && first < row->vocab; first += VW) {
            const vi keys = keys_of(load_logits(row, first));
            for (long i = 0; i < VW && first + i < row->vocab; i++) {
                to->keys[count] = keys[i];
                to->weights[count] = row->weights[first + i];
                to->ids[count] = (int32_t)(first + i);
                count += keys[i] >= lowest;
            }
        }
    }
    to->count = count;
    for (to->padded = round_up(count, VW); count < to->padded; count++) {
        to->keys[count] = INT32_MIN;
        to->weights[count] = 0.0f;
    }
}

/* The key from which on logits are candidates. */
static int32_t candidate_bound(const WeighedRow *row, const Draw *draw) {
    const long count = num_peaks(row->vocab);
    const int32_t top = key_of(row->best);
    int32_t bound = key_of(-INFINITY);
    double exponent = -INFINITY; /* of shares of the best token */
    if (has_top_k(row, draw)) {
        if (draw->top_k <= (double)count)
            bound = narrow(row->peaks, NULL, round_up(count, ALIGN_FLOATS), draw->top_k, bound, top);
    } else if (draw->top_p < 1.0) { /* all tokens below weigh less together than what is left out */
        exponent = log((1.0 - draw->top_p) * total_weight(row) / (double)row->vocab);
    }
    if (draw->min_p > 0.0 && !has_top_k(row, draw)) exponent = fmax(exponent, log(draw->min_p));
    const double value = (double)row->best + (double)row->temperature * (exponent - MARGIN);
    const int32_t likely = key_of(nextafterf(fmaxf((float)value, -FLT_MAX), -INFINITY));
    return likely > bound ? likely : bound;
}

/* The token at which the kept weights reach the number. Of those with the key `edge` the first `num_equal` are kept. */
static int64_t pick(const Candidates *all, int32_t edge, long num_equal, const Draw *draw) {
    double total = 0.0, reached = 0.0;
    for (int round = 0; round < 2; round++) {
        const double target = draw->number * total;
        long num_seen = 0, last = -1;
        for (long i = 0; i < all->count; i++) {
            const int is_kept = all->keys[i] > edge || (all->keys[i] == edge && num_seen++ < num_equal);
            if (!is_kept || !(all->weights[i] >= (float)draw->min_p) || all->weights[i] == 0.0f) continue;
            last = i;
            if (round == 0)
                total += all->weights[i];
            else if ((reached += all->weights[i]) > target)
                break;
        }
        if (round == 1 && last >= 0) return all->ids[last];
    }
    return UNUSABLE;
}

static int64_t pick_from_candidates(const WeighedRow *row, const Draw *draw, float *memory) {
    const long size = row->blocks * DRAW_BLOCK;
    Candidates all = {.keys = (int32_t *)memory, .ids = (int32_t *)(memory + size), .weights = memory + 2 * size};
    int32_t edge = candidate_bound(row, draw);
    const int32_t top = key_of(row->best);
    long num_equal = row->vocab;
    collect(row, edge, &all);
    if (has_top_k(row, draw))
        edge = narrow(all.keys, NULL, all.padded, draw->top_k, edge, top);
    if (draw->top_p < 1.0) {
        const double total =
            has_top_k(row, draw) ? amount_from(all.keys, all.weights, all.padded, edge) : total_weight(row);
        const double goal = draw->top_p * total;
        edge = narrow(all.keys, all.weights, all.padded, goal, edge, top);
        const double above = edge < top ? amount_from(all.keys, all.weights, all.padded, edge + 1) : 0.0;
        long i = 0;
        while (i < all.count && all.keys[i] != edge) i++;
        const double each = i < all.count ? all.weights[i] : 0.0;
        if (each > 0.0 && goal > above) num_equal = (long)fmin(ceil((goal - above) / each), (double)row->vocab);
        if (each > 0.0 && goal <= above) num_equal = 1;
    }
    return pick(&all, edge, num_equal, draw);
}

static int64_t pick_from_all(const WeighedRow *row, const Draw *draw) {
    const double target = draw->number * total_weight(row);
    long block = 0, last = 0;
    double reached = 0.0, before = 0.0; /* the block that is reached */
    for (long b = 0; b < row->blocks && reached <= target; b++) {
        if (row->sums[b] == 0.0) continue;
        block = b, before = reached;
        reached += row->sums[b];
    }
    for (long i = block * DRAW_BLOCK; i < (block + 1) * DRAW_BLOCK; i++) {
        if (row->weights[i] == 0.0f) continue;
        last = i;
        if ((before += row->weights[i]) > target) break;
    }
    return last;
}

/* `memory`: draw_floats(vocab). */
static int64_t draw_token(const float *logits, long vocab, const Draw *draw, float *memory) {
    const long blocks = draw_blocks(vocab), size = blocks * DRAW_BLOCK;
    float *after = memory + 4 * size;
    WeighedRow row = {.logits = logits, .vocab = vocab, .blocks = blocks, .temperature = (float)draw->temperature,
                      .weights = memory, .sums = (double *)after,
                      .peaks = (int32_t *)(after + 2 * round_up(blocks, ALIGN_FLOATS))};
    find_peaks(&row);
    if (!isfinite(row.best)) return UNUSABLE;
    weigh(&row);
    const int keeps_all = !(draw->top_k > 0.0) && !(draw->top_p < 1.0) && !(draw->min_p > 0.0);
    return keeps_all ? pick_from_all(&row, draw) : pick_from_candidates(&row, draw, memory + size);
}

#endif
