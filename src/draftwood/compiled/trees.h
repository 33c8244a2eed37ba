/* Trees of many requests as columns (tree/packed.py), and what a cycle does with all of them at once. */
#ifndef DRAFTWOOD_TREES_H
#define DRAFTWOOD_TREES_H

#include <stdint.h>

enum { NUM_BINS = 10 }; /* of chances, as in engine/calibration.py */

/* The place of a tree in its forest. Sources are integers. */
typedef struct {
    int64_t size;
    const int32_t *tokens;
    int64_t stride; /* nodes per column: parents, depths and sources follow the tokens at this distance */
    const double *probs;
} Tree;

static inline Tree tree_at(int64_t size, int64_t first, int64_t stride, const int32_t *ints, const double *probs) {
    return (Tree){size, ints + first, stride, probs + first};
}

static inline const int32_t *parents_of(const Tree *t) { return t->tokens + t->stride; }
static inline const int32_t *depths_of(const Tree *t) { return t->tokens + 2 * t->stride; }
static inline const int32_t *sources_of(const Tree *t) { return t->tokens + 3 * t->stride; }

/* The child of a node that carries the token, or -1. */
static int64_t child_with(const Tree *t, int64_t node, int64_t token) {
    const int32_t *parents = parents_of(t);
    for (int64_t child = node + 1; child < t->size; child++)
        if (t->tokens[child] == token && parents[child] == node) return child;
    return -1;
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* Walks down each tree along the target's tokens (verify/base.py). Row i of a tree's part of `choices` is the token
 * after its node i. `paths` and `emitted` receive the accepted nodes and the tokens that they and the bonus token add,
 * those of all trees one after the other; `lengths` how many. */
void draftwood_accept(int64_t n, const Tree *trees, const int64_t *first_rows, const int64_t *choices, int32_t *paths,
                      int32_t *emitted, int64_t *lengths) {
    for (int64_t i = 0; i < n; i++) {
        const Tree *t = &trees[i];
        const int32_t *start = paths;
        for (int64_t node = 0; node >= 0;) {
            const int64_t token = choices[first_rows[i] + node];
            *paths++ = (int32_t)node;
            *emitted++ = (int32_t)token;
            node = child_with(t, node, token);
        }
        lengths[i] = paths - start;
    }
}

/* Counts the nodes of verified trees (engine/tally.py). `paths`: accepted nodes without the root, `lengths` per tree;
 * `num_reached`: path nodes, root included, whose children could have been emitted. `drafted`: nodes by source.
 * `tried [num_sources][NUM_BINS][3]`: of the nodes below reached ones, by source and by their chance, how many there
 * are, the sum of their chances, and how many were accepted. `depths`: of each tree. */
void draftwood_tally(int64_t n, const Tree *trees, const int32_t *paths, const int64_t *lengths,
                     const int64_t *num_reached, int64_t *drafted, double (*tried)[NUM_BINS][3], int64_t *depths) {
    for (int64_t i = 0; i < n; i++, paths += lengths[i - 1]) {
        const Tree *t = &trees[i];
        const int32_t *parents = parents_of(t), *sources = sources_of(t), *own = depths_of(t);
        depths[i] = 0;
        for (int64_t node = 1; node < t->size; node++) {
            drafted[sources[node]]++;
            if (own[node] > depths[i]) depths[i] = own[node];
            int is_reached = parents[node] == 0, is_accepted = 0;
            for (int64_t k = 0; k + 1 < num_reached[i]; k++) is_reached |= parents[node] == paths[k];
            if (!is_reached) continue;
            for (int64_t k = 0; k < lengths[i]; k++) is_accepted |= node == paths[k];
            /* Drafters may be third-party code: no chance is outside 0 to 1, and NaN is 0. */
            const double prob = t->probs[node], chance = prob > 0.0 ? prob < 1.0 ? prob : 1.0 : 0.0;
            const int64_t bin = (int64_t)(chance * NUM_BINS);
            double *counts = tried[sources[node]][bin < NUM_BINS ? bin : NUM_BINS - 1];
            counts[0] += 1.0, counts[1] += chance, counts[2] += is_accepted;
        }
    }
}

#endif
