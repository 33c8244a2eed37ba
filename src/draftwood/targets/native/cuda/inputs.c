/* Inputs.fill of inputs.py in one call. The fields are explained there and in attention/plan.py. */
#include <stdint.h>
#include <string.h>

#define NO_SLOT (-1)
#define TILE_FIELDS 7
#define WORD_BITS 32

/* Addresses and sizes of the parts of the buffer. */
typedef struct {
    int32_t *moves; /* [1 + 2 * max_moves]: their number, sources, targets */
    int32_t *ids, *positions, *slots, *afters, *wanted; /* [num_rows] */
    int32_t *tiles; /* [num_tiles][TILE_FIELDS] */
    uint32_t *words; /* [num_rows][num_words] */
    int64_t num_rows, num_tiles, num_words, max_moves, nodes_per_tile;
    int64_t window; /* 0: none */
    int64_t filled; /* rows that the last batch wrote */
} Inputs;

typedef struct {
    int32_t base, prefix_len;
    int32_t after, size; /* nodes of its tree written by earlier passes, and new nodes */
    int32_t num_logits;
} Segment;

/* Whether the segment is a new chain, which needs no ancestor words. */
static int is_chain(const Segment *s, const int32_t *parents) {
    for (int64_t node = 0; node < s->size; node++)
        if (parents[node] != node - 1) return 0;
    return s->after == 0;
}

static int64_t words_for(int64_t nodes) { return (nodes + WORD_BITS - 1) / WORD_BITS; }

/* Whether the batch fits the buffer, and every parent precedes its children. */
static int fits(const Inputs *p, int64_t num_segments, const Segment *segments, const int32_t *parents,
                int64_t num_moves) {
    int64_t rows = 0, tiles = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        const Segment *s = segments + i;
        const int64_t nodes = s->after + s->size, bits = s->size + words_for(s->after) * WORD_BITS;
        if (s->num_logits < 0 || s->num_logits > s->size || rows + s->size > p->num_rows) return 0;
        for (int64_t node = 0; node < nodes; node++)
            if (parents[node] >= node) return 0;
        if (bits > WORD_BITS * p->num_words && !is_chain(s, parents)) return 0;
        parents += nodes;
        rows += s->size;
        tiles += (s->size + p->nodes_per_tile - 1) / p->nodes_per_tile;
    }
    return tiles <= p->num_tiles && num_moves <= p->max_moves;
}

static int32_t depth_of(const int32_t *parents, int32_t node) {
    int32_t depth = 0;
    while ((node = parents[node]) >= 0) depth++;
    return depth;
}

/* Nodes of earlier passes use the last words. */
static void set_bit(const Inputs *p, uint32_t *words, int64_t node, int64_t after) {
    words += node < after ? p->num_words - words_for(after) : 0;
    node -= node < after ? 0 : after;
    words[node / WORD_BITS] |= UINT32_C(1) << node % WORD_BITS;
}

/* Sets the bits of `node` and its ancestors, as far as the window of a child of `node` reaches. */
static void set_ancestors(const Inputs *p, uint32_t *words, const int32_t *parents, int32_t node, int32_t after) {
    int64_t seen = 1; /* the child itself */
    for (; node >= 0 && (!p->window || seen < p->window); node = parents[node], seen++) set_bit(p, words, node, after);
}

/* Writes the rows of one segment from `start` on, and its tiles; returns the next free tile. */
static int32_t *write_segment(const Inputs *p, const Segment *s, int64_t start, const int32_t *parents, int32_t *tile) {
    const int chain = is_chain(s, parents);
    const int32_t after = s->after;
    int32_t *positions = p->positions + start, *slots = p->slots + start;
    uint32_t *words = p->words + start * p->num_words;
    memset(words, 0, s->size * p->num_words * sizeof *words);
    for (int64_t row = 0; row < s->size; row++) {
        const int32_t node = after + (int32_t)row, parent = parents[node];
        positions[row] = parent >= after ? positions[parent - after] + 1 : s->prefix_len + depth_of(parents, node);
        slots[row] = s->base + s->prefix_len + node;
        p->afters[start + row] = after;
        if (chain) continue;
        uint32_t *own = words + row * p->num_words;
        if (parent >= after && !p->window)
            memcpy(own, words + (parent - after) * p->num_words, p->num_words * sizeof *own);
        else
            set_ancestors(p, own, parents, parent, after);
        set_bit(p, own, node, after);
    }
    for (int64_t first = 0; first < s->size; first += p->nodes_per_tile, tile += TILE_FIELDS) {
        const int64_t left = s->size - first, nodes = left < p->nodes_per_tile ? left : p->nodes_per_tile;
        const int32_t fields[TILE_FIELDS] = {(int32_t)(start + first), (int32_t)nodes, s->base,
                                             s->prefix_len, (int32_t)start, chain, after};
        memcpy(tile, fields, sizeof fields);
    }
    return tile;
}

/* Returns 0, or 1 with nothing written if the batch does not fit: then Python fills the buffer, or raises. */
int draftwood_fill(Inputs *p, int64_t num_segments, const Segment *segments, const int32_t *ids, const int32_t *parents,
                   int64_t num_moves, const int32_t *sources, const int32_t *targets) {
    if (!fits(p, num_segments, segments, parents, num_moves)) return 1;
    p->moves[0] = (int32_t)num_moves;
    for (int64_t i = 0; i < num_moves; i++) {
        p->moves[1 + i] = sources[i];
        p->moves[1 + p->max_moves + i] = targets[i];
    }
    int64_t rows = 0;
    int32_t *tile = p->tiles, *wanted = p->wanted;
    for (int64_t i = 0; i < num_segments; i++) {
        tile = write_segment(p, segments + i, rows, parents, tile);
        parents += segments[i].after + segments[i].size;
        rows += segments[i].size;
        for (int64_t row = rows - segments[i].num_logits; row < rows; row++) *wanted++ = (int32_t)row;
    }
    memset(tile, 0, (p->tiles + p->num_tiles * TILE_FIELDS - tile) * sizeof *tile);
    memcpy(p->ids, ids, rows * sizeof *ids);
    for (int64_t row = rows; row < p->filled; row++) {
        p->ids[row] = p->positions[row] = 0;
        p->slots[row] = NO_SLOT;
        memset(p->words + row * p->num_words, 0, p->num_words * sizeof *p->words);
    }
    p->filled = rows;
    return 0;
}
