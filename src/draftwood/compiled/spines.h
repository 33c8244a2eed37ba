/* Spine trees of many requests: what drafters/goose.py does for one, with bit-identical results. */
#ifndef DRAFTWOOD_SPINES_H
#define DRAFTWOOD_SPINES_H

#include "context.h"
#include "growth.h"
#include "requests.h"
#include "trees.h"

enum { MAX_SPINE = 1024 };
enum { BYPASS_COPIED, BYPASS_MATCHED, BYPASS_AGREED, BYPASS_NEVER, BYPASS_AUTO };
enum { VOTES_OFF, VOTES_SIZES, VOTES_PLACES };
enum { ROUTE_PLAIN, ROUTE_BRANCH, ROUTE_SPINE, ROUTE_BYPASS };

typedef struct {
    int64_t max_draft, repeat; /* of a copy */
    int64_t bypass, bypass_length, bypass_budget, votes;
    int64_t branch_depth, spine_branches;
    int64_t spine_source, branch_source; /* numbers of the sources */
    double spine_share, min_score;
    double smoothing, low_rate, high_rate, low_ratio, middle_ratio, high_ratio;
} SpineRules;

typedef struct {
    const SpineRules *rules;
    Table *table;
    Context *context; /* NULL: no spine */
    double spine_rate; /* running acceptance rate */
    int64_t previous, root; /* last tokens of the text */
} SpineRequest;

/* Tolerates rounding: 10 * (1 - 0.9) gives 1. */
static inline int64_t floor_of(double number) { return (int64_t)(number + 1e-9); }

static int should_bypass(const SpineRequest *q, const Match *match, int64_t copied, int64_t budget) {
    const SpineRules *r = q->rules;
    int64_t kind = r->bypass;
    if (kind == BYPASS_AUTO) kind = budget < r->bypass_budget ? BYPASS_COPIED : BYPASS_NEVER;
    if (kind == BYPASS_NEVER) return 0;
    if (kind == BYPASS_AGREED) return copied >= r->bypass_length && match->num_agreeing == q->context->num_sizes;
    const int64_t length = kind == BYPASS_MATCHED ? match->length : copied;
    const int64_t votes = r->votes == VOTES_SIZES ? match->num_agreeing : r->votes == VOTES_PLACES ? match->num_places : 0;
    return length >= r->bypass_length || votes >= 2;
}

/* Number of branches for the root and for each of `length` spine nodes, falling with depth. */
static void divide_branches(int64_t free, int64_t length, double spine_share, int64_t *allowances) {
    const int64_t for_root = length ? floor_of((double)free * (1.0 - spine_share)) : free;
    double harmonic = 0.0;
    for (int64_t i = 1; i <= length; i++) harmonic += 1.0 / (double)i;
    allowances[0] = for_root;
    for (int64_t i = 1; i <= length; i++) allowances[i] = floor_of((double)(free - for_root) / (double)i / harmonic);
}

/* Proposes the tree of one request. Returns its size, or 0 if out of memory. */
static int64_t propose_spine(const SpineRequest *q, int64_t budget, int64_t stride, int32_t *ints, double *probs,
                             int64_t *route) {
    const SpineRules *r = q->rules;
    int32_t spine[MAX_SPINE];
    double trust[MAX_SPINE];
    int64_t allowances[MAX_SPINE + 1], copied = 0;
    Match match = {0, 0, 0, 0};
    if (q->context) match = find_match(q->context);
    if (match.length) copied = copy_match(q->context, &match, r->max_draft, (int)r->repeat, spine);
    for (int64_t i = 0; i < copied; i++) trust[i] = 1.0 - 1.0 / ((double)(match.length + i) + 1.5);
    int64_t length, size;
    if (match.length && should_bypass(q, &match, copied, budget)) {
        length = copied < budget - 1 ? copied : budget - 1;
        ints[0] = (int32_t)q->root, ints[stride] = NONE, ints[2 * stride] = 0, probs[0] = 1.0;
        for (int64_t i = 1; i <= length; i++) {
            ints[i] = spine[i - 1], ints[stride + i] = (int32_t)i - 1, ints[2 * stride + i] = (int32_t)i;
            probs[i] = trust[i - 1];
        }
        size = length + 1;
        *route = size == 1 ? ROUTE_PLAIN : ROUTE_BYPASS;
    } else {
        const double ratio = q->spine_rate < r->low_rate ? r->low_ratio
                             : q->spine_rate < r->high_rate ? r->middle_ratio : r->high_ratio;
        length = floor_of((double)budget * ratio);
        if (length > copied) length = copied;
        if (length > budget - 1) length = budget - 1;
        const int64_t num_branched = r->spine_branches ? length : 0;
        divide_branches(budget - 1 - length, num_branched, r->spine_share, allowances);
        size = grow_spine(q->table, q->previous, q->root, length, spine, trust, num_branched + 1, allowances, budget,
                          r->branch_depth, r->min_score, stride, ints, probs);
        *route = size == 1 ? ROUTE_PLAIN : length ? ROUTE_SPINE : ROUTE_BRANCH;
    }
    int32_t *sources = ints + 3 * stride;
    for (int64_t i = 0; i < size; i++)
        sources[i] = i == 0 ? 0 : (int32_t)(i <= length ? r->spine_source : r->branch_source);
    return size;
}

