/* Runs a model whose experts do not fit into memory, or are cold, under one policy, and prints
 * figures as JSON.
 *
 *     memory MODEL ROWS BATCH POLICY NUMBER     a token a row, BATCH rows a forward; for `switch`
 *                                               see below
 *
 *   faults         the mapping and nothing else
 *   random         and MADV_RANDOM: no read-ahead
 *   announce N     chosen experts are announced to N prefetching threads
 *   ahead N        and with a layer's experts those that the last token chose in the next layer
 *   hot BYTES      the most frequent experts of the calibration locked, as many as fit BYTES; the
 *                  rest by faults
 *   both BYTES     the same, and chosen experts announced to 2 threads
 *   cache BYTES    no mapping: experts are read into memory of our own, the least recently used
 *                  given up beyond BYTES
 *   direct BYTES   the same, past the page cache
 *   drop, dropped N  faults, and announce N, with every expert released before each forward
 *   switch N       a two-layer model: how long layer 2 takes when its expert is in memory, is cold,
 *                  is cold and was announced to N threads when layer 1 began, and the same long
 *                  before; medians of all rows */
#define _GNU_SOURCE
#include "colibri_host.h"

#include "format/format.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 64, MOST = 4096 };

static colibri_map_t map;
static colibri_prefetch_t prefetch;
static const uint8_t *model;
static const clb_header *header;
static const clb_layer *layers;
static const clb_expert *experts;
static colibri_context_t *ctx;

static void require(int condition, const char *what) {
    if (!condition) {
        perror(what);
        exit(1);
    }
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void find_directories(void) {
    header = (const clb_header *)(const void *)model;
    layers = (const clb_layer *)(const void *)(model + header->layers_offset);
    experts = (const clb_expert *)(const void *)(model + header->experts_offset);
    require(header->experts <= MOST && header->layers <= LAYERS, "a model of so many experts");
}

/* --- ahead --- */

static int32_t last[LAYERS][64];
static int last_count[LAYERS];

static void announce_ahead(void *user, int layer, const int32_t *chosen, int tokens, int k) {
    colibri_prefetch_announce(user, layer, chosen, tokens, k);
    const int next = (layer + 1) % (int)header->layers;
    if (last_count[next] > 0) {
        colibri_prefetch_announce(user, next, last[next], 1, last_count[next]);
    }
    last_count[layer] = tokens * k < 64 ? tokens * k : 64;
    memcpy(last[layer], chosen, (size_t)last_count[layer] * sizeof *chosen);
}

/* --- a cache of our own --- */

static int cache_file;
static size_t cache_limit, cache_used;
static uint64_t used_at[MOST], cache_clock, cache_read; /* used_at: 0 where not in the cache */

static size_t pages_of(const clb_expert *e) { return (size_t)(e->bytes + 4095) / 4096 * 4096; }

static void read_at(uint64_t offset, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        uint8_t *to = (uint8_t *)(uintptr_t)model + offset + done;
        const ssize_t n = pread(cache_file, to, bytes - done, (off_t)(offset + done));
        require(n > 0 || done + 4096 > bytes, "read");
        if (n <= 0) {
            return; /* the file ends within its last page */
        }
        done += (size_t)n;
    }
    cache_read += bytes;
}

static void use_cached(void *user, int layer, const int32_t *chosen, int tokens, int k) {
    (void)user;
    for (int i = 0; i < tokens * k; ++i) {
        const uint32_t e = layers[layer].first_expert + (uint32_t)chosen[i];
        if (used_at[e] == 0) {
            while (cache_used + pages_of(&experts[e]) > cache_limit) {
                uint32_t oldest = MOST;
                for (uint32_t n = 0; n < header->experts; ++n) {
                    if (used_at[n] != 0 && (oldest == MOST || used_at[n] < used_at[oldest])) {
                        oldest = n;
                    }
                }
                require(oldest < MOST, "a cache for the experts of one layer");
                madvise((uint8_t *)(uintptr_t)model + experts[oldest].offset,
                        pages_of(&experts[oldest]), MADV_DONTNEED);
                used_at[oldest] = 0;
                cache_used -= pages_of(&experts[oldest]);
            }
            read_at(experts[e].offset, pages_of(&experts[e]));
            cache_used += pages_of(&experts[e]);
            /* The bytes are the process's now; the kernel's own copy would take the room of another
             * expert. */
            posix_fadvise(cache_file, (off_t)experts[e].offset, (off_t)pages_of(&experts[e]),
                          POSIX_FADV_DONTNEED);
        }
        used_at[e] = ++cache_clock;
    }
}

