/* Runs a model from a mapped file, forward after forward, announcing experts to a prefetcher, and
 * writes the last output.
 *
 *     announce MODEL INPUT BATCH THREADS MODE
 *
 *   MODE  plain; strict: the forwards run in a thread where any system call kills it; curious: and
 *         the hook makes one
 *
 * Exit status: 0; 1 where something failed; 2 where the thread did not come back. */
#define _GNU_SOURCE
#include "colibri_host.h"

#include <fcntl.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FORWARDS = 50 };

static colibri_prefetch_t prefetch;
static colibri_context_t *ctx;
static float *x, *y;
static int batch;
static const char *mode;
static atomic_int done;

static void curious(void *user, int layer, const int32_t *experts, int tokens, int k) {
    colibri_prefetch_announce(user, layer, experts, tokens, k);
    syscall(SYS_getppid);
}

static void forwards(void) {
    for (int n = 0; n < FORWARDS; ++n) {
        colibri_forward(ctx, x, y, batch);
    }
    atomic_store(&done, 1);
}

static void *confined(void *unused) {
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) {
        return unused;
    }
    forwards();
    for (;;) {
        syscall(SYS_exit, 0); /* this thread only */
    }
}

int main(int argc, char **argv) {
    static colibri_map_t map;
    if (argc != 6 || colibri_map_open(&map, argv[1], COLIBRI_MAP_WEIGHTS) != COLIBRI_OK) {
        return 1;
    }
    const size_t size = colibri_model_size(colibri_map_model(&map));
    ctx = colibri_init(aligned_alloc(64, (size + 63) / 64 * 64), size, colibri_map_model(&map));
    batch = atoi(argv[3]);
    mode = argv[5];
    const size_t inputs = (size_t)batch * ctx->input_size * 4,
                 outputs = (size_t)batch * ctx->output_size * 4;
    x = malloc(inputs);
    y = malloc(outputs);
    FILE *file = fopen(argv[2], "rb");
    if (x == NULL || y == NULL || file == NULL || fread(x, 1, inputs, file) != inputs) {
        return 1;
    }
    fclose(file);
    int32_t all[1024];
    const int experts = colibri_get_num_experts(colibri_map_model(&map));
    for (int e = 0; e < experts; ++e) {
        all[e] = e;
    }
    if (colibri_map_release(&map, all, experts, NULL) != COLIBRI_OK ||
        colibri_prefetch_start(&prefetch, &map, atoi(argv[4])) != COLIBRI_OK) {
        return 1;
    }
    ctx->user = &prefetch;
    ctx->on_route = strcmp(mode, "curious") == 0 ? curious : colibri_prefetch_announce;
    if (strcmp(mode, "plain") == 0) {
        forwards();
    } else {
        pthread_t thread;
        if (pthread_create(&thread, NULL, confined, NULL) != 0) {
            return 1;
        }
        for (int n = 0; n < 300 && !atomic_load(&done); ++n) {
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        }
        if (!atomic_load(&done)) {
            return 2;
        }
    }
    colibri_prefetch_stop(&prefetch);
    colibri_prefetch_counts_t counts;
    colibri_prefetch_count(&prefetch, &counts);
    if (counts.announced == 0 || colibri_map_status(&map) != COLIBRI_OK ||
        fwrite(y, 1, outputs, stdout) != outputs) {
        return 1;
    }
    colibri_map_close(&map);
    return 0;
}
