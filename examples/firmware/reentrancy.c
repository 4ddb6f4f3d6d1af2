/* Several users of one model: two tasks forecast in turn, each in a context of its own, while a
 * timer interrupts them at random points and forecasts too, in a third context. Whatever they
 * interrupt, all must answer as they do alone. */
#include "board.h"
#include "colibri.h"
#include "model.h"
#include "rows.h"

enum { TASKS = 2, USERS = TASKS + 1, ROUNDS = 16 };

static _Alignas(64) uint8_t memory[USERS][(COLIBRI_MODEL_CONTEXT_BYTES + 63) / 64 * 64];
static colibri_context_t *context[USERS];
static float alone[ROWS][COLIBRI_MODEL_OUTPUT_SIZE];
static volatile uint32_t interrupts, wrong;

/* Forecast a row in a user's context, and compare every bit with what it was when nobody else
 * ran. */
static void forecast(int user, int row) {
    float output[COLIBRI_MODEL_OUTPUT_SIZE];
    colibri_forward(context[user], rows[row], output, 1);
    if (__builtin_memcmp(output, alone[row], sizeof output) != 0) {
        ++wrong;
    }
}

static void timer(void) {
    forecast(TASKS, (int)(interrupts * 7 % ROWS));
    ++interrupts;
}

int main(void) {
    for (int user = 0; user < USERS; ++user) {
        context[user] = colibri_init(memory[user], COLIBRI_MODEL_CONTEXT_BYTES, colibri_model);
    }
    for (int row = 0; row < ROWS; ++row) {
        colibri_forward(context[0], rows[row], alone[row], 1);
    }
    board_interrupt(timer);
    for (int n = 0; n < ROUNDS * ROWS; ++n) {
        forecast(n % TASKS, n % ROWS);
    }
    board_interrupt(0);
    board_print(wrong != 0          ? "wrong\n"
                : interrupts < ROWS ? "too few interrupts\n"
                                    : "reentrant\n");
    return wrong != 0 || interrupts < ROWS;
}
