/* One tree through a random model: forward WEIGHTS CACHE HEAD_DIM WINDOW > logits of all nodes.
 *
 * WEIGHTS and CACHE: 0 is float32, 1 is bfloat16. Fails unless nodes get the same bits when their path is decoded one
 * token at a time, after a prompt in chunks. test_instruction_sets.py compiles it for several instruction sets. */
#include "kernel.c"

#include <stdio.h>

enum { PROMPT = 90, NODES = 23, VOCAB = 101, SLOTS = 512, SECOND = 256 /* base of another sequence */ };

static uint32_t state = 1;

static float noise(void) { /* -1 to 1 */
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state * 0x1p-31f;
}

static float *new_vector(long count, float around, float width) {
    float *values = calloc((size_t)round_up(count, 64), sizeof(float));
    for (long i = 0; i < count; i++) values[i] = around + width * noise();
    return values;
}

static Matrix new_matrix(long format, long outputs, long inputs, int joined) {
    const long count = outputs * inputs * (joined ? 2 : 1);
    Matrix m = {.outputs = outputs, .inputs = inputs, .joined = joined, .format = format};
    float *values = new_vector(count, 0.0f, 2.0f / sqrtf((float)inputs));
    bf16 *halves = calloc((size_t)count, sizeof(bf16));
    for (long i = 0; i < count; i++) { /* the same numbers in both types */
        halves[i] = to_bf16(values[i]);
        values[i] = from_bf16(halves[i]);
    }
    m.data = aligned_alloc(64, (size_t)round_up(draftwood_packed_bytes(&m) + 4096, 64));
    if (draftwood_pack(&m, format ? (void *)halves : (void *)values, 1)) exit(3);
    return m;
}

static void forward(const Model *m, const int64_t *tokens, const int64_t *parents, long size, long base, long prefix,
                    long wanted, float *logits) {
    int64_t greedy[NODES];
    const Segment segment = {.start = 0, .base = base, .prefix = prefix, .size = size, .wanted = wanted};
    const Batch batch = {.rows = size, .nodes = size, .segments = 1, .wanted = wanted, .token_ids = tokens,
                         .parents = parents, .segment = &segment, .logits = logits, .greedy_ids = greedy};
    if (draftwood_forward(m, &batch, 1)) exit(4);
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    const long weights = atol(arguments[1]), head_dim = atol(arguments[3]), hidden = 64, inner = 96;
    Model m = {.hidden = hidden, .inner = inner, .layers = 2, .heads = 6, .kv_heads = 2, .head_dim = head_dim,
               .vocab = VOCAB, .tokens = VOCAB, .window = atol(arguments[4]), .cache_type = atol(arguments[2]), .slots = SLOTS,
               .norm_eps = 1e-5};
    Layer layers[2];
    for (long i = 0; i < m.layers; i++)
        layers[i] = (Layer){.input_norm = new_vector(hidden, 1.0f, 0.3f), .post_norm = new_vector(hidden, 1.0f, 0.3f),
                            .qkv = {new_matrix(weights, (m.heads + 2 * m.kv_heads) * head_dim, hidden, 0)},
                            .o = new_matrix(weights, hidden, m.heads * head_dim, 0),
                            .gate_up = {new_matrix(weights, inner, hidden, 1)},
                            .down = new_matrix(weights, hidden, inner, 0)};
    float *frequencies = new_vector(head_dim / 2, 0.0f, 0.0f);
    for (long i = 0; i < head_dim / 2; i++) frequencies[i] = powf(10000.0f, (float)(-2 * i) / (float)head_dim);
    const size_t cache_bytes = (size_t)(m.layers * m.kv_heads * SLOTS * head_dim * cache_item_bytes(&m));
    m.layer = layers;
    m.norm = new_vector(hidden, 1.0f, 0.3f);
    m.inverse_frequencies = frequencies;
    m.head = new_matrix(weights, VOCAB, hidden, 0);
    m.keys = aligned_alloc(64, cache_bytes);
    m.values = aligned_alloc(64, cache_bytes);
    memset(m.keys, 0xff, cache_bytes); /* NaN: unwritten values must have no effect */
    memset(m.values, 0xff, cache_bytes);

    int64_t tokens[PROMPT], chain[PROMPT], drafted[NODES], parents[NODES];
    for (long i = 0; i < PROMPT; i++) {
        tokens[i] = (i * 37 + 11) % VOCAB;
        chain[i] = i - 1;
    }
    for (long i = 0; i < NODES; i++) {
        drafted[i] = (i * 53 + 7) % VOCAB;
        parents[i] = i % 3 ? i - 1 : i / 2 - 1;
    }
    static float logits[NODES][VOCAB], alone[VOCAB];
    forward(&m, tokens, chain, PROMPT, 0, 0, 0, NULL);
    forward(&m, drafted, parents, NODES, 0, PROMPT, NODES, logits[0]);
    fwrite(logits, sizeof(logits), 1, stdout);
    for (long i = 0; i < PROMPT; i += 7) forward(&m, tokens + i, chain, min_long(7, PROMPT - i), SECOND, i, 0, NULL);
    for (long node = 1; node < NODES; node += 7) {
        long path[NODES], length = 0;
        for (long at = node; at >= 0; at = parents[at]) path[length++] = at;
        for (long i = 0; i < length; i++)
            forward(&m, drafted + path[length - 1 - i], chain, 1, SECOND, PROMPT + i, 1, alone);
        if (memcmp(alone, logits[node], sizeof(alone))) return 5;
    }
    return 0;
}
