/* float16 weights, multiplied in float32. */
#ifndef DRAFTWOOD_FORMAT_F16_H
#define DRAFTWOOD_FORMAT_F16_H

#include "blocks.h"
#include "half_products.h"

INLINE uint16_t *f16_group(const Matrix *m, long group) {
    return (uint16_t *)m->data + group * round_up(m->inputs, 4) * GROUP_COLUMNS;
}

static int f16_pack(const Matrix *m, const void *from, long group) {
    uint16_t *to = f16_group(m, group);
    int finite = 1;
    memset(to, 0, (size_t)group_bytes_16_bits(round_up(m->inputs, 4)));
    for (long column = 0; column < GROUP_COLUMNS; column++) {
        const long row = source_row(m, group, column);
        if (row < 0) continue;
        const uint16_t *weights = (const uint16_t *)from + row * m->inputs;
        for (long k = 0; k < m->inputs; k++) {
            to[k * GROUP_COLUMNS + column] = weights[k];
            finite &= half_is_finite(weights[k]);
        }
    }
    return finite;
}

static void f16_unpack_row(const Matrix *m, long row, float *to) {
    const uint16_t *from = f16_group(m, row / GROUP_COLUMNS) + row % GROUP_COLUMNS;
    for (long k = 0; k < m->inputs; k++) to[k] = half_to_float(from[k * GROUP_COLUMNS]);
}

static void f16_multiply(const GroupProduct *p) { multiply_16_bits(p, f16_wide, f16_spill); }

static const Format F16 = {.input_step = 4, .streamed_rows = 2, .group_bytes = group_bytes_16_bits,
                           .scratch_floats = panel_floats, .pack = f16_pack, .unpack_row = f16_unpack_row,
                           .multiply = f16_multiply};

#endif
