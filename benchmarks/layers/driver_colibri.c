/* The Colibri engine as driver.c's backend: model.bin mapped, one context, perhaps a pool of
 * threads. */
#define _GNU_SOURCE
#include "backend.h"
#include "colibri_host.h"
#include "colibri_inspect.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static colibri_context_t *context;
static colibri_pool_t pool;

int backend_open(const char *path, int threads) {
    struct stat info;
    int file = open(path, O_RDONLY);
    if (file < 0 || fstat(file, &info)) {
        perror(path);
        return -1;
    }
    size_t bytes = (size_t)info.st_size;
    const uint8_t *model = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    int error = model == MAP_FAILED ? COLIBRI_ERR_NULL
                                    : colibri_check(model, bytes, COLIBRI_CHECK_STRUCTURE);
    if (!error) {
        size_t size = colibri_model_size(model);
        void *memory = aligned_alloc(64, (size + 63) / 64 * 64);
        context = memory ? colibri_init(memory, size, model) : NULL;
        error = context ? COLIBRI_OK : colibri_diagnose(memory, size, model);
    }
    if (!error && threads > 1) {
        if (colibri_pool_start(&pool, threads) != threads) {
            fprintf(stderr, "%d threads could not be started\n", threads);
            return -1;
        }
        context->parallel = colibri_pool_run;
        context->parallel_user = &pool;
    }
    if (error) fprintf(stderr, "%s: %s\n", path, colibri_error_text(error));
    return error ? -1 : 0;
}

int backend_input_size(void) { return (int)context->input_size; }

int backend_output_size(void) { return (int)context->output_size; }

void backend_forward(const float *x, float *y, int batch) {
    colibri_forward(context, x, y, batch);
    if (context->status) {
        fprintf(stderr, "%s\n", colibri_error_text(context->status));
        exit(1);
    }
}
