/* Activations in 8 bits, and their exact products with small integers.
 *
 * A row is cut into blocks of 32 inputs, each with a scale of its own. A product over a block is a sum of integers,
 * which is exact: every instruction set gives the same number. Only then are the scales applied, in float32. */
#ifndef DRAFTWOOD_INTEGERS_H
#define DRAFTWOOD_INTEGERS_H

#include "vec.h"

#define QBLOCK 32 /* inputs of a block */
#define STEPS 8 /* of four inputs, in a block */

/* A sum of integers starts from START. Its bits, read as float32, are then UNIT plus the sum, so that one fused
 * multiply-add makes a product with a scale out of it: UNIT times a scale has few bits and is exact. */
#if FUSED
#define UNIT 12582912.0f /* 1.5 * 2^23: sums below 2^22 are exact beside it */
#define START 0x4b400000
#else
#define START 0
#endif

typedef struct {
    int8_t values[QBLOCK]; /* -127 to 127 */
    float scale;
    float scaled_sum; /* scale times the sum of the values */
    int32_t starts[6]; /* START minus an offset of weights times the sum of values, in the order below */
} InputBlock;

enum { TIMES_8, TIMES_16, TIMES_128, FIRST_TIMES_32, SECOND_TIMES_32 }; /* of all values; of the first and second half */

INLINE vi splat_int(int32_t x) { return x - (vi){0}; }

