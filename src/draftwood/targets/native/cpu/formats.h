/* The weight formats by id. A new format is one more file and one more row here and in records.py. */
#ifndef DRAFTWOOD_FORMATS_H
#define DRAFTWOOD_FORMATS_H

#include "format_bf16.h"
#include "format_blocks.h"
#include "format_f16.h"
#include "format_f32.h"

static const Format *const FORMATS[] = {&F32, &BF16, &F16, &Q4_0, &Q4_1, &Q5_0, &Q5_1, &Q8_0, &Q4_K, &Q5_K,
                                        &Q6_K, &IQ4_NL, &IQ4_XS, &MXFP4};

INLINE const Format *format_of(const Matrix *m) {
    const Format *format = FORMATS[m->format];
    return format->tiled && amx_granted() ? format->tiled : format;
}

#endif
