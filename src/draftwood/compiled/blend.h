/* One tree from several sources (growth/blend.py has the same steps in Python and explains them).
 *
 * A source looks at the end of a text and hints at tokens that may follow, each with a kind. Every kind has a learned
 * acceptance rate. The rates of all sources for a token are mixed into one chance in the logistic domain. */
#ifndef DRAFTWOOD_BLEND_H
#define DRAFTWOOD_BLEND_H

#include <math.h>
#include <stdlib.h>

#include "hints.h"
#include "requests.h"

enum { MAX_SOURCES = 8 };

#define SURE 1.5 /* log odds of a hint from which its source is sure */

typedef struct {
    Look look;
    Follow follow; /* NULL: it learns nothing from trees */
    void *data;
    double *trials, *hits, *logits; /* [kinds] decayed counts; log odds of their ratio */
} Source;

/* The last tokens of a text, at most TAIL. */
typedef struct {
    int64_t length;
    int32_t tokens[TAIL];
} TextEnd;

typedef struct {
    int64_t num_sources;
    const Source *sources;
    double *weights; /* [whether a source is sure][state of a guess][num_sources + 1], bias first */
    double decay, step, bias_step;
    const int32_t *names; /* [1 << num_sources] number of each set of sources, as trees have it */
    int64_t learns; /* 0: rates and weights stay */
    TextEnd end; /* of the text that trees continue */
} Blend;

/* How the guesses that the same set of sources hints at are mixed. */
typedef struct {
    int is_known;
    double odds; /* before their own hints are added: the bias, and what the silence of other sources says */
    double *weights; /* bias first */
} Mix;

/* The tokens that may follow a node, in columns. */
enum { MAX_GUESSES = MAX_SOURCES * MAX_HINTS };
typedef struct {
    int64_t count;
    int32_t tokens[MAX_GUESSES];
    uint32_t listed[MAX_GUESSES]; /* bit s: source s hints at it */
    double chances[MAX_GUESSES];
    int32_t kinds[MAX_GUESSES][MAX_SOURCES]; /* of the hints; for a source that does not hint at it, see `absent` */
    uint32_t informed; /* bit s: source s knows something about this text */
    int32_t absent[MAX_SOURCES]; /* kinds of tokens that a source does not hint at; NONE: it knows nothing */
    Mix mixes[1 << MAX_SOURCES]; /* by the sources that hint at a token */
} GuessList;

static inline int64_t guess_of(GuessList *all, int32_t token) {
    for (int64_t i = 0; i < all->count; i++)
        if (all->tokens[i] == token) return i;
    all->tokens[all->count] = token;
    all->listed[all->count] = 0;
    return all->count++;
}

static const Mix *mix_of(const Blend *b, GuessList *all, uint32_t listed, int is_sure) {
    static const int64_t POWERS[] = {1, 3, 9, 27, 81, 243, 729, 2187, 6561};
    Mix *mix = &all->mixes[listed];
    if (mix->is_known) return mix;
    int64_t state = is_sure ? POWERS[b->num_sources] : 0;
    for (int64_t s = 0; s < b->num_sources; s++) state += POWERS[s] * ((all->informed >> s & 1) + (listed >> s & 1));
    const double *weights = mix->weights = b->weights + state * (b->num_sources + 1);
    mix->odds = weights[0];
    for (int64_t s = 0; s < b->num_sources; s++)
        if (~listed >> s & 1 && all->absent[s] != NONE)
            mix->odds += weights[s + 1] * b->sources[s].logits[all->absent[s]];
    mix->is_known = 1;
    return mix;
}

/* Asks all sources what may follow a text. */
static void look_up(const Blend *b, const int32_t *tail, int64_t length, int64_t depth, GuessList *all) {
    Hints hints;
    all->count = 0;
    all->informed = 0;
    for (int64_t s = 0; s < b->num_sources; s++) {
        hints.count = 0;
        hints.absent = NONE;
        b->sources[s].look(b->sources[s].data, tail, length, depth, &hints);
        all->absent[s] = hints.count ? hints.absent : NONE;
        if (hints.count) all->informed |= 1u << s;
        for (int64_t i = 0; i < hints.count; i++) {
            const int64_t guess = guess_of(all, hints.tokens[i]);
            all->listed[guess] |= 1u << s;
            all->kinds[guess][s] = hints.kinds[i];
        }
    }
}

