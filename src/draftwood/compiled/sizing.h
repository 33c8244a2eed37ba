/* Acceptance probabilities of guesses, and the parts of the trees of a batch that pay; identical to sizing/chances.py. */
#ifndef DRAFTWOOD_SIZING_H
#define DRAFTWOOD_SIZING_H

#include <stdlib.h>
#include <string.h>

#include "requests.h"
#include "trees.h"

#define MAX_EDGES 16

typedef struct {
    double trust, prior_trials, prior_hits, min_rate;
    double hope, fade;
    int64_t deep, num_edges;
    double edges[MAX_EDGES]; /* bin edges of the sources' own estimates */
} Rules;

/* Per kind: trials and hits. */
typedef struct {
    double decay;
    double (*counts)[2];
} Record;

typedef struct {
    const Rules *rules;
    Record request, drafter;
    int64_t last_was_right;
} Experience;

/* The believed part of the source's estimate if no sibling before the node is right; `*left`: what those leave of a
 * total of 1. */
static double estimate_of(const Rules *r, const Tree *t, int64_t node, double *left) {
    const double prob = t->probs[node] > 0.0 ? r->trust * t->probs[node] : 0.0, before = *left; /* NaN is 0 */
    *left = before > prob ? before - prob : 0.0;
    return before > prob ? prob / before : prob > 0.0 ? 1.0 : 0.0;
}

static int64_t kind_of(const Experience *e, const Tree *t, int64_t node, double estimate) {
    const Rules *r = e->rules;
    const int64_t depth_of_node = depths_of(t)[node];
    int64_t bin = 0;
    while (bin < r->num_edges && r->trust * r->edges[bin] <= estimate) bin++;
    const int64_t depth = depth_of_node < r->deep ? depth_of_node : r->deep;
    const int64_t in_run = e->last_was_right && depth_of_node == 1;
    return ((sources_of(t)[node] * (r->num_edges + 1) + bin) * (r->deep + 1) + depth) * 2 + in_run;
}

static double rate(const Record *record, int64_t kind, const Rules *r, double believed) {
    const double trials = record->counts[kind][0], hits = record->counts[kind][1];
    double likely = believed * trials > hits ? believed : hits / (trials > 0.0 ? trials : 1.0);
    if (likely < r->min_rate) likely = r->min_rate;
    const double rare = r->prior_hits / likely;
    const double weight = r->prior_trials > rare ? r->prior_trials : rare;
    const double rate = (hits + weight * believed) / (trials + weight);
    return rate < 1.0 ? rate : 1.0;
}

static void count(Record *record, int64_t kind, double right) {
    double *counts = record->counts[kind];
    counts[0] = counts[0] * record->decay + 1.0;
    counts[1] = counts[1] * record->decay + right;
}

/* Acceptance probability of every node; 1 for the root. `left` has room for twice the nodes. */
static void find_chances(const Experience *e, const Tree *t, double *chances, double *left) {
    const Rules *r = e->rules;
    const int32_t *parents = parents_of(t);
    double *open = left + t->size; /* the chance that a node is accepted and none of its children so far is right */
    for (int64_t node = 0; node < t->size; node++) left[node] = 1.0;
    chances[0] = open[0] = 1.0;
    for (int64_t node = 1; node < t->size; node++) {
        const int64_t parent = parents[node];
        const double estimate = estimate_of(r, t, node, &left[parent]);
        const int64_t kind = kind_of(e, t, node, estimate);
        const double believed = rate(&e->drafter, kind, r, estimate);
        chances[node] = open[node] = open[parent] * rate(&e->request, kind, r, believed);
        open[parent] -= chances[node];
    }
}

/* -- cutting ------------------------------------------------------------------------------------------------------- */

/* What drafters offer for some requests, and the limits of their trees. */
typedef struct {
    const Tree *trees;
    const Experience *const *experiences;
    const int64_t *rooms, *max_depths;
    const double *lessons; /* tokens that later trees gain from the first node that is verified; others teach less */
} Offers;

static inline int may_keep(const Offers *o, int64_t i, int64_t node) {
    return node < o->rooms[i] && depths_of(&o->trees[i])[node] <= o->max_depths[i];
}

/* A node that may be kept. Keys of better nodes are smaller; equal chances keep their order, parents first. */
static inline uint64_t sort_key(double chance, uint64_t index) {
    const float rounded = (float)chance; /* not negative, so that its bits are ordered as its value */
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return (uint64_t)(UINT32_MAX - bits) << 32 | index;
}

