/* Experts read into memory before they are used. A forward puts announced experts into a ring,
 * which takes no system call; threads of the prefetcher's own take them out and have the kernel
 * read their pages. */
#define _GNU_SOURCE

#include "host.h"

#ifdef __linux__

#include "colibri_ring.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

enum {
    WAITING = 256,   /* announcements */
    WINDOW = 1024,   /* experts whose duplicates are looked for at once */
    CHUNK = 1 << 21, /* bytes waited for at once */
    ASKED = 1
        /* bytes asked for at once: of more, Linux reads no further than the disk's read-ahead */
        << 17,
    PAGES = CHUNK >> 12, /* at most: pages are of 4 KB or larger */
    BUSY_LOOKS = 2000,   /* for announcements, every 50 µs, before looking less often */
};

typedef struct {
    colibri_ring_t ring; /* of pointers to expert records */
    colibri_ring_slot slots[WAITING];
    const clb_map *map;
    atomic_int stopping, threads;           /* threads: that have started */
    atomic_ullong announced, dropped, late; /* the forward writes these */
    atomic_ullong finished, hits, misses, bytes, failures, nanoseconds;
    atomic_ullong own_faults[COLIBRI_PREFETCH_MOST]; /* the threads write these */
    uint64_t faults_before;
    pthread_t workers[COLIBRI_PREFETCH_MOST];
} prefetcher;

_Static_assert(sizeof(prefetcher) <= sizeof(colibri_prefetch_t),
               "the caller's memory holds the prefetcher");

static void add(atomic_ullong *count, uint64_t n) {
    atomic_fetch_add_explicit(count, n, memory_order_relaxed);
}

