/* Runs the parity certificate of every model linked in, with all kernels this processor has and
 * with its generated code, under every control word: a line each, then DONE. */
#include "colibri_inspect.h"
#include "core/internal.h"
#include "selftest.h"

#include <stdio.h>

static _Alignas(64) uint8_t memory[MEMORY_BYTES];
static float output[OUTPUT_FLOATS];

/* Every control word a caller may have: flushing, default NaNs and each rounding mode where there
 * is one. */
static const uint32_t words[] = {
    CLB_STANDARD,
#if defined(__SSE__)
    0x9FC0,       0x5F80, 0x3F80, 0x7F80, 0x0000,
#elif defined(__ARM_FP)
    1u << 24,     1u << 25, 1u << 26, 1u << 22, 2u << 22, 3u << 22,
#elif defined(__riscv_flen)
    1,
    2,
    3,
    4,
#endif
};

/* The first result that is not COLIBRI_OK, over all words; -2 where a word is not given back. */
static int in_every_word(int (*selftest)(colibri_context_t *ctx, float *output),
                         colibri_context_t *ctx) {
    const clb_control found = clb_read_control();
    const clb_control others =
        found & ~(clb_control)CLB_CONTROL; /* Helium's vector length is none of ours */
    int first = COLIBRI_OK;
    for (unsigned n = 0; n < sizeof words / sizeof *words; ++n) {
        clb_write_control(others | words[n]);
        const int result = selftest(ctx, output);
        const clb_control after = clb_read_control() & CLB_CONTROL;
        clb_write_control(found);
        first = first != COLIBRI_OK ? first : after != (words[n] & CLB_CONTROL) ? -2 : result;
    }
    return first;
}

int main(void) {
    for (int i = 0; i < model_count; ++i) {
        const model *m = &models[i];
        colibri_context_t *ctx = colibri_init(memory, sizeof memory, m->bytes);
        if (ctx == NULL) {
            printf("%s - %d\n", m->name, colibri_diagnose(memory, sizeof memory, m->bytes));
            continue;
        }
        for (uint32_t n = 0; clb_kernels_at(n) != NULL; ++n) {
            clb_use_kernels(ctx, clb_kernels_at(n));
            printf("%s %s %d\n", m->name, clb_kernels_at(n)->name,
                   in_every_word(colibri_selftest, ctx));
        }
        if (m->init != NULL) {
            ctx = m->init(memory, sizeof memory, m->flash);
            printf("%s generated %d\n", m->name,
                   ctx == NULL ? -1 : in_every_word(m->selftest, ctx));
        }
    }
    printf("DONE\n");
    return 0;
}
