/* A thread pool for work that consists of phases, such as a forward.
 *
 * A phase is a number of independent items. Threads take items one by one, so a preempted thread delays only its
 * current item. A phase ends when all items are done; it does not wait for idle threads. Workers spin during the work
 * and sleep afterwards. Each library that includes this has a pool of its own. */
#ifndef DRAFTWOOD_POOL_H
#define DRAFTWOOD_POOL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPINS_BEFORE_YIELD 2000
#define SPINS_BEFORE_SLEEP 4000
#define MAX_MOVES 2

typedef void (*ItemFn)(void *context, long item, int thread);

static struct {
    pthread_mutex_t owner; /* held during the work: one at a time */
    pthread_mutex_t sleeping;
    pthread_cond_t wake;
    _Atomic uint64_t state; /* phase number << 32 | items not yet taken */
    _Atomic long done; /* items of the phase that are finished */
    _Atomic int active; /* there is work */
    _Atomic int threads; /* threads of this work, the caller included */
    _Atomic int caller_cpu; /* CPU of the calling thread */
    ItemFn fn;
    void *context;
    long items;
    uint32_t phase;
    int workers; /* threads started so far */
    pid_t pid; /* process that owns the threads: a forked child has none */
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .sleeping = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb"); /* "yield" is a no-op on most cores */
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Takes one item and runs it. The context may only be read after the item is taken: until then the phase may change. */
static int pool_take(int thread) {
    uint64_t state = atomic_load_explicit(&pool.state, memory_order_acquire);
    for (;;) {
        uint32_t left = (uint32_t)state;
        if (!left || thread >= atomic_load_explicit(&pool.threads, memory_order_relaxed)) return 0;
        if (atomic_compare_exchange_weak_explicit(&pool.state, &state, state - 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            pool.fn(pool.context, pool.items - left, thread);
            atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
            return 1;
        }
    }
}

#if defined(__linux__)
static inline int current_cpu(void) { return sched_getcpu(); }

/* A busy Linux may leave a woken worker on the CPU of the caller, where the two take turns. Excluding that CPU for a
 * moment moves the worker; then the affinity is restored. */
static void leave_cpu(int cpu) {
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof(allowed), &allowed)) return;
    others = allowed;
    CPU_CLR(cpu, &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof(others), &others)) return;
    sched_setaffinity(0, sizeof(allowed), &allowed);
}
#else
static inline int current_cpu(void) { return -1; }
static void leave_cpu(int cpu) { (void)cpu; }
#endif

static void *pool_work(void *argument) {
    const int thread = (int)(intptr_t)argument;
    int moves = MAX_MOVES;
    for (long spins = 0;;) {
        if (pool_take(thread)) {
            spins = 0;
            const int cpu = moves ? current_cpu() : -1;
            if (cpu >= 0 && cpu == pool.caller_cpu) {
                leave_cpu(cpu);
                moves--;
            }
            continue;
        }
        relax();
        spins++;
        int idle = !atomic_load_explicit(&pool.active, memory_order_acquire) || thread >= pool.threads;
        if (idle && spins > SPINS_BEFORE_SLEEP) {
            pthread_mutex_lock(&pool.sleeping);
            while (!pool.active || thread >= pool.threads) pthread_cond_wait(&pool.wake, &pool.sleeping);
            pthread_mutex_unlock(&pool.sleeping);
            spins = 0;
            moves = MAX_MOVES;
        } else if (spins % SPINS_BEFORE_YIELD == 0) {
            sched_yield();
        }
    }
    return NULL;
}

/* Runs fn for items 0 .. items - 1 and returns when all are done. */
static void pool_run(ItemFn fn, void *context, long items) {
    if (items <= 1 || pool.threads == 1) {
        for (long item = 0; item < items; item++) fn(context, item, 0);
        return;
    }
    pool.fn = fn;
    pool.context = context;
    pool.items = items;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    pool.phase++;
    atomic_store_explicit(&pool.state, (uint64_t)pool.phase << 32 | (uint64_t)items, memory_order_release);
    while (pool_take(0)) {}
    for (long spins = 1; atomic_load_explicit(&pool.done, memory_order_acquire) != items; spins++) {
        relax();
        if (spins % SPINS_BEFORE_YIELD == 0) sched_yield();
    }
}

static void pool_reset_after_fork(void) {
    static const pthread_mutex_t fresh_mutex = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t fresh_condition = PTHREAD_COND_INITIALIZER;
    pool.owner = fresh_mutex;
    pool.sleeping = fresh_mutex;
    pool.wake = fresh_condition;
    pool.workers = 0;
    pool.active = 0;
    pool.state = 0;
    pool.pid = getpid();
}

/* Returns the actual number of threads: the system may refuse to start some. */
static int pool_begin(int threads) {
    if (pool.pid != getpid()) pool_reset_after_fork();
    pthread_mutex_lock(&pool.owner);
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    while (pool.workers < threads - 1) {
        pthread_t handle;
        if (pthread_create(&handle, NULL, pool_work, (void *)(intptr_t)(pool.workers + 1))) break;
        pthread_detach(handle);
        pool.workers++;
    }
    if (threads > pool.workers + 1) threads = pool.workers + 1;
    pthread_mutex_lock(&pool.sleeping);
    pool.threads = threads;
    pool.caller_cpu = current_cpu();
    pool.active = 1;
    if (threads > 1) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleeping);
    return threads;
}

static void pool_end(void) {
    pool.active = 0;
    pthread_mutex_unlock(&pool.owner);
}

#endif
