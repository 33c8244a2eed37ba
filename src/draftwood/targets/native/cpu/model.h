/* The records Python fills in (decoder.py mirrors them field by field), and what a forward works with. */
#ifndef DRAFTWOOD_MODEL_H
#define DRAFTWOOD_MODEL_H

#include "amx.h"
#include "vec.h"

enum { FLOAT32 = 0, BFLOAT16 = 1 };

typedef struct {
    const void *data; /* packed: [groups][padded inputs][GROUP panels][PANEL], or in tiles */
    int64_t outputs; /* of a joined gate and up matrix: of one of them */
    int64_t inputs;
    int64_t joined; /* panels alternate between gate and up */
} Matrix;

typedef struct {
    const float *input_norm; /* all vectors are float32, padded with zeros to a multiple of 64 */
    const float *post_norm;
    const float *qkv_bias; /* or NULL, as the following */
    const float *o_bias;
    const float *q_norm;
    const float *k_norm;
    Matrix qkv, o, gate_up, down;
} Layer;

typedef struct {
    int64_t hidden, inner, layers, heads, kv_heads, head_dim, vocab;
    int64_t window; /* 0: none */
    int64_t weight_type, cache_type;
    int64_t slots; /* of the cache */
    double norm_eps;
    const Layer *layer; /* [layers] */
    const float *norm;
    const float *inverse_frequencies; /* [head_dim / 2] */
    const void *embed; /* [vocab, hidden] as loaded, or NULL where the head serves as embedding */
    Matrix head;
    void *keys, *values; /* [layers, kv_heads, slots, head_dim] */
} Model;

typedef struct {
    int64_t start, base, prefix; /* as PackedSegment */
    int64_t first; /* where its tree begins in the parents of all trees */
    int64_t after, size, wanted; /* nodes of earlier passes, its own, those whose logits are wanted */
} Segment;

typedef struct {
    int64_t rows, nodes, segments, taps, wanted; /* nodes: of all trees; wanted: rows that go through the head */
    const int64_t *token_ids, *positions; /* [rows] */
    const int64_t *parents; /* [nodes] */
    const Segment *segment; /* [segments] */
    const int64_t *tap_layers; /* [taps] */
    float *logits; /* [wanted, vocab] */
    int64_t *greedy_ids; /* [wanted] */
    float *tapped; /* [rows, taps * hidden] */
} Batch;

/* Whether matrices of this type lie in tiles: decided once per machine. */
INLINE int in_tiles(long type) { return type == BFLOAT16 && amx_granted(); }

INLINE long padded_inputs(const Matrix *m, long type) { return round_up(m->inputs, in_tiles(type) ? TILE_INPUTS : 4); }

INLINE long num_groups(const Matrix *m) {
    long columns = m->joined ? GROUP_COLUMNS / 2 : GROUP_COLUMNS;
    return (m->outputs + columns - 1) / columns;
}

INLINE long type_size(long type) { return type == BFLOAT16 ? 2 : 4; }

/* Row length of an activation buffer. The odd multiple keeps equal columns of neighbouring rows off one cache set. */
INLINE long row_stride(long columns) { return round_up(columns, ALIGN_FLOATS) + ALIGN_FLOATS; }

#endif
