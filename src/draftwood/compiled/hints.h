/* Sources of a blend: what may follow a text, judged by its last tokens (sources/hints has the same steps in Python and
 * explains the kinds). */
#ifndef DRAFTWOOD_HINTS_H
#define DRAFTWOOD_HINTS_H

#include <math.h>
#include <stdlib.h>

#include "places.h"
#include "table.h"

enum { TAIL = 32, MAX_HINTS = 64 };

/* What a source says about the token after a text. `absent`: kind of all tokens that it does not hint at; NONE if it
 * knows nothing about this text. */
typedef struct {
    int64_t count;
    int32_t tokens[MAX_HINTS], kinds[MAX_HINTS];
    int32_t absent;
} Hints;

/* `depth`: how many of the last tokens are drafted, not text. */
typedef void (*Look)(const void *data, const int32_t *tail, int64_t length, int64_t depth, Hints *hints);

/* Reads a verified tree. Nonzero: no memory. */
typedef int (*Follow)(void *data, const Seen *seen);

static int32_t bucket(const double *edges, int32_t count, double value) {
    int32_t at = 0;
    for (int32_t i = 0; i < count; i++) at += edges[i] <= value; /* they ascend; without branches */
    return at;
}

/* -- matches in the text ------------------------------------------------------------------------------------------- */

/* Kinds of matches: first those of absent tokens, by the longest match; then by whether the token follows the latest of
 * the longest matches, by the longest match that it follows, and by the number of places that it follows (1, 2, 3+). */
static const double LENGTHS[] = {2, 3, 4, 5, 6, 8, 11, 16, 24};
enum { NUM_LENGTHS = 10, MAX_PLACES = 6 };

void draftwood_look_places(const void *data, const int32_t *tail, int64_t length, int64_t depth, Hints *hints) {
    const Places *p = data;
    (void)depth;
    int64_t matched[MAX_HINTS], votes[MAX_HINTS], longest = 0, first = 0, found = INT64_MAX;
    int64_t latest[NUM_ORDERS], from = NUM_ORDERS; /* runs from this one on occurred: if one did not, no longer one did */
    while (from > 0 && p->size && length >= ORDERS[from - 1]) {
        const int64_t place = *place_slot(p, from - 1, tail + length - ORDERS[from - 1]) - 1;
        if (place == NONE) break;
        latest[--from] = place;
    }
    for (int64_t order = from; order < NUM_ORDERS; order++) {
        const int64_t run = ORDERS[order];
        int64_t place = latest[order];
        for (int looked = 0; place != NONE && looked < MAX_PLACES; looked++) {
            const int64_t own = match_length(p, place, tail, length, run);
            const int32_t token = p->tokens[place];
            place = p->before[order * p->capacity + place];
            if (own >= found || token < 0) continue; /* seen after the longer run; the end of a text */
            int64_t at = 0;
            while (at < hints->count && hints->tokens[at] != token) at++;
            if (at == hints->count) {
                hints->tokens[hints->count++] = token;
                matched[at] = votes[at] = 0;
            }
            votes[at]++;
            if (own > matched[at]) matched[at] = own;
            if (own > longest) longest = own, first = at;
        }
        found = run;
    }
    if (!hints->count) return;
    hints->absent = bucket(LENGTHS, NUM_LENGTHS - 1, (double)longest);
    for (int64_t i = 0; i < hints->count; i++) {
        const int32_t by_length = bucket(LENGTHS, NUM_LENGTHS - 1, (double)matched[i]);
        const int32_t by_votes = votes[i] < 3 ? (int32_t)votes[i] - 1 : 2;
        hints->kinds[i] = NUM_LENGTHS + ((i != first) * NUM_LENGTHS + by_length) * 3 + by_votes;
    }
}

/* Python has reserved memory. */
int draftwood_follow_places(void *data, const Seen *seen) {
    draftwood_add_places(data, seen->num_emitted, seen->emitted);
    return 0;
}

/* -- successors of the last tokens --------------------------------------------------------------------------------- */

/* Kinds of successors: first those of absent tokens, by tier (pair, token, initial); then by tier and probability. */
static const double PROBS[] = {0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95, 0.985};
enum { NUM_PROBS = 16, NUM_TIERS = 3 };