/* Mixes what the sources have answered. */
static void find_chances_of_guesses(const Blend *b, GuessList *all) {
    int is_sure = 0;
    for (int64_t i = 0; i < all->count; i++)
        for (uint32_t left = all->listed[i]; left; left &= left - 1) {
            const int s = __builtin_ctz(left);
            is_sure |= b->sources[s].logits[all->kinds[i][s]] >= SURE;
        }
    memset(all->mixes, 0, sizeof *all->mixes << b->num_sources);
    double total = 0.0;
    for (int64_t i = 0; i < all->count; i++) {
        const Mix *mix = mix_of(b, all, all->listed[i], is_sure);
        double odds = mix->odds;
        for (uint32_t left = all->listed[i]; left; left &= left - 1) {
            const int s = __builtin_ctz(left);
            odds += mix->weights[s + 1] * b->sources[s].logits[all->kinds[i][s]];
        }
        all->chances[i] = 1.0 / (1.0 + exp(-odds));
        total += all->chances[i];
    }
    if (total > 1.0)
        for (int64_t i = 0; i < all->count; i++) all->chances[i] /= total;
}

static void find_guesses(const Blend *b, const int32_t *tail, int64_t length, int64_t depth, GuessList *all) {
    look_up(b, tail, length, depth, all);
    find_chances_of_guesses(b, all);
}

/* The kind that a source gives to a guess; NONE if it knows nothing about the text. */
static inline int32_t hinted_kind(const GuessList *all, int64_t guess, int64_t source) {
    return all->listed[guess] >> source & 1 ? all->kinds[guess][source] : all->absent[source];
}

static void count_kind(const Source *source, int32_t kind, double right, double decay) {
    source->trials[kind] = source->trials[kind] * decay + 1.0;
    source->hits[kind] = source->hits[kind] * decay + right;
    source->logits[kind] = NAN; /* not known now */
}

static void find_logit(const Source *source, int32_t kind) {
    if (!isnan(source->logits[kind])) return;
    double rate = (source->hits[kind] + 0.02) / (source->trials[kind] + 0.1);
    rate = rate < 5e-4 ? 5e-4 : rate > 0.998 ? 0.998 : rate;
    source->logits[kind] = log(rate / (1.0 - rate));
}

/* Counts one outcome: `right` followed the text. */
static void learn_outcome(Blend *b, const GuessList *all, int32_t right) {
    for (int64_t i = 0; i < all->count; i++) {
        double *weights = all->mixes[all->listed[i]].weights;
        const double error = (all->tokens[i] == right) - all->chances[i];
        weights[0] += b->bias_step * error;
        for (int64_t s = 0; s < b->num_sources; s++) {
            const int32_t kind = hinted_kind(all, i, s);
            if (kind != NONE) weights[s + 1] += b->step * error * b->sources[s].logits[kind];
        }
    }
    for (int64_t i = 0; i < all->count; i++)
        for (int64_t s = 0; s < b->num_sources; s++) {
            const int32_t kind = hinted_kind(all, i, s);
            if (kind != NONE) count_kind(&b->sources[s], kind, all->tokens[i] == right, b->decay);
        }
    /* Many guesses are of the same kind: logarithms of all would take most of the time. */
    for (int64_t i = 0; i < all->count; i++)
        for (int64_t s = 0; s < b->num_sources; s++) {
            const int32_t kind = hinted_kind(all, i, s);
            if (kind != NONE) find_logit(&b->sources[s], kind);
        }
}

/* -- growing ------------------------------------------------------------------------------------------------------- */

/* The best remaining guess of a node. */
typedef struct {
    double value; /* chance of the whole path */
    int64_t order; /* breaks ties: first in, first out */
    int32_t parent, first; /* the parent's node; index of this guess */
    int32_t left; /* guesses of the parent from this one on */
} Open;

typedef struct {
    Open *heap; /* best first */
    int64_t size, order;
} OpenQueue;

static int is_better(const Open *a, const Open *b) {
    return a->value > b->value || (a->value == b->value && a->order < b->order);
}

static void push_open(OpenQueue *q, Open open) {
    int64_t at = q->size++;
    for (; at > 0 && is_better(&open, &q->heap[(at - 1) / 2]); at = (at - 1) / 2) q->heap[at] = q->heap[(at - 1) / 2];
    q->heap[at] = open;
}

static void sink_open(OpenQueue *q, Open open) {
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < q->size; at = child) {
        if (child + 1 < q->size && is_better(&q->heap[child + 1], &q->heap[child])) child++;
        if (!is_better(&q->heap[child], &open)) break;
        q->heap[at] = q->heap[child];
    }
    q->heap[at] = open;
}

