/* bfloat16 weights, multiplied in float32. A packed group holds, input by input, the weights of its GROUP_COLUMNS
 * columns. Columns c and VW + c of a panel share 32 bits, low half first: a shift and a mask expand them to two vectors
 * in column order. */
#ifndef DRAFTWOOD_FORMAT_BF16_H
#define DRAFTWOOD_FORMAT_BF16_H

#include "format.h"
#include "half_products.h"

static void bf16_load_row(const Matrix *m, long row, float *to) {
    const bf16 *from = (const bf16 *)m->data + row * m->inputs;
    for (long k = 0; k < m->inputs; k++) to[k] = from_bf16(from[k]);
}

INLINE bf16 *bf16_group(const Matrix *m, long group) {
    return (bf16 *)m->data + group * round_up(m->inputs, 4) * GROUP_COLUMNS;
}

INLINE long bf16_place(long column) {
    const long panel = column / PANEL * PANEL, c = column % PANEL;
    return panel + (c < VW ? 2 * c : 2 * (c - VW) + 1);
}

static int bf16_pack(const Matrix *m, const void *from, long group) {
    bf16 *to = bf16_group(m, group);
    memset(to, 0, (size_t)group_bytes_16_bits(round_up(m->inputs, 4)));
    for (long column = 0; column < GROUP_COLUMNS; column++) {
        const long row = source_row(m, group, column), place = bf16_place(column);
        if (row < 0) continue;
        const bf16 *weights = (const bf16 *)from + row * m->inputs;
        for (long k = 0; k < m->inputs; k++) to[k * GROUP_COLUMNS + place] = weights[k];
    }
    return 1;
}

static void bf16_unpack_row(const Matrix *m, long row, float *to) {
    const bf16 *from = bf16_group(m, row / GROUP_COLUMNS) + bf16_place(row % GROUP_COLUMNS);
    for (long k = 0; k < m->inputs; k++) to[k] = from_bf16(from[k * GROUP_COLUMNS]);
}

static void bf16_multiply(const GroupProduct *p) { multiply_16_bits(p, bf16_wide, bf16_spill); }

/* The same weights for CPUs with AMX: a packed group is one right-hand side of amx.h. */
INLINE bf16 *tiles_group(const Matrix *m, long group) {
    return (bf16 *)m->data + group * round_up(m->inputs, TILE_INPUTS) * GROUP_COLUMNS;
}

static int tiles_pack(const Matrix *m, const void *from, long group) {
    bf16 *to = tiles_group(m, group);
    memset(to, 0, (size_t)group_bytes_16_bits(round_up(m->inputs, TILE_INPUTS)));
    for (long column = 0; column < GROUP_COLUMNS; column++) {
        const long row = source_row(m, group, column);
        if (row < 0) continue;
        const bf16 *weights = (const bf16 *)from + row * m->inputs;
        for (long k = 0; k < m->inputs; k++) to[place_in_tiles(k, column)] = weights[k];
    }
    return 1;
}

static void tiles_unpack_row(const Matrix *m, long row, float *to) {
    const bf16 *from = tiles_group(m, row / GROUP_COLUMNS);
    for (long k = 0; k < m->inputs; k++) to[k] = from_bf16(from[place_in_tiles(k, row % GROUP_COLUMNS)]);
}

/* The extra step keeps equal columns of neighbouring rows off one cache set. */
static long tiles_prepared_bytes(long inputs) { return (inputs + TILE_INPUTS) * (long)sizeof(bf16); }

static void tiles_prepare(const float *row, long inputs, void *to) {
    narrow_row(row, round_up(inputs, ALIGN_FLOATS), round_up(inputs, TILE_INPUTS), to);
}

/* Reads and writes whole tiles of rows. */
static void tiles_multiply(const GroupProduct *p) {
    const bf16 *weights = (const bf16 *)p->weights;
    const long stride = p->input_bytes / (long)sizeof(bf16);
    const char *next = p->next;
    for (long row = 0; row < p->rows; next = NULL) {
        const bf16 *from = (const bf16 *)p->input + row * stride;
        float *to = p->out + row * GROUP_COLUMNS;
        if (p->rows - row > TILE_ROWS) {
            amx_multiply_32(from, stride, weights, p->inputs, to, GROUP_COLUMNS, next);
            row += 2 * TILE_ROWS;
        } else {
            amx_multiply(from, stride, weights, p->inputs, GROUP_COLUMNS / TILE_COLUMNS, to, GROUP_COLUMNS, next);
            row += TILE_ROWS;
        }
    }
}

static const Format BF16_TILES = {.input_step = TILE_INPUTS, .streamed_rows = MAX_CHUNK,
                                  .group_bytes = group_bytes_16_bits, .pack = tiles_pack,
                                  .unpack_row = tiles_unpack_row, .load_row = bf16_load_row,
                                  .prepared_bytes = tiles_prepared_bytes, .prepare = tiles_prepare,
                                  .begin = amx_configure, .multiply = tiles_multiply};

static const Format BF16 = {.input_step = 4, .streamed_rows = 2, .group_bytes = group_bytes_16_bits,
                            .scratch_floats = panel_floats, .pack = bf16_pack, .unpack_row = bf16_unpack_row,
                            .load_row = bf16_load_row, .multiply = bf16_multiply, .tiled = &BF16_TILES};

#endif
