/* An n-gram index of one text (sources/context.py has the same steps in Python and explains them).
 *
 * Python owns all memory and reserves it before tokens are added. */
#ifndef DRAFTWOOD_CONTEXT_H
#define DRAFTWOOD_CONTEXT_H

#include <stdint.h>
#include <string.h>

enum { MAX_NGRAM_SIZES = 8 };

typedef struct {
    int64_t size; /* tokens */
    int32_t *tokens;
    int64_t num_sizes, sizes[MAX_NGRAM_SIZES]; /* of n-grams, longest first */
    int64_t bits; /* log2 of the number of slots */
    int32_t *slots; /* [num_sizes][1 << bits] index of the token after the latest occurrence of each n-gram; 0: none */
} Context;

/* Where the last tokens occurred before. */
typedef struct {
    int64_t length; /* matched tokens; 0: nowhere */
    int64_t start; /* index of the token after them */
    int64_t num_agreeing, num_places;
} Match;

/* The slot of the n-gram before `end`, or the empty slot where it belongs. */
static int32_t *ngram_slot(const Context *c, int64_t order, int64_t end) {
    const uint64_t mask = (UINT64_C(1) << c->bits) - 1;
    const int64_t size = c->sizes[order];
    const int32_t *run = c->tokens + end - size;
    int32_t *slots = c->slots + (order << c->bits);
    uint64_t key = 0;
    for (int64_t i = 0; i < size; i++) key = (key + (uint32_t)run[i] + 1) * UINT64_C(0x9E3779B97F4A7C15);
    for (uint64_t slot = key >> (64 - c->bits);; slot = (slot + 1) & mask)
        if (!slots[slot] || !memcmp(c->tokens + slots[slot] - size, run, size * sizeof *run)) return slots + slot;
}

/* Indexes the n-grams before `end`, whose token is known now. */
static void index_ngrams(Context *c, int64_t end) {
    for (int64_t order = 0; order < c->num_sizes; order++)
        if (c->sizes[order] <= end) *ngram_slot(c, order, end) = (int32_t)end;
}

static Match find_match(const Context *c) {
    Match match = {0, 0, 0, 0};
    int64_t agreeing[MAX_NGRAM_SIZES];
    for (int64_t order = 0; order < c->num_sizes; order++) {
        if (c->sizes[order] > c->size) continue;
        const int64_t start = *ngram_slot(c, order, c->size);
        if (!start) continue;
        if (!match.length) match.length = c->sizes[order], match.start = start;
        if (c->tokens[start] != c->tokens[match.start]) continue;
        int64_t place = 0;
        while (place < match.num_places && agreeing[place] != start) place++;
        if (place == match.num_places) agreeing[match.num_places++] = start;
        match.num_agreeing++;
    }
    return match;
}

/* Copies up to `limit` tokens that followed the match; with `repeat`, the copy starts over at the end of the text. */
static int64_t copy_match(const Context *c, const Match *match, int64_t limit, int repeat, int32_t *tokens) {
    const int64_t left = c->size - match->start;
    const int64_t count = repeat || left > limit ? limit : left;
    for (int64_t i = 0; i < count; i++) tokens[i] = c->tokens[match->start + i % left];
    return count;
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* Adds tokens to the texts of many requests: `lengths` tokens each. */
void draftwood_extend_contexts(int64_t n, Context *const *contexts, const int64_t *lengths, const int32_t *tokens) {
    for (int64_t i = 0; i < n; tokens += lengths[i++]) {
        Context *c = contexts[i];
        memcpy(c->tokens + c->size, tokens, lengths[i] * sizeof *tokens);
        for (int64_t k = 0; k < lengths[i]; k++) index_ngrams(c, c->size++);
    }
}

/* Inserts all n-grams into new, empty slots. */
void draftwood_index_context(Context *c) {
    for (int64_t end = 0; end < c->size; end++) index_ngrams(c, end);
}

/* Returns the number of tokens that followed the last occurrence, up to `limit`; 0 if there is none. `match`: length,
 * start, number of agreeing sizes and of places. */
int64_t draftwood_match(const Context *c, int64_t limit, int64_t repeat, int64_t *match, int32_t *tokens) {
    const Match found = find_match(c);
    memcpy(match, &found, sizeof found);
    return found.length ? copy_match(c, &found, limit, (int)repeat, tokens) : 0;
}

#endif
