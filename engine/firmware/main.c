/* The model as firmware: on power-up it proves that it answers as it did where it was exported;
 * then it is called. */
#include "board.h"
#include "colibri.h"
#include "colibri_inspect.h"
#include "model.h"

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
/* One row of each; model.h says what is where. */
static float input[COLIBRI_MODEL_INPUT_SIZE], output[COLIBRI_MODEL_OUTPUT_SIZE];

int main(void) {
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (ctx == NULL) {
        board_print("no context\n");
        return 1;
    }
    const int result = colibri_selftest(ctx, output); /* 0, or an enum colibri_error */
    board_report("selftest", (uint32_t)result);

    uint8_t *const top = board_stack_pointer();
    board_stack_paint(top);
    colibri_forward(ctx, input, output, 1); /* your inputs here, instead of zeros */
    const uint32_t used = board_stack_used(top);
    board_report("stack", used);
    return result;
}
