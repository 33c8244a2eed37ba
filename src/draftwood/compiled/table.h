/* The transition table: top successors by token, and by pair of tokens in a bounded table.
 *
 * Python owns all memory; the record holds its addresses. Only contexts that were seen have a row, since every request
 * may have a table of its own and a vocabulary is large. Pairs are found by open addressing: a hash slot holds a row
 * index plus 1, and each row has its key. The rows of pairs form a list from the least to the most recently written, so
 * the row to evict is known. */
#ifndef DRAFTWOOD_TABLE_H
#define DRAFTWOOD_TABLE_H

#include <stdint.h>
#include <string.h>

#include "requests.h"
#include "trees.h"

#define NONE (-1) /* end of the list of rows; also the token that pads short rows */

typedef struct {
    int64_t vocab, width;
    int32_t *row_of; /* [vocab] row of a token plus 1; 0: not seen */
    int64_t num_seen, seen_room; /* rows of tokens; that memory is reserved for */
    int32_t *ids; /* [rows][width] */
    float *scores; /* [rows][width] */
    const int32_t *initial_ids; /* [vocab], rows initial_stride apart, or NULL: initial successors */
    const float *initial_scores;
    int64_t initial_stride;
    int64_t capacity, used, room; /* rows of pairs; capacity 0: no pairs; room: that memory is reserved for */
    int64_t oldest, latest; /* rows */
    int64_t bits; /* log2 of the number of slots */
    int32_t *slots; /* [1 << bits] */
    uint64_t *keys; /* [rows] */
    int32_t *older, *later; /* [rows] list links */
    int32_t *pair_ids; /* [rows][width] */
    float *pair_scores; /* [rows][width] */
} Table;

/* The successors of a context, best first; scores is NULL if there are none. */
typedef struct {
    const int32_t *ids;
    const float *scores;
} Row;

enum { NOT_FOUND = -1, BY_TOKEN = -2, INITIAL = -3 }; /* results of find that are not rows of pairs */

static inline uint64_t pair_key(int64_t previous, int64_t token) {
    return (uint64_t)(uint32_t)previous << 32 | (uint32_t)token;
}

static inline uint64_t home_slot(const Table *t, uint64_t key) {
    return key * UINT64_C(0x9E3779B97F4A7C15) >> (64 - t->bits);
}

/* The slot of the key, or the empty slot where it belongs. */
static uint64_t slot_of(const Table *t, uint64_t key) {
    const uint64_t mask = (UINT64_C(1) << t->bits) - 1;
    uint64_t slot = home_slot(t, key);
    while (t->slots[slot] && t->keys[t->slots[slot] - 1] != key) slot = (slot + 1) & mask;
    return slot;
}

/* Empties a slot; displaced entries after it move up. */
static void remove_slot(Table *t, uint64_t slot) {
    const uint64_t mask = (UINT64_C(1) << t->bits) - 1;
    for (uint64_t next = (slot + 1) & mask; t->slots[next]; next = (next + 1) & mask) {
        const uint64_t wanted = home_slot(t, t->keys[t->slots[next] - 1]);
        if (((next - wanted) & mask) >= ((next - slot) & mask)) {
            t->slots[slot] = t->slots[next];
            slot = next;
        }
    }
    t->slots[slot] = 0;
}

static void unlink_row(Table *t, int64_t row) {
    const int32_t older = t->older[row], later = t->later[row];
    if (older == NONE) t->oldest = later; else t->later[older] = later;
    if (later == NONE) t->latest = older; else t->older[later] = older;
}

static void link_as_latest(Table *t, int64_t row) {
    t->older[row] = (int32_t)t->latest;
    t->later[row] = NONE;
    if (t->latest == NONE) t->oldest = row; else t->later[t->latest] = (int32_t)row;
    t->latest = row;
}

/* Returns a free row: a new one, or the least recently written one, which is evicted. */
static int64_t free_row(Table *t) {
    if (t->used < t->capacity) return t->used++;
    const int64_t row = t->oldest;
    remove_slot(t, slot_of(t, t->keys[row]));
    unlink_row(t, row);
    return row;
}

/* Returns the row of the key, adding it if new; it becomes the latest. */
static int64_t claim(Table *t, uint64_t key) {
    uint64_t slot = slot_of(t, key);
    if (t->slots[slot]) {
        const int64_t row = t->slots[slot] - 1;
        unlink_row(t, row);
        link_as_latest(t, row);
        return row;
    }
    const int64_t used = t->used, row = free_row(t);
    if (used == t->used) slot = slot_of(t, key); /* the eviction moved entries */
    t->slots[slot] = (int32_t)row + 1;
    t->keys[row] = key;
    link_as_latest(t, row);
    return row;
}