static uint64_t look(const atomic_ullong *count) {
    return atomic_load_explicit(count, memory_order_relaxed);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t major_faults(int whose) {
    struct rusage usage;
    return getrusage(whose, &usage) == 0 ? (uint64_t)usage.ru_majflt : 0;
}

static uint64_t missing_pages(clb_pages chunk, size_t page) {
    unsigned char in_memory[PAGES];
    uint64_t missing = 0;
    if (mincore(chunk.at, chunk.bytes, in_memory) == 0) {
        for (size_t n = 0; n < chunk.bytes / page; ++n) {
            missing += !(in_memory[n] & 1);
        }
    }
    return missing;
}

static clb_pages chunk_at(clb_pages pages, size_t offset, size_t most) {
    const size_t left = pages.bytes - offset;
    return (clb_pages){pages.at + offset, left < most ? left : most};
}

/* The expert's pages and no others: requests for all of them, then the wait for each chunk. Asks
 * even for what seems to be in memory: Linux shows that only to the file's owner, and to others
 * that all of it is. */
static void fetch(prefetcher *p, const clb_expert *e) {
    const clb_pages pages = clb_expert_pages(p->map, e);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uint64_t start = now();
    uint64_t missing = 0;
    for (size_t done = 0; done < pages.bytes; done += CHUNK) {
        missing += missing_pages(chunk_at(pages, done, CHUNK), page);
    }
    int failed = 0;
    for (size_t done = 0; done < pages.bytes; done += ASKED) {
        const clb_pages chunk = chunk_at(pages, done, ASKED);
        failed |= madvise(chunk.at, chunk.bytes, MADV_WILLNEED) != 0;
    }
    for (size_t done = 0;
         done < pages.bytes && !atomic_load_explicit(&p->stopping, memory_order_relaxed);
         done += CHUNK) {
        const clb_pages chunk = chunk_at(pages, done, CHUNK);
        if (madvise(chunk.at, chunk.bytes, MADV_POPULATE_READ) != 0) {
            failed |=
                errno !=
                /* an older kernel: it is reading, and the forward waits for what it comes to */
                EINVAL;
            break;
        }
    }
    add(missing ? &p->misses : &p->hits, 1);
    add(&p->bytes, missing * page);
    add(&p->failures, (uint64_t)failed);
    add(&p->nanoseconds, missing ? now() - start : 0);
    add(&p->finished, 1);
}

static void *work(void *arg) {
    prefetcher *p = arg;
    const int number = atomic_fetch_add(&p->threads, 1);
    const struct timespec soon = {.tv_nsec = 50000};
    const struct timespec later = {.tv_nsec = 1000000};
    for (int looks = 0; !atomic_load_explicit(&p->stopping, memory_order_relaxed);) {
        const clb_expert *e = colibri_ring_pop(&p->ring);
        if (e != NULL) {
            fetch(p, e);
            atomic_store_explicit(&p->own_faults[number], major_faults(RUSAGE_THREAD),
                                  memory_order_relaxed);
            looks = 0;
        } else {
            /* To be woken would take a system call of the forward. */
            looks += looks < BUSY_LOOKS;
            nanosleep(looks < BUSY_LOOKS ? &soon : &later, NULL);
        }
    }
    return NULL;
}

/* Whether page faults on experts read ahead. While experts are fetched whole they must not: what
 * lies behind an expert is another one, which nobody asked for. */
static void advise_experts(const clb_map *m, int advice) {
    const clb_header *h = (const clb_header *)(const void *)m->model;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t from = (size_t)(h->meta_bytes + h->shared_bytes + page - 1) / page * page;
    if (from >= m->copied && from < m->span) {
        (void)madvise((void *)(uintptr_t)(m->model + from), m->span - from, advice);
    }
}

int colibri_prefetch_start(colibri_prefetch_t *prefetch, colibri_map_t *map, int threads) {
    prefetcher *p = (prefetcher *)(void *)prefetch;
    const clb_map *m = (const clb_map *)(const void *)map;
    if (prefetch == NULL || map == NULL || m->model == NULL) return COLIBRI_ERR_NULL;
    memset(p, 0, sizeof *p);
    colibri_ring_init(&p->ring, p->slots, WAITING);
    p->map = m;
    p->faults_before = major_faults(RUSAGE_SELF);
    const int wanted = threads < 1                       ? 1
                       : threads > COLIBRI_PREFETCH_MOST ? COLIBRI_PREFETCH_MOST
                                                         : threads;
    /* The caller's signals are not for these threads; what a fault raises cannot be blocked. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int started = 0;
    while (started < wanted && pthread_create(&p->workers[started], NULL, work, p) == 0) {
        ++started;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started < wanted) {
        atomic_store(&p->stopping, 1);
        while (started > 0) {
            pthread_join(p->workers[--started], NULL);
        }
        memset(p, 0, sizeof *p);
        return COLIBRI_ERR_THREAD_FAILED;
    }
    advise_experts(m, MADV_RANDOM);
    while (atomic_load(&p->threads) < wanted) {
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return COLIBRI_OK;
}

/* Announce experts `first + experts[i]`, each once and in the order a forward runs them; `limit` of
 * them there are. */
static void announce(prefetcher *p, uint32_t first, uint32_t limit, const int32_t *experts,
                     size_t count) {
    add(&p->late, look(&p->announced) - look(&p->dropped) - look(&p->finished));
    for (uint32_t window = 0; window < limit; window += WINDOW) {
        uint64_t chosen[WINDOW / 64] = {0};
        for (size_t i = 0; i < count; ++i) {
            const uint32_t e = (uint32_t)experts[i];
            if (e < limit && e >= window && e - window < WINDOW) {
                chosen[(e - window) / 64] |= UINT64_C(1) << (e - window) % 64;
            }
        }
        for (uint32_t n = 0; n < WINDOW; ++n) {
            if (chosen[n / 64] >> n % 64 & 1) {
                void *record = (void *)(uintptr_t)&p->map->experts[first + window + n];
                add(&p->announced, 1);
                add(&p->dropped, !colibri_ring_push(&p->ring, record));
            }
        }
    }
}

void colibri_prefetch_announce(void *user, int layer, const int32_t *experts, int tokens, int k) {
    prefetcher *p = user;
    if (p->map == NULL || layer < 0 || (uint32_t)layer >= p->map->layer_count) return;
    const clb_layer *l = &p->map->layers[layer];
    if (l->first_expert <= p->map->expert_count &&
        l->experts <= p->map->expert_count - l->first_expert) {
        announce(p, l->first_expert, l->experts, experts, (size_t)tokens * (size_t)k);
    }
}

void colibri_prefetch_experts(colibri_prefetch_t *prefetch, const int32_t *experts, int count) {
    prefetcher *p = (prefetcher *)(void *)prefetch;
    if (p->map != NULL && count > 0) {
        announce(p, 0, p->map->expert_count, experts, (size_t)count);
    }
}

void colibri_prefetch_count(const colibri_prefetch_t *prefetch, colibri_prefetch_counts_t *counts) {
    const prefetcher *p = (const prefetcher *)(const void *)prefetch;
    counts->announced = look(&p->announced);
    counts->dropped = look(&p->dropped);
    counts->late = look(&p->late);
    counts->hits = look(&p->hits);
    counts->misses = look(&p->misses);
    counts->bytes = look(&p->bytes);
    counts->failures = look(&p->failures);
    counts->nanoseconds = look(&p->nanoseconds);
    counts->faults = p->map == NULL ? 0 : major_faults(RUSAGE_SELF) - p->faults_before;
    for (int n = 0; n < COLIBRI_PREFETCH_MOST; ++n) {
        const uint64_t own = look(&p->own_faults[n]);
        counts->faults -= own < counts->faults ? own : counts->faults;
    }
}

void colibri_prefetch_stop(colibri_prefetch_t *prefetch) {
    prefetcher *p = (prefetcher *)(void *)prefetch;
    atomic_store(&p->stopping, 1);
    for (int n = atomic_exchange(&p->threads, 0); n > 0; --n) {
        pthread_join(p->workers[n - 1], NULL);
    }
    if (p->map != NULL) {
        advise_experts(p->map, MADV_NORMAL);
    }
    p->map = NULL;
}

#else

int colibri_prefetch_start(colibri_prefetch_t *prefetch, colibri_map_t *map, int threads) {
    (void)prefetch;
    (void)map;
    (void)threads;
    return COLIBRI_ERR_UNSUPPORTED;
}

void colibri_prefetch_announce(void *user, int layer, const int32_t *experts, int tokens, int k) {
    (void)user;
    (void)layer;
    (void)experts;
    (void)tokens;
    (void)k;
}

void colibri_prefetch_experts(colibri_prefetch_t *prefetch, const int32_t *experts, int count) {
    (void)prefetch;
    (void)experts;
    (void)count;
}

void colibri_prefetch_count(const colibri_prefetch_t *prefetch, colibri_prefetch_counts_t *counts) {
    (void)prefetch;
    *counts = (colibri_prefetch_counts_t){0};
}

void colibri_prefetch_stop(colibri_prefetch_t *prefetch) { (void)prefetch; }

#endif
