/* What the self-test says of the model linked in and the status of forwards; then, of rows from
 * standard input, the outputs: none where ALONE is defined. */
#include "colibri_inspect.h"
#include "model.h"

#include <stdio.h>

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
static float input[COLIBRI_MODEL_INPUT_SIZE];
static float output[COLIBRI_MODEL_OUTPUT_SIZE];

int main(void) {
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (ctx == NULL) {
        return 1;
    }
    const int result = colibri_selftest(ctx, output);
    colibri_forward(ctx, input, output, 1);
    printf("%d %d\n", result, (int)ctx->status);
#if !defined(ALONE)
    while (ctx->status == COLIBRI_OK && fread(input, sizeof input, 1, stdin) == 1) {
        colibri_forward(ctx, input, output, 1);
        fwrite(output, sizeof output, 1, stdout);
    }
#endif
    return 0;
}
