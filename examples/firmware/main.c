/* The smart meter's forecast as firmware: the model is read in place from flash, checks itself, and
 * forecasts. Prints what a test or a person compares: the self-test's result, a digest of all
 * outputs, the instructions of one forecast, and how deep the stack grew in one. */
#include "board.h"
#include "colibri.h"
#include "colibri_inspect.h"
#include "model.h"
#include "rows.h" /* const float rows[ROWS][COLIBRI_MODEL_INPUT_SIZE] */

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
static float output[COLIBRI_MODEL_OUTPUT_SIZE];

int main(void) {
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (ctx == NULL) {
        board_print("no context\n");
        return 1;
    }
    const int result = colibri_selftest(ctx, output);
    board_report("selftest", (uint32_t)result);
    uint32_t digest = 2166136261u, most = 0; /* FNV-1a over the outputs' bytes */
    for (int row = 0; row < ROWS; ++row) {
        const uint32_t begin = board_clock();
        colibri_forward(ctx, rows[row], output, 1);
        const uint32_t took = board_clock() - begin;
        most = took > most ? took : most;
        for (unsigned i = 0; i < sizeof output; ++i) {
            digest = (digest ^ ((const uint8_t *)output)[i]) * 16777619u;
        }
    }
    uint8_t *const top = board_stack_pointer();
    board_stack_paint(top);
    colibri_forward(ctx, rows[0], output, 1);
    const uint32_t used = board_stack_used(top);
    board_report("digest", digest);
    board_report("instructions", most);
    board_report("stack", used);
    return result;
}