static void sort_few(uint64_t *keys, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        const uint64_t key = keys[i];
        int64_t at = i;
        for (; at > 0 && keys[at - 1] > key; at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
}

enum { INDEX_DIGITS = 4 }; /* of a key, the lowest ones */

/* Sorts digit by digit, the lowest byte first; the result is in `keys`. Digits that are the same everywhere are skipped,
 * and those before `digit`, by which the keys are sorted already. */
static void sort_keys(uint64_t *keys, uint64_t *spare, int64_t n, int digit) {
    enum { FEW = 64, DIGITS = sizeof *keys, VALUES = 256 };
    if (n <= FEW) {
        sort_few(keys, n);
        return;
    }
    uint32_t places[DIGITS][VALUES] = {{0}}; /* counts of a digit's values, then where the next one belongs */
    for (int64_t i = 0; i < n; i++)
        for (int own = digit; own < DIGITS; own++) places[own][keys[i] >> 8 * own & (VALUES - 1)]++;
    uint64_t *from = keys, *to = spare;
    for (; digit < DIGITS; digit++) {
        uint32_t *place = places[digit], start = 0;
        if (place[keys[0] >> 8 * digit & (VALUES - 1)] == n) continue;
        for (int value = 0; value < VALUES; value++) {
            const uint32_t count = place[value];
            place[value] = start;
            start += count;
        }
        for (int64_t i = 0; i < n; i++) to[place[from[i] >> 8 * digit & (VALUES - 1)]++] = from[i];
        uint64_t *last = from;
        from = to, to = last;
    }
    if (from != keys) memcpy(keys, from, n * sizeof *keys);
}

/* Moves the `size` smallest of `n` different keys to the front, in any order. */
static void select_keys(uint64_t *keys, int64_t n, int64_t size) {
    int64_t low = 0, high = n - 1; /* those before are among the smallest, those after are not */
    while (low < size && high >= size) {
        const uint64_t a = keys[low], b = keys[low + (high - low) / 2], c = keys[high];
        const uint64_t pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t i = low, k = high;
        while (i <= k) {
            while (keys[i] < pivot) i++;
            while (keys[k] > pivot) k--;
            if (i <= k) {
                const uint64_t key = keys[i];
                keys[i++] = keys[k];
                keys[k--] = key;
            }
        }
        if (size <= k) high = k;
        else if (size >= i) low = i;
        else return; /* the key between both parts is where it belongs */
    }
}

/* Copies the kept nodes of a tree to node `start` of a forest and renumbers their parents. Returns how many. */
static int64_t copy_kept(const Tree *t, const uint8_t *kept, int32_t *numbers, int64_t stride, int32_t *ints,
                         double *probs, int64_t start) {
    int64_t size = 0;
    for (int64_t node = 0; node < t->size; node++) {
        if (!kept[node]) continue;
        int32_t *to = ints + start + size;
        to[0] = t->tokens[node];
        to[stride] = node ? numbers[parents_of(t)[node]] : -1;
        to[2 * stride] = depths_of(t)[node];
        to[3 * stride] = sources_of(t)[node];
        probs[start + size] = t->probs[node];
        numbers[node] = (int32_t)size++;
    }
    return size;
}

/* The lowest value of a kept path and the highest of one that might have been kept, as the drafter estimates them. */
static void find_edges(const Offers *o, int64_t i, const uint8_t *kept, double *values, double *least, double *most) {
    const Tree *t = &o->trees[i];
    *least = 1.0, *most = 0.0;
    values[0] = 1.0;
    for (int64_t node = 1; node < t->size; node++) {
        const double value = values[node] = values[parents_of(t)[node]] * t->probs[node];
        if (kept[node]) *least = value < *least ? value : *least;
        else if (may_keep(o, i, node)) *most = value > *most ? value : *most;
    }
}

typedef struct {
    const Offers *offers;
    double *chances, *left; /* of all trees */
} CutChances;

static void find_chances_of(void *job, long i, int thread) {
    const CutChances *c = job;
    const Offers *o = c->offers;
    int64_t first = 0;
    for (int64_t before = 0; before < i; before++) first += o->trees[before].size;
    (void)thread;
    find_chances(o->experiences[i], &o->trees[i], c->chances + first, c->left + 2 * first);
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* `chances` must have room for three times the number of nodes. */
void draftwood_chances(const Experience *e, const Tree *t, double *chances) {
    find_chances(e, t, chances, chances + t->size);
}

/* Cuts the trees of a batch to the nodes that maximise tokens per second, now and later, whichever requests they
 * belong to.
 * `seconds`: duration of a pass over 1, 2, ... positions more than those of other requests; `fixed`: seconds that do
 * not depend on the nodes; `per_node`: seconds outside the pass. `tokens`: expected from other requests. What nodes
 * teach counts like tokens, but is not expected. The forest `ints [4][stride], probs [stride]` receives the trees side
 * by side; `cut` where they are, `expected` their tokens. Of the values that the drafter gives to paths, `least [n]`
 * receives the lowest of a kept guess, 1 if none is, and `most [n]` the highest of one that might have been kept, 0 if
 * all are. Returns 0 if out of memory. */
int draftwood_cut(int64_t n, const Tree *trees, const Experience *const *experiences, const int64_t *rooms,
                  const int64_t *max_depths, const double *lessons, const Rules *rules, double tokens,
                  const double *seconds, double fixed, double per_node, int64_t stride, int32_t *ints, double *probs,
                  Tree *cut, double *expected, double *least, double *most) {
    const Offers offers = {trees, experiences, rooms, max_depths, lessons};
    int64_t total = 0, num_keys = 0;
    for (int64_t i = 0; i < n; i++) total += trees[i].size;
    char *memory = malloc(total * (4 * sizeof(double) + 2 * sizeof(uint64_t) + sizeof(int32_t) + 1));
    if (!memory) return 0;
    double *chances = (double *)memory, *values = chances + total, *left = values + total;
    uint64_t *keys = (uint64_t *)(left + 2 * total);
    int32_t *numbers = (int32_t *)(keys + 2 * total);
    uint8_t *kept = (uint8_t *)(numbers + total);
    CutChances job = {&offers, chances, left};
    for_requests(find_chances_of, &job, n, 1);
    for (int64_t i = 0, first = 0; i < n; first += trees[i++].size) {
        double lesson = lessons[i];
        kept[first] = 1;
        for (int64_t node = 1; node < trees[i].size; node++) {
            kept[first + node] = 0;
            chances[first + node] *= rules->hope;
            values[first + node] = chances[first + node] + lesson;
            lesson *= rules->fade;
            if (may_keep(&offers, i, node))
                keys[num_keys++] = sort_key(values[first + node], (uint64_t)(first + node));
        }
        tokens += 1.0;
    }
    sort_keys(keys, keys + total, num_keys, INDEX_DIGITS);
    double best_rate = tokens / (seconds[n - 1] + fixed);
    int64_t best = 0;
    for (int64_t i = 1; i <= num_keys; i++) {
        tokens += values[(uint32_t)keys[i - 1]];
        const double rate = tokens / (seconds[n + i - 1] + fixed + per_node * (double)i);
        if (rate > best_rate) best = i, best_rate = rate;
    }
    for (int64_t i = 0; i < best; i++) kept[(uint32_t)keys[i]] = 1;
    for (int64_t i = 0, first = 0, start = 0; i < n; first += trees[i++].size) {
        const Tree *t = &trees[i];
        const int64_t size = copy_kept(t, kept + first, numbers, stride, ints, probs, start);
        cut[i] = tree_at(size, start, stride, ints, probs);
        start += size;
        expected[i] = 1.0;
        for (int64_t node = 1; node < t->size; node++)
            if (kept[first + node]) expected[i] += chances[first + node] / rules->hope;
        find_edges(&offers, i, kept + first, values + first, &least[i], &most[i]);
    }
    free(memory);
    return 1;
}

/* Counts the guesses that the emitted tokens of each request decide: the children of the root and of every right
 * guess, up to the right one. `emitted` holds the tokens of all requests, `lengths` how many each has. */
void draftwood_note(int64_t n, Experience *const *experiences, const Tree *trees, const int64_t *lengths,
                    const int32_t *emitted) {
    for (int64_t i = 0; i < n; emitted += lengths[i++]) {
        Experience *e = experiences[i];
        const Tree *t = &trees[i];
        const int32_t *parents = parents_of(t);
        int64_t node = 0, right = 0, first_is_right = 0;
        for (int64_t k = 0; k < lengths[i] && right >= 0; k++, node = right) {
            double left = 1.0;
            right = -1;
            for (int64_t child = node + 1; child < t->size && right < 0; child++) {
                if (parents[child] != node) continue;
                const int64_t kind = kind_of(e, t, child, estimate_of(e->rules, t, child, &left));
                const int is_right = t->tokens[child] == emitted[k];
                if (is_right) right = child;
                count(&e->request, kind, is_right);
                count(&e->drafter, kind, is_right);
            }
            if (k == 0) first_is_right = right >= 0;
        }
        e->last_was_right = first_is_right;
    }
}

#endif
