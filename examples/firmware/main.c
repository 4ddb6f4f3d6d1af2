/* The smart meter's forecast as firmware: the model is read in place from flash, checks itself, and forecasts. Prints what
 * a test or a person compares: the self-test's result, a digest of all outputs, and the instructions of one forecast. */
#include "board.h"
#include "colibri.h"
#include "colibri_inspect.h"
#include "model.h"
#include "rows.h" /* const float rows[ROWS][COLIBRI_MODEL_INPUT_SIZE] */

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
static float output[COLIBRI_MODEL_OUTPUT_SIZE];

static void print(const char *name, uint32_t value)
{
    char text[12] = "0x00000000\n";
    for (int i = 0; i < 8; ++i) {
        text[9 - i] = "0123456789abcdef"[value >> 4 * i & 15];
    }
    board_print(name);
    board_print(" ");
    board_print(text);
}

int main(void)
{
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    if (ctx == NULL) {
        board_print("no context\n");
        return 1;
    }
    const int result = colibri_selftest(ctx, output);
    print("selftest", (uint32_t)result);
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
    print("digest", digest);
    print("instructions", most);
    return result;
}
