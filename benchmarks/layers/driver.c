/* Runs a backend in a loop and times it, asked line by line on stdin:
 *
 *     driver MODEL THREADS [INPUTS]        with INPUTS: run its first row once and say "ready"
 *                                          (start-up is timed so)
 *     load BATCH COUNT PATH                COUNT inputs of BATCH raw float32 rows            ->
 *                                          "ok"
 *     time CALLS FIRST                     CALLS forwards, inputs in turn from FIRST on      ->
 *                                          nanoseconds in all
 *     write PATH                           the outputs of all inputs as raw float32          ->
 *                                          "ok"
 *     memory                               bytes: resident at the start, and at the peak, after all
 *                                          inputs -> two numbers */
#define _POSIX_C_SOURCE 200809L
#include "backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static long long status_bytes(const char *field) {
    char line[256];
    long long kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0) kib = atoll(line + strlen(field) + 1);
    if (file) fclose(file);
    return kib * 1024;
}

static float *read_floats(const char *path, size_t count) {
    float *data = aligned_alloc(64, (count * sizeof *data + 63) / 64 * 64);
    FILE *file = fopen(path, "rb");
    if (!data || !file || fread(data, sizeof *data, count, file) != count) {
        fprintf(stderr, "%s has not %zu floats\n", path, count);
        exit(1);
    }
    fclose(file);
    return data;
}

int main(int argc, char **argv) {
    long long resident = status_bytes("VmRSS:");
    if (argc < 3 || backend_open(argv[1], atoi(argv[2]))) return 1;
    size_t in = (size_t)backend_input_size(), out = (size_t)backend_output_size();
    float *x = NULL, *y = NULL;
    int batch = 0, count = 0;
    char line[4096], path[4000];

    if (argc > 3) {
        struct stat info;
        batch = 1;
        count = stat(argv[3], &info) ? 0 : (int)((size_t)info.st_size / sizeof *x / in);
        x = read_floats(argv[3], (size_t)count * in);
        y = malloc(out * sizeof *y);
        backend_forward(x, y, 1);
        printf("ready\n");
        fflush(stdout);
    }
    while (fgets(line, sizeof line, stdin)) {
        long long calls, first;
        if (sscanf(line, "load %d %d %3999[^\n]", &batch, &count, path) == 3) {
            free(x);
            free(y);
            x = read_floats(path, (size_t)count * (size_t)batch * in);
            y = malloc((size_t)batch * out * sizeof *y);
            printf("ok\n");
        } else if (sscanf(line, "time %lld %lld", &calls, &first) == 2 && x && count > 0) {
            long long start = now();
            for (long long n = first; n < first + calls; n++)
                backend_forward(x + (size_t)(n % count) * (size_t)batch * in, y, batch);
            printf("%lld\n", now() - start);
        } else if (sscanf(line, "write %3999[^\n]", path) == 1 && x) {
            FILE *file = fopen(path, "wb");
            for (int n = 0; file && n < count; n++) {
                backend_forward(x + (size_t)n * (size_t)batch * in, y, batch);
                fwrite(y, sizeof *y, (size_t)batch * out, file);
            }
            if (!file || fclose(file)) return 1;
            printf("ok\n");
        } else if (strcmp(line, "memory\n") == 0) {
            for (int n = 0; n < count; n++)
                backend_forward(x + (size_t)n * (size_t)batch * in, y, batch);
            printf("%lld %lld\n", resident, status_bytes("VmHWM:"));
        } else {
            fprintf(stderr, "not understood: %s", line);
            return 1;
        }
        fflush(stdout);
    }
    return 0;
}
