/* Trees of many requests as columns (tree/packed.py), and what a cycle does with all of them at once. */
#ifndef DRAFTWOOD_TREES_H
#define DRAFTWOOD_TREES_H

#include <stdint.h>

/* The place of a tree in its forest. Sources are integers. */
typedef struct {
    int64_t size;
    const int32_t *tokens;
    int64_t stride; /* nodes per column: parents, depths and sources follow the tokens at this distance */
    const double *probs;
} Tree;

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
 * both at the first row of the tree; `lengths` how many. */
void draftwood_accept(int64_t n, const Tree *trees, const int64_t *first_rows, const int64_t *choices, int32_t *paths,
                      int32_t *emitted, int64_t *lengths) {
    for (int64_t i = 0; i < n; i++) {
        const Tree *t = &trees[i];
        const int64_t row = first_rows[i];
        int64_t node = 0, length = 0;
        while (node >= 0) {
            const int64_t token = choices[row + node];
            paths[row + length] = (int32_t)node;
            emitted[row + length++] = (int32_t)token;
            node = child_with(t, node, token);
        }
        lengths[i] = length;
    }
}

/* Counts the nodes of verified trees (engine/stats.py). `paths`: accepted nodes without the root, `lengths` per tree;
 * `num_reached`: path nodes, root included, whose children could have been emitted. `counts [3][num_sources]`: nodes
 * drafted, tried and accepted by source. `depths`: of each tree. */
void draftwood_tally(int64_t n, const Tree *trees, const int32_t *paths, const int64_t *lengths,
                     const int64_t *num_reached, int64_t num_sources, int64_t *counts, int64_t *depths) {
    int64_t *drafted = counts, *tried = counts + num_sources, *accepted = counts + 2 * num_sources;
    for (int64_t i = 0; i < n; i++, paths += lengths[i - 1]) {
        const Tree *t = &trees[i];
        const int32_t *parents = parents_of(t), *sources = sources_of(t), *own = depths_of(t);
        depths[i] = 0;
        for (int64_t node = 1; node < t->size; node++) {
            drafted[sources[node]]++;
            if (own[node] > depths[i]) depths[i] = own[node];
            int reached = parents[node] == 0;
            for (int64_t k = 0; k + 1 < num_reached[i]; k++) reached |= parents[node] == paths[k];
            tried[sources[node]] += reached;
        }
        for (int64_t k = 0; k < lengths[i]; k++) accepted[sources[paths[k]]]++;
    }
}

#endif
