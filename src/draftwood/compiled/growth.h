/* The spine tree of growth/spine.py with the best-first extension of growth/best_first.py: the same nodes in the same
 * order, to the last bit of their probabilities. Read there what it does; this is the quick form of it. */
#ifndef DRAFTWOOD_GROWTH_H
#define DRAFTWOOD_GROWTH_H

#include <stdlib.h>

#include "table.h"

typedef struct {
    int64_t size, budget;
    int32_t *tokens, *parents, *depths; /* [budget] */
    double *probs; /* [budget] */
    int32_t *last_child, *sibling_before; /* [budget], NONE at the end */
} Builder;

/* A node to grow from. */
typedef struct {
    double value; /* how likely the node is to be reached */
    int32_t node, previous, token;
    int32_t depth; /* below the spine */
    int64_t next_rank;
} Start;

/* The best successor of a node that is not taken yet. */
typedef struct {
    double value, parent_value;
    int64_t order; /* the earlier of two equals goes first */
    int64_t rank;
    int32_t parent, token, depth; /* of the parent: node, token, depth below the spine */
    Row row;
} Candidate;

typedef struct {
    Candidate *heap; /* the best is the first */
    int64_t size, order;
} Queue;

typedef struct {
    const Table *table;
    Builder tree;
    Start *starts; /* [budget] */
    int64_t num_starts;
    Queue queue;
    double min_score;
    int64_t max_depth;
} Growth;

/* The new node; NONE where the parent has the token already, or there is no room. */
static int32_t add_new(Builder *b, int32_t parent, int32_t token, double prob) {
    if (b->size == b->budget) return NONE;
    for (int32_t child = b->last_child[parent]; child != NONE; child = b->sibling_before[child])
        if (b->tokens[child] == token) return NONE;
    const int32_t node = (int32_t)b->size++;
    b->tokens[node] = token;
    b->parents[node] = parent;
    b->depths[node] = b->depths[parent] + 1;
    b->probs[node] = prob;
    b->last_child[node] = NONE;
    b->sibling_before[node] = b->last_child[parent];
    b->last_child[parent] = node;
    return node;
}

static void plant(Builder *b, int32_t root) {
    b->tokens[0] = root;
    b->parents[0] = NONE;
    b->depths[0] = 0;
    b->probs[0] = 1.0;
    b->last_child[0] = b->sibling_before[0] = NONE;
    b->size = 1;
}

/* -- the queue ----------------------------------------------------------------------------------------------------- */

static inline int comes_before(const Candidate *a, const Candidate *b) {
    return a->value > b->value || (a->value == b->value && a->order < b->order);
}

/* Puts a candidate where the place `at` is free, or above it. */
static void rise(Queue *q, int64_t at, Candidate candidate) {
    while (at > 0 && comes_before(&candidate, &q->heap[(at - 1) / 2])) {
        q->heap[at] = q->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    q->heap[at] = candidate;
}

/* Puts a candidate in the place of the first, or below it. */
static void sink(Queue *q, Candidate candidate) {
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < q->size; at = child) {
        if (child + 1 < q->size && comes_before(&q->heap[child + 1], &q->heap[child])) child++;
        if (!comes_before(&q->heap[child], &candidate)) break;
        q->heap[at] = q->heap[child];
    }
    q->heap[at] = candidate;
}

static void push(Queue *q, Candidate candidate) {
    candidate.order = q->order++;
    rise(q, q->size++, candidate);
}

static void replace_first(Queue *q, Candidate candidate) {
    candidate.order = q->order++;
    sink(q, candidate);
}

static void drop_first(Queue *q) {
    if (--q->size) sink(q, q->heap[q->size]);
}

/* -- growing ------------------------------------------------------------------------------------------------------- */

static int is_guess(const Growth *g, Row row, int64_t rank) {
    return row.scores && rank < g->table->width && row.scores[rank] >= g->min_score;
}

/* Lets a node's best successor from a rank on wait in the queue. */
static void offer(Growth *g, int32_t node, int32_t previous, int32_t token, double value, int32_t depth, int64_t rank) {
    if (depth >= g->max_depth) return;
    const Row row = successors(g->table, previous, token);
    if (is_guess(g, row, rank))
        push(&g->queue, (Candidate){value * row.scores[rank], value, 0, rank, node, token, depth, row});
}

