/* Floats from standard input through the model linked in, in one batch: outputs to standard output. */
#include "colibri.h"
#include "colibri_inspect.h"
#include "model.h"

#include <stdio.h>
#include <stdlib.h>

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];

int main(int argc, char **argv)
{
    static float input[COLIBRI_MODEL_MAX_BATCH * COLIBRI_MODEL_INPUT_SIZE];
    static float output[COLIBRI_MODEL_MAX_BATCH * COLIBRI_MODEL_OUTPUT_SIZE];
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (argc != 2 || ctx == NULL || colibri_selftest(ctx, output) != COLIBRI_OK ||
        colibri_model_size(colibri_model) != sizeof memory ||
        colibri_get_num_experts(colibri_model) != COLIBRI_MODEL_EXPERTS) {
        return 1;
    }
    const int batch = atoi(argv[1]);
    if (fread(input, sizeof(float), sizeof input / sizeof *input, stdin) != (size_t)batch * COLIBRI_MODEL_INPUT_SIZE) {
        return 2;
    }
    colibri_forward(ctx, input, output, batch);
    fwrite(output, sizeof(float), (size_t)batch * COLIBRI_MODEL_OUTPUT_SIZE, stdout);
    static _Alignas(64) uint8_t other[sizeof(uint64_t) * 64]; /* no model, and not this one */
    return ctx->status != COLIBRI_OK || colibri_init(memory, sizeof memory, other) != NULL;
}
