/* The certificate runner inside a WebAssembly module that has no library: the host hands over
 * memory. */
#include "colibri_inspect.h"
#include "core/internal.h"

/* The selftest's code with the n-th best kernels; -1 where there are no more, -2 where the model is
 * refused. */
int run(const uint8_t *model, void *memory, size_t size, float *output, uint32_t n) {
    if (clb_kernels_at(n) == NULL) {
        return -1;
    }
    colibri_context_t *ctx = colibri_init(memory, size, model);
    if (ctx == NULL) {
        return -2;
    }
    clb_use_kernels(ctx, clb_kernels_at(n));
    return colibri_selftest(ctx, output);
}
