/* Matrix products with AMX tiles, the matrix unit of recent x86 servers: for bfloat16 weights and caches.
 *
 * One instruction multiplies 16 rows of 32 inputs with 32 inputs of 16 columns. The sums of a row run over its own
 * inputs in a fixed order, whatever the other rows contain, so products stay batch-invariant. Inputs are rounded to
 * bfloat16; sums are float32.
 *
 * A right-hand side is 64 columns wide: [inputs / 32][4 tiles][16 pairs of inputs][16 columns][2]. */
#ifndef DRAFTWOOD_AMX_H
#define DRAFTWOOD_AMX_H

#include "vec.h"

#define TILE_ROWS 16
#define TILE_INPUTS 32
#define TILE_COLUMNS 16
#define TILE_NUMBERS 512 /* of a right-hand tile */
#define WIDE_COLUMNS 64 /* of a pass: four tiles */

/* Index of input k, column c in a right-hand side. */
INLINE long place_in_tiles(long k, long c) {
    const long tile = k / TILE_INPUTS * (WIDE_COLUMNS / TILE_COLUMNS) + c / TILE_COLUMNS;
    return tile * TILE_NUMBERS + k % TILE_INPUTS / 2 * (2 * TILE_COLUMNS) + c % TILE_COLUMNS * 2 + k % 2;
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(GROUP_COLUMNS == WIDE_COLUMNS, "a group of weights is as wide as a pass");

/* A process must request the tile registers from Linux once; some sandboxes refuse. */
static int amx_granted(void) {
    static int granted = -1;
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    if (granted < 0) granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileShapes;

/* Compilers do not know that tile loads read memory. */
#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")

/* Sets all eight tiles of the calling thread to full size; cheap enough for the start of every item. */
INLINE void amx_configure(void) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = TILE_ROWS;
        shapes.bytes_per_row[i] = 2 * TILE_INPUTS;
    }
    MEMORY_IS_READ;
    _tile_loadconfig(&shapes);
}

/* Prefetches `count` tiles of the next right-hand side, so that all of it is in the cache when it is used. */
INLINE void amx_prefetch(const char *tiles, long count) {
    for (long line = 0; line < count * TILE_NUMBERS * 2; line += 64) __builtin_prefetch(tiles + line, 0, 2);
}

/* out[16][64] = input[16][inputs] times a right-hand side; inputs is a multiple of 32. Only the first columns may be
 * wanted: 16 per tile. `next`: to prefetch, or NULL. */
