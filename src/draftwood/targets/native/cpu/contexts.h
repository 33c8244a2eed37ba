/* The context of each node, and how attention is split into units. */
#ifndef DRAFTWOOD_CONTEXTS_H
#define DRAFTWOOD_CONTEXTS_H

#include "attention.h"
#include "run.h"

/* Measures lengths and contiguous parts, which determine the memory for the scattered slots. Nodes of earlier passes
 * have contexts too: the contexts of their descendants start with them. */
static void measure_contexts(Run *run) {
    const Batch *b = run->batch;
    run->num_scattered = 0;
    for (long s = 0; s < b->segments; s++) {
        const Segment *segment = b->segment + s;
        const int64_t *parents = b->parents + segment->first;
        Context *context = run->context + segment->first;
        for (long i = 0; i < segment->after + segment->size; i++) {
            Context *own = context + i;
            const Context root = {segment->prefix, segment->prefix, NULL};
            const Context *up = parents[i] < 0 ? &root : context + parents[i];
            const int contiguous = up->contiguous == up->length && segment->prefix + i == up->length;
            own->length = up->length + 1;
            own->contiguous = contiguous ? own->length : up->contiguous;
            run->num_scattered += own->length - own->contiguous;
        }
    }
}

/* Also the positions of the rows. */
static void list_scattered(Run *run) {
    const Batch *b = run->batch;
    int32_t *next = run->scattered;
    for (long s = 0; s < b->segments; s++) {
        const Segment *segment = b->segment + s;
        const int64_t *parents = b->parents + segment->first;
        Context *context = run->context + segment->first;
        for (long i = 0; i < segment->after + segment->size; i++) {
            Context *own = context + i;
            const long count = own->length - own->contiguous;
            own->scattered = next;
            if (i >= segment->after) run->positions[segment->start + i - segment->after] = own->length - 1;
            if (!count) continue;
            if (count > 1) /* the parent has scattered slots too */
                memcpy(next, context[parents[i]].scattered, (size_t)(count - 1) * sizeof(*next));
            next[count - 1] = (int32_t)(segment->prefix + i);
            next += count;
        }
    }
}

static long count_units(const Model *m, const Batch *b) {
    long units = 0;
    for (long s = 0; s < b->segments; s++) units += (b->segment[s].size + unit_rows(m) - 1) / unit_rows(m);
    return units;
}

static void list_units(Run *run) {
    const Model *m = run->model;
    Unit *unit = run->unit;
    long partials = 0;
    for (long s = 0; s < run->batch->segments; s++) {
        const Segment *segment = run->batch->segment + s;
        for (long row = 0; row < segment->size; row += unit_rows(m), unit++) {
            long shortest = INT64_MAX, longest = 0;
            unit->segment = s;
            unit->row = segment->start + row;
            unit->rows = min_long(unit_rows(m), segment->size - row);
            unit->context = run->context + segment->first + segment->after + row;
            for (long r = 0; r < unit->rows; r++) {
                shortest = min_long(shortest, unit->context[r].length);
                longest = max_long(longest, unit->context[r].length);
            }
            unit->first_block = m->window ? max_long(0, shortest - m->window) / BLOCK : 0;
            unit->end_block = (longest + BLOCK - 1) / BLOCK;
            unit->partial = partials;
            partials += (unit->end_block - unit->first_block) * unit->rows * m->heads;
        }
    }
    run->partial_count = partials;
}

/* If there are too few units for all threads, each is split into runs of blocks. */
static void choose_split(Run *run) {
    const Model *m = run->model;
    const long items = run->units * m->kv_heads, wished = 4 * run->threads;
    const long bytes = run->partial_count * partial_size(m) * (long)sizeof(float);
    run->split = 1;
    if (run->threads > 1 && items < wished && bytes <= SPLIT_BYTES) run->split = (wished + items - 1) / items;
}

#endif