typedef struct {
    double chance;
    int32_t token;
    uint32_t listed;
} Offer;

/* Sorts the likeliest guesses first and keeps at most `room`; earlier ones first among equals. */
static int32_t keep_best(const GuessList *all, Offer *offers, int64_t room, double min_chance) {
    int64_t count = 0;
    for (int64_t i = 0; i < all->count; i++) {
        const double chance = all->chances[i];
        if (chance < min_chance || (count == room && chance <= offers[count - 1].chance)) continue;
        int64_t at = count < room ? count++ : count - 1;
        for (; at > 0 && offers[at - 1].chance < chance; at--) offers[at] = offers[at - 1];
        offers[at] = (Offer){chance, all->tokens[i], all->listed[i]};
    }
    return (int32_t)count;
}

/* Grows a tree of at most `budget` nodes below the last token of the text; nothing is added if the chance of its path is
 * below `min_value`. Writes tokens, parents, depths and sources of each node (columns `stride` apart) and chances given
 * the parent. Returns the number of nodes, 0 without memory. */
static int64_t grow_blend(const Blend *b, int64_t budget, int64_t max_depth, double min_value, int64_t stride,
                          int32_t *nodes, double *chances) {
    enum { WIDTH = 16 }; /* guesses kept per node */
    const TextEnd *end = &b->end;
    const int64_t length = end->length;
    int32_t *tokens = nodes, *parents = nodes + stride, *depths = nodes + 2 * stride, *sources = nodes + 3 * stride;
    const size_t heap_bytes = budget * sizeof(Open), offer_bytes = budget * WIDTH * sizeof(Offer);
    const size_t value_bytes = budget * sizeof(double), tail_bytes = budget * TAIL * sizeof(int32_t);
    char *memory = malloc(heap_bytes + offer_bytes + value_bytes + tail_bytes + sizeof(GuessList));
    if (!memory) return 0;
    GuessList *all = (GuessList *)memory;
    OpenQueue queue = {(Open *)(memory + sizeof *all), 0, 0};
    Offer *offers = (Offer *)((char *)queue.heap + heap_bytes);
    double *values = (double *)((char *)offers + offer_bytes);
    int32_t *tails = (int32_t *)((char *)values + value_bytes);
    tokens[0] = end->tokens[length - 1], parents[0] = NONE, depths[0] = 0, sources[0] = b->names[0];
    chances[0] = values[0] = 1.0;
    memcpy(tails, end->tokens, length * sizeof *tails);
    int64_t size = 1;
    for (int64_t node = 0;;) {
        const int64_t room = budget - size;
        if (room && depths[node] < max_depth) {
            const int64_t own = length + depths[node] < TAIL ? length + depths[node] : TAIL;
            find_guesses(b, tails + node * TAIL, own, depths[node], all);
            Offer *best = offers + node * WIDTH;
            const int32_t count = keep_best(all, best, room < WIDTH ? room : WIDTH, min_value / values[node]);
            if (count) push_open(&queue, (Open){values[node] * best->chance, queue.order++, (int32_t)node, 0, count});
        }
        if (!room || !queue.size) break;
        const Open first = queue.heap[0];
        const Offer *offer = offers + first.parent * WIDTH + first.first;
        if (first.left > 1) {
            const double value = values[first.parent] * offer[1].chance;
            sink_open(&queue, (Open){value, queue.order++, first.parent, first.first + 1, first.left - 1});
        } else if (--queue.size) {
            sink_open(&queue, queue.heap[queue.size]);
        }
        node = size++;
        tokens[node] = offer->token, parents[node] = first.parent, depths[node] = depths[first.parent] + 1;
        sources[node] = b->names[offer->listed];
        chances[node] = offer->chance, values[node] = first.value;
        const int64_t above = length + depths[first.parent] < TAIL ? length + depths[first.parent] : TAIL;
        const int64_t kept = above < TAIL ? above : TAIL - 1;
        memcpy(tails + node * TAIL, tails + first.parent * TAIL + above - kept, kept * sizeof *tails);
        tails[node * TAIL + kept] = offer->token;
    }
    free(memory);
    return size;
}

/* -- learning ------------------------------------------------------------------------------------------------------ */

/* What sources had to say about tokens that followed a text, one after the other. For each: the number of guesses,
 * `informed`, `absent [num_sources]`, and by guess `tokens`, `listed` and `kinds [num_sources]`. */
typedef struct {
    int64_t size;
    int32_t *words; /* NULL if there are none */
} Answers;