typedef struct {
    const SpineRequest *const *requests;
    const int64_t *budgets;
    int64_t stride;
    int32_t *ints;
    double *probs;
    Tree *trees;
    int64_t *routes;
} SpineDrafts;

static void propose_one_spine(void *job, long i, int thread) {
    const SpineDrafts *d = job;
    const int64_t first = sum_before(d->budgets, i);
    (void)thread;
    const int64_t size =
        propose_spine(d->requests[i], d->budgets[i], d->stride, d->ints + first, d->probs + first, &d->routes[i]);
    d->trees[i] = tree_at(size, first, d->stride, d->ints, d->probs);
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* Proposes a tree of at most `budgets[i]` nodes for each request, at node `budgets[0] + ... + budgets[i - 1]` of a
 * forest, and writes where it is. Returns nonzero if out of memory. */
int draftwood_propose_spines(int64_t n, const SpineRequest *const *requests, const int64_t *budgets, int64_t stride,
                             int32_t *ints, double *probs, Tree *trees, int64_t *routes) {
    SpineDrafts drafts = {requests, budgets, stride, ints, probs, trees, routes};
    for_requests(propose_one_spine, &drafts, n, 1);
    for (int64_t i = 0; i < n; i++)
        if (!trees[i].size) return 1;
    return 0;
}

/* Follows the outcome of a verified tree: the running acceptance rate of spines, and the last tokens. `path`: accepted
 * nodes; `emitted`: tokens that are now text. */
void draftwood_follow_spine(SpineRequest *q, const Tree *tree, int64_t length, const int32_t *path, int64_t num_emitted,
                            const int32_t *emitted) {
    const int32_t *sources = sources_of(tree);
    int64_t drafted = 0, accepted = 0;
    for (int64_t node = 0; node < tree->size; node++) drafted += sources[node] == q->rules->spine_source;
    for (int64_t k = 0; k < length; k++) accepted += sources[path[k]] == q->rules->spine_source;
    if (drafted) q->spine_rate += q->rules->smoothing * ((double)accepted / (double)drafted - q->spine_rate);
    for (int64_t k = num_emitted > 2 ? num_emitted - 2 : 0; k < num_emitted; k++)
        q->previous = q->root, q->root = emitted[k];
}

typedef struct {
    SpineRequest *const *requests;
    Outcomes outcomes;
    _Atomic int failed;
} SpineLessons;

static void observe_one_spine(void *job, long i, int thread) {
    SpineLessons *lessons = job;
    SpineRequest *q = lessons->requests[i];
    const Seen seen = seen_by(&lessons->outcomes, i, q->table->width);
    (void)thread;
    prefetch_tree(q->table, seen.tree, q->previous, prefetch_slot);
    if (learn_seen(q->table, &seen, q->previous)) lessons->failed = 1;
    draftwood_follow_spine(q, seen.tree, seen.path_length, seen.path, seen.num_emitted, seen.emitted);
    if (q->context) draftwood_extend_contexts(1, &q->context, &seen.num_emitted, seen.emitted);
}

/* Learns from verified trees: the rows of all nodes, and what is now text. Python has reserved memory. Returns nonzero
 * if a tree is invalid; the other requests have learned. */
int draftwood_observe_spines(int64_t n, SpineRequest *const *requests, const Tree *trees, const int64_t *lengths,
                             const int32_t *paths, const int64_t *num_emitted, const int32_t *emitted,
                             const int64_t *rows, const int32_t *ids, const float *scores) {
    SpineLessons lessons = {requests, {trees, lengths, paths, num_emitted, emitted, rows, ids, scores}, 0};
    Table *tables[n];
    for (int64_t i = 0; i < n; i++) tables[i] = requests[i]->table;
    for_requests(observe_one_spine, &lessons, n, are_apart(tables, n));
    return lessons.failed;
}

#endif
