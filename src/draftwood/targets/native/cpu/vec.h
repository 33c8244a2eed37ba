/* float32 vectors in the width of the machine, written with the vector extensions of GCC and clang.
 *
 * Batch invariance depends on this file: the compiler must not contract or reorder (-ffp-contract=off, no fast-math),
 * so that every multiply-add below rounds the same way wherever it is inlined. */
#ifndef DRAFTWOOD_VEC_H
#define DRAFTWOOD_VEC_H

#include <stdint.h>
#include <string.h>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(VW) /* set on the command line, with GROUP and MAX_ROWS, to test another width */
#elif defined(__AVX512F__)
#define VW 16 /* lanes */
#define GROUP 2 /* panels in a group, the smallest unit of a product */
#define MAX_ROWS 8 /* rows of one block: as many as fit in registers */
#elif defined(__AVX__)
#define VW 8
#define GROUP 2
#define MAX_ROWS 6
#else
#define VW 4
#define GROUP 4
#define MAX_ROWS 8
#endif

#define PANEL (2 * VW) /* output columns whose weights are interleaved */
#define GROUP_COLUMNS (GROUP * PANEL)
#define ALIGN_FLOATS 16 /* row lengths are padded to a multiple of this; every VW divides it */

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(4 * VW)));
typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef float vf_any __attribute__((vector_size(4 * VW), aligned(4), may_alias)); /* at any address */
typedef uint32_t vu_any __attribute__((vector_size(4 * VW), aligned(2), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * VW), aligned(4), may_alias));

typedef uint16_t bf16;

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }

#if (VW == 4 && defined(__aarch64__)) || (VW == 16 && defined(__AVX512F__)) || (VW == 8 && defined(__FMA__))
#define FUSED 1 /* fma_vec rounds once */
#else
#define FUSED 0
#endif

INLINE vf fma_vec(vf sum, vf a, vf b) {
#if VW == 4 && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#elif VW == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif VW == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* sum += a * b in place. With the intrinsic, GCC 12 on ARM copies sums between registers; with this it does not. */
#if VW == 4 && defined(__aarch64__)
#define FMA_INTO(sum, a, b) __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b))
#define FMA_LANE_INTO(sum, a, b, LANE) __asm__("fmla %0.4s, %1.4s, %2.s[" #LANE "]" : "+w"(sum) : "w"(a), "w"(b))
#else
#define FMA_INTO(sum, a, b) ((sum) = fma_vec((sum), (a), (b)))
#endif

INLINE vf select_vec(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* v, but 0 where a equals b. */
INLINE vf zero_where_equal(vf a, vf b, vf v) {
#if VW == 16 && defined(__AVX512F__)
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NEQ_UQ), (__m512)v);
#else
    return select_vec(a == b, (vf){0}, v);
#endif
}

INLINE vf max_vec(vf a, vf b) {
#if VW == 4 && defined(__aarch64__)
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#elif VW == 16 && defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VW == 8 && defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_vec(a > b, a, b);
#endif
}

INLINE vf min_vec(vf a, vf b) {
#if VW == 4 && defined(__aarch64__)
    return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b);
#elif VW == 16 && defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif VW == 8 && defined(__AVX__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_vec(a < b, a, b);
#endif
}

#if defined(__AVX__)
INLINE float sum_lanes_128(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
INLINE float sum_lanes_256(__m256 v) {
    return sum_lanes_128(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
}
#endif

INLINE float sum_lanes(vf v) {
#if VW == 4 && defined(__aarch64__)
    return vaddvq_f32((float32x4_t)v);
#elif VW == 16 && defined(__AVX512F__)
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1));
    return sum_lanes_256(_mm256_add_ps(_mm512_castps512_ps256((__m512)v), high));
#elif VW == 8 && defined(__AVX__)
    return sum_lanes_256((__m256)v);
#else
    float lanes[VW];
    store(lanes, v);
    for (int width = VW / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

INLINE float max_lanes(vf v) {
#if VW == 4 && defined(__aarch64__)
    return vmaxvq_f32((float32x4_t)v);
#elif VW == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lanes[VW], best;
    store(lanes, v);
    best = lanes[0];
    for (int i = 1; i < VW; i++) best = lanes[i] > best ? lanes[i] : best;
    return best;
#endif
}

/* e^x to about 2 ulp for x in [-87, 88], clamped outside; exactly 1 at 0. */
INLINE vf exp_vec(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = min_vec(max_vec(x, splat(-87.0f)), splat(88.0f));
    vf shifted = fma_vec(magic, x, splat(1.44269504f));
    vf n = shifted - magic;
    vf r = fma_vec(x, n, splat(-0.693359375f));
    r = fma_vec(r, n, splat(2.12194440e-4f));
    vf p = splat(1.9875691500e-4f);
    p = fma_vec(splat(1.3981999507e-3f), p, r);
    p = fma_vec(splat(8.3334519073e-3f), p, r);
    p = fma_vec(splat(4.1665795894e-2f), p, r);
    p = fma_vec(splat(1.6666665459e-1f), p, r);
    p = fma_vec(splat(5.0000001201e-1f), p, r);
    p = fma_vec(r, p, r * r) + splat(1.0f);
    vi exponent = ((vi)shifted - (vi)magic) << 23;
    return (vf)((vi)p + exponent);
}

INLINE float exp_one(float x) { return exp_vec(splat(x))[0]; }

INLINE float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Loads 2 * VW bfloat16 numbers as two vectors: those at even and those at odd indices. */
INLINE void load_bf16_pair(const bf16 *p, vf *even, vf *odd) {
    vu both = *(const vu_any *)p;
#if VW == 4 && defined(__aarch64__)
    /* Same as the shift below, but can run on either of the two vector units. */
    *even = (vf)vtrn1q_u16(vdupq_n_u16(0), (uint16x8_t)both);
#else
    *even = (vf)(both << 16);
#endif
    *odd = (vf)(both & 0xffff0000u);
}

/* VW numbers of 16 bits (float16), as float32. */
INLINE vf load_halves(const uint16_t *p) {
#if VW == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VW == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif VW == 4 && defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else /* finite numbers only: the exponent is moved, which is exact for small ones too */
    vu bits;
    for (int i = 0; i < VW; i++) bits[i] = p[i];
    const vf magnitude = (vf)((bits & 0x7fff) << 13) * splat(0x1p112f);
    return (vf)((vu)magnitude | (bits & 0x8000) << 16);
#endif
}

#if VW == 16 && defined(__AVX512F__)
/* 16 rows of 16 words: swaps the off-diagonal quarters of squares of 16, 8, 4 and 2. */
INLINE void transpose_16(vi v[16]) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    UNROLL for (int half = 8; half; half /= 2) {
        const vi right = (lane & half) != 0; /* -1 or 0 */
        const __m512i first = (__m512i)((right & (16 + lane - half)) | (~right & lane));
        const __m512i second = (__m512i)((right & (16 + lane)) | (~right & (lane + half)));
        UNROLL for (int i = 0; i < 16; i++) {
            if (i & half) continue;
            const __m512i low = (__m512i)v[i], high = (__m512i)v[i | half];
            v[i] = (vi)_mm512_permutex2var_epi32(low, first, high);
            v[i | half] = (vi)_mm512_permutex2var_epi32(low, second, high);
        }
    }
}
#endif

INLINE long round_up(long n, long step) { return (n + step - 1) / step * step; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

#endif
