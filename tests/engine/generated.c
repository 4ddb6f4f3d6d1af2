/* Floats from standard input through the model linked in, in batches: outputs to standard output.
 *
 *     generated ROWS [TAIL]
 *
 *   TAIL   rows of each batch that are wanted, the last ones; all without it */
#include "colibri.h"
#include "colibri_inspect.h"
#include "model.h"

#include <stdio.h>
#include <stdlib.h>

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];

int main(int argc, char **argv) {
    static float input[COLIBRI_MODEL_MAX_BATCH * COLIBRI_MODEL_INPUT_SIZE];
    static float output[COLIBRI_MODEL_MAX_BATCH * COLIBRI_MODEL_OUTPUT_SIZE];
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (argc < 2 || ctx == NULL || colibri_selftest(ctx, output) != COLIBRI_OK ||
        colibri_model_size(colibri_model) != sizeof memory ||
        colibri_get_num_experts(colibri_model) != COLIBRI_MODEL_EXPERTS) {
        return 1;
    }
    ctx->tail = argc > 2 ? atoi(argv[2]) : 0;
    const unsigned tail = (unsigned)ctx->tail;
    for (unsigned left = (unsigned)atoi(argv[1]), batch; left > 0 && ctx->status == COLIBRI_OK;
         left -= batch) {
        batch = left < COLIBRI_MODEL_MAX_BATCH ? left : COLIBRI_MODEL_MAX_BATCH;
        if (fread(input, sizeof(float) * COLIBRI_MODEL_INPUT_SIZE, batch, stdin) != batch) {
            return 2;
        }
        const unsigned wanted = tail > 0 && tail < batch ? tail : batch;
        float *behind = wanted < batch ? output + wanted * COLIBRI_MODEL_OUTPUT_SIZE : NULL;
        if (behind != NULL) {
            *behind = 7.0f;
        }
        colibri_forward(ctx, input, output, (int)batch);
        if (behind != NULL && *behind != 7.0f) {
            return 3;
        }
        fwrite(output, sizeof(float) * COLIBRI_MODEL_OUTPUT_SIZE, wanted, stdout);
    }
    static _Alignas(64) uint8_t other[sizeof(uint64_t) * 64]; /* no model, and not this one */
    return ctx->status != COLIBRI_OK || colibri_init(memory, sizeof memory, other) != NULL;
}
