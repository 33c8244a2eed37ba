/* An index of a text: for the last two tokens of any text, the places where they occurred before, latest first.
 *
 * Python owns all memory and reserves it before tokens are added; sources/places.py has the same steps in Python. */
#ifndef DRAFTWOOD_PLACES_H
#define DRAFTWOOD_PLACES_H

#include "table.h"

typedef struct {
    int64_t size; /* tokens */
    int32_t *tokens; /* [size] */
    int32_t *before; /* [size] the place before this one with the same two tokens before it, NONE if none */
    int64_t bits; /* log2 of the number of slots */
    int32_t *slots; /* [1 << bits] latest place of each pair plus 1 */
} Places;

/* The slot of a pair of tokens, or the empty slot where it belongs. */
static uint64_t place_slot(const Places *p, int32_t first, int32_t second) {
    const uint64_t mask = (UINT64_C(1) << p->bits) - 1;
    uint64_t slot = pair_key(first, second) * UINT64_C(0x9E3779B97F4A7C15) >> (64 - p->bits);
    for (int32_t place; (place = p->slots[slot]); slot = (slot + 1) & mask)
        if (p->tokens[place - 3] == first && p->tokens[place - 2] == second) break;
    return slot;
}

static void add_place(Places *p, int64_t place) {
    p->before[place] = NONE;
    if (place < 2) return;
    int32_t *slot = &p->slots[place_slot(p, p->tokens[place - 2], p->tokens[place - 1])];
    p->before[place] = *slot - 1;
    *slot = (int32_t)place + 1;
}

/* The latest place after the last two tokens of `tail`; NONE if there is none. */
static int64_t latest_place(const Places *p, const int32_t *tail, int64_t length) {
    if (length < 2 || !p->bits) return NONE;
    return (int64_t)p->slots[place_slot(p, tail[length - 2], tail[length - 1])] - 1;
}

/* How many of the last tokens of `tail` precede the place; two do. */
static int64_t match_length(const Places *p, int64_t place, const int32_t *tail, int64_t length) {
    const int64_t most = length < place ? length : place;
    int64_t matched = 2;
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
