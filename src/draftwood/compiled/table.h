/* The transition table: top successors by token, and by pair of tokens in a bounded table.
 *
 * Both tiers are hash tables of rows. Only contexts that were seen have a row, since every request may have a table of
 * its own and a vocabulary is large. Python owns all memory; the records hold its addresses. */
#ifndef DRAFTWOOD_TABLE_H
#define DRAFTWOOD_TABLE_H

#include <stdint.h>
#include <string.h>

#include "requests.h"
#include "trees.h"

#define NONE (-1) /* no row; also the token that pads short rows */

/* Rows by key, found by open addressing: a hash slot holds a row index plus 1, and each row has its key. If they are
 * bounded, the rows form a list from the least to the most recently written, so the row to evict is known. */
typedef struct {
    int64_t capacity, used, room; /* rows: at most, so far, that memory is reserved for */
    int64_t oldest, latest; /* rows */
    int64_t bits; /* log2 of the number of slots */
    int32_t *slots; /* [1 << bits] */
    uint64_t *keys; /* [room] */
    int32_t *older, *later; /* [room] list links; NULL: never evicted */
    int32_t *ids; /* [room][width] */
    float *scores; /* [room][width] */
} Rows;

typedef struct {
    int64_t vocab, width;
    const int32_t *initial_ids; /* [vocab], rows initial_stride apart, or NULL: initial successors */
    const float *initial_scores;
    int64_t initial_stride;
    Rows tokens, pairs; /* by token; by pair, if these have a capacity */
} Table;

enum { BY_PAIR, BY_TOKEN, INITIAL, NOT_FOUND }; /* tiers, in the order in which they are looked up */

/* The successors of a context, best first. */
typedef struct {
    int32_t tier;
    const int32_t *ids;
    const float *scores; /* NULL if not found */
} Row;

static inline uint64_t pair_key(int64_t previous, int64_t token) {
    return (uint64_t)(uint32_t)previous << 32 | (uint32_t)token;
}

static inline uint64_t home_slot(const Rows *r, uint64_t key) {
    return key * UINT64_C(0x9E3779B97F4A7C15) >> (64 - r->bits);
}

/* The slot of the key, or the empty slot where it belongs. */
static uint64_t slot_of(const Rows *r, uint64_t key) {
    const uint64_t mask = (UINT64_C(1) << r->bits) - 1;
    uint64_t slot = home_slot(r, key);
    while (r->slots[slot] && r->keys[r->slots[slot] - 1] != key) slot = (slot + 1) & mask;
    return slot;
}

/* Empties a slot; displaced entries after it move up. */
static void remove_slot(Rows *r, uint64_t slot) {
    const uint64_t mask = (UINT64_C(1) << r->bits) - 1;
    for (uint64_t next = (slot + 1) & mask; r->slots[next]; next = (next + 1) & mask) {
        const uint64_t wanted = home_slot(r, r->keys[r->slots[next] - 1]);
        if (((next - wanted) & mask) >= ((next - slot) & mask)) {
            r->slots[slot] = r->slots[next];
            slot = next;
        }
    }
    r->slots[slot] = 0;
}

static void unlink_row(Rows *r, int64_t row) {
    const int32_t older = r->older[row], later = r->later[row];
    if (older == NONE) r->oldest = later; else r->later[older] = later;
    if (later == NONE) r->latest = older; else r->older[later] = older;
}

static void link_as_latest(Rows *r, int64_t row) {
    r->older[row] = (int32_t)r->latest;
    r->later[row] = NONE;
    if (r->latest == NONE) r->oldest = row; else r->later[r->latest] = (int32_t)row;
    r->latest = row;
}

/* Returns a free row: a new one, or the least recently written one, which is evicted. */
static int64_t free_row(Rows *r) {
    if (r->used < r->capacity) return r->used++;
    const int64_t row = r->oldest;
    remove_slot(r, slot_of(r, r->keys[row]));
    unlink_row(r, row);
    return row;
}

/* Returns the row of the key, adding it if new; it becomes the latest. */
static int64_t claim(Rows *r, uint64_t key) {
    uint64_t slot = slot_of(r, key);
    if (r->slots[slot]) {
        const int64_t row = r->slots[slot] - 1;
        if (r->older) unlink_row(r, row), link_as_latest(r, row);
        return row;
    }
    const int64_t used = r->used, row = free_row(r);
    if (used == r->used) slot = slot_of(r, key); /* the eviction moved entries */
    r->slots[slot] = (int32_t)row + 1;
    r->keys[row] = key;
    if (r->older) link_as_latest(r, row);
    return row;
}

static void write_row(Rows *r, uint64_t key, int64_t width, const int32_t *ids, const float *scores) {
    const int64_t row = claim(r, key);
    memcpy(r->ids + row * width, ids, width * sizeof *ids);
    memcpy(r->scores + row * width, scores, width * sizeof *scores);
}