/* Tables are far larger than caches, and a cycle reads and writes dozens of rows in places that it knows beforehand.
 * These fetch what `find` and `learn` read first, and what they read next. */
static inline void prefetch_slot(const Table *t, int64_t previous, int64_t token) {
    if (token < 0 || token >= t->vocab) return;
    if (t->capacity) __builtin_prefetch(t->slots + home_slot(t, pair_key(previous, token)));
    __builtin_prefetch(t->row_of + token);
}

static inline void prefetch_row(const Table *t, int64_t previous, int64_t token) {
    if (token >= 0 && token < t->vocab && t->row_of[token]) {
        const int64_t seen = t->row_of[token] - 1;
        __builtin_prefetch(t->ids + seen * t->width);
        __builtin_prefetch(t->scores + seen * t->width);
    }
    if (!t->capacity) return;
    const int64_t row = t->slots[home_slot(t, pair_key(previous, token))] - 1;
    if (row < 0) return;
    __builtin_prefetch(t->keys + row);
    __builtin_prefetch(t->older + row);
    __builtin_prefetch(t->later + row);
    __builtin_prefetch(t->pair_ids + row * t->width);
    __builtin_prefetch(t->pair_scores + row * t->width);
}

/* Finds the successors of two tokens: the row of the pair, else BY_TOKEN, INITIAL or NOT_FOUND. */
static int64_t find(const Table *t, int64_t previous, int64_t token) {
    if (t->capacity) {
        const int64_t row = t->slots[slot_of(t, pair_key(previous, token))];
        if (row) return row - 1;
    }
    if (token < 0 || token >= t->vocab) return NOT_FOUND;
    if (t->row_of[token]) return BY_TOKEN;
    return t->initial_ids && t->initial_ids[token * t->initial_stride] != NONE ? INITIAL : NOT_FOUND;
}

/* The successors that `find` found for the token and the one before it. */
static Row row_at(const Table *t, int64_t found, int64_t token) {
    if (found >= 0) return (Row){t->pair_ids + found * t->width, t->pair_scores + found * t->width};
    if (found == BY_TOKEN) {
        const int64_t row = t->row_of[token] - 1;
        return (Row){t->ids + row * t->width, t->scores + row * t->width};
    }
    if (found == INITIAL) return (Row){t->initial_ids + token * t->initial_stride, t->initial_scores + token * t->initial_stride};
    return (Row){0, 0};
}

static Row successors(const Table *t, int64_t previous, int64_t token) {
    return row_at(t, find(t, previous, token), token);
}

static int are_tokens(const Table *t, int64_t n, const int32_t *tokens) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= t->vocab) return 0;
    return 1;
}

/* Stores the successors of one context. */
static void learn(Table *t, int64_t previous, int64_t token, const int32_t *ids, const float *scores) {
    const int64_t width = t->width;
    if (!t->row_of[token]) t->row_of[token] = (int32_t)++t->num_seen;
    const int64_t seen = t->row_of[token] - 1;
    memcpy(t->ids + seen * width, ids, width * sizeof *ids);
    memcpy(t->scores + seen * width, scores, width * sizeof *scores);
    if (!t->capacity) return;
    const int64_t row = claim(t, pair_key(previous, token));
    memcpy(t->pair_ids + row * width, ids, width * sizeof *ids);
    memcpy(t->pair_scores + row * width, scores, width * sizeof *scores);
}

