/* The records that Python fills in (records.py mirrors them field by field), and sizes derived from them. */
#ifndef DRAFTWOOD_MODEL_H
#define DRAFTWOOD_MODEL_H

#include "amx.h"
#include "vec.h"

enum { FLOAT32 = 0, BFLOAT16 = 1 }; /* element types of the KV cache */

typedef struct {
    const void *data; /* packed as its format requires; embeddings: rows as loaded */
    int64_t outputs; /* if joined: of the gate matrix alone */
    int64_t inputs;
    int64_t joined; /* gate and up in one matrix: panels alternate between the two */
    int64_t format; /* index into FORMATS of formats.h */
} Matrix;

typedef struct {
    const float *input_norm; /* all vectors are float32, padded with zeros to a multiple of 64 */
    const float *post_norm;
    const float *qkv_bias; /* or NULL; so are the next three */
    const float *o_bias;
    const float *q_norm;
    const float *k_norm;
    Matrix qkv[3]; /* one matrix, or one each if their formats differ; those not used have no outputs */
    Matrix o;
    Matrix gate_up[2]; /* one joined matrix, or one each */
    Matrix down;
} Layer;

typedef struct {
    int64_t hidden, inner, layers, heads, kv_heads, head_dim, vocab;
    int64_t tokens; /* that have an embedding */
    int64_t window; /* 0: none */
    int64_t cache_type;
    int64_t slots; /* of the cache */
    double norm_eps;
    const Layer *layer; /* [layers] */
    const float *norm;
    const float *inverse_frequencies; /* [head_dim / 2] */
    Matrix embed; /* data is NULL if embeddings are tied: rows are then read from the head */
    int64_t embed_packed; /* else its rows are as loaded */
    Matrix head;
    void *keys, *values; /* [layers, kv_heads, slots, head_dim] */
    const float *feature_norm; /* draft heads, or NULL: the first layer reads normed tokens beside normed features */
    int64_t norm_before_residual; /* with features: the residual of the first layer is the normed feature */
    Matrix fuse; /* with features: from hidden states of the target to a feature; no outputs: features are given */
    const float *fuse_bias; /* or NULL */
} Model;

typedef struct {
    int64_t start, base, prefix; /* as in PackedSegment */
    int64_t first; /* offset of its tree in `parents` */
    int64_t after, size, wanted; /* nodes: written by earlier passes, written by this pass, with logits */
} Segment;

/* A token to draw: the fields of DRAW_FIELDS in native/decoder.py. */
typedef struct {
    double row; /* of the logits */
    double temperature, top_k, top_p, min_p;
    double number; /* random, in [0, 1) */
} Draw;

typedef struct {
    int64_t rows, nodes, segments, taps, wanted; /* nodes: of all trees; wanted: rows with logits */
    int64_t top_k; /* top entries to find in each row of logits; 0: none */
    const int64_t *token_ids; /* [rows] */
    const int64_t *parents; /* [nodes] */
    const Segment *segment; /* [segments] */
    const int64_t *tap_layers; /* [taps] */
    float *logits; /* [wanted, vocab] */
    int64_t *greedy_ids; /* [wanted] */
    void *top; /* as in top_results of toprows.h, if top_k is not 0 */
    float *tapped; /* [rows, taps * hidden] */
    const float *features; /* [rows, hidden], if the model reads features */
    const float *given; /* [rows, inputs of fuse] hidden states to make the features of, instead; or NULL */
    int64_t draws;
    const Draw *draw; /* [draws] for all rows of some segments, ascending */
    int32_t *drawn; /* [wanted] tokens, for nodes on the accepted path; UNUSABLE of draw.h: no logit is finite */
} Batch;

INLINE long cache_item_bytes(const Model *m) { return m->cache_type == BFLOAT16 ? 2 : 4; }

/* Row length of an activation buffer. The extra step keeps equal columns of neighbouring rows off one cache set. */
INLINE long row_stride(long columns) { return round_up(columns, ALIGN_FLOATS) + ALIGN_FLOATS; }

#endif
