/* Chains of guesses for many texts in one call (vllm/chains.py has the same steps in Python). */
#ifndef DRAFTWOOD_CHAINS_H
#define DRAFTWOOD_CHAINS_H

#include "blend.h"

/* The end of a text that is indexed by `p`. */
static const int32_t *end_of_text(const Places *p, int64_t *length) {
    *length = p->size < TAIL ? p->size : TAIL;
    return p->tokens + p->size - *length;
}

/* The likeliest guess after a text, and after that one, and so on, while the chance of the whole path is at least
 * `min_value`. Writes that chance for each guess. Returns the number of guesses. */
static int64_t best_chain(const Blend *b, const Places *own, int64_t max_tokens, double min_value, GuessList *all,
                          int32_t *text, int32_t *tokens, double *values) {
    int64_t length, size = 0;
    const int32_t *tail = end_of_text(own, &length);
    memcpy(text, tail, length * sizeof *text);
    for (double value = 1.0; size < max_tokens; size++) {
        const int64_t known = length + size < TAIL ? length + size : TAIL;
        find_guesses(b, text + length + size - known, known, size, all);
        int64_t best = 0;
        for (int64_t i = 1; i < all->count; i++)
            if (all->chances[i] > all->chances[best]) best = i;
        if (!all->count || (value *= all->chances[best]) < min_value) break;
        text[length + size] = tokens[size] = all->tokens[best];
        values[size] = value;
    }
    return size;
}

/* Learns from tokens that were added to texts, adds them, and guesses what follows.
 *
 * New tokens of text i: `tokens` from starts[i] to starts[i + 1]; Python has reserved memory for them. `is_new`: nothing
 * was guessed about these tokens. Writes chains to `chains`, the chances of their paths to `values` (both
 * [n][max_tokens]) and their lengths to `sizes`. Nonzero: no memory. */
int draftwood_follow_texts(int64_t n, Blend *const *blends, Places *const *texts, const int64_t *starts,
                           const int32_t *tokens, const uint8_t *is_new, int64_t max_tokens, double min_value,
                           int32_t *chains, double *values, int64_t *sizes) {
    GuessList *all = malloc(sizeof *all + (TAIL + max_tokens) * sizeof *tokens);
    if (!all) return 1;
    for (int64_t i = 0; i < n; i++) {
        const int32_t *added = tokens + starts[i];
        const int64_t count = starts[i + 1] - starts[i];
        int64_t length;
        const int32_t *tail = end_of_text(texts[i], &length);
        if (!is_new[i] && draftwood_blend_learn(blends[i], tail, length, count, added)) {
            free(all);
            return 1;
        }
        draftwood_add_places(texts[i], count, added);
        sizes[i] = best_chain(blends[i], texts[i], max_tokens, min_value, all, (int32_t *)(all + 1),
                              chains + i * max_tokens, values + i * max_tokens);
    }
    free(all);
    return 0;
}

#endif