/* Nonzero: no memory. */
static int add_answer(Answers *a, const GuessList *all, int64_t num_sources) {
    const int64_t count = all->count, more = 2 + num_sources + count * (2 + num_sources);
    int32_t *words = realloc(a->words, (a->size + more) * sizeof *words);
    if (!words) return 1;
    a->words = words;
    words += a->size;
    a->size += more;
    *words++ = (int32_t)count, *words++ = (int32_t)all->informed;
    memcpy(words, all->absent, num_sources * sizeof *words);
    words += num_sources;
    memcpy(words, all->tokens, count * sizeof *words);
    memcpy(words + count, all->listed, count * sizeof *words);
    words += 2 * count;
    for (int64_t i = 0; i < count; i++, words += num_sources) memcpy(words, all->kinds[i], num_sources * sizeof *words);
    return 0;
}

/* Returns the words after the answer. */
static const int32_t *take_answer(const int32_t *words, GuessList *all, int64_t num_sources) {
    const int64_t count = all->count = *words++;
    all->informed = (uint32_t)*words++;
    memcpy(all->absent, words, num_sources * sizeof *words);
    words += num_sources;
    memcpy(all->tokens, words, count * sizeof *words);
    memcpy(all->listed, words + count, count * sizeof *words);
    words += 2 * count;
    for (int64_t i = 0; i < count; i++, words += num_sources) memcpy(all->kinds[i], words, num_sources * sizeof *words);
    return words;
}

/* Asks about each of the tokens that followed a text. Nonzero: no memory. */
static int ask(const Blend *b, const int32_t *tail, int64_t length, int64_t n, const int32_t *emitted, Answers *a) {
    if (!b->learns) return 0;
    GuessList all;
    int32_t text[TAIL + n];
    memcpy(text, tail, length * sizeof *tail);
    memcpy(text + length, emitted, n * sizeof *tail);
    for (int64_t i = 0; i < n; i++) {
        const int64_t known = length + i < TAIL ? length + i : TAIL;
        look_up(b, text + length + i - known, known, i, &all);
        if (add_answer(a, &all, b->num_sources)) return 1;
    }
    return 0;
}

/* Learns how good the answers were, and frees them. */
static void learn_answers(Blend *b, const int32_t *emitted, Answers *a) {
    GuessList all;
    for (const int32_t *words = a->words; words < a->words + a->size; emitted++) {
        words = take_answer(words, &all, b->num_sources);
        find_chances_of_guesses(b, &all);
        learn_outcome(b, &all, *emitted);
    }
    free(a->words);
}

/* The text goes on with these tokens. */
void draftwood_move_end(Blend *b, int64_t n, const int32_t *tokens) {
    TextEnd *end = &b->end;
    if (n > TAIL) tokens += n - TAIL, n = TAIL;
    const int64_t kept = end->length + n > TAIL ? TAIL - n : end->length;
    memmove(end->tokens, end->tokens + end->length - kept, kept * sizeof *tokens);
    memcpy(end->tokens + kept, tokens, n * sizeof *tokens);
    end->length = kept + n;
}

typedef struct {
    const Blend *const *blends;
    const int64_t *budgets;
    int64_t max_depth;
    double min_value;
    int64_t stride;
    int32_t *ints;
    double *probs;
    Tree *trees;
} BlendDrafts;

static void propose_one_blend(void *job, long i, int thread) {
    const BlendDrafts *d = job;
    const int64_t first = sum_before(d->budgets, i);
    (void)thread;
    const int64_t size = grow_blend(d->blends[i], d->budgets[i], d->max_depth, d->min_value, d->stride,
                                    d->ints + first, d->probs + first);
    d->trees[i] = tree_at(size, first, d->stride, d->ints, d->probs);
}

typedef struct {
    int64_t count;
    Blend *const *blends;
    Table *const *tables;
    Outcomes outcomes;
    Answers *answers;
    _Atomic int failed;
} BlendLessons;

/* What was hinted about the emitted tokens: before anything is learned. */
static void ask_one_blend(void *job, long i, int thread) {
    BlendLessons *lessons = job;
    const Blend *b = lessons->blends[i];
    const Seen seen = seen_by(&lessons->outcomes, i, lessons->tables[i]->width);
    (void)thread;
    if (ask(b, b->end.tokens, b->end.length, seen.num_emitted, seen.emitted, &lessons->answers[i])) lessons->failed = 1;
}

