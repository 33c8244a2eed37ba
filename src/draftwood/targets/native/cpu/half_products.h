/* Products with weights of 16 bits, multiplied in float32. A packed group holds, input by input, the weights of its
 * GROUP_COLUMNS columns. */
#ifndef DRAFTWOOD_HALF_PRODUCTS_H
#define DRAFTWOOD_HALF_PRODUCTS_H

#include "format.h"
#include "micro.h"

#define PREFETCH_BYTES 1024 /* distance for a single row, whose product is bound by memory alone */

static long group_bytes_16_bits(long inputs) { return inputs * GROUP_COLUMNS * (long)sizeof(uint16_t); }

/* One panel expanded to float32; products load one input ahead. */
static long panel_floats(long inputs) { return (inputs + 1) * PANEL; }

static void multiply_16_bits(const GroupProduct *p, Micro *const *wide_rows, Micro *const *spill_rows) {
    const float *input = (const float *)p->input;
    const long stride = p->input_bytes / (long)sizeof(float), first = next_block(p->rows), wide = WIDE_PANELS(first);
    const long row_bytes = GROUP_COLUMNS * sizeof(uint16_t), panel_bytes = PANEL * sizeof(uint16_t);
    const char *ahead = wide == GROUP ? p->weights + PREFETCH_BYTES : p->next;
    if (p->rows <= MAX_ROWS) {
        for (long panel = 0; panel < GROUP; panel += wide)
            wide_rows[p->rows - 1](input, stride, p->weights + panel * panel_bytes, row_bytes, panel_bytes, p->inputs,
                                   p->out + panel * PANEL, GROUP_COLUMNS,
                                   ahead + panel / wide * (4 * wide / GROUP) * row_bytes, NULL);
        return;
    }
    for (long panel = 0; panel < GROUP; panel++) {
        float *out = p->out + panel * PANEL;
        spill_rows[first - 1](input, stride, p->weights + panel * panel_bytes, row_bytes, panel_bytes, p->inputs, out,
                              GROUP_COLUMNS, ahead + panel * (4 / GROUP) * row_bytes, p->scratch);
        for (long row = first, block; row < p->rows; row += block) {
            block = next_block(p->rows - row);
            f32_one[block - 1](input + row * stride, stride, (const char *)p->scratch, PANEL * sizeof(float), 0,
                               p->inputs, out + row * GROUP_COLUMNS, GROUP_COLUMNS, NULL, NULL);
        }
    }
}

#endif