INLINE int32_t max_lanes_int(vi v) {
#if VW == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#elif VW == 4 && defined(__aarch64__)
    return vmaxvq_s32((int32x4_t)v);
#else
    int32_t best = v[0];
    for (int i = 1; i < VW; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

/* Stores 16 small integers as bytes and returns their sum. */
INLINE int32_t store_bytes(const vi *v, int8_t *to) {
#if defined(__AVX2__) && VW >= 8
#if VW == 16
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v[0]);
#else
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
#endif
    const __m128i eights = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    _mm_storeu_si128((__m128i *)to, bytes);
    return _mm_cvtsi128_si32(eights) + _mm_extract_epi16(eights, 4) - 16 * 128;
#elif VW == 4 && defined(__aarch64__)
    const int16x8_t low = vcombine_s16(vmovn_s32((int32x4_t)v[0]), vmovn_s32((int32x4_t)v[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32((int32x4_t)v[2]), vmovn_s32((int32x4_t)v[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    return vaddlvq_s16(vaddq_s16(low, high));
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        to[i] = (int8_t)v[i / VW][i % VW];
        sum += v[i / VW][i % VW];
    }
    return sum;
#endif
}

/* Rounds 32 inputs to nearest, ties to even. The largest becomes 127 or -127. A value that is not finite makes the
 * scale so, and with it all products: comparing magnitudes as integers puts NaN above all numbers. */
INLINE void quantize_block(const float *from, InputBlock *to) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vi largest = {0};
    for (int i = 0; i < QBLOCK; i += VW) {
        const vi magnitude = (vi)load(from + i) & 0x7fffffff;
        const vi greater = magnitude > largest;
        largest = (magnitude & greater) | (largest & ~greater);
    }
    const int32_t bits = max_lanes_int(largest);
    float top;
    memcpy(&top, &bits, 4);
    const vf inverse = splat(bits ? 127.0f / top : 0.0f);
    vi rounded[QBLOCK / VW];
    for (int i = 0; i < QBLOCK; i += VW) rounded[i / VW] = (vi)(load(from + i) * inverse + magic) - (vi)magic;
    const int32_t first = store_bytes(rounded, to->values);
    const int32_t second = store_bytes(rounded + QBLOCK / VW / 2, to->values + QBLOCK / 2), sum = first + second;
    to->scale = top / 127.0f;
    to->scaled_sum = to->scale * (float)sum;
    to->starts[TIMES_8] = START - 8 * sum;
    to->starts[TIMES_16] = START - 16 * sum;
    to->starts[TIMES_128] = START - 128 * sum;
    to->starts[FIRST_TIMES_32] = START - 32 * first;
    to->starts[SECOND_TIMES_32] = START - 32 * second;
}

/* A sum of integers times a scale, rounded once. `lift` is lift_of(scale). */
#if FUSED
INLINE vf lift_of(vf scale) { return splat(-UNIT) * scale; }
INLINE vf scale_sum(vi sum, vf scale, vf lift) { return fma_vec(lift, (vf)sum, scale); }
#else
INLINE vf lift_of(vf scale) { return scale; }
INLINE vf scale_sum(vi sum, vf scale, vf lift) {
    (void)lift;
    return __builtin_convertvector(sum, vf) * scale;
}
#endif

/* add_products(rows, sum, w, first, steps, x, largest): adds to the lanes of sum[r][s] the products of the weights in the
 * bytes of w[s][first ...], four per lane and step, with as many inputs of row x[r]. `largest` is a bound on the weights.
 * Below 128 they are not negative. Otherwise they are signed bytes, or, with UNSIGNED_WEIGHTS, signed bytes plus 128.
 *
 * SUBS vectors of columns share a load of inputs, and up to MAX_TOGETHER rows a register of weights. Together they are
 * enough independent sums to hide the latency of a product, and few enough to stay in registers. */
#if (VW == 16 && defined(__AVX512VNNI__)) || \
    (VW == 8 && (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))))
#define UNSIGNED_WEIGHTS 1
#else
#define UNSIGNED_WEIGHTS 0
#endif
#if VW == 16
#define SUBS 2
#define MAX_TOGETHER 4
#elif VW == 8
#define SUBS 1
#define MAX_TOGETHER 4
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define SUBS 2
#define MAX_TOGETHER 4
#elif defined(__ARM_FEATURE_DOTPROD)
#define SUBS 1
#define MAX_TOGETHER 8
#else
#define SUBS 2
#define MAX_TOGETHER 2
#endif
#if VW == 4 && defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define TOTALS_STAY 1 /* in registers, from the first block to the last */
#else
#define TOTALS_STAY 0
#endif

INLINE vi four_inputs(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return splat_int(four);
}

#if UNSIGNED_WEIGHTS
#if VW == 16
#define DOT(sum, w, x) ((vi)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x)))
#elif defined(__AVXVNNI__)
#define DOT(sum, w, x) ((vi)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x)))
#else
#define DOT(sum, w, x) ((vi)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x)))
#endif
INLINE void add_products(const int rows, vi sum[][SUBS], const vu w[][STEPS], int first, int steps,
                         const int8_t *const *x, int largest) {
    (void)largest;
    UNROLL for (int j = first; j < first + steps; j++)
        UNROLL for (int r = 0; r < rows; r++) {
            const vi inputs = four_inputs(x[r] + 4 * j);
            UNROLL for (int s = 0; s < SUBS; s++) sum[r][s] = DOT(sum[r][s], w[s][j], inputs);
        }
}
#elif (VW == 16 && defined(__AVX512BW__)) || (VW == 8 && defined(__AVX2__))
#if VW == 16
typedef __m512i Bytes;
#define PAIRS(w, x) _mm512_maddubs_epi16(w, x)
#define ADD_16(a, b) _mm512_add_epi16(a, b)
#define WIDEN(a) _mm512_madd_epi16(a, _mm512_set1_epi16(1))
#define MAGNITUDE(w) _mm512_abs_epi8(w)
#define WITH_SIGN(x, w) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x)
#else
typedef __m256i Bytes;
#define PAIRS(w, x) _mm256_maddubs_epi16(w, x)
#define ADD_16(a, b) _mm256_add_epi16(a, b)
#define WIDEN(a) _mm256_madd_epi16(a, _mm256_set1_epi16(1))
#define MAGNITUDE(w) _mm256_abs_epi8(w)
#define WITH_SIGN(x, w) _mm256_sign_epi8(x, w)
#endif
/* A sum of two products fits in 16 bits with a sign: 2 * 128 * 127 < 32768. Smaller weights leave room for more. */
INLINE void add_products(const int rows, vi sum[][SUBS], const vu w[][STEPS], int first, int steps,
                         const int8_t *const *x, int largest) {
    const int span = largest <= 15 ? 8 : largest <= 31 ? 4 : largest <= 63 ? 2 : 1;
    UNROLL for (int j = first; j < first + steps; j += span)
        UNROLL for (int r = 0; r < rows; r++) {
            Bytes partial[SUBS];
            UNROLL for (int i = j; i < j + span && i < first + steps; i++) {
                const Bytes inputs = (Bytes)four_inputs(x[r] + 4 * i);
                UNROLL for (int s = 0; s < SUBS; s++) {
                    const Bytes weights = (Bytes)w[s][i];
                    const Bytes pairs = largest < 128 ? PAIRS(weights, inputs)
                                                      : PAIRS(MAGNITUDE(weights), WITH_SIGN(inputs, weights));
                    partial[s] = i == j ? pairs : ADD_16(partial[s], pairs);
                }
            }
            UNROLL for (int s = 0; s < SUBS; s++) sum[r][s] += (vi)WIDEN(partial[s]);
        }
}
#elif VW == 4 && defined(__ARM_FEATURE_DOTPROD)
/* In place, as FMA_INTO. */
#define DOT_INTO(sum, w, x, LANE) __asm__("sdot %0.4s, %1.16b, %2.4b[" #LANE "]" : "+w"(sum) : "w"(w), "w"(x))
#define LOAD_ANEW(to, from) __asm__ volatile("ldr %q0, %1" : "=w"(to) : "m"(from)) /* not copied from a register */
INLINE void add_row_products(vi sum[SUBS], const vu w[][STEPS], int first, int steps, const int8_t *x) {
    UNROLL for (int j = first; j < first + steps; j += 4) {
        const int8x16_t inputs = vld1q_s8(x + 4 * j);
        UNROLL for (int s = 0; s < SUBS; s++) DOT_INTO(sum[s], w[s][j], inputs, 0);
        UNROLL for (int s = 0; s < SUBS; s++) DOT_INTO(sum[s], w[s][j + 1], inputs, 1);
        UNROLL for (int s = 0; s < SUBS; s++) DOT_INTO(sum[s], w[s][j + 2], inputs, 2);
        UNROLL for (int s = 0; s < SUBS; s++) DOT_INTO(sum[s], w[s][j + 3], inputs, 3);
    }
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
/* One instruction multiplies eight inputs of two rows with those of two columns: two steps of a vector of weights are
 * interleaved into columns 0 and 1, and 2 and 3. */
INLINE void add_pair_products(const int pairs, vi sum[][SUBS], const vu w[][STEPS], int first, int steps,
                              const int8_t *const *x) {
    int32x4_t square[MAX_TOGETHER / 2][SUBS][2]; /* two rows, two columns */
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int s = 0; s < SUBS; s++) square[i][s][0] = square[i][s][1] = vdupq_n_s32(0);
    UNROLL for (int j = first; j < first + steps; j += 2)
        UNROLL for (int s = 0; s < SUBS; s++) {
            const int32x4_t one = (int32x4_t)w[s][j], two = (int32x4_t)w[s][j + 1];
            const int8x16_t left = (int8x16_t)vzip1q_s32(one, two), right = (int8x16_t)vzip2q_s32(one, two);
            UNROLL for (int i = 0; i < pairs; i++) {
                const int8x16_t inputs = vcombine_s8(vld1_s8(x[2 * i] + 4 * j), vld1_s8(x[2 * i + 1] + 4 * j));
                square[i][s][0] = vmmlaq_s32(square[i][s][0], inputs, left);
                square[i][s][1] = vmmlaq_s32(square[i][s][1], inputs, right);
            }
        }
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int s = 0; s < SUBS; s++) {
            const int64x2_t left = (int64x2_t)square[i][s][0], right = (int64x2_t)square[i][s][1];
            sum[2 * i][s] += (vi)vzip1q_s64(left, right);
            sum[2 * i + 1][s] += (vi)vzip2q_s64(left, right);
        }
}
#else
INLINE void add_pair_products(const int pairs, vi sum[][SUBS], const vu w[][STEPS], int first, int steps,
                              const int8_t *const *x) {
    UNROLL for (int r = 0; r < 2 * pairs; r++) add_row_products(sum[r], w, first, steps, x[r]);
}
#endif
INLINE void add_products(const int rows, vi sum[][SUBS], const vu w[][STEPS], int first, int steps,
                         const int8_t *const *x, int largest) {
    (void)largest;
    add_pair_products(rows / 2, sum, w, first, steps, x);
    if (rows % 2) add_row_products(sum[rows - 1], w, first, steps, x[rows - 1]);
}
#else
INLINE void add_products(const int rows, vi sum[][SUBS], const vu w[][STEPS], int first, int steps,
                         const int8_t *const *x, int largest) {
    (void)largest;
    for (int r = 0; r < rows; r++)
        for (int k = 4 * first; k < 4 * (first + steps); k++)
            for (int s = 0; s < SUBS; s++)
                sum[r][s] += ((vi)(w[s][k / 4] << (24 - k % 4 * 8)) >> 24) * splat_int(x[r][k]);
}
#endif

/* The upper four bits of every byte. */
INLINE vu high_halves(vu v) {
#if VW == 4 && defined(__aarch64__)
    return (vu)vshrq_n_u8((uint8x16_t)v, 4);
#else
    return v >> 4 & 0x0f0f0f0f;
#endif
}

/* table[code] for the codes 0 to 15 in the bytes of v. */
INLINE vu look_up(const int8_t *table, vu v) {
#if VW == 16 && defined(__AVX512BW__)
    const __m128i entries = _mm_loadu_si128((const __m128i *)table);
    return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)v);
