/* The deepest that colibri_forward grows the stack for each row: it runs on a painted stack of its
 * own.
 *
 *     stack MODEL BYTES ROWS COUNT CONTEXT_BYTES       prints one number a row */
#define _GNU_SOURCE
#include "colibri.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STACK = 1 << 20, PAINT = 0xA5 };

typedef void forward(colibri_context_t *ctx, const float *input, float *output, int batch_size);

typedef struct {
    forward *volatile call;
    colibri_context_t *ctx;
    const float *input;
    float *output;
} job;

static void nothing(colibri_context_t *ctx, const float *input, float *output, int batch_size) {
    (void)ctx, (void)input, (void)output, (void)batch_size;
}

static void *run(void *arg) {
    const job *j = arg;
    j->call(j->ctx, j->input, j->output, 1);
    return NULL;
}

/* Bytes of the stack that a thread which makes this call has used. */
static size_t used(job *j, unsigned char *stack) {
    pthread_attr_t attributes;
    pthread_t thread;
    memset(stack, PAINT, STACK);
    if (pthread_attr_init(&attributes) || pthread_attr_setstack(&attributes, stack, STACK) ||
        pthread_create(&thread, &attributes, run, j) || pthread_join(thread, NULL)) {
        exit(1);
    }
    size_t low = 0;
    while (low < STACK && stack[low] == PAINT) {
        ++low;
    }
    return STACK - low;
}

static void *block(const char *file, size_t size) {
    void *memory = aligned_alloc(64, (size + 63) / 64 * 64);
    FILE *in = file == NULL ? NULL : fopen(file, "rb");
    if (memory == NULL || (file != NULL && (in == NULL || fread(memory, 1, size, in) != size))) {
        exit(1);
    }
    if (in != NULL) {
        fclose(in);
    }
    return memory;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        return 2;
    }
    const uint8_t *model = block(argv[1], strtoull(argv[2], NULL, 10));
    const int rows = atoi(argv[4]);
    const size_t size = strtoull(argv[5], NULL, 10);
    colibri_context_t *ctx = colibri_init(block(NULL, size), size, model);
    if (ctx == NULL) {
        return 3;
    }
    const float *input = block(argv[3], (size_t)rows * ctx->input_size * sizeof(float));
    float *output = block(NULL, ctx->output_size * sizeof(float));
    unsigned char *stack = aligned_alloc(4096, STACK);
    job idle = {nothing, ctx, input, output};
    const size_t base = used(&idle, stack);
    for (int n = 0; n < rows; ++n) {
        job j = {colibri_forward, ctx, input + (size_t)n * ctx->input_size, output};
        printf("%zu\n",
               used(&j, stack) - base + sizeof(void *)); /* idle pushed its return address */
    }
    return 0;
}
