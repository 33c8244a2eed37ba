/* float32 weights. A packed group holds, input by input, the weights of its GROUP_COLUMNS columns. */
#ifndef DRAFTWOOD_FORMAT_F32_H
#define DRAFTWOOD_FORMAT_F32_H

#include "format.h"
#include "micro.h"

static long f32_group_bytes(long inputs) { return inputs * GROUP_COLUMNS * (long)sizeof(float); }

INLINE float *f32_group(const Matrix *m, long group) {
    return (float *)m->data + group * round_up(m->inputs, 4) * GROUP_COLUMNS;
}

static int f32_pack(const Matrix *m, const void *from, long group) {
    float *to = f32_group(m, group);
    memset(to, 0, (size_t)f32_group_bytes(round_up(m->inputs, 4)));
    for (long column = 0; column < GROUP_COLUMNS; column++) {
        const long row = source_row(m, group, column);
        if (row < 0) continue;
        const float *weights = (const float *)from + row * m->inputs;
        for (long k = 0; k < m->inputs; k++) to[k * GROUP_COLUMNS + column] = weights[k];
    }
    return 1;
}

static void f32_unpack_row(const Matrix *m, long row, float *to) {
    const float *from = f32_group(m, row / GROUP_COLUMNS) + row % GROUP_COLUMNS;
    for (long k = 0; k < m->inputs; k++) to[k] = from[k * GROUP_COLUMNS];
}

static void f32_load_row(const Matrix *m, long row, float *to) {
    memcpy(to, (const float *)m->data + row * m->inputs, (size_t)m->inputs * sizeof(float));
}

static void f32_multiply(const GroupProduct *p) {
    multiply_f32((const float *)p->input, p->input_bytes / (long)sizeof(float), p->rows, p->weights,
                 GROUP_COLUMNS * sizeof(float), GROUP, p->inputs, p->out, GROUP_COLUMNS, p->next);
}

static const Format F32 = {.input_step = 4, .streamed_rows = 2, .group_bytes = f32_group_bytes, .pack = f32_pack,
                           .unpack_row = f32_unpack_row, .load_row = f32_load_row, .multiply = f32_multiply};

#endif
