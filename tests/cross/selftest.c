/* Runs the parity certificate of every model linked in, with all kernels this processor has and with its generated code: a
 * line each, then DONE. */
#include "colibri_inspect.h"
#include "internal.h"
#include "selftest.h"

#include <stdio.h>

static _Alignas(64) uint8_t memory[MEMORY_BYTES];
static float output[OUTPUT_FLOATS];

int main(void)
{
    for (int i = 0; i < model_count; ++i) {
        const model *m = &models[i];
        colibri_context_t *ctx = colibri_init(memory, sizeof memory, m->bytes);
        if (ctx == NULL) {
            printf("%s - %d\n", m->name, colibri_diagnose(memory, sizeof memory, m->bytes));
            continue;
        }
        for (uint32_t n = 0; clb_kernels_at(n) != NULL; ++n) {
            clb_use_kernels(ctx, clb_kernels_at(n));
            printf("%s %s %d\n", m->name, clb_kernels_at(n)->name, colibri_selftest(ctx, output));
        }
        if (m->init != NULL) {
            ctx = m->init(memory, sizeof memory, m->bytes);
            printf("%s generated %d\n", m->name, ctx == NULL ? -1 : m->selftest(ctx, output));
        }
    }
    printf("DONE\n");
    return 0;
}
