/* Multiplies rows with one matrix: products FORMAT OUTPUTS INPUTS ROWS BYTES < blocks and inputs > outputs.
 *
 * test_instruction_sets.py compiles it for several instruction sets and compares the outputs bit by bit. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "matmul.h"

int main(int count, char **arguments) {
    if (count != 6) return 2;
    Matrix m = {.format = atol(arguments[1]), .outputs = atol(arguments[2]), .inputs = atol(arguments[3])};
    const long rows = atol(arguments[4]), from_bytes = atol(arguments[5]);
    char *from = malloc((size_t)from_bytes);
    const long stride = row_stride(m.inputs), out_stride = round_up(m.outputs, GROUP_COLUMNS);
    float *input = calloc((size_t)(rows * stride), sizeof(float)), *out = calloc((size_t)(rows * out_stride), sizeof(float));
    if (fread(from, 1, (size_t)from_bytes, stdin) != (size_t)from_bytes) return 3;
    for (long row = 0; row < rows; row++)
        if (fread(input + row * stride, sizeof(float), (size_t)m.inputs, stdin) != (size_t)m.inputs) return 4;
    const Format *format = format_of(&m);
    const long packed_bytes = num_groups(&m) * format->group_bytes(padded_inputs(format, &m));
    m.data = aligned_alloc(64, (size_t)round_up(packed_bytes + 4096, 64));
    for (long group = 0; group < num_groups(&m); group++)
        if (!format->pack(&m, from, group)) return 5;
    const long scratch_stride = product_scratch(&m);
    Product job = {.matrix = &m, .input = input, .input_stride = stride, .rows = rows, .ending = STORE, .out = out,
                   .out_stride = out_stride, .scratch = malloc((size_t)scratch_stride * sizeof(float)),
                   .scratch_stride = scratch_stride,
                   .prepared = aligned_alloc(64, (size_t)round_up((rows + MAX_CHUNK) * prepared_bytes(&m) + 64, 64))};
    pool_begin(1);
    run_products(&job, 1);
    pool_end();
    for (long row = 0; row < rows; row++)
        fwrite(out + row * out_stride, sizeof(float), (size_t)m.outputs, stdout);
    float *unpacked = malloc((size_t)m.inputs * sizeof(float));
    for (long row = 0; row < m.outputs; row++) { /* as embeddings are read */
        format->unpack_row(&m, row, unpacked);
        fwrite(unpacked, sizeof(float), (size_t)m.inputs, stdout);
    }
    return 0;
}
