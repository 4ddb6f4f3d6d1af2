/* The certificate runner inside a WebAssembly module that has no library: the host hands over memory. */
#include "colibri_inspect.h"
#include "internal.h"

void *memcpy(void *restrict to, const void *restrict from, size_t n)
{
    return __builtin_memcpy(to, from, n); /* one instruction, memory.copy */
}

void *memmove(void *to, const void *from, size_t n)
{
    return __builtin_memmove(to, from, n);
}

void *memset(void *to, int value, size_t n)
{
    return __builtin_memset(to, value, n);
}

int memcmp(const void *a, const void *b, size_t n)
{
    const uint8_t *x = a, *y = b;
    for (size_t i = 0; i < n; ++i) {
        if (x[i] != y[i]) {
            return x[i] < y[i] ? -1 : 1;
        }
    }
    return 0;
}

/* The selftest's code with the n-th best kernels; -1 where there are no more, -2 where the model is refused. */
int run(const uint8_t *model, void *memory, size_t size, float *output, uint32_t n)
{
    if (clb_kernels_at(n) == NULL) {
        return -1;
    }
    colibri_context_t *ctx = colibri_init(memory, size, model);
    if (ctx == NULL) {
        return -2;
    }
    ctx->kernels = clb_kernels_at(n);
    return colibri_selftest(ctx, output);
}