void draftwood_look_successors(const void *data, const int32_t *tail, int64_t length, int64_t depth, Hints *hints) {
    const Table *t = data;
    (void)depth;
    const int32_t token = tail[length - 1], previous = length > 1 ? tail[length - 2] : token;
    const Row row = find(t, previous, token);
    if (row.tier == NOT_FOUND) return;
    for (int64_t rank = 0; rank < t->width && rank < MAX_HINTS && row.scores[rank] > 0.0f; rank++) {
        hints->tokens[hints->count] = row.ids[rank];
        hints->kinds[hints->count++] = NUM_TIERS + row.tier * NUM_PROBS + bucket(PROBS, NUM_PROBS - 1, row.scores[rank]);
    }
    hints->absent = row.tier;
}

/* -- predictions for the same position ----------------------------------------------------------------------------- */

/* What the rejected branches of the last trees predicted for the next positions. Kinds: of absent tokens after the text
 * and after drafted tokens; then of the others by that and by their share of the predictions. */
static const double SHARES[] = {0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.8};
enum { NUM_SHARES = 11, NUM_LEVELS = 8, LEVEL_WIDTH = 12, MAX_LEVEL_TOKENS = 256 };
#define MIN_SCORE 0.01f /* of a prediction that counts */

typedef struct {
    int64_t counts[NUM_LEVELS]; /* by depth below the root: tokens */
    int32_t tokens[NUM_LEVELS][LEVEL_WIDTH]; /* likeliest first */
    double shares[NUM_LEVELS][LEVEL_WIDTH];
} Positions;

void draftwood_look_positions(const void *data, const int32_t *tail, int64_t length, int64_t depth, Hints *hints) {
    const Positions *p = data;
    (void)tail, (void)length;
    if (depth >= NUM_LEVELS || !p->counts[depth]) return;
    hints->absent = depth > 0;
    hints->count = p->counts[depth];
    for (int64_t i = 0; i < hints->count; i++) {
        hints->tokens[i] = p->tokens[depth][i];
        hints->kinds[i] = 2 + (depth > 0) * NUM_SHARES + bucket(SHARES, NUM_SHARES - 1, p->shares[depth][i]);
    }
}

/* Sums the predictions of rejected nodes at one depth of a tree, weighted by the chances of the nodes. */
static void note_level(Positions *p, int64_t level, int64_t depth, int64_t n, const int32_t *depths,
                       const double *values, const uint8_t *accepted, int64_t width, const int32_t *ids,
                       const float *scores) {
    enum { SLOTS = 2 * MAX_LEVEL_TOKENS };
    int32_t tokens[MAX_LEVEL_TOKENS];
    double sums[MAX_LEVEL_TOKENS], total = 0.0;
    int16_t slots[SLOTS] = {0}; /* by hash of a token: its index plus 1 */
    int64_t count = 0;
    for (int64_t node = 0; node < n; node++) {
        if (depths[node] != depth || accepted[node]) continue;
        total += values[node];
        for (int64_t i = node * width; i < (node + 1) * width && scores[i] > MIN_SCORE; i++) {
            uint32_t slot = (uint32_t)ids[i] * UINT32_C(0x9E3779B1) >> 16 & (SLOTS - 1);
            while (slots[slot] && tokens[slots[slot] - 1] != ids[i]) slot = (slot + 1) & (SLOTS - 1);
            if (!slots[slot]) {
                if (count == MAX_LEVEL_TOKENS) continue;
                tokens[count] = ids[i], sums[count++] = 0.0;
                slots[slot] = (int16_t)count;
            }
            sums[slots[slot] - 1] += values[node] * scores[i];
        }
    }
    if (!count) return;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (kept == LEVEL_WIDTH && sums[i] / total <= p->shares[level][kept - 1]) continue;
        int64_t at = kept < LEVEL_WIDTH ? kept++ : kept - 1;
        for (; at > 0 && p->shares[level][at - 1] < sums[i] / total; at--) {
            p->tokens[level][at] = p->tokens[level][at - 1];
            p->shares[level][at] = p->shares[level][at - 1];
        }
        p->tokens[level][at] = tokens[i];
        p->shares[level][at] = sums[i] / total;
    }
    p->counts[level] = kept;
}

