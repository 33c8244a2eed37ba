/* Blocks of quantised weights as GGUF files store them, one reader per format.
 *
 * A weight is a code of a few bits with a scale: scale * (code - offset), or scale * code + minimum, or
 * scale * table[code]. The formats in blocks of 256 have a scale in 16 bits for the block and small integer scales for
 * its parts. */
#ifndef DRAFTWOOD_BLOCKS_H
#define DRAFTWOOD_BLOCKS_H

#include "vec.h"

#define MAX_BLOCK 256 /* weights */

/* How scales are stored. HALF: 16 bits. HALF_MIN: the same for scale and minimum. SUPER: a 16-bit scale times a signed
 * byte per 32 weights; SUPER_16: per 16 weights; SUPER_MIN: two 16-bit scales times an unsigned byte each per 32
 * weights, for scale and minimum, which is subtracted. EXPONENT: a power of two. */
enum { HALF, HALF_MIN, SUPER, SUPER_16, SUPER_MIN, EXPONENT };

typedef struct {
    uint8_t codes[MAX_BLOCK]; /* 8 bits: signed */
    uint16_t scale, minimum; /* 16-bit floats; EXPONENT: scale is the exponent */
    uint8_t scales[16], minima[8]; /* per part */
} BlockContent;

INLINE uint16_t read_half(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, bits = (uint32_t)(h & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    uint32_t out;
    memcpy(&out, &value, 4);
    out |= sign;
    memcpy(&value, &out, 4);
    return value;
}

INLINE int half_is_finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

/* 2^(e - 128): the codes of MXFP4 are doubled. */
INLINE float exponent_to_float(uint8_t e) {
    const uint32_t bits = e >= 2 ? (uint32_t)(e - 1) << 23 : e ? 0x00400000u : 0x00200000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The low halves of `count` bytes, then the high halves. */
INLINE void read_nibbles(const uint8_t *p, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) {
        codes[i] = p[i] & 15;
        codes[count + i] = p[i] >> 4;
    }
}

INLINE void add_high_bits(const uint8_t *p, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((p[i / 8] >> (i % 8) & 1) << 4);
}

static void read_q4_0(const uint8_t *p, BlockContent *to) {
    to->scale = read_half(p);
    read_nibbles(p + 2, 16, to->codes);
}

static void read_q4_1(const uint8_t *p, BlockContent *to) {
    to->scale = read_half(p);
    to->minimum = read_half(p + 2);
    read_nibbles(p + 4, 16, to->codes);
}

static void read_q5_0(const uint8_t *p, BlockContent *to) {
    to->scale = read_half(p);
    read_nibbles(p + 6, 16, to->codes);
    add_high_bits(p + 2, to->codes);
}

static void read_q5_1(const uint8_t *p, BlockContent *to) {
    to->scale = read_half(p);
    to->minimum = read_half(p + 2);
    read_nibbles(p + 8, 16, to->codes);
    add_high_bits(p + 4, to->codes);
}

static void read_q8_0(const uint8_t *p, BlockContent *to) {
    to->scale = read_half(p);
    memcpy(to->codes, p + 2, 32);
}

/* 12 bytes hold 8 scales and 8 minima of six bits; the first eight bytes hold the top bits of the last four of each. */
INLINE void read_scales_and_minima(const uint8_t *p, BlockContent *to) {
    to->scale = read_half(p);
    to->minimum = read_half(p + 2);
    for (int i = 0; i < 4; i++) {
        const uint8_t first = p[4 + i], second = p[8 + i], third = p[12 + i];
        to->scales[i] = first & 63;
        to->minima[i] = second & 63;
        to->scales[4 + i] = (uint8_t)((third & 15) | (first >> 6) << 4);
        to->minima[4 + i] = (uint8_t)((third >> 4) | (second >> 6) << 4);
    }
}

static void read_q4_k(const uint8_t *p, BlockContent *to) {
    read_scales_and_minima(p, to);
    for (int i = 0; i < 4; i++) read_nibbles(p + 16 + 32 * i, 32, to->codes + 64 * i);
}

static void read_q5_k(const uint8_t *p, BlockContent *to) {
    read_scales_and_minima(p, to);
    for (int i = 0; i < 4; i++) read_nibbles(p + 48 + 32 * i, 32, to->codes + 64 * i);
    for (int i = 0; i < 256; i++) to->codes[i] |= (uint8_t)((p[16 + i % 32] >> (i / 32) & 1) << 4);
}

static void read_q6_k(const uint8_t *p, BlockContent *to) {
    to->scale = read_half(p + 208);
    memcpy(to->scales, p + 192, 16);
    for (int half = 0; half < 2; half++) {
        uint8_t *codes = to->codes + 128 * half;
        read_nibbles(p + 64 * half, 64, codes);
        for (int i = 0; i < 128; i++) codes[i] |= (uint8_t)((p[128 + 32 * half + i % 32] >> (i / 32 * 2) & 3) << 4);
    }
}

static void read_iq4_xs(const uint8_t *p, BlockContent *to) {
    const uint16_t high = read_half(p + 2);
    to->scale = read_half(p);
    for (int i = 0; i < 8; i++) {
        const int scale = (p[4 + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4;
        to->scales[i] = (uint8_t)(scale - 32);
        read_nibbles(p + 8 + 16 * i, 16, to->codes + 32 * i);
    }
}

static void read_mxfp4(const uint8_t *p, BlockContent *to) {
    to->scale = p[0];
    read_nibbles(p + 1, 16, to->codes);
}

static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t FP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* twice the value */

#endif