static void learn_chances(BlendLessons *lessons, int64_t i) {
    const Seen seen = seen_by(&lessons->outcomes, i, lessons->tables[i]->width);
    learn_answers(lessons->blends[i], seen.emitted, &lessons->answers[i]);
}

static void observe_one_blend(void *job, long i, int thread) {
    BlendLessons *lessons = job;
    Blend *b = lessons->blends[i];
    Table *table = lessons->tables[i];
    const Seen seen = seen_by(&lessons->outcomes, i, table->width);
    const int32_t before = b->end.tokens[b->end.length > 1 ? b->end.length - 2 : 0];
    (void)thread;
    prefetch_tree(table, seen.tree, before, prefetch_slot);
    int failed = learn_seen(table, &seen, before);
    for (int64_t s = 0; s < b->num_sources; s++)
        if (b->sources[s].follow) failed |= b->sources[s].follow(b->sources[s].data, &seen);
    draftwood_move_end(b, seen.num_emitted, seen.emitted);
    if (failed) lessons->failed = 1;
}

/* The chances of hints, which requests share, are learned in order, and meanwhile all else on the other threads. */
static void observe_part(void *job, long part, int thread) {
    BlendLessons *lessons = job;
    if (part) observe_one_blend(job, part - 1, thread);
    else for (int64_t i = 0; i < lessons->count; i++) learn_chances(lessons, i);
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

/* Grows a tree for each request, at node `budget 0 + ... + budget i - 1` of a forest, and writes where it is.
 * `at_once`: no source is in Python. Nonzero: no memory. */
int draftwood_propose_blends(int64_t n, const Blend *const *blends, const int64_t *budgets, int64_t max_depth,
                             double min_value, int64_t stride, int32_t *ints, double *probs, Tree *trees,
                             int64_t at_once) {
    BlendDrafts drafts = {blends, budgets, max_depth, min_value, stride, ints, probs, trees};
    for_requests(propose_one_blend, &drafts, n, at_once != 0);
    for (int64_t i = 0; i < n; i++)
        if (!trees[i].size) return 1;
    return 0;
}

/* Learns from verified trees: how good the hints about the emitted tokens were, the rows of all nodes, and what is now
 * text. The arguments are those of observe_spines, and the tables. No source may be in Python. */
int draftwood_observe_blends(int64_t n, Blend *const *blends, Table *const *tables, const Tree *trees,
                             const int64_t *lengths, const int32_t *paths, const int64_t *num_emitted,
                             const int32_t *emitted, const int64_t *rows, const int32_t *ids, const float *scores) {
    Answers answers[n];
    memset(answers, 0, sizeof answers);
    const Outcomes outcomes = {trees, lengths, paths, num_emitted, emitted, rows, ids, scores};
    BlendLessons lessons = {n, blends, tables, outcomes, answers, 0};
    if (are_apart(tables, n)) {
        for_requests(ask_one_blend, &lessons, n, 1);
        for_requests(observe_part, &lessons, n + 1, 1);
    } else { /* each request learns all before the next */
        for (int64_t i = 0; i < n; i++) {
            ask_one_blend(&lessons, (long)i, 0);
            learn_chances(&lessons, i);
            observe_one_blend(&lessons, (long)i, 0);
        }
    }
    return lessons.failed;
}

/* Writes what all sources hint at after a text: tokens, the sources of each, and its kinds ([guesses][sources]). Returns
 * the number of guesses, negative without memory; there is room for `room`. */
int64_t draftwood_blend_guesses(const Blend *b, const int32_t *tail, int64_t length, int64_t depth, int64_t room,
                                int32_t *tokens, int32_t *listed, int32_t *kinds) {
    GuessList *all = malloc(sizeof *all);
    if (!all) return -1;
    if (length > TAIL) tail += length - TAIL, length = TAIL;
    find_guesses(b, tail, length, depth, all);
    const int64_t count = all->count < room ? all->count : room;
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = all->tokens[i];
        listed[i] = (int32_t)all->listed[i];
        for (int64_t s = 0; s < b->num_sources; s++) kinds[i * b->num_sources + s] = hinted_kind(all, i, s);
    }
    free(all);
    return count;
}

/* Learns from the tokens that followed `tail`. Nonzero: no memory. */
int draftwood_blend_learn(Blend *b, const int32_t *tail, int64_t length, int64_t n, const int32_t *emitted) {
    const int64_t known = length < TAIL ? length : TAIL;
    Answers answers = {0, NULL};
    const int failed = ask(b, tail + length - known, known, n, emitted, &answers);
    learn_answers(b, emitted, &answers);
    return failed;
}

#endif
