/* A row inside a packed frame of a sensor, two bytes from where a float may lie; what a forecast
 * says, and what it leaves. */
#include "board.h"
#include "colibri.h"
#include "model.h"

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
static _Alignas(8) uint8_t frame[2 + sizeof(float) * COLIBRI_MODEL_INPUT_SIZE];
static float input[COLIBRI_MODEL_INPUT_SIZE], output[COLIBRI_MODEL_OUTPUT_SIZE + 1];

int main(void) {
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (ctx == NULL) {
        return 1;
    }
    output[0] = 7.0f;
    for (unsigned at = 1; at < 4; ++at) {
        colibri_forward(ctx, (const float *)(const void *)(frame + (at & 2)), output, 1);
        board_report(at & 2 ? "input" : "aligned", (uint32_t)ctx->status);
        output[0] = 7.0f;
        colibri_forward(ctx, input, (float *)(void *)((uint8_t *)output + at), 1);
        board_report("output", (uint32_t)ctx->status);
    }
    return output[0] != 7.0f;
}
