/* What Inputs.fill of inputs.py writes, in one call. Read there, and in attention_plan.py, what it all means. */
#include <stdint.h>
#include <string.h>

#define NO_SLOT (-1)
#define TILE_FIELDS 6
#define WORD_BITS 32

/* Where the parts of the buffer are. */
typedef struct {
    int32_t *moves; /* their number, sources, targets: [1 + 2 * most_moves] */
    int32_t *ids, *positions, *slots, *wanted; /* [num_rows] */
    int32_t *tiles; /* [num_tiles][TILE_FIELDS] */
    uint32_t *words; /* [num_rows][num_words] */
    int64_t num_rows, num_tiles, num_words, most_moves, nodes_per_tile;
    int64_t filled; /* rows that the last pass left there */
} Plan;

typedef struct {
    int32_t base, prefix_len, size, num_logits;
} Segment;

static int is_chain(const int32_t *parents, int64_t size) {
    for (int64_t node = 0; node < size; node++)
        if (parents[node] != node - 1) return 0;
    return 1;
}

/* Whether all of it has its place, and every parent comes before its children. */
static int fits(const Plan *p, int64_t num_segments, const Segment *segments, const int32_t *parents,
                int64_t num_moves) {
    int64_t rows = 0, tiles = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        const Segment *s = segments + i;
        if (s->num_logits < 0 || s->num_logits > s->size || rows + s->size > p->num_rows) return 0;
        for (int64_t node = 0; node < s->size; node++)
            if (parents[rows + node] >= node) return 0;
        if (s->size > WORD_BITS * p->num_words && !is_chain(parents + rows, s->size)) return 0;
        rows += s->size;
        tiles += (s->size + p->nodes_per_tile - 1) / p->nodes_per_tile;
    }
    return tiles <= p->num_tiles && num_moves <= p->most_moves;
}

/* Rows of one segment from `start` on, and its tiles; returns the first tile behind them. */
static int32_t *write_segment(const Plan *p, const Segment *s, int64_t start, const int32_t *parents, int32_t *tile) {
    const int chain = is_chain(parents, s->size);
    int32_t *positions = p->positions + start, *slots = p->slots + start;
    uint32_t *words = p->words + start * p->num_words;
    memset(words, 0, s->size * p->num_words * sizeof *words);
    for (int64_t node = 0; node < s->size; node++) {
        const int32_t parent = parents[node];
        positions[node] = parent < 0 ? s->prefix_len : positions[parent] + 1;
        slots[node] = s->base + s->prefix_len + (int32_t)node;
        if (chain) continue;
        uint32_t *own = words + node * p->num_words;
        if (parent >= 0) memcpy(own, words + parent * p->num_words, p->num_words * sizeof *own);
        own[node / WORD_BITS] |= UINT32_C(1) << node % WORD_BITS;
    }
    for (int64_t first = 0; first < s->size; first += p->nodes_per_tile, tile += TILE_FIELDS) {
        const int64_t left = s->size - first, nodes = left < p->nodes_per_tile ? left : p->nodes_per_tile;
        const int32_t fields[TILE_FIELDS] = {(int32_t)(start + first), (int32_t)nodes, s->base,
                                             s->prefix_len, (int32_t)start, chain};
        memcpy(tile, fields, sizeof fields);
    }
    return tile;
}

/* 0; or 1 and nothing is written: Python does it then, and says what is wrong. */
int draftwood_fill(Plan *p, int64_t num_segments, const Segment *segments, const int32_t *ids, const int32_t *parents,
                   int64_t num_moves, const int32_t *sources, const int32_t *targets) {
    if (!fits(p, num_segments, segments, parents, num_moves)) return 1;
    p->moves[0] = (int32_t)num_moves;
    for (int64_t i = 0; i < num_moves; i++) {
        p->moves[1 + i] = sources[i];
        p->moves[1 + p->most_moves + i] = targets[i];
    }
    int64_t rows = 0;
    int32_t *tile = p->tiles, *wanted = p->wanted;
    for (int64_t i = 0; i < num_segments; i++) {
        tile = write_segment(p, segments + i, rows, parents + rows, tile);
        rows += segments[i].size;
        for (int64_t row = rows - segments[i].num_logits; row < rows; row++) *wanted++ = (int32_t)row;
    }
    memset(tile, 0, (p->tiles + p->num_tiles * TILE_FIELDS - tile) * sizeof *tile);
    memcpy(p->ids, ids, rows * sizeof *ids);
    for (int64_t row = rows; row < p->filled; row++) {
        p->ids[row] = p->positions[row] = 0;
        p->slots[row] = NO_SLOT;
    }
    p->filled = rows;
    return 0;
}
