/* The weight formats by id. A new format is one more file and one more row here and in records.py. */
#ifndef DRAFTWOOD_FORMATS_H
#define DRAFTWOOD_FORMATS_H

#include "format_bf16.h"
#include "format_f32.h"

static const Format *const FORMATS[] = {&F32, &BF16};

INLINE const Format *format_of(const Matrix *m) {
    const Format *format = FORMATS[m->format];
    return format->tiled && amx_granted() ? format->tiled : format;
}

#endif