#elif VW == 8 && defined(__AVX2__)
    const __m128i entries = _mm_loadu_si128((const __m128i *)table);
    return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)v);
#elif VW == 4 && defined(__aarch64__)
    return (vu)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)v);
#else
    uint8_t bytes[4 * VW];
    memcpy(bytes, &v, sizeof(bytes));
    for (int i = 0; i < 4 * VW; i++) bytes[i] = (uint8_t)table[bytes[i]];
    memcpy(&v, bytes, sizeof(bytes));
    return v;
#endif
}

/* VW numbers of 8 bits. GCC 12 would convert them one by one. */
INLINE vi load_unsigned_bytes(const uint8_t *p) {
#if VW == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VW == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif VW == 4 && defined(__aarch64__)
    uint32_t four;
    memcpy(&four, p, 4);
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
    vi v;
    for (int i = 0; i < VW; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vi load_signed_bytes(const int8_t *p) {
#if VW == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VW == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif VW == 4 && defined(__aarch64__)
    uint32_t four;
    memcpy(&four, p, 4);
    return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
#else
    vi v;
    for (int i = 0; i < VW; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vf to_floats(vi v) { return __builtin_convertvector(v, vf); }

/* 2^(e - 128) for VW bytes e. */
INLINE vf load_exponents(const uint8_t *p) {
    const vi e = load_unsigned_bytes(p), normal = e >= 2;
    return (vf)((normal & (e - 1) << 23) | (~normal & 0x00200000 << (e & 1)));
}

#endif
