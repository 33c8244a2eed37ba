/* The state of one forward, and its memory: an arena that only grows, used by one forward at a time. */
#ifndef DRAFTWOOD_RUN_H
#define DRAFTWOOD_RUN_H

#include <stdlib.h>

#include "attention.h"
#include "draw.h"
#include "matmul.h"
#include "model.h"
#include "toprows.h"

#define HUGE_PAGE (2L << 20)

typedef struct {
    const Model *model;
    const Batch *batch;
    int threads;
    long hidden_stride, normed_stride, half;
    float *hidden, *normed; /* [rows][their stride] */
    float *qkv, *mixed, *gated; /* [rows][stride of their width] */
    float *fused; /* [rows][hidden_stride] features made of hidden states */
    float *cosine, *sine; /* [rows][half] */
    int64_t *positions; /* [rows] in their sequences */
    int64_t *wanted_rows; /* [wanted] */
    Context *context; /* [nodes] */
    int32_t *scattered; /* [num_scattered] */
    long num_scattered;
    Unit *unit; /* [units] */
    long units, split, partial_count;
    float *partials, *scratch;
    long scratch_stride;
    char *prepared; /* [rows + MAX_CHUNK][prepared bytes]: inputs of a product as its format reads them */
    long prepared_bytes;
    Best *best; /* [threads][wanted] */
    float *drawing; /* [threads][draw_floats], if tokens are drawn */
    float *parts; /* of the logits, see toprows.h; NULL: no top entries are wanted */
    long layer; /* current layer, for the row-wise phases */
    const float *norm_weight;
} Run;

static struct {
    char *base;
    size_t size;
} arena;

typedef struct {
    char *base; /* NULL: only measure */
    size_t used;
} Cursor;

static void *take(Cursor *cursor, size_t bytes) {
    void *at = cursor->base ? cursor->base + cursor->used : NULL;
    cursor->used += (bytes + 63) & ~(size_t)63;
    return at;
}

static float *take_floats(Cursor *cursor, long count) { return take(cursor, (size_t)count * sizeof(float)); }

static void lay_out(Run *run, Cursor *cursor) {
    const Model *m = run->model;
    const long rows = run->batch->rows;
    run->hidden = take_floats(cursor, rows * run->hidden_stride);
    run->normed = take_floats(cursor, rows * run->normed_stride);
    run->qkv = take_floats(cursor, rows * row_stride((m->heads + 2 * m->kv_heads) * m->head_dim));
    run->mixed = take_floats(cursor, rows * row_stride(m->heads * m->head_dim));
    run->gated = take_floats(cursor, rows * row_stride(m->inner));
    run->fused = take_floats(cursor, run->batch->given ? rows * run->hidden_stride : 0);
    run->cosine = take_floats(cursor, rows * run->half);
    run->sine = take_floats(cursor, rows * run->half);
    run->positions = take(cursor, (size_t)rows * sizeof(int64_t));
    run->wanted_rows = take(cursor, (size_t)run->batch->wanted * sizeof(int64_t));
    run->scattered = take(cursor, (size_t)run->num_scattered * sizeof(int32_t));
    run->unit = take(cursor, (size_t)run->units * sizeof(Unit));
    run->scratch = take_floats(cursor, run->threads * run->scratch_stride);
    run->prepared = take(cursor, (size_t)((rows + MAX_CHUNK) * run->prepared_bytes));
    run->best = take(cursor, (size_t)(run->threads * run->batch->wanted) * sizeof(Best));
    run->drawing = take_floats(cursor, run->batch->draws ? run->threads * draw_floats(m->vocab) : 0);
    run->parts = NULL;
    if (run->batch->top_k) run->parts = take_floats(cursor, run->batch->wanted * parts_size(m->vocab));
}

static int arena_grow(size_t size) {
    if (size <= arena.size) return 1;
    free(arena.base);
    arena.size = (size + (size_t)HUGE_PAGE - 1) & ~((size_t)HUGE_PAGE - 1);
    arena.base = aligned_alloc((size_t)HUGE_PAGE, arena.size);
    if (!arena.base) arena.size = 0;
    return arena.base != NULL;
}

#endif
