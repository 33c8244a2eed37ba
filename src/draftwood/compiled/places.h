/* An index of a text: the places where the last tokens of any text occurred before, latest first.
 *
 * Runs of several lengths are indexed, since the latest places after a short run may all differ from the text further
 * back. Python owns all memory and reserves it before tokens are added; sources/hints.py has the same steps in Python. */
#ifndef DRAFTWOOD_PLACES_H
#define DRAFTWOOD_PLACES_H

#include "table.h"

enum { NUM_ORDERS = 3 };
static const int64_t ORDERS[NUM_ORDERS] = {8, 4, 2}; /* lengths of the runs that are indexed, longest first */

typedef struct {
    int64_t size, capacity; /* tokens */
    int32_t *tokens; /* [capacity] */
    int32_t *before; /* [NUM_ORDERS][capacity] the place before this one after the same run, NONE if none */
    int64_t bits; /* log2 of the number of slots */
    int32_t *slots; /* [NUM_ORDERS][1 << bits] latest place after each run plus 1 */
} Places;

/* The slot of a run of tokens, or the empty slot where it belongs. */
static int32_t *place_slot(const Places *p, int64_t order, const int32_t *run) {
    const uint64_t mask = (UINT64_C(1) << p->bits) - 1;
    const int64_t size = ORDERS[order];
    int32_t *slots = p->slots + (order << p->bits);
    uint64_t key = 0;
    for (int64_t i = 0; i < size; i++) key = (key + (uint32_t)run[i] + 1) * UINT64_C(0x9E3779B97F4A7C15);
    for (uint64_t slot = key >> (64 - p->bits);; slot = (slot + 1) & mask) {
        const int32_t place = slots[slot] - 1;
        if (place < 0 || !memcmp(p->tokens + place - size, run, size * sizeof *run)) return slots + slot;
    }
}

static void add_place(Places *p, int64_t place) {
    for (int64_t order = 0; order < NUM_ORDERS; order++) {
        int32_t *before = p->before + order * p->capacity + place;
        *before = NONE;
        if (place < ORDERS[order]) continue;
        int32_t *slot = place_slot(p, order, p->tokens + place - ORDERS[order]);
        *before = *slot - 1;
        *slot = (int32_t)place + 1;
    }
}

/* How many of the last tokens of `tail` precede the place; `matched` do. */
static int64_t match_length(const Places *p, int64_t place, const int32_t *tail, int64_t length, int64_t matched) {
    const int64_t most = length < place ? length : place;
    while (matched < most && tail[length - 1 - matched] == p->tokens[place - 1 - matched]) matched++;
    return matched;
}

/* Adds `n` tokens, for which Python has reserved memory. A place is indexed once its token is known. */
void draftwood_add_places(Places *p, int64_t n, const int32_t *tokens) {
    memcpy(p->tokens + p->size, tokens, n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++) add_place(p, p->size++);
}

/* Inserts all places into new, empty slots. */
void draftwood_index_places(Places *p) {
    for (int64_t place = 0; place < p->size; place++) add_place(p, place);
}

#endif
