/* Weights, packed once: the GROUP_COLUMNS output columns of a group lie interleaved, so a product reads its weights
 * front to back. A row of a group holds the weights of one input, panel by panel. In bfloat16 the columns c and VW + c
 * of a panel share 32 bits, low half first: a shift and a mask expand them to two vectors in column order. Where the
 * CPU multiplies in tiles, a bfloat16 group is one right-hand side of amx.h instead. */
#ifndef DRAFTWOOD_PACK_H
#define DRAFTWOOD_PACK_H

#include "model.h"
#include "pool.h"

typedef struct {
    const Matrix *to;
    const void *from; /* [outputs (twice that if joined), inputs] */
    long type;
} Packing;

INLINE long place_in_panel(long column, long type) {
    if (type == FLOAT32) return column;
    return column < VW ? 2 * column : 2 * (column - VW) + 1;
}

/* Which output column stands at (group, panel, column); -1 for padding. */
INLINE long source_row(const Matrix *m, long group, long panel, long column) {
    if (!m->joined) {
        long row = (group * GROUP + panel) * PANEL + column;
        return row < m->outputs ? row : -1;
    }
    long row = (group * (GROUP / 2) + panel / 2) * PANEL + column;
    return row < m->outputs ? row + (panel % 2) * m->outputs : -1;
}

static void pack_group(void *context, long group, int thread) {
    (void)thread;
    const Packing *job = context;
    const Matrix *m = job->to;
    const long inputs = m->inputs, padded = padded_inputs(m, job->type), size = type_size(job->type);
    const int tiles = in_tiles(job->type);
    memset((char *)m->data + group * padded * GROUP_COLUMNS * size, 0, (size_t)(padded * GROUP_COLUMNS * size));
    for (long panel = 0; panel < GROUP; panel++) {
        char *to = (char *)m->data + (group * padded * GROUP + panel) * PANEL * size;
        for (long column = 0; column < PANEL; column++) {
            const long row = source_row(m, group, panel, column), place = place_in_panel(column, job->type);
            if (row < 0) continue;
            if (tiles) {
                const bf16 *from = (const bf16 *)job->from + row * inputs;
                bf16 *side = (bf16 *)m->data + group * padded * GROUP_COLUMNS;
                for (long k = 0; k < inputs; k++) side[place_in_tiles(k, panel * PANEL + column)] = from[k];
            } else if (job->type == BFLOAT16) {
                const bf16 *from = (const bf16 *)job->from + row * inputs;
                for (long k = 0; k < inputs; k++) ((bf16 *)to)[k * GROUP_COLUMNS + place] = from[k];
            } else {
                const float *from = (const float *)job->from + row * inputs;
                for (long k = 0; k < inputs; k++) ((float *)to)[k * GROUP_COLUMNS + place] = from[k];
            }
        }
    }
}

/* Row `token` of the embedding, read back from the packed head it shares its weights with. */
static void unpack_row(const Matrix *m, long type, long token, float *to) {
    const long padded = padded_inputs(m, type), place = place_in_panel(token % PANEL, type);
    const long group = token / GROUP_COLUMNS, panel = token % GROUP_COLUMNS / PANEL;
    if (in_tiles(type)) {
        const bf16 *side = (const bf16 *)m->data + group * padded * GROUP_COLUMNS;
        for (long k = 0; k < m->inputs; k++) to[k] = from_bf16(side[place_in_tiles(k, token % GROUP_COLUMNS)]);
        return;
    }
    const long first = (group * padded * GROUP + panel) * PANEL + place;
    for (long k = 0; k < m->inputs; k++) {
        if (type == BFLOAT16)
            to[k] = from_bf16(((const bf16 *)m->data)[first + k * GROUP_COLUMNS]);
        else
            to[k] = ((const float *)m->data)[first + k * GROUP_COLUMNS];
    }
}

#endif
