/* Colibri, optional, for hosts: a thread pool for colibri_context_t.parallel (POSIX threads), and
 * on Linux memory-mapped model files with experts prefetched, locked and released. A separate
 * library, libcolibri_host.a, linked before libcolibri; the engine does not depend on it. No heap:
 * all state is in the caller's memory. docs/memory.md says which functions pay off, and when. */
#ifndef COLIBRI_HOST_H
#define COLIBRI_HOST_H

#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- threads for one forward ---
 *
 *     static colibri_pool_t pool;
 *     colibri_pool_start(&pool, 4);
 *     ctx->parallel = colibri_pool_run;
 *     ctx->parallel_user = &pool;
 *     …
 *     colibri_pool_stop(&pool);          // after the last colibri_forward that uses it */

#define COLIBRI_POOL_MOST 64 /* threads of a pool, the caller's included */

/* A pool's memory, owned by the caller; 8-byte aligned; must not move. The content is private. */
typedef struct colibri_pool {
    uint64_t words[256];
} colibri_pool_t;

/* Start threads - 1 workers. 0 means one thread for each processor this process may use, which is
 * also the upper limit. Returns the pool's threads, the caller's included: 1 if no worker could be
 * started. Idle workers spin for a few microseconds, then sleep. */
COLIBRI_API int colibri_pool_start(colibri_pool_t *pool, int threads);

/* A colibri_parallel_hook; `user` is the pool. Several contexts may share a pool: while one uses
 * it, the others run on their own threads alone. A child process after fork has no workers: the
 * caller does all the work. */
COLIBRI_API void colibri_pool_run(void *user, void (*task)(void *arg, uint32_t index), void *arg,
                                  uint32_t count);

/* End the workers and wait for them. */
COLIBRI_API void colibri_pool_stop(colibri_pool_t *pool);

/* --- a model file, mapped: Linux; elsewhere every call below that returns an error returns
 * COLIBRI_ERR_UNSUPPORTED ---
 *
 *     static colibri_map_t map;
 *     int error = colibri_map_open(&map, "model.bin", COLIBRI_MAP_WEIGHTS);
 *     colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_map_model(&map));
 *     colibri_forward(ctx, x, y, 1);
 *     if (colibri_map_status(&map) != COLIBRI_OK) { … }   // y is not to be used
 *     colibri_map_close(&map);                            // after the last use of the model
 *
 * The metadata (header, program, directories) is copied into memory of its own before it is
 * checked; only weights are mapped. So whatever happens to the file, a forward stays inside its
 * memory: weights are never followed as addresses. */

/* What colibri_map_open does; 0 for the default: the structure is checked and the mapping
 * guarded. */
enum colibri_map_options {
    COLIBRI_MAP_WEIGHTS = 1, /* check every weight's checksum too: reads the whole file */
    COLIBRI_MAP_UNCHECKED =
        2, /* check the header and the file's length only; colibri_init checks the structure */
    COLIBRI_MAP_UNGUARDED =
        4 /* leave SIGBUS alone: reading a page that the file has lost ends the process */
};

/* A map's memory, owned by the caller; 8-byte aligned; must not move. The content is private. */
typedef struct colibri_map {
    uint64_t words[16];
} colibri_map_t;

/* Map the model file at `path`. `options` are enum colibri_map_options, added up. Returns
 * COLIBRI_OK, or an error; then nothing is mapped or open. After COLIBRI_ERR_OPEN_FAILED and
 * COLIBRI_ERR_MMAP_FAILED errno has the cause.
 *
 * The guard is a SIGBUS handler, installed with the first guarded map of the process and removed
 * with the last. A page that was truncated or that the medium cannot read then reads as zeros, and
 * colibri_map_status reports it; faults at other addresses go to the previous handler. At most 64
 * guarded maps at a time. */
COLIBRI_API int colibri_map_open(colibri_map_t *map, const char *path, int options);

/* The model, for colibri_init; NULL if nothing is mapped. */
COLIBRI_API const uint8_t *colibri_map_model(const colibri_map_t *map);

/* Call after a forward, before its output is used: COLIBRI_OK; COLIBRI_ERR_TRUNCATED,
 * COLIBRI_ERR_READ_FAILED: weights were or may have been read as zeros; COLIBRI_ERR_CHANGED: the
 * file was written to since it was opened, so a forward may have read either content. One system
 * call. */
COLIBRI_API int colibri_map_status(const colibri_map_t *map);

/* Unmap. Stop prefetching first; the model must no longer be in use. */
COLIBRI_API void colibri_map_close(colibri_map_t *map);

