/* Micro-kernels: a few rows of float32 inputs times panels of float32, bfloat16 or float16 weights.
 *
 * Every output element is one chain of fused multiply-adds over the inputs in ascending order, for any number of rows
 * and in every micro-kernel. A row's result therefore does not depend on the batch it is computed in. */
#ifndef DRAFTWOOD_MICRO_H
#define DRAFTWOOD_MICRO_H

#include "vec.h"

/* Source of the weights. SPILL: the panel expanded to float32 is stored for the next rows. */
enum { FROM_F32, FROM_BF16, FROM_BF16_SPILL, FROM_F16, FROM_F16_SPILL };

/* Four inputs of one row, and acc += weights * input[LANE]. */
#if VW == 4 && defined(__aarch64__)
typedef float32x4_t Inputs;
#define LOAD_INPUTS(p) vld1q_f32(p)
#define FMA_INPUT(acc, w, x, LANE) FMA_LANE_INTO(acc, w, x, LANE)
#else
typedef const float *Inputs;
#define LOAD_INPUTS(p) (p)
#define FMA_INPUT(acc, w, x, LANE) FMA_INTO(acc, w, splat((x)[LANE]))
#endif

#define LOAD_WEIGHTS(low, high, K)                                                             \
    UNROLL for (int p = 0; p < panels; p++) {                                                  \
        const char *at = weights + (K) * row_bytes + p * panel_bytes;                          \
        if (source == FROM_F32) {                                                              \
            low[p] = load((const float *)at);                                                  \
            high[p] = load((const float *)at + VW);                                            \
        } else if (source == FROM_F16 || source == FROM_F16_SPILL) {                           \
            low[p] = load_halves((const uint16_t *)at);                                        \
            high[p] = load_halves((const uint16_t *)at + VW);                                  \
        } else {                                                                               \
            load_bf16_pair((const bf16 *)at, &low[p], &high[p]);                               \
        }                                                                                      \
    }

/* One k: multiplies `low` and `high`. The next k's weights are loaded first, which hides the latency of the load. */
#define STEP(LANE, low, high, next_low, next_high)                                             \
    LOAD_WEIGHTS(next_low, next_high, k + LANE + 1)                                            \
    UNROLL for (int p = 0; p < panels; p++) {                                                  \
        if (source == FROM_BF16_SPILL || source == FROM_F16_SPILL) {                           \
            store(spill + (k + LANE) * PANEL, low[p]);                                         \
            store(spill + (k + LANE) * PANEL + VW, high[p]);                                   \
        }                                                                                      \
        UNROLL for (int r = 0; r < rows; r++) {                                                \
            FMA_INPUT(acc[r][p][0], low[p], x[r], LANE);                                       \
            FMA_INPUT(acc[r][p][1], high[p], x[r], LANE);                                      \
        }                                                                                      \
    }

/* out[rows][panels * PANEL] = input[rows][inputs] times the panels; inputs is a multiple of 4. */
INLINE void micro(const int rows, const int panels, const int source, const float *input, long input_stride,
                  const char *weights, long row_bytes, long panel_bytes, long inputs, float *out, long out_stride,
                  const char *ahead, float *spill) {
    vf acc[MAX_ROWS][GROUP][2]; /* fixed bounds: an array of variable size would not stay in registers */
    vf low[GROUP], high[GROUP], next_low[GROUP], next_high[GROUP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = splat(0.0f);
    LOAD_WEIGHTS(low, high, 0)
    for (long k = 0; k < inputs; k += 4) {
        Inputs x[MAX_ROWS];
        UNROLL for (int r = 0; r < rows; r++) x[r] = LOAD_INPUTS(input + r * input_stride + k);
        if (source != FROM_F32 || ahead) /* each pass over a group prefetches its share of the next lines */
            UNROLL for (int i = 0; i < 4 * panels / GROUP; i++) {
                __builtin_prefetch(ahead + (k + i) * row_bytes, 0, panels == GROUP ? 3 : 2);
                if (source == FROM_F32) __builtin_prefetch(ahead + (k + i) * row_bytes + 64, 0, 2);
            }
        STEP(0, low, high, next_low, next_high)
        STEP(1, next_low, next_high, low, high)
        STEP(2, low, high, next_low, next_high)
        STEP(3, next_low, next_high, low, high)
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int p = 0; p < panels; p++) {
            store(out + r * out_stride + p * PANEL, acc[r][p][0]);
            store(out + r * out_stride + p * PANEL + VW, acc[r][p][1]);
        }
    }
}