/* Reads a verified tree of `n` nodes with the rows of its nodes; `emitted` tokens are now text. Predictions of earlier
 * trees stay where this one has none. Nonzero: no memory. */
int draftwood_note_positions(Positions *p, int64_t n, const int32_t *parents, const int32_t *depths,
                             const double *chances, int64_t length, const int32_t *path, int64_t emitted, int64_t width,
                             const int32_t *ids, const float *scores) {
    double *values = malloc(n * (sizeof *values + 1));
    if (!values) return 1;
    uint8_t *accepted = (uint8_t *)(values + n);
    memset(accepted, 0, n);
    for (int64_t i = 0; i < length; i++) accepted[path[i]] = 1;
    values[0] = 1.0;
    for (int64_t node = 1; node < n; node++) values[node] = values[parents[node]] * chances[node];
    for (int64_t level = 0; level < NUM_LEVELS; level++) {
        const int64_t before = level + emitted;
        p->counts[level] = before < NUM_LEVELS ? p->counts[before] : 0;
        if (p->counts[level]) {
            memcpy(p->tokens[level], p->tokens[before], sizeof p->tokens[level]);
            memcpy(p->shares[level], p->shares[before], sizeof p->shares[level]);
        }
        note_level(p, level, before, n, depths, values, accepted, width, ids, scores);
    }
    free(values);
    return 0;
}

int draftwood_follow_positions(void *data, const Seen *seen) {
    const Tree *t = seen->tree;
    return draftwood_note_positions(data, t->size, parents_of(t), depths_of(t), t->probs, seen->path_length, seen->path,
                                    seen->num_emitted, seen->width, seen->ids, seen->scores);
}

/* -- a draft model ------------------------------------------------------------------------------------------------- */

/* What a draft model predicted after the nodes that it was run over in this cycle. Kinds: of absent tokens by depth;
 * then of the others by depth and probability. */
enum { MAX_DRAFTED = 160, DRAFTED_WIDTH = 16, NUM_DRAFT_DEPTHS = 3 };

typedef struct {
    int64_t count;
    uint64_t keys[MAX_DRAFTED]; /* of the texts */
    int64_t widths[MAX_DRAFTED];
    int32_t tokens[MAX_DRAFTED][DRAFTED_WIDTH];
    float scores[MAX_DRAFTED][DRAFTED_WIDTH];
} Drafted;

static uint64_t tail_key(const int32_t *tail, int64_t length) {
    uint64_t key = (uint64_t)length;
    for (int64_t i = 0; i < length; i++) key = (key ^ (uint32_t)tail[i]) * UINT64_C(0x9E3779B97F4A7C15) + 1;
    return key;
}

void draftwood_look_drafted(const void *data, const int32_t *tail, int64_t length, int64_t depth, Hints *hints) {
    const Drafted *d = data;
    const uint64_t key = tail_key(tail, length);
    const int32_t by_depth = depth < 1 ? 0 : depth < 3 ? 1 : 2;
    for (int64_t row = 0; row < d->count; row++) {
        if (d->keys[row] != key) continue;
        hints->count = d->widths[row];
        hints->absent = by_depth;
        for (int64_t i = 0; i < hints->count; i++) {
            hints->tokens[i] = d->tokens[row][i];
            hints->kinds[i] =
                NUM_DRAFT_DEPTHS + by_depth * NUM_PROBS + bucket(PROBS, NUM_PROBS - 1, d->scores[row][i]);
        }
        return;
    }
}

/* Adds the predictions after a text that ends with `tail`; entries of score 0 and all after them are left out. */
void draftwood_add_drafted(Drafted *d, const int32_t *tail, int64_t length, int64_t width, const int32_t *ids,
                           const float *scores) {
    if (d->count == MAX_DRAFTED) return;
    if (length > TAIL) tail += length - TAIL, length = TAIL;
    const int64_t row = d->count++;
    int64_t kept = 0;
    while (kept < width && kept < DRAFTED_WIDTH && scores[kept] > 0.0f) kept++;
    d->keys[row] = tail_key(tail, length);
    d->widths[row] = kept;
    memcpy(d->tokens[row], ids, kept * sizeof *ids);
    memcpy(d->scores[row], scores, kept * sizeof *scores);
}

#endif
