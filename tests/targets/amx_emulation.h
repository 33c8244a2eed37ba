/* The tile instructions of AMX in plain C: with `-include` of this file, code for AMX runs on CPUs without it.
 *
 * Wrong shapes, which are illegal instructions on a real CPU, end the program. Sums of bfloat16 products follow Intel's
 * description: even and odd inputs apart, one fused multiply-add after the other. */
#ifndef AMX_EMULATION_H
#define AMX_EMULATION_H

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AVX512BF16__ 1
#define syscall(...) 0L /* permission to use tiles */

typedef struct {
    int rows, bytes;
    uint8_t data[16][64];
} EmulatedTile;

static _Thread_local EmulatedTile emulated[8];

static void emulated_check(int legal) {
    if (!legal) abort();
}

static void emulated_configure(const uint8_t *shapes) {
    emulated_check(shapes[0] == 1);
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        memcpy(&bytes, shapes + 16 + 2 * i, 2);
        emulated_check(bytes <= 64 && shapes[48 + i] <= 16 && !bytes == !shapes[48 + i]);
        emulated[i] = (EmulatedTile){.rows = shapes[48 + i], .bytes = bytes};
    }
}

static EmulatedTile *emulated_tile(int i) {
    emulated_check(emulated[i].rows > 0);
    return emulated + i;
}

static void emulated_load(EmulatedTile *t, const char *from, long stride) {
    memset(t->data, 0, sizeof(t->data));
    for (int r = 0; r < t->rows; r++) memcpy(t->data[r], from + r * stride, (size_t)t->bytes);
}

static void emulated_store(const EmulatedTile *t, char *to, long stride) {
    for (int r = 0; r < t->rows; r++) memcpy(to + r * stride, t->data[r], (size_t)t->bytes);
}

static void emulated_check_product(const EmulatedTile *c, const EmulatedTile *a, const EmulatedTile *b) {
    emulated_check(c != a && c != b && a != b && c->rows == a->rows && c->bytes == b->bytes && a->bytes == 4 * b->rows);
}

#define FAST __attribute__((optimize("O3")))

static float emulated_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

FAST static void emulated_halves(EmulatedTile *c, const EmulatedTile *a, const EmulatedTile *b) {
    emulated_check_product(c, a, b);
    for (int r = 0; r < c->rows; r++) {
        float sums[16], parts[2][16] = {{0}};
        uint16_t row[32], line[32];
        memcpy(sums, c->data[r], sizeof(sums));
        memcpy(row, a->data[r], sizeof(row));
        for (int k = 0; k < a->bytes / 2; k++) {
            memcpy(line, b->data[k / 2], sizeof(line));
            for (int n = 0; n < 16; n++)
                parts[k % 2][n] = fmaf(emulated_half(row[k]), emulated_half(line[2 * n + k % 2]), parts[k % 2][n]);
        }
        for (int n = 0; n < 16; n++) sums[n] += parts[0][n] + parts[1][n];
        memcpy(c->data[r], sums, (size_t)c->bytes);
    }
}

static __m256i emulated_narrow(__m512 v) { /* to nearest, ties to even */
    const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _mm512_cvtneps_pbh
#define _tile_loadconfig(shapes) emulated_configure((const uint8_t *)(shapes))
#define _tile_zero(t) memset(emulated_tile(t)->data, 0, sizeof(emulated->data))
#define _tile_loadd(t, from, stride) emulated_load(emulated_tile(t), (const char *)(from), stride)
#define _tile_stored(t, to, stride) emulated_store(emulated_tile(t), (char *)(to), stride)
#define _tile_dpbf16ps(c, a, b) emulated_halves(emulated_tile(c), emulated_tile(a), emulated_tile(b))
#define _mm512_cvtneps_pbh(v) emulated_narrow(v)

#endif
