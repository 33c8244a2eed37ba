/* What a draft model found by itself: its tree, identical to growth/neural/search.py, or its predictions as hints,
 * identical to sources/hints/drafted.py. */
#ifndef DRAFTWOOD_FOUND_H
#define DRAFTWOOD_FOUND_H

#include <stdlib.h>
#include <string.h>

#include "hints.h"
#include "sizing.h"

/* Records of passes, for all trees: tokens, probabilities and values of the candidates, picks and depths of the nodes.
 * targets/searches.py numbers nodes and candidates. */
typedef struct {
    const int32_t *records;
    int64_t stride; /* of a record */
    int64_t num_passes, num_trees, tree;
    int64_t width, best; /* nodes of a pass, candidates after a node */
    const int32_t *names; /* tokens by the numbers that are recorded; NULL: these are tokens */
} Found;

static inline const int32_t *candidate_at(const Found *f, int64_t part, int64_t candidate) {
    const int64_t group = f->width * f->best;
    return f->records + candidate / group * f->stride + (part * f->num_trees + f->tree) * group + candidate % group;
}

static inline int32_t of_node(const Found *f, int64_t part, int64_t node) {
    const int64_t first = (3 * f->best + part) * f->num_trees * f->width;
    return f->records[node / f->width * f->stride + first + f->tree * f->width + node % f->width];
}

static inline float float_at(const Found *f, int64_t part, int64_t candidate) {
    float value;
    memcpy(&value, candidate_at(f, part, candidate), sizeof value);
    return value;
}

/* Writes the candidates of the tree to `order`, which has room for all: the best `size` by their values, or of the
 * `size` ones in `wanted` those that exist. Parents come first. Returns how many. */
static int64_t order_found(const Found *f, int64_t size, const int32_t *wanted, uint64_t *keys, int32_t *order) {
    const int64_t group = f->width * f->best, num_candidates = f->num_passes * group;
    int64_t count = 0;
    if (wanted) {
        for (int64_t i = 0; i < size; i++)
            if (wanted[i] < num_candidates && float_at(f, 2, wanted[i]) > 0.0f) order[count++] = wanted[i];
        return count;
    }
    for (int64_t first = 0; first < num_candidates; first += group) {
        const int32_t *values = candidate_at(f, 2, first);
        for (int64_t i = 0; i < group; i++) {
            float value;
            memcpy(&value, values + i, sizeof value);
            if (value > 0.0f) keys[count++] = sort_key(value, (uint64_t)(first + i));
        }
    }
    if (size < count) {
        select_keys(keys, count, size);
        count = size;
    }
    sort_keys(keys, keys + count, count, 0);
    for (int64_t i = 0; i < count; i++) order[i] = (int32_t)keys[i];
    return count;
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* The tree in the columns `ints [4][stride], probs [stride]`, which have room for `size` nodes and the root. All its
 * nodes have one source. `order` receives its candidates. Returns the number of nodes, 0 if out of memory. */
int64_t draftwood_found_tree(const Found *f, int64_t size, const int32_t *wanted, int64_t root, int64_t source,
                             int64_t stride, int32_t *ints, double *probs, int32_t *order) {
    const int64_t num_candidates = f->num_passes * f->width * f->best;
    uint64_t *keys = malloc(num_candidates * (2 * sizeof *keys + 2 * sizeof(int32_t)));
    if (!keys) return 0;
    int32_t *chosen = (int32_t *)(keys + 2 * num_candidates), *numbers = chosen + num_candidates; /* of candidates */
    const int64_t count = order_found(f, size, wanted, keys, chosen);
    memset(numbers, 0, num_candidates * sizeof *numbers);
    ints[0] = (int32_t)root, ints[stride] = -1, ints[2 * stride] = 0, ints[3 * stride] = 0, probs[0] = 1.0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t candidate = order[i] = chosen[i], node = candidate / f->best;
        const int32_t token = *candidate_at(f, 0, candidate), pick = of_node(f, 0, node);
        int32_t *to = ints + i + 1;
        numbers[candidate] = (int32_t)i + 1;
        to[0] = f->names ? f->names[token] : token;
        to[stride] = pick < 0 ? 0 : numbers[pick];
        to[2 * stride] = of_node(f, 1, node) + 1;
        to[3 * stride] = (int32_t)source;
        probs[i + 1] = float_at(f, 1, candidate);
    }
    free(keys);
    return count + 1;
}

/* Adds the predictions after all nodes of a search, below a text that ends with `tail`. */
void draftwood_add_found(Drafted *d, const int32_t *tail, int64_t length, const Found *f) {
    const int64_t num_nodes = f->num_passes * f->width;
    int32_t tails[MAX_DRAFTED][TAIL], ids[DRAFTED_WIDTH];
    int64_t lengths[MAX_DRAFTED], width = f->best < DRAFTED_WIDTH ? f->best : DRAFTED_WIDTH;
    float scores[DRAFTED_WIDTH];
    if (length > TAIL) tail += length - TAIL, length = TAIL;
    for (int64_t node = 0; node < num_nodes && node < MAX_DRAFTED; node++) {
        const int32_t pick = of_node(f, 0, node);
        if (node && pick < 0) continue;
        if (!node) {
            memcpy(tails[0], tail, length * sizeof *tail);
            lengths[0] = length;
        } else {
            const int64_t parent = pick / f->best, first = lengths[parent] == TAIL;
            const int32_t token = *candidate_at(f, 0, pick);
            lengths[node] = lengths[parent] - first;
            memcpy(tails[node], tails[parent] + first, lengths[node] * sizeof *tail);
            tails[node][lengths[node]++] = f->names ? f->names[token] : token;
        }
        for (int64_t i = 0; i < width; i++) {
            const int32_t token = *candidate_at(f, 0, node * f->best + i);
            scores[i] = float_at(f, 1, node * f->best + i);
            ids[i] = f->names && scores[i] > 0.0f ? f->names[token] : token;
        }
        draftwood_add_drafted(d, tails[node], lengths[node], width, ids, scores);
    }
}

#endif
