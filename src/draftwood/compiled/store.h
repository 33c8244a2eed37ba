/* Hints from a corpus with its suffix array (sources/hints/corpus.py has the same steps in Python). */
#ifndef DRAFTWOOD_STORE_H
#define DRAFTWOOD_STORE_H

#include "hints.h"

static const double STORE_LENGTHS[] = {3, 4, 6, 9, 13};
static const double STORE_SHARES[] = {0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.99};
enum { NUM_STORE_LENGTHS = 6, NUM_STORE_SHARES = 9, MIN_STORE_MATCH = 2, MAX_STORE_MATCH = 16, STORE_PLACES = 64 };

typedef struct {
    int64_t size, vocab;
    const int32_t *tokens; /* [size] every document ends with a negative token */
    const int32_t *suffixes; /* [size] places in the order of what begins there */
} Store;

/* The first suffix that is not less than `run`, followed by a token (`is_followed`), or that is greater than all that
 * begin with it. The end of the corpus is less than any token. */
static int64_t store_bound(const Store *s, const int32_t *run, int64_t length, int is_followed) {
    int64_t low = 0, high = s->size;
    while (low < high) {
        const int64_t middle = (low + high) / 2, place = s->suffixes[middle];
        int64_t i = 0;
        while (i < length && place + i < s->size && s->tokens[place + i] == run[i]) i++;
        int is_before;
        if (i == length) is_before = !is_followed || place + i == s->size || s->tokens[place + i] < 0;
        else is_before = place + i == s->size || s->tokens[place + i] < run[i];
        if (is_before) low = middle + 1;
        else high = middle;
    }
    return low;
}

void draftwood_look_store(const void *data, const int32_t *tail, int64_t length, int64_t depth, Hints *hints) {
    const Store *s = data;
    (void)depth;
    int64_t low = MIN_STORE_MATCH - 1, high = length < MAX_STORE_MATCH ? length : MAX_STORE_MATCH;
    int64_t first = 0, last = 0;
    while (low < high) { /* if a run occurs, so do its ends: the longest one is found by halving */
        const int64_t own = (low + high + 1) / 2;
        const int32_t *run = tail + length - own;
        const int64_t begin = store_bound(s, run, own, 1), end = store_bound(s, run, own, 0);
        if (begin < end) low = own, first = begin, last = end;
        else high = own - 1;
    }
    if (first == last) return;
    const int64_t places = last - first, looked = places < STORE_PLACES ? places : STORE_PLACES;
    int64_t votes[MAX_HINTS];
    for (int64_t i = 0; i < looked; i++) {
        const int32_t token = s->tokens[s->suffixes[first + i * places / looked] + low];
        if (token < 0 || token >= s->vocab) continue;
        int64_t at = 0;
        while (at < hints->count && hints->tokens[at] != token) at++;
        if (at == hints->count) hints->tokens[hints->count++] = token, votes[at] = 0;
        votes[at]++;
    }
    const int32_t by_length = bucket(STORE_LENGTHS, NUM_STORE_LENGTHS - 1, (double)low);
    hints->absent = by_length;
    for (int64_t i = 0; i < hints->count; i++) {
        const double share = (double)votes[i] / (double)looked;
        hints->kinds[i] =
            NUM_STORE_LENGTHS + by_length * NUM_STORE_SHARES + bucket(STORE_SHARES, NUM_STORE_SHARES - 1, share);
    }
}

#endif