/* The root and the spine; all of them are starts. */
static void lay_spine(Growth *g, int32_t previous, int64_t length, const int32_t *spine, const double *trust) {
    Start start = {1.0, 0, previous, g->tree.tokens[0], 0, 0};
    g->starts[g->num_starts++] = start;
    for (int64_t i = 0; i < length; i++) {
        const int32_t node = add_new(&g->tree, start.node, spine[i], trust[i]);
        start = (Start){start.value * trust[i], node, start.token, spine[i], 0, 0};
        g->starts[g->num_starts++] = start;
    }
}

/* The best successors of a start as its children, which are starts too. */
static void attach(Growth *g, Start *start, int64_t allowance) {
    const Row row = successors(g->table, start->previous, start->token);
    int64_t rank = 0;
    for (; allowance && is_guess(g, row, rank); rank++) {
        const double score = row.scores[rank];
        const int32_t node = add_new(&g->tree, start->node, row.ids[rank], score);
        if (node == NONE) continue; /* the spine may have its own token there already */
        g->starts[g->num_starts++] = (Start){start->value * score, node, start->token, row.ids[rank], 1, 0};
        allowance--;
    }
    start->next_rank = rank;
}

/* The likeliest first, of equals the earlier one. */
static void sort_starts(Start *starts, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        const Start start = starts[i];
        int64_t at = i;
        for (; at > 0 && starts[at - 1].value < start.value; at--) starts[at] = starts[at - 1];
        starts[at] = start;
    }
}

static void grow_best_first(Growth *g) {
    Builder *tree = &g->tree;
    Queue *queue = &g->queue;
    int64_t next = 0; /* start */
    sort_starts(g->starts, g->num_starts);
    while (tree->size < tree->budget) {
        /* A start is looked up when nothing in the queue is worth more than all it may lead to. */
        for (; next < g->num_starts && (!queue->size || g->starts[next].value >= queue->heap[0].value); next++) {
            const Start *s = &g->starts[next];
            offer(g, s->node, s->previous, s->token, s->value, s->depth, s->next_rank);
        }
        if (!queue->size) break;
        const Candidate best = queue->heap[0];
        Candidate after = best;
        after.rank++;
        if (is_guess(g, best.row, after.rank)) {
            after.value = best.parent_value * best.row.scores[after.rank];
            replace_first(queue, after);
        } else {
            drop_first(queue);
        }
        const int32_t token = best.row.ids[best.rank];
        const int32_t node = add_new(tree, best.parent, token, best.row.scores[best.rank]);
        if (node == NONE) continue; /* whoever added it lets it grow */
        if (tree->size < tree->budget) offer(g, node, best.token, token, best.value, best.depth + 1, 0);
    }
}

/* -- what Python calls --------------------------------------------------------------------------------------------- */

/* A tree of at most `budget` nodes: its size, or 0 where there is no memory. `allowances`: how many branches the root
 * gets, and the first spine nodes; the others are no starts. The results have room for `budget` nodes. */
int64_t draftwood_spine_tree(const Table *table, int64_t previous, int64_t root, int64_t length, const int32_t *spine,
                             const double *trust, int64_t num_allowances, const int64_t *allowances, int64_t budget,
                             int64_t branch_depth, double min_score, int32_t *nodes, double *probs) {
    const size_t room = (size_t)budget;
    char *memory = malloc(room * (sizeof(Candidate) + sizeof(Start) + 2 * sizeof(int32_t)));
    if (!memory) return 0;
    Candidate *heap = (Candidate *)memory; /* a node waits in it once, and is a start once */
    Start *starts = (Start *)(heap + room);
    int32_t *links = (int32_t *)(starts + room);
    Growth g = {
        .table = table,
        .tree = {0, budget, nodes, nodes + room, nodes + 2 * room, probs, links, links + room},
        .starts = starts,
        .queue = {heap, 0, 0},
        .min_score = min_score,
        .max_depth = branch_depth,
    };
    plant(&g.tree, (int32_t)root);
    lay_spine(&g, (int32_t)previous, length, spine, trust);
    g.num_starts = num_allowances;
    for (int64_t i = 0; i < num_allowances; i++)
        if (allowances[i]) attach(&g, &g.starts[i], allowances[i]);
    grow_best_first(&g);
    free(memory);
    return g.tree.size;
}

#endif
