/* The spine tree of growth/spine.py with the best-first extension of growth/best_first.py. The results are
 * bit-identical; see there for an explanation. */
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
    double value; /* path probability of the node */
    int32_t node, previous, token;
    int32_t depth; /* below the spine */
    int64_t next_rank;
} Start;

/* The best remaining successor of a node. */
typedef struct {
    double value, parent_value;
    int64_t order; /* breaks ties: first in, first out */
    int64_t rank;
    int32_t parent, token, depth; /* of the parent: node, token, depth below the spine */
    Row row;
} Candidate;

typedef struct {
    Candidate *heap; /* best first */
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

/* Returns the new node; NONE if the parent already has the token or the budget is used up. */
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

static void add_root(Builder *b, int32_t root) {
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

/* Sifts a candidate up from the free index `at`. */
static void sift_up(Queue *q, int64_t at, Candidate candidate) {
    while (at > 0 && comes_before(&candidate, &q->heap[(at - 1) / 2])) {
        q->heap[at] = q->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    q->heap[at] = candidate;
}

/* Replaces the first candidate and sifts the new one down. */
static void sift_down(Queue *q, Candidate candidate) {
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
    sift_up(q, q->size++, candidate);
}

static void replace_first(Queue *q, Candidate candidate) {
    candidate.order = q->order++;
    sift_down(q, candidate);
}

static void pop_first(Queue *q) {
    if (--q->size) sift_down(q, q->heap[q->size]);
}

/* -- growing ------------------------------------------------------------------------------------------------------- */

static int is_guess(const Growth *g, Row row, int64_t rank) {
    return row.scores && rank < g->table->width && row.scores[rank] >= g->min_score;
}

/* Queues the best successor of a node, starting at `rank`. */
static void offer(Growth *g, int32_t node, int32_t previous, int32_t token, double value, int32_t depth, int64_t rank) {
    if (depth >= g->max_depth) return;
    const Row row = find(g->table, previous, token);
    if (!is_guess(g, row, rank)) return;
    prefetch_slot(g->table, token, row.ids[rank]);
    push(&g->queue, (Candidate){value * row.scores[rank], value, 0, rank, node, token, depth, row});
}

/* Adds the spine; the root and all spine nodes become starts. */
static void lay_spine(Growth *g, int32_t previous, int64_t length, const int32_t *spine, const double *trust) {
    Start start = {1.0, 0, previous, g->tree.tokens[0], 0, 0};
    g->starts[g->num_starts++] = start;
    for (int64_t i = 0; i < length; i++) {
        const int32_t node = add_new(&g->tree, start.node, spine[i], trust[i]);
        start = (Start){start.value * trust[i], node, start.token, spine[i], 0, 0};
        g->starts[g->num_starts++] = start;
    }
}

/* Adds the best successors of a start as children, which become starts too. */
static void attach(Growth *g, Start *start, int64_t allowance) {
    const Row row = find(g->table, start->previous, start->token);
    int64_t rank = 0;
    for (; allowance && is_guess(g, row, rank); rank++) {
        const double score = row.scores[rank];
        const int32_t node = add_new(&g->tree, start->node, row.ids[rank], score);
        if (node == NONE) continue; /* the spine already has this token here */
        g->starts[g->num_starts++] = (Start){start->value * score, node, start->token, row.ids[rank], 1, 0};
        allowance--;
    }
    start->next_rank = rank;
}

/* Sorts by falling value; stable. */
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
    int64_t next = 0; /* next start */
    sort_starts(g->starts, g->num_starts);
    while (tree->size < tree->budget) {
        /* The successors of a start are looked up once no queued candidate has a higher value. */
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
            prefetch_slot(g->table, best.token, best.row.ids[after.rank]);
            replace_first(queue, after);
        } else {
            pop_first(queue);
        }
        const int32_t token = best.row.ids[best.rank];
        const int32_t node = add_new(tree, best.parent, token, best.row.scores[best.rank]);
        if (node == NONE) continue; /* already in the tree, where it has its own start or candidate */
        if (tree->size < tree->budget) offer(g, node, best.token, token, best.value, best.depth + 1, 0);
    }
}

/* Grows a tree of at most `budget` nodes. Returns its size, or 0 if out of memory. `allowances`: number of branches of
 * the root and of the first spine nodes; the other spine nodes are not starts. The columns tokens, parents and depths
 * start at `ints`, `stride` apart, and have room for `budget` nodes. */
static int64_t grow_spine(const Table *table, int64_t previous, int64_t root, int64_t length, const int32_t *spine,
                          const double *trust, int64_t num_allowances, const int64_t *allowances, int64_t budget,
                          int64_t branch_depth, double min_score, int64_t stride, int32_t *ints, double *probs) {
    const size_t room = (size_t)budget;
    char *memory = malloc(room * (sizeof(Candidate) + sizeof(Start) + 2 * sizeof(int32_t)));
    if (!memory) return 0;
    Candidate *heap = (Candidate *)memory; /* each node is queued at most once and a start at most once */
    Start *starts = (Start *)(heap + room);
    int32_t *links = (int32_t *)(starts + room);
    Growth g = {
        .table = table,
        .tree = {0, budget, ints, ints + stride, ints + 2 * stride, probs, links, links + room},
        .starts = starts,
        .queue = {heap, 0, 0},
        .min_score = min_score,
        .max_depth = branch_depth,
    };
    add_root(&g.tree, (int32_t)root);
    lay_spine(&g, (int32_t)previous, length, spine, trust);
    g.num_starts = num_allowances;
    for (int64_t i = 0; i < num_allowances; i++)
        if (allowances[i]) attach(&g, &g.starts[i], allowances[i]);
    grow_best_first(&g);
    free(memory);
    return g.tree.size;
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

int64_t draftwood_spine_tree(const Table *table, int64_t previous, int64_t root, int64_t length, const int32_t *spine,
                             const double *trust, int64_t num_allowances, const int64_t *allowances, int64_t budget,
                             int64_t branch_depth, double min_score, int32_t *nodes, double *probs) {
    return grow_spine(table, previous, root, length, spine, trust, num_allowances, allowances, budget, branch_depth,
                      min_score, budget, nodes, probs);
}

#endif