/* Few rows are multiplied with several panels at once: enough independent chains to hide the latency of an FMA. */
#if MAX_ROWS == 8
#define WIDE_PANELS(rows) ((rows) == 1 ? GROUP : (rows) <= 4 ? 2 : 1)
#else
#define WIDE_PANELS(rows) ((rows) <= 3 ? 2 : 1)
#endif

typedef void Micro(const float *input, long input_stride, const char *weights, long row_bytes, long panel_bytes,
                   long inputs, float *out, long out_stride, const char *ahead, float *spill);

#define MICRO(name, rows, panels, source)                                                                              \
    static void name(const float *input, long input_stride, const char *weights, long row_bytes, long panel_bytes,     \
                     long inputs, float *out, long out_stride, const char *ahead, float *spill) {                      \
        micro(rows, panels, source, input, input_stride, weights, row_bytes, panel_bytes, inputs, out, out_stride,     \
              ahead, spill);                                                                                           \
    }
#define MICROS(rows)                                          \
    MICRO(f32_wide_##rows, rows, WIDE_PANELS(rows), FROM_F32)  \
    MICRO(f32_one_##rows, rows, 1, FROM_F32)                   \
    MICRO(bf16_wide_##rows, rows, WIDE_PANELS(rows), FROM_BF16) \
    MICRO(bf16_spill_##rows, rows, 1, FROM_BF16_SPILL)         \
    MICRO(f16_wide_##rows, rows, WIDE_PANELS(rows), FROM_F16)  \
    MICRO(f16_spill_##rows, rows, 1, FROM_F16_SPILL)
MICROS(1) MICROS(2) MICROS(3) MICROS(4) MICROS(5) MICROS(6)
#if MAX_ROWS == 8
MICROS(7) MICROS(8)
#define FOR_ROWS(kind) {kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6, kind##_7, kind##_8}
#else
#define FOR_ROWS(kind) {kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6}
#endif
static Micro *const f32_wide[MAX_ROWS] = FOR_ROWS(f32_wide);
static Micro *const f32_one[MAX_ROWS] = FOR_ROWS(f32_one);
static Micro *const bf16_wide[MAX_ROWS] = FOR_ROWS(bf16_wide);
static Micro *const bf16_spill[MAX_ROWS] = FOR_ROWS(bf16_spill);
static Micro *const f16_wide[MAX_ROWS] = FOR_ROWS(f16_wide);
static Micro *const f16_spill[MAX_ROWS] = FOR_ROWS(f16_spill);

/* Size of the first block if `rows` rows are split into blocks of nearly equal size. */
INLINE long next_block(long rows) {
    long blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return (rows + blocks - 1) / blocks;
}

/* out[rows][panels * PANEL] from float32 weights, for any number of rows. `next`: weights to prefetch, or NULL. */
static void multiply_f32(const float *input, long input_stride, long rows, const char *weights, long row_bytes,
                         long panels, long inputs, float *out, long out_stride, const char *next) {
    const long panel_bytes = PANEL * sizeof(float);
    for (long row = 0, block; row < rows; row += block) {
        block = next_block(rows - row);
        const float *x = input + row * input_stride;
        const long wide = WIDE_PANELS(block);
        const int fetch = next && row == 0 && wide < GROUP; /* a single pass reads ahead by itself */
        for (long p = 0; p < panels;) {
            const int fits = p + wide <= panels;
            (fits ? f32_wide : f32_one)[block - 1](x, input_stride, weights + p * panel_bytes, row_bytes, panel_bytes,
                                                   inputs, out + row * out_stride + p * PANEL, out_stride,
                                                   fetch ? next + p * (4 / GROUP) * row_bytes : NULL, NULL);
            p += fits ? wide : 1;
        }
    }
}

#endif
