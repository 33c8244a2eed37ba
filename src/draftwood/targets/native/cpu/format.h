/* What a weight format provides. formats.h lists the formats.
 *
 * Output columns are packed in groups of GROUP_COLUMNS, so that a product reads its weights front to back. */
#ifndef DRAFTWOOD_FORMAT_H
#define DRAFTWOOD_FORMAT_H

#include "model.h"

#define MAX_CHUNK 64 /* rows of one item at most: their inputs stay in the second-level cache */

/* One group of weights times some rows. */
typedef struct {
    const char *input; /* [rows], prepared if the format prepares its inputs, else float32 */
    long input_bytes; /* from one row to the next */
    long rows;
    const char *weights;
    long inputs; /* of the matrix, padded to the format's step */
    float *out; /* [rows][GROUP_COLUMNS]; has room for MAX_CHUNK rows */
    const char *next; /* the group this thread most likely multiplies next: to prefetch */
    float *scratch; /* scratch_floats(inputs) of this thread */
} GroupProduct;

typedef struct Format {
    long input_step; /* inputs are padded with zeros to a multiple of this */
    long streamed_rows; /* up to this many rows a product is bound by memory, which is read fastest in long runs */
    long (*group_bytes)(long inputs); /* of a packed group; inputs are padded, here and below */
    long (*scratch_floats)(long inputs); /* or NULL: none */
    /* Packs one group of m from rows [outputs (gates, then ups, if joined)][inputs] as loaded. Returns 0 if a scale is
     * not finite. */
    int (*pack)(const Matrix *m, const void *from, long group);
    void (*unpack_row)(const Matrix *m, long row, float *to); /* one row of a packed matrix, as float32 */
    void (*load_row)(const Matrix *m, long row, float *to); /* one row of a matrix as loaded, as float32; or NULL */
    long (*prepared_bytes)(long inputs); /* of an input row as `multiply` reads it, or NULL: it reads float32 */
    void (*prepare)(const float *row, long inputs, void *to); /* NULL if prepared_bytes is; inputs are not padded */
    void (*begin)(void); /* called on a thread before it multiplies, or NULL */
    void (*multiply)(const GroupProduct *p);
    const struct Format *tiled; /* used instead where the CPU has AMX, or NULL */
} Format;

INLINE long padded_inputs(const Format *format, const Matrix *m) { return round_up(m->inputs, format->input_step); }

INLINE long num_groups(const Matrix *m) {
    const long columns = m->joined ? GROUP_COLUMNS / 2 : GROUP_COLUMNS;
    return (m->outputs + columns - 1) / columns;
}

/* The row of the matrix whose weights are in `column` of a group; -1 for padding. */
INLINE long source_row(const Matrix *m, long group, long column) {
    const long panel = column / PANEL;
    if (!m->joined) {
        const long row = group * GROUP_COLUMNS + column;
        return row < m->outputs ? row : -1;
    }
    const long row = (group * (GROUP / 2) + panel / 2) * PANEL + column % PANEL;
    return row < m->outputs ? row + (panel % 2) * m->outputs : -1;
}

#endif
