/* The smart meter's forecast in C: reads rows of features, writes one line a row: forecast, expert.
 *
 *     ./forecast features.f32 forecast.csv
 *
 * On a device `memory` is static and the model stays in flash; nothing here but files and the clock
 * needs an operating system. */
#include "colibri.h"
#include "model.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];

static void remember_expert(void *user, int layer, const int32_t *experts, int tokens, int k) {
    (void)layer, (void)tokens, (void)k;
    *(int *)user = (int)experts[0];
}

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    enum { ROUNDS = 101 };
    static double times[ROUNDS];
    float input[COLIBRI_MODEL_INPUT_SIZE], output[COLIBRI_MODEL_OUTPUT_SIZE];
    int expert = -1;
    long rows = 0;

    FILE *in = argc == 3 ? fopen(argv[1], "rb") : NULL,
         *out = argc == 3 ? fopen(argv[2], "w") : NULL;
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (in == NULL || out == NULL || ctx == NULL) {
        fprintf(stderr, ctx == NULL ? "the model does not load\n"
                                    : "usage: forecast features.f32 forecast.csv\n");
        return EXIT_FAILURE;
    }
    ctx->on_route = remember_expert;
    ctx->user = &expert;
    while (fread(input, sizeof input, 1, in) == 1) {
        colibri_forward(ctx, input, output, 1);
        fprintf(out, "%.9g,%d\n", (double)output[0], expert);
        ++rows;
    }
    for (int round = 0; round < ROUNDS; ++round) {
        enum { CALLS = 200 };
        const double start = seconds();
        for (int call = 0; call < CALLS; ++call) {
            colibri_forward(ctx, input, output, 1);
        }
        times[round] = (seconds() - start) / CALLS;
    }
    qsort(times, ROUNDS, sizeof times[0], by_value);
    printf("{\"rows\": %ld, \"context_bytes\": %zu, \"experts\": %d, \"microseconds\": %.3f}\n",
           rows, sizeof memory, colibri_get_num_experts(colibri_model), times[ROUNDS / 2] * 1e6);
    colibri_free(ctx);
    return fclose(in) == 0 && fclose(out) == 0 && rows > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