static void learn_node(Table *t, int64_t node, const int32_t *tokens, const int32_t *parents, int64_t before,
                       const int32_t *ids, const float *scores) {
    const int64_t previous = node ? tokens[parents[node]] : before;
    learn(t, previous, tokens[node], ids + node * t->width, scores + node * t->width);
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

int64_t draftwood_find(const Table *t, int64_t previous, int64_t token) {
    return find(t, previous, token);
}

/* Stores one row of successors per context, in order; for equal contexts the last wins. Python has reserved memory.
 * Returns nonzero without writing if a token is invalid. */
int draftwood_learn(Table *t, int64_t n, const int32_t *previous, const int32_t *tokens, const int32_t *ids,
                    const float *scores) {
    if (!are_tokens(t, n, tokens)) return 1;
    for (int64_t i = 0; i < n; i++) learn(t, previous[i], tokens[i], ids + i * t->width, scores + i * t->width);
    return 0;
}

/* Stores the rows of a tree's nodes, those of a path last. `before`: the token before the root. Returns nonzero without
 * writing if a token is invalid, a node does not follow its parent or the path does not ascend. */
static int learn_tree(Table *t, int64_t n, const int32_t *tokens, const int32_t *parents, int64_t before,
                      int64_t length, const int32_t *path, const int32_t *ids, const float *scores) {
    if (!are_tokens(t, n, tokens)) return 1;
    for (int64_t node = 1; node < n; node++)
        if (parents[node] < 0 || parents[node] >= node) return 1;
    for (int64_t i = 0; i < length; i++)
        if (path[i] < 0 || path[i] >= n || (i && path[i] <= path[i - 1])) return 1;
    for (int64_t node = 0, next = 0; node < n; node++) {
        if (next < length && path[next] == node) next++;
        else learn_node(t, node, tokens, parents, before, ids, scores);
    }
    for (int64_t i = 0; i < length; i++) learn_node(t, path[i], tokens, parents, before, ids, scores);
    return 0;
}

int draftwood_learn_tree(Table *t, int64_t n, const int32_t *tokens, const int32_t *parents, int64_t before,
                         int64_t length, const int32_t *path, const int32_t *ids, const float *scores) {
    return learn_tree(t, n, tokens, parents, before, length, path, ids, scores);
}

static inline void prefetch_tree(const Table *table, const Tree *t, int64_t before,
                                 void (*prefetch)(const Table *, int64_t, int64_t)) {
    const int32_t *parents = parents_of(t);
    for (int64_t node = 0; node < t->size; node++)
        prefetch(table, node && parents[node] >= 0 ? t->tokens[parents[node]] : before, t->tokens[node]);
}

/* -- verified trees of many requests ------------------------------------------------------------------------------- */

/* One after the other: accepted paths, root first, the tokens that are now text, and the rows of all nodes. */
typedef struct {
    const Tree *trees;
    const int64_t *lengths; /* of the paths */
    const int32_t *paths;
    const int64_t *num_emitted;
    const int32_t *emitted;
    const int64_t *rows; /* the first of each tree in `ids` and `scores` */
    const int32_t *ids;
    const float *scores;
} Outcomes;

/* One of them. */
typedef struct {
    const Tree *tree;
    int64_t path_length;
    const int32_t *path;
    int64_t num_emitted;
    const int32_t *emitted;
    int64_t width;
    const int32_t *ids; /* [nodes][width] best first */
    const float *scores;
} Seen;

static Seen seen_by(const Outcomes *o, int64_t i, int64_t width) {
    const int32_t *path = o->paths + sum_before(o->lengths, i), *text = o->emitted + sum_before(o->num_emitted, i);
    const int64_t first = o->rows[i] * width;
    return (Seen){&o->trees[i], o->lengths[i], path, o->num_emitted[i], text, width, o->ids + first, o->scores + first};
}

static int learn_seen(Table *t, const Seen *seen, int64_t before) {
    const Tree *tree = seen->tree;
    prefetch_tree(t, tree, before, prefetch_row);
    return learn_tree(t, tree->size, tree->tokens, parents_of(tree), before, seen->path_length, seen->path, seen->ids,
                      seen->scores);
}

/* Whether each of `n` requests has a table of its own. */
static int are_apart(Table *const *tables, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t other = 0; other < i; other++)
            if (tables[i] == tables[other]) return 0;
    return 1;
}

/* Returns the first table from `start` on that may lack memory for `more` rows, or -1. */
int64_t draftwood_find_full(int64_t n, Table *const *tables, int64_t more, int64_t start) {
    for (int64_t i = start; i < n; i++) {
        const Table *t = tables[i];
        int64_t needed = t->used + more, tokens = t->num_seen + more;
        if (needed > t->capacity) needed = t->capacity;
        if (tokens > t->vocab) tokens = t->vocab;
        if (tokens > t->seen_room || needed > t->room || needed > INT64_C(1) << t->bits >> 1) return i;
    }
    return -1;
}

void draftwood_claim(Table *t, int64_t n, const uint64_t *keys, int64_t *rows) {
    for (int64_t i = 0; i < n; i++) rows[i] = claim(t, keys[i]);
}

/* All rows, least recently written first. */
void draftwood_order(const Table *t, int64_t *rows) {
    for (int64_t row = t->oldest; row != NONE; row = t->later[row]) *rows++ = row;
}

/* Inserts all rows into new, empty slots. */
void draftwood_rehash(Table *t) {
    for (int64_t row = 0; row < t->used; row++) t->slots[slot_of(t, t->keys[row])] = (int32_t)row + 1;
}

#endif
