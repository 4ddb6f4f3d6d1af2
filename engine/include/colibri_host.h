/* Colibri, optional, for hosts with POSIX threads: a small pool for colibri_context_t.parallel. In its own library,
 * libcolibri_host.a; the engine knows nothing of it.
 *
 *     static colibri_pool_t pool;
 *     colibri_pool_start(&pool, 4);
 *     ctx->parallel = colibri_pool_run;
 *     ctx->parallel_user = &pool;
 *     …
 *     colibri_pool_stop(&pool);          // after the last colibri_forward that uses it */
#ifndef COLIBRI_HOST_H
#define COLIBRI_HOST_H

#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLIBRI_POOL_MOST 64 /* threads of a pool, the caller's included */

/* A pool's memory, the caller's; 8-byte aligned; must not move. The content is the pool's own. */
typedef struct colibri_pool {
    uint64_t words[256];
} colibri_pool_t;

/* Start threads - 1 workers; 0 means as many threads as this process may use processors, and no more are ever started.
 * Returns the threads the pool has, the caller's included: 1 where no worker could be started. Workers wait spinning for
 * a few microseconds, then asleep. */
COLIBRI_API int colibri_pool_start(colibri_pool_t *pool, int threads);

/* A colibri_parallel_hook; `user` is the pool. Several contexts may share a pool: while one uses it, the others' work is
 * done by their own threads alone. In a child after fork, which has no workers, the caller does all the work. */
COLIBRI_API void colibri_pool_run(void *user, void (*task)(void *arg, uint32_t index), void *arg, uint32_t count);

/* End the workers and wait for them. */
COLIBRI_API void colibri_pool_stop(colibri_pool_t *pool);

#ifdef __cplusplus
}
#endif

#endif