static void open_cached(const char *path, size_t limit, int direct) {
    struct stat info;
    cache_file = open(path, O_RDONLY | O_CLOEXEC);
    require(cache_file >= 0 && fstat(cache_file, &info) == 0, path);
    model = mmap(NULL, ((size_t)info.st_size + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(model != MAP_FAILED, "address space");
    read_at(0, sizeof(clb_header));
    header = (const clb_header *)(const void *)model;
    const uint64_t rest = header->meta_bytes + header->shared_bytes;
    read_at(0, (size_t)rest);
    find_directories();
    if (direct) {
        cache_file = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        require(cache_file >= 0, "O_DIRECT");
    }
    cache_limit = limit;
}

/* --- hot --- */

static int by_frequency(const void *a, const void *b) {
    const float x = experts[*(const int32_t *)a].frequency,
                y = experts[*(const int32_t *)b].frequency;
    return (x < y) - (x > y);
}

static int lock_hot(size_t limit) {
    static int32_t order[MOST];
    for (uint32_t e = 0; e < header->experts; ++e) {
        order[e] = (int32_t)e;
    }
    qsort(order, header->experts, sizeof *order, by_frequency);
    int count = 0;
    for (size_t bytes = 0;
         count < (int)header->experts && bytes + pages_of(&experts[order[count]]) <= limit;
         ++count) {
        bytes += pages_of(&experts[order[count]]);
    }
    colibri_progress_t done;
    require(colibri_map_lock(&map, order, count, &done) == COLIBRI_OK, "lock");
    return count;
}

/* --- switch --- */

enum { WARM, COLD, LAYER_AHEAD, LONG_AHEAD, CASES };

static double second_layer_began;
static int32_t to_announce = -1;

static void watch(void *user, int layer, const int32_t *chosen, int tokens, int k) {
    (void)user;
    (void)chosen;
    (void)tokens;
    (void)k;
    if (layer == 1) {
        second_layer_began = seconds();
    } else if (to_announce >= 0) {
        colibri_prefetch_experts(&prefetch, &to_announce, 1);
    }
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void nap(long milliseconds) {
    nanosleep(
        &(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000},
        NULL);
}

static void measure_switch(const float *x, float *y, int rows, int batch, int threads) {
    static double times[CASES][1000], first[1000];
    ctx->on_route = watch;
    const int32_t expert = (int32_t)layers[1].first_expert;
    const int trials = rows < 1000 ? rows : 1000;
    colibri_forward(ctx, x, y, batch);
    for (int which = 0; which < CASES; ++which) {
        if (which == LAYER_AHEAD) { /* from here on page faults do not read ahead */
            require(colibri_prefetch_start(&prefetch, &map, threads) == COLIBRI_OK, "threads");
        }
        for (int n = 0; n < trials; ++n) {
            if (which != WARM) {
                require(colibri_map_release(&map, &expert, 1, NULL) == COLIBRI_OK, "release");
            }
            if (which == LONG_AHEAD) {
                colibri_prefetch_experts(&prefetch, &expert, 1);
                nap(100);
            }
            /* the prefetcher looks every 50 µs for a tenth of a second after a wake-up call: here
             * is one */
            nap(1);
            to_announce = which == LAYER_AHEAD ? expert : -1;
            const double began = seconds();
            colibri_forward(ctx, x, y, batch);
            times[which][n] = seconds() - second_layer_began;
            first[n] = second_layer_began - began;
        }
    }
    colibri_prefetch_stop(&prefetch);
    for (int which = 0; which < CASES; ++which) {
        qsort(times[which], (size_t)trials, sizeof(double), ascending);
    }
    qsort(first, (size_t)trials, sizeof(double), ascending);
    printf("{\"bytes\": %llu, \"first_layer\": %.9f, \"warm\": %.9f, \"cold\": %.9f, "
           "\"layer_ahead\": %.9f, "
           "\"long_ahead\": %.9f}\n",
           (unsigned long long)experts[expert].bytes, first[trials / 2], times[WARM][trials / 2],
           times[COLD][trials / 2], times[LAYER_AHEAD][trials / 2], times[LONG_AHEAD][trials / 2]);
}

static uint64_t bytes_read(void) {
    unsigned long long bytes = 0;
    char line[128];
    FILE *file = fopen("/proc/self/io", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL &&
           sscanf(line, "read_bytes: %llu", &bytes) != 1) {
    }
    if (file != NULL) {
        fclose(file);
    }
    return bytes;
}

int main(int argc, char **argv) {
    require(argc == 6, "arguments: MODEL ROWS BATCH POLICY NUMBER");
    const char *policy = argv[4];
    const int batch = atoi(argv[3]), threads = atoi(argv[5]);
    const size_t limit = (size_t)strtoull(argv[5], NULL, 10);
    if (strcmp(policy, "cache") == 0 || strcmp(policy, "direct") == 0) {
        open_cached(argv[1], limit, *policy == 'd');
    } else {
        const int error = colibri_map_open(&map, argv[1], 0);
        if (error != COLIBRI_OK) {
            fprintf(stderr, "open: error %d\n", error);
            return 1;
        }
        model = colibri_map_model(&map);
        find_directories();
    }
    const size_t size = (colibri_model_size(model) + 63) / 64 * 64;
    ctx = colibri_init(aligned_alloc(64, size), size, model);
    require(ctx != NULL, "init");

    FILE *file = fopen(argv[2], "rb");
    struct stat info;
    require(file != NULL && fstat(fileno(file), &info) == 0, argv[2]);
    float *x = malloc((size_t)info.st_size),
          *y = calloc((size_t)batch * ctx->output_size, sizeof(float));
    require(x != NULL && y != NULL &&
                fread(x, 1, (size_t)info.st_size, file) == (size_t)info.st_size,
            "rows");
    const int rows = (int)((size_t)info.st_size / sizeof(float) / ctx->input_size);
    if (strcmp(policy, "switch") == 0) {
        measure_switch(x, y, rows / batch, batch, threads);
        return 0;
    }

    static int32_t all[MOST];
    for (uint32_t e = 0; e < header->experts; ++e) {
        all[e] = (int32_t)e;
    }
    int locked = 0;
    const int dropping = strncmp(policy, "drop", 4) == 0;
    const int announcing = strcmp(policy, "announce") == 0 || strcmp(policy, "ahead") == 0 ||
                           strcmp(policy, "dropped") == 0 || strcmp(policy, "both") == 0;
    if (strcmp(policy, "random") == 0) {
        const uint64_t from = (header->meta_bytes + 4095) / 4096 * 4096;
        require(madvise((uint8_t *)(uintptr_t)model + from, header->total_bytes - from,
                        MADV_RANDOM) == 0,
                "random");
    } else if (strcmp(policy, "hot") == 0 || strcmp(policy, "both") == 0) {
        locked = lock_hot(limit);
    }
    if (announcing) {
        require(colibri_prefetch_start(&prefetch, &map, locked > 0 ? 2 : threads) == COLIBRI_OK,
                "threads");
        ctx->on_route = strcmp(policy, "ahead") == 0 ? announce_ahead : colibri_prefetch_announce;
        ctx->user = &prefetch;
    } else if (cache_limit > 0) {
        ctx->on_route = use_cached;
    }
    /* The first quarter fills memory and is not counted. */
    const int forwards = rows / batch, first = forwards / 4;
    uint32_t digest = 0;
    uint64_t read_before = 0;
    double began = 0, lost = 0;
    for (int n = 0; n < forwards; ++n) {
        if (n == first) {
            began = seconds();
            lost = 0;
            read_before = bytes_read();
        }
        if (dropping) {
            const double start = seconds();
            require(colibri_map_release(&map, all, (int)header->experts, NULL) == COLIBRI_OK,
                    "release");
            lost += seconds() - start;
        }
        colibri_forward(ctx, x + (size_t)n * (size_t)batch * ctx->input_size, y, batch);
        for (size_t i = 0; i < (size_t)batch * ctx->output_size; ++i) {
            uint32_t bits;
            memcpy(&bits, &y[i], sizeof bits);
            digest = digest * 31 + bits;
        }
    }
    const double took = seconds() - began - lost;
    const uint64_t read = bytes_read() - read_before;
    colibri_prefetch_counts_t counts = {0};
    if (announcing) {
        colibri_prefetch_count(&prefetch, &counts);
        colibri_prefetch_stop(&prefetch);
    }
    const int measured = (forwards - first) * batch;
    printf("{\"tokens\": %d, \"seconds\": %.6f, \"read\": %llu, \"digest\": %u, \"locked\": %d, "
           "\"hits\": %llu, "
           "\"misses\": %llu, \"late\": %llu, \"fetch\": %.9f}\n",
           measured, took, (unsigned long long)read, digest, locked,
           (unsigned long long)counts.hits, (unsigned long long)counts.misses,
           (unsigned long long)counts.late,
           counts.misses ? (double)counts.nanoseconds * 1e-9 / (double)counts.misses : 0.0);
    return 0;
}