/* Tables are far larger than caches, and a cycle reads and writes dozens of rows in places that it knows beforehand.
 * These fetch what `find` and `learn` read first, and what they read next. */
static inline void prefetch_key(const Rows *r, uint64_t key) {
    if (r->used) __builtin_prefetch(r->slots + home_slot(r, key));
}

static inline void prefetch_row_of(const Rows *r, uint64_t key, int64_t width) {
    if (!r->used) return;
    const int64_t row = r->slots[home_slot(r, key)] - 1;
    if (row < 0) return;
    __builtin_prefetch(r->keys + row);
    __builtin_prefetch(r->ids + row * width);
    __builtin_prefetch(r->scores + row * width);
    if (!r->older) return;
    __builtin_prefetch(r->older + row);
    __builtin_prefetch(r->later + row);
}

static inline void prefetch_slot(const Table *t, int64_t previous, int64_t token) {
    prefetch_key(&t->pairs, pair_key(previous, token));
    prefetch_key(&t->tokens, (uint32_t)token);
}

static inline void prefetch_row(const Table *t, int64_t previous, int64_t token) {
    prefetch_row_of(&t->pairs, pair_key(previous, token), t->width);
    prefetch_row_of(&t->tokens, (uint32_t)token, t->width);
}

/* The row of the key, or NONE. */
static int64_t row_of(const Rows *r, uint64_t key) { return r->used ? r->slots[slot_of(r, key)] - 1 : NONE; }

/* Finds the successors of two tokens: of the pair, else of the second one, else the initial ones of that. */
static Row find(const Table *t, int64_t previous, int64_t token) {
    int64_t row = row_of(&t->pairs, pair_key(previous, token));
    if (row >= 0) return (Row){BY_PAIR, t->pairs.ids + row * t->width, t->pairs.scores + row * t->width};
    if (token < 0 || token >= t->vocab) return (Row){NOT_FOUND, 0, 0};
    row = row_of(&t->tokens, (uint32_t)token);
    if (row >= 0) return (Row){BY_TOKEN, t->tokens.ids + row * t->width, t->tokens.scores + row * t->width};
    const int64_t first = token * t->initial_stride;
    if (!t->initial_ids || t->initial_ids[first] == NONE) return (Row){NOT_FOUND, 0, 0};
    return (Row){INITIAL, t->initial_ids + first, t->initial_scores + first};
}

static int are_tokens(const Table *t, int64_t n, const int32_t *tokens) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= t->vocab) return 0;
    return 1;
}

/* Stores the successors of one context. */
static void learn(Table *t, int64_t previous, int64_t token, const int32_t *ids, const float *scores) {
    write_row(&t->tokens, (uint32_t)token, t->width, ids, scores);
    if (t->pairs.capacity) write_row(&t->pairs, pair_key(previous, token), t->width, ids, scores);
}

static void learn_node(Table *t, int64_t node, const int32_t *tokens, const int32_t *parents, int64_t before,
                       const int32_t *ids, const float *scores) {
    const int64_t previous = node ? tokens[parents[node]] : before;
    learn(t, previous, tokens[node], ids + node * t->width, scores + node * t->width);
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* Copies the successors [width] of two tokens; returns their tier. */
int draftwood_find(const Table *t, int64_t previous, int64_t token, int32_t *ids, float *scores) {
    const Row row = find(t, previous, token);
    if (row.tier == NOT_FOUND) return NOT_FOUND;
    memcpy(ids, row.ids, t->width * sizeof *ids);
    memcpy(scores, row.scores, t->width * sizeof *scores);
    return row.tier;
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

static int is_full(const Rows *r, int64_t more) {
    const int64_t needed = r->used + more < r->capacity ? r->used + more : r->capacity;
    return needed > r->room || needed > INT64_C(1) << r->bits >> 1;
}

/* Returns the first table from `start` on that may lack memory for `more` rows, or -1. */
int64_t draftwood_find_full(int64_t n, Table *const *tables, int64_t more, int64_t start) {
    for (int64_t i = start; i < n; i++)
        if (is_full(&tables[i]->tokens, more) || is_full(&tables[i]->pairs, more)) return i;
    return -1;
}

void draftwood_claim(Rows *r, int64_t n, const uint64_t *keys, int64_t *rows) {
    for (int64_t i = 0; i < n; i++) rows[i] = claim(r, keys[i]);
}

/* All rows that can be evicted, least recently written first. */
void draftwood_order(const Rows *r, int64_t *rows) {
    for (int64_t row = r->oldest; row != NONE; row = r->later[row]) *rows++ = row;
}

/* Inserts all rows into new, empty slots. */
void draftwood_rehash(Rows *r) {
    for (int64_t row = 0; row < r->used; row++) r->slots[slot_of(r, r->keys[row])] = (int32_t)row + 1;
}

#endif
