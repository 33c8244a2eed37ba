/* Work for many requests that do not share what it changes: on several threads, if there is enough of it. */
#ifndef DRAFTWOOD_REQUESTS_H
#define DRAFTWOOD_REQUESTS_H

#include <stdint.h>

#include "pool.h"

enum { REQUESTS_PER_THREAD = 4 }; /* at least: waking a thread takes as long as two or three trees */

static int64_t max_threads = 1;

/* Calls `fn(job, request, thread)` for each of `n` requests, in order if `at_once` is 0. */
static void for_requests(ItemFn fn, void *job, int64_t n, int at_once) {
    int64_t threads = n / REQUESTS_PER_THREAD < max_threads ? n / REQUESTS_PER_THREAD : max_threads;
    if (!at_once || threads < 2) {
        for (int64_t i = 0; i < n; i++) fn(job, (long)i, 0);
        return;
    }
    pool_begin((int)threads);
    pool_run(fn, job, (long)n);
    pool_end();
}

static int64_t sum_before(const int64_t *counts, int64_t i) {
    int64_t sum = 0;
    while (i-- > 0) sum += counts[i];
    return sum;
}

/* -- called from Python -------------------------------------------------------------------------------------------- */

void draftwood_set_threads(int64_t threads) { max_threads = threads; }

#endif
