/* Decodes with a mapped language model under one policy, and prints figures as JSON.
 *
 *     larger MODEL POOL FILL TOKENS THREADS     THREADS prefetching; 0: page faults and nothing
 *                                               else
 *
 * POOL threads compute. FILL tokens fill memory and are not counted, TOKENS are; ids are drawn,
 * always the same. */
#define _GNU_SOURCE
#include "colibri_host.h"
#include "colibri_lm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static colibri_map_t map;
static colibri_pool_t pool;
static colibri_prefetch_t prefetch;

static void require(int condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "larger: %s failed\n", what);
        exit(1);
    }
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A figure of this process: /proc/self/io's read_bytes, or /proc/self/status's VmRSS in kB. */
static unsigned long long figure(const char *path, const char *format) {
    unsigned long long value = 0;
    char line[256];
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL &&
           sscanf(line, format, &value) != 1) {
    }
    if (file != NULL) {
        fclose(file);
    }
    return value;
}

int main(int argc, char **argv) {
    require(argc == 6, "arguments: MODEL POOL FILL TOKENS THREADS");
    const int fill = atoi(argv[3]), tokens = atoi(argv[4]), threads = atoi(argv[5]);
    require(colibri_map_open(&map, argv[1], 0) == COLIBRI_OK, "map");
    const uint8_t *model = colibri_map_model(&map);
    const size_t size = (colibri_model_size(model) + 63) / 64 * 64;
    colibri_context_t *ctx = colibri_init(aligned_alloc(64, size), size, model);
    require(ctx != NULL, "init");
    colibri_pool_start(&pool, atoi(argv[2]));
    ctx->parallel = colibri_pool_run;
    ctx->parallel_user = &pool;
    if (threads > 0) {
        require(colibri_prefetch_start(&prefetch, &map, threads) == COLIBRI_OK, "prefetch");
        ctx->on_route = colibri_prefetch_announce;
        ctx->user = &prefetch;
    }
    float *logits = malloc(ctx->output_size * sizeof *logits);
    require(logits != NULL, "memory");
    uint64_t random = 1;
    uint32_t digest = 0;
    unsigned long long read = 0;
    double began = seconds(), first = 0;
    for (int n = 0; n < fill + tokens; ++n) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const int32_t token = (int32_t)((random >> 33) % ctx->output_size);
        if (n == fill) {
            began = seconds();
            read = figure("/proc/self/io", "read_bytes: %llu");
        }
        require(colibri_lm_evaluate(ctx, &token, 1, logits) == COLIBRI_OK, "evaluate");
        if (n == 0) {
            first = seconds() - began;
        }
        for (size_t i = 0; i < ctx->output_size; ++i) {
            uint32_t bits;
            memcpy(&bits, &logits[i], sizeof bits);
            digest = digest * 31 + bits;
        }
    }
    const double took = seconds() - began;
    read = figure("/proc/self/io", "read_bytes: %llu") - read;
    require(colibri_map_status(&map) == COLIBRI_OK, "map status");
    colibri_prefetch_counts_t counts = {0};
    if (threads > 0) {
        colibri_prefetch_count(&prefetch, &counts);
        colibri_prefetch_stop(&prefetch);
    }
    printf("{\"tokens\": %d, \"seconds\": %.6f, \"first\": %.6f, \"read\": %llu, \"digest\": %u, "
           "\"resident\": %llu, "
           "\"hits\": %llu, \"misses\": %llu, \"dropped\": %llu, \"late\": %llu}\n",
           tokens, took, first, read, digest, figure("/proc/self/status", "VmRSS: %llu") << 10,
           (unsigned long long)counts.hits, (unsigned long long)counts.misses,
           (unsigned long long)counts.dropped, (unsigned long long)counts.late);
    return 0;
}
