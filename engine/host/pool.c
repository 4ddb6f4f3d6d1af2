/* A pool of threads for one parallel loop at a time: every thread takes the next index from one
 * atomic counter. */
#define _GNU_SOURCE

#include "colibri_host.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { SPINS = 4000 }; /* looks at the generation before a worker sleeps: a few microseconds */

typedef struct {
    /* written by the caller while no loop is open, read by workers that have found one open */
    void (*task)(void *arg, uint32_t index);
    void *arg;
    uint32_t count;
    int threads;
    pid_t owner;
    atomic_flag busy;
    atomic_uint generation; /* of the loop; odd or even means nothing, a change means work */
    atomic_uint next;       /* index */
    atomic_int open;        /* whether a worker may still join the loop */
    atomic_int working;     /* workers that have joined, or are looking whether they may */
    atomic_int sleeping;
    atomic_int stopping;
    pthread_mutex_t mutex; /* guards going to sleep, and nothing else */
    pthread_cond_t wake;
    pthread_t workers[COLIBRI_POOL_MOST];
} pool_t;

_Static_assert(sizeof(pool_t) <= sizeof(colibri_pool_t), "the caller's memory holds the pool");

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_indices(pool_t *p) {
    for (uint32_t i;
         (i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < p->count;) {
        p->task(p->arg, i);
    }
}

/* Wait for a generation other than `seen`; spinning first, for the next loop of a forward is
 * near. */
static unsigned await_change(pool_t *p, unsigned seen) {
    unsigned now;
    for (int spin = 0; spin < SPINS; ++spin) {
        if ((now = atomic_load_explicit(&p->generation, memory_order_acquire)) != seen) return now;
        pause_briefly();
    }
    /* The caller changes the generation, then looks at `sleeping`; a worker does the reverse: one
     * of them notices. */
    pthread_mutex_lock(&p->mutex);
    atomic_fetch_add(&p->sleeping, 1);
    while ((now = atomic_load(&p->generation)) == seen) {
        pthread_cond_wait(&p->wake, &p->mutex);
    }
    atomic_fetch_sub(&p->sleeping, 1);
    pthread_mutex_unlock(&p->mutex);
    return now;
}

static void wake_all(pool_t *p) {
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleeping) > 0) {
        pthread_mutex_lock(&p->mutex);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->mutex);
    }
}

static void *work(void *arg) {
    pool_t *p = arg;
    unsigned seen = 0;
    for (;;) {
        seen = await_change(p, seen);
        if (atomic_load(&p->stopping)) return NULL;
        /* A worker says it is here, then looks; the caller closes, then looks for workers: one of
         * them notices. So the caller never waits for a worker that has not begun, such as one
         * without a processor. */
        atomic_fetch_add(&p->working, 1);
        if (atomic_load(&p->open)) {
            take_indices(p);
        }
        atomic_fetch_sub(&p->working, 1);
    }
}

static int processors(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

int colibri_pool_start(colibri_pool_t *pool, int threads) {
    pool_t *p = (pool_t *)(void *)pool;
    const int available = processors();
    int wanted = threads < 1 || threads > available ? available : threads;
    wanted = wanted > COLIBRI_POOL_MOST ? COLIBRI_POOL_MOST : wanted;
    memset(p, 0, sizeof *p);
    p->owner = getpid();
    p->threads = 1;
    atomic_flag_clear(&p->busy);
    if (pthread_mutex_init(&p->mutex, NULL) != 0 || pthread_cond_init(&p->wake, NULL) != 0) {
        return 1;
    }
    while (p->threads < wanted && pthread_create(&p->workers[p->threads], NULL, work, p) == 0) {
        ++p->threads;
    }
    return p->threads;
}

void colibri_pool_run(void *user, void (*task)(void *arg, uint32_t index), void *arg,
                      uint32_t count) {
    pool_t *p = user;
    if (p->threads == 1 || p->owner != getpid() ||
        atomic_flag_test_and_set_explicit(&p->busy, memory_order_acquire)) {
        for (uint32_t i = 0; i < count; ++i) {
            task(arg, i);
        }
        return;
    }
    p->task = task;
    p->arg = arg;
    p->count = count;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_store(&p->open, 1);
    wake_all(p);
    take_indices(p);
    atomic_store(&p->open, 0);
    for (int spin = 0; atomic_load(&p->working) > 0; ++spin) {
        if (spin < SPINS) {
            pause_briefly();
        } else {
            sched_yield(); /* a worker has lost its processor amid its work */
        }
    }
    atomic_flag_clear_explicit(&p->busy, memory_order_release);
}

void colibri_pool_stop(colibri_pool_t *pool) {
    pool_t *p = (pool_t *)(void *)pool;
    if (p->threads > 1 && p->owner == getpid()) {
        atomic_store(&p->stopping, 1);
        wake_all(p);
        for (int i = 1; i < p->threads; ++i) {
            pthread_join(p->workers[i], NULL);
        }
        pthread_cond_destroy(&p->wake);
        pthread_mutex_destroy(&p->mutex);
    }
    p->threads = 1;
}