INLINE void amx_multiply(const bf16 *input, long input_stride, const bf16 *side, long inputs, long tiles, float *out,
                         long out_stride, const char *next) {
    MEMORY_IS_READ;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += TILE_INPUTS, side += 4 * TILE_NUMBERS) {
        if (next) amx_prefetch(next + k * WIDE_COLUMNS * 2, 4);
        _tile_loadd(4, input + k, input_stride * 2);
        _tile_loadd(5, side, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (tiles == 1) continue;
        _tile_loadd(6, side + TILE_NUMBERS, 64);
        _tile_dpbf16ps(1, 4, 6);
        if (tiles == 2) continue;
        _tile_loadd(7, side + 2 * TILE_NUMBERS, 64);
        _tile_dpbf16ps(2, 4, 7);
        if (tiles == 3) continue;
        _tile_loadd(5, side + 3 * TILE_NUMBERS, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, out, out_stride * 4);
    if (tiles == 1) return;
    _tile_stored(1, out + 16, out_stride * 4);
    if (tiles == 2) return;
    _tile_stored(2, out + 32, out_stride * 4);
    if (tiles == 3) return;
    _tile_stored(3, out + 48, out_stride * 4);
}

/* The same for 32 rows, in two passes of 32 columns: half as many loads per product. */
INLINE void amx_multiply_32(const bf16 *input, long input_stride, const bf16 *side, long inputs, float *out,
                            long out_stride, const char *next) {
    const bf16 *below = input + TILE_ROWS * input_stride;
    MEMORY_IS_READ;
    for (int half = 0; half < 2; half++, side += 2 * TILE_NUMBERS, out += 32) {
        const bf16 *at = side;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long k = 0; k < inputs; k += TILE_INPUTS, at += 4 * TILE_NUMBERS) {
            if (next) amx_prefetch(next + k * WIDE_COLUMNS * 2 + half * 2 * TILE_NUMBERS * 2, 2);
            _tile_loadd(4, input + k, input_stride * 2);
            _tile_loadd(6, at, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, at + TILE_NUMBERS, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, below + k, input_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, out_stride * 4);
        _tile_stored(1, out + 16, out_stride * 4);
        _tile_stored(2, out + TILE_ROWS * out_stride, out_stride * 4);
        _tile_stored(3, out + TILE_ROWS * out_stride + 16, out_stride * 4);
    }
}

/* Rounds a row to bfloat16; zeros from `count` to `padded`, both multiples of 16. */
INLINE void narrow_row(const float *from, long count, long padded, bf16 *to) {
    for (long i = 0; i < count; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
    for (long i = count; i < padded; i += 16) _mm256_storeu_si256((__m256i *)(to + i), _mm256_setzero_si256());
}

/* Packs 16 rows of keys (NULL: zeros) as columns of a right-hand side; `tiles`: their first tile. */
INLINE void amx_pack_keys(const bf16 *const rows[16], long head_dim, bf16 *tiles) {
    for (long d = 0; d < head_dim; d += TILE_INPUTS, tiles += 4 * TILE_NUMBERS) {
        vi v[16];
        UNROLL for (int i = 0; i < 16; i++)
            v[i] = (vi)(rows[i] ? _mm512_loadu_si512(rows[i] + d) : _mm512_setzero_si512());
        transpose_16(v);
        UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(tiles + 32 * i, (__m512i)v[i]);
    }
}

/* Packs two rows of values (NULL: zeros) as a pair of inputs of right-hand sides 64 dimensions wide. `to`: the pair in
 * the first side; `side`: elements from one side to the next. */
INLINE void amx_pack_values(const bf16 *first, const bf16 *second, long head_dim, long side, bf16 *to) {
    for (long d = 0; d < head_dim; d += 32) {
        const __m512i a = first ? _mm512_loadu_si512(first + d) : _mm512_setzero_si512();
        const __m512i b = second ? _mm512_loadu_si512(second + d) : _mm512_setzero_si512();
        const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        const __m512i front = _mm512_shuffle_i32x4(low, high, 0x44), back = _mm512_shuffle_i32x4(low, high, 0xee);
        bf16 *at = to + d / WIDE_COLUMNS * side + d % WIDE_COLUMNS / TILE_COLUMNS * TILE_NUMBERS;
        _mm512_storeu_si512(at, _mm512_shuffle_i32x4(front, front, 0xd8));
        _mm512_storeu_si512(at + TILE_NUMBERS, _mm512_shuffle_i32x4(back, back, 0xd8));
    }
}
#else
/* Stubs for CPUs without AMX; never called. */
INLINE int amx_granted(void) { return 0; }
INLINE void amx_configure(void) {}
INLINE void amx_multiply(const bf16 *input, long input_stride, const bf16 *side, long inputs, long tiles, float *out,
                         long out_stride, const char *next) {
    (void)input, (void)input_stride, (void)side, (void)inputs, (void)tiles, (void)out, (void)out_stride, (void)next;
}
INLINE void amx_multiply_32(const bf16 *input, long input_stride, const bf16 *side, long inputs, float *out,
                            long out_stride, const char *next) {
    (void)input, (void)input_stride, (void)side, (void)inputs, (void)out, (void)out_stride, (void)next;
}
INLINE void narrow_row(const float *from, long count, long padded, bf16 *to) {
    (void)from, (void)count, (void)padded, (void)to;
}
INLINE void amx_pack_keys(const bf16 *const rows[16], long head_dim, bf16 *tiles) {
    (void)rows, (void)head_dim, (void)tiles;
}
INLINE void amx_pack_values(const bf16 *first, const bf16 *second, long head_dim, long side, bf16 *to) {
    (void)first, (void)second, (void)head_dim, (void)side, (void)to;
}
#endif

#endif
