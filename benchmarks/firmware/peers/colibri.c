/* Colibri's firmware: generated model.c, the kernels it uses, and the context as the only
 * memory. */
#include "colibri.h"
#include "harness.h"
#include "model.h"

#ifdef WITH_SELFTEST
#include "colibri_inspect.h"
#endif

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
static colibri_context_t *context;

int peer_start(void) {
    context = colibri_init(memory, sizeof memory, colibri_model);
#ifdef WITH_SELFTEST
    float output[COLIBRI_MODEL_OUTPUT_SIZE];
    if (context != NULL && colibri_selftest(context, output) != 0) {
        return 1;
    }
#endif
    return context == NULL;
}

float peer_forecast(const float *features) {
    float output[COLIBRI_MODEL_OUTPUT_SIZE];
    colibri_forward(context, features, output, 1);
    return output[0];
}

#include "harness.c" /* the example's link takes one program */
