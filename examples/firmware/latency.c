/* How much a forecast's instructions depend on its input: least and most over pseudo-random inputs,
 * for each expert that the router chose. The work is the same whatever the numbers; what remains
 * are branches of the router and of exp. */
#include "board.h"
#include "colibri.h"
#include "model.h"

enum {
    INPUTS = 1000,
    TIMES = 16 /* a forecast is repeated, because the clock counts in steps of many instructions */
};

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
static float input[COLIBRI_MODEL_INPUT_SIZE], output[COLIBRI_MODEL_OUTPUT_SIZE];

static void note_expert(void *user, int layer, const int32_t *experts, int tokens, int k) {
    (void)layer, (void)tokens, (void)k;
    *(int32_t *)user = experts[0];
}

int main(void) {
    static uint32_t least[COLIBRI_MODEL_EXPERTS], most[COLIBRI_MODEL_EXPERTS];
    int32_t expert = 0;
    uint32_t seed = 1;
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (ctx == NULL) {
        board_print("no context\n");
        return 1;
    }
    for (int n = 0; n < INPUTS; ++n) {
        for (unsigned i = 0; i < COLIBRI_MODEL_INPUT_SIZE; ++i) {
            seed = seed * 1664525u + 1013904223u;
            input[i] = (float)(int32_t)seed * 0x1p-30f; /* -2 … 2 */
        }
        ctx->on_route = note_expert;
        ctx->user = &expert;
        colibri_forward(ctx, input, output, 1);
        ctx->on_route = NULL;
        const uint32_t begin = board_clock();
        for (int time = 0; time < TIMES; ++time) {
            colibri_forward(ctx, input, output, 1);
        }
        const uint32_t took = (board_clock() - begin) / TIMES;
        least[expert] = least[expert] == 0 || took < least[expert] ? took : least[expert];
        most[expert] = took > most[expert] ? took : most[expert];
    }
    for (unsigned e = 0; e < COLIBRI_MODEL_EXPERTS; ++e) {
        board_report("least", least[e]);
        board_report("most", most[e]);
    }
    return 0;
}