/* How much of its list of experts a call has processed. */
typedef struct colibri_progress {
    int32_t experts; /* experts done, from the start of the list */
    uint64_t bytes;  /* their bytes, in whole pages */
} colibri_progress_t;

/* Experts below are numbered as in the expert directory, 0 … colibri_get_num_experts() - 1: layer
 * after layer, in the order the layers run. Calls process the list in order, stop at the first
 * failure and report their progress; `done` may be NULL. */

/* Read experts and keep them in memory (mlock). COLIBRI_ERR_LOCK_LIMIT: RLIMIT_MEMLOCK, often 8 MB,
 * allows no more. */
COLIBRI_API int colibri_map_lock(colibri_map_t *map, const int32_t *experts, int count,
                                 colibri_progress_t *done);
COLIBRI_API int colibri_map_unlock(colibri_map_t *map, const int32_t *experts, int count,
                                   colibri_progress_t *done);

/* Release the memory of experts that will not be used for some time; the next use reads them again.
 * The page cache frees unmapped memory in blocks of up to 2 MB: a block may stay because of a
 * mapped neighbour, or free a neighbour that is cached but not mapped. Locked experts are refused:
 * COLIBRI_ERR_RELEASE_FAILED. */
COLIBRI_API int colibri_map_release(colibri_map_t *map, const int32_t *experts, int count,
                                    colibri_progress_t *done);

/* Ask for huge pages for all weights, before they are read. COLIBRI_ERR_HUGE_PAGES: this process
 * gets none. Otherwise the file system decides where it gives them; FilePmdMapped in
 * /proc/self/smaps says how many there are. */
COLIBRI_API int colibri_map_huge_pages(colibri_map_t *map);

/* --- prefetching of experts, by separate threads ---
 *
 *     static colibri_prefetch_t prefetch;
 *     colibri_prefetch_start(&prefetch, &map, 1);
 *     ctx->on_route = colibri_prefetch_announce;
 *     ctx->user = &prefetch;
 *     …
 *     colibri_prefetch_stop(&prefetch);  // after the last forward, before colibri_map_close */

#define COLIBRI_PREFETCH_MOST 8 /* threads */

/* A prefetcher's memory, owned by the caller; 8-byte aligned; must not move. The content is
 * private. */
typedef struct colibri_prefetch {
    uint64_t words[384];
} colibri_prefetch_t;

/* Start 1 … COLIBRI_PREFETCH_MOST threads that read announced experts into memory. They poll for
 * announcements every 50 µs, and every millisecond after 0.1 s without any. All threads start, or
 * none. While they run, a page fault on an expert reads one page without read-ahead: announce every
 * expert, or do not start a prefetcher. One prefetcher per map. */
COLIBRI_API int colibri_prefetch_start(colibri_prefetch_t *prefetch, colibri_map_t *map,
                                       int threads);

/* A colibri_route_hook; `user` is the prefetcher, which serves one context (or one thread) at a
 * time. Makes no system call. At most 256 experts wait; further ones are dropped, and read when
 * they are used. */
COLIBRI_API void colibri_prefetch_announce(void *user, int layer, const int32_t *experts,
                                           int tokens, int k);

/* Announce experts a caller expects to be chosen, by their number in the directory; from the same
 * thread. */
COLIBRI_API void colibri_prefetch_experts(colibri_prefetch_t *prefetch, const int32_t *experts,
                                          int count);

/* What has happened since the start. */
typedef struct colibri_prefetch_counts {
    uint64_t announced,
        dropped; /* experts, each once per call; dropped: those of them that found the queue full */
    uint64_t late; /* experts still waiting or being read when the next announcement came */
    /* announced experts found whole in memory, or not. Linux tells only those who own the file or
     * may write to it; to others everything is a hit */
    uint64_t hits, misses;
    uint64_t bytes;    /* of pages that were not in memory */
    uint64_t failures; /* the system did not read ahead: see colibri_map_status */
    uint64_t
        /* spent on misses; nanoseconds / misses: how early an expert must be announced */
        nanoseconds;
    uint64_t faults; /* pages the rest of this process waited for (major faults) */
} colibri_prefetch_counts_t;

COLIBRI_API void colibri_prefetch_count(const colibri_prefetch_t *prefetch,
                                        colibri_prefetch_counts_t *counts);

/* Drop waiting experts, end the threads and wait for them. */
COLIBRI_API void colibri_prefetch_stop(colibri_prefetch_t *prefetch);

#ifdef __cplusplus
}
#endif

#endif
