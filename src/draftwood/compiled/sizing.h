/* Acceptance probabilities of guesses and the best tree size; bit-identical to sizing/chances.py. */
#ifndef DRAFTWOOD_SIZING_H
#define DRAFTWOOD_SIZING_H

#include <stdint.h>
#include <stdlib.h>

#define MAX_EDGES 16

typedef struct {
    double trust, prior_trials, hope;
    int64_t deep, num_edges;
    double edges[MAX_EDGES]; /* bin edges of the sources' own estimates */
} Rules;

/* A tree as columns; sources are integers. */
typedef struct {
    int64_t size;
    const int32_t *tokens, *parents, *depths, *sources;
    const double *probs;
} Guesses;

/* Per kind: trials and hits. */
typedef struct {
    double decay;
    double (*counts)[2];
} Record;

typedef struct {
    const Rules *rules;
    Record request, drafter;
    int64_t last_was_right;
} Experience;

static int64_t kind_of(const Experience *e, const Guesses *g, int64_t node) {
    const Rules *r = e->rules;
    int64_t estimate = 0;
    while (estimate < r->num_edges && r->edges[estimate] <= g->probs[node]) estimate++;
    const int64_t depth = g->depths[node] < r->deep ? g->depths[node] : r->deep;
    const int64_t in_run = e->last_was_right && g->depths[node] == 1;
    return ((g->sources[node] * (r->num_edges + 1) + estimate) * (r->deep + 1) + depth) * 2 + in_run;
}

static double rate(const Record *record, int64_t kind, double prior_trials, double believed) {
    const double trials = record->counts[kind][0], hits = record->counts[kind][1];
    const double rate = (hits + prior_trials * believed) / (trials + prior_trials);
    return rate < 1.0 ? rate : 1.0;
}

static void count(Record *record, int64_t kind, double right) {
    double *counts = record->counts[kind];
    counts[0] = counts[0] * record->decay + 1.0;
    counts[1] = counts[1] * record->decay + right;
}

/* Acceptance probability of every node; 1 for the root. Siblings share a total of 1, earlier ones first. */
static void find_chances(const Experience *e, const Guesses *g, double *chances, double *left) {
    const Rules *r = e->rules;
    for (int64_t node = 0; node < g->size; node++) left[node] = 1.0;
    chances[0] = 1.0;
    for (int64_t node = 1; node < g->size; node++) {
        const int64_t kind = kind_of(e, g, node), parent = g->parents[node];
        const double believed = rate(&e->drafter, kind, r->prior_trials, r->trust * g->probs[node]);
        double share = rate(&e->request, kind, r->prior_trials, believed);
        if (left[parent] < share) share = left[parent];
        left[parent] -= share;
        chances[node] = chances[parent] * share;
    }
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* `chances` must have room for twice the number of nodes. */
void draftwood_chances(const Experience *e, const Guesses *g, double *chances) {
    find_chances(e, g, chances, chances + g->size);
}

/* Returns the number of nodes that maximises tokens per second; `kept` receives these nodes, ascending. `tokens` is the
 * expected number of tokens of other requests in the pass; on return, that of this tree. `seconds`: duration of passes
 * by number of nodes. */
int64_t draftwood_best_part(const Experience *e, const Guesses *g, double *tokens, const double *seconds,
                            double drafting, int32_t *kept) {
    const int64_t size = g->size;
    double *chances = malloc(2 * size * sizeof *chances + size * sizeof(int32_t));
    if (!chances) return 0;
    int32_t *nodes = (int32_t *)(chances + 2 * size);
    find_chances(e, g, chances, chances + size);
    for (int64_t node = 1; node < size; node++) chances[node] *= e->rules->hope;
    for (int64_t i = 0; i < size; i++) { /* insertion sort by falling chance; stable */
        int64_t at = i;
        for (; at > 0 && chances[nodes[at - 1]] < chances[i]; at--) nodes[at] = nodes[at - 1];
        nodes[at] = (int32_t)i;
    }
    double sum = *tokens, best_rate = 0.0, best_tokens = 0.0, first_tokens = 0.0;
    int64_t best = 0;
    for (int64_t i = 0; i < size; i++) {
        sum += chances[nodes[i]];
        if (i == 0) first_tokens = sum;
        const double rate = sum / (seconds[i] + drafting);
        if (i == 0 || rate > best_rate) best = i + 1, best_rate = rate, best_tokens = sum;
    }
    for (int64_t i = 0; i < best; i++) {
        int64_t at = i;
        for (; at > 0 && kept[at - 1] > nodes[i]; at--) kept[at] = kept[at - 1];
        kept[at] = nodes[i];
    }
    *tokens = 1.0 + (best_tokens - first_tokens) / e->rules->hope;
    free(chances);
    return best;
}

/* Counts the guesses that the emitted tokens decide: the children of the root and of every right guess. */
void draftwood_note(Experience *e, const Guesses *g, int64_t num_emitted, const int32_t *emitted) {
    int64_t node = 0, right = 0, first_is_right = 0;
    for (int64_t i = 0; i < num_emitted && right >= 0; i++, node = right) {
        right = -1;
        for (int64_t child = node + 1; child < g->size; child++) {
            if (g->parents[child] != node) continue;
            const int64_t kind = kind_of(e, g, child);
            const int is_right = g->tokens[child] == emitted[i];
            if (is_right) right = child;
            count(&e->request, kind, is_right);
            count(&e->drafter, kind, is_right);
        }
        if (i == 0) first_is_right = right >= 0;
    }
    e->last_was_right = first_is_right;
}

#endif
