/* The certificate: golden inputs, the router's choices and a digest of the outputs, recomputed on
 * this machine. Small enough for a power-on self-test. */
#include "colibri_inspect.h"

#include "../core/internal.h"

typedef struct {
    const uint16_t *next; /* the certificate's choices still to come */
    uint32_t left;
    int equal;
} expected_routes;

static void compare_routes(void *user, int layer, const int32_t *experts, int tokens, int k) {
    expected_routes *expected = user;
    (void)layer;
    for (int i = 0; i < tokens * k; ++i) {
        if (expected->left == 0 || (uint16_t)experts[i] != *expected->next) {
            expected->equal = 0;
            return;
        }
        ++expected->next;
        --expected->left;
    }
}

int colibri_selftest(colibri_context_t *ctx, float *output) {
    if (ctx == NULL || ctx->model == NULL || output == NULL) return COLIBRI_ERR_NULL;
    if (ctx->seal != clb_seal(ctx)) return COLIBRI_ERR_DAMAGED;
    if (ctx->busy) return COLIBRI_ERR_BUSY;
    if (CLB_USED_TEXT && (ctx->position | ctx->source) != 0) return COLIBRI_ERR_UNFINISHED;
    const clb_header *header = clb_at(ctx->model, 0);
    colibri_route_hook *const hook = ctx->on_route;
    void *const user = ctx->user;
    int result = header->golden_rows > 0 ? COLIBRI_OK : COLIBRI_ERR_SELFTEST;
    for (uint32_t n = 0; n < header->golden_rows && result == COLIBRI_OK; ++n) {
        const uint8_t *row = ctx->model + CLB_GOLDEN_AT(header) + (size_t)n * header->golden_bytes;
        const clb_golden *golden = clb_at(row, 0);
        const float *input = clb_at(row, sizeof *golden);
        const void *choices = input + header->input_floats;
        expected_routes expected = {choices, golden->choices, 1};
        ctx->on_route = compare_routes;
        ctx->user = &expected;
        ctx->source = CLB_USED_TEXT ? 0 : ctx->source;
        /* A row's source text is the row itself. */
        for (int run = !CLB_USED_TEXT || header->encoder_ops == 0; run < 2; ++run) {
            colibri_forward(ctx, input, output, 1);
        }
        const uint64_t bytes = (uint64_t)header->output_floats * sizeof(float);
        if (ctx->status != COLIBRI_OK) {
            result = ctx->status;
        } else if (!expected.equal || expected.left != 0 ||
                   clb_crc32(0, output, bytes) != golden->output_crc) {
            result = COLIBRI_ERR_SELFTEST;
        }
    }
    ctx->position = CLB_USED_TEXT ? 0 : ctx->position;
    ctx->source = CLB_USED_TEXT ? 0 : ctx->source;
    ctx->on_route = hook;
    ctx->user = user;
    return result;
}
