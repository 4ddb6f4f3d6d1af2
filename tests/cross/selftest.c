/* Runs the parity certificate of every model linked in, with all kernels this processor has: a line each, then DONE. */
#include "colibri_inspect.h"
#include "internal.h"

#include <stdio.h>

typedef struct {
    const char *name;
    const uint8_t *bytes;
} model;

extern const model models[];
extern const int model_count;

static _Alignas(64) uint8_t memory[MEMORY_BYTES];
static float output[OUTPUT_FLOATS];

int main(void)
{
    for (int i = 0; i < model_count; ++i) {
        colibri_context_t *ctx = colibri_init(memory, sizeof memory, models[i].bytes);
        if (ctx == NULL) {
            printf("%s - %d\n", models[i].name, colibri_diagnose(memory, sizeof memory, models[i].bytes));
            continue;
        }
        for (uint32_t n = 0; clb_kernels_at(n) != NULL; ++n) {
            ctx->kernels = clb_kernels_at(n);
            printf("%s %s %d\n", models[i].name, clb_kernels_at(n)->name, colibri_selftest(ctx, output));
        }
    }
    printf("DONE\n");
    return 0;
}
