/* colibri_inspect.h: checks, the certificate's self-test, and errors in words. */
#include "colibri_inspect.h"

#include "internal.h"

#include "error_text.h"

int colibri_check(const uint8_t *model_bin, size_t size, enum colibri_depth depth)
{
    clb_model m;
    const int error = clb_validate(model_bin, size, &m);
    if (error != COLIBRI_OK || depth == COLIBRI_CHECK_STRUCTURE) {
        return error;
    }
    if (clb_crc32(model_bin + m.header->meta_bytes, m.header->shared_bytes) != m.header->shared_crc) {
        return COLIBRI_ERR_CHECKSUM;
    }
    for (uint32_t n = 0; n < m.header->experts; ++n) {
        if (clb_crc32(model_bin + m.experts[n].offset, m.experts[n].bytes) != m.experts[n].crc) {
            return COLIBRI_ERR_CHECKSUM;
        }
    }
    return COLIBRI_OK;
}

int colibri_diagnose(const void *mem, size_t mem_size, const uint8_t *model_bin)
{
    clb_model m;
    const int error = clb_validate(model_bin, UINT64_MAX, &m);
    return error != COLIBRI_OK ? error : clb_check_memory(mem, mem_size, &m);
}

typedef struct {
    const uint16_t *next; /* the certificate's choices still to come */
    uint32_t left;
    int equal;
} expected_routes;

static void compare_routes(void *user, int layer, const int32_t *experts, int tokens, int k)
{
    expected_routes *expected = user;
    (void)layer;
    for (int i = 0; i < tokens * k; ++i) {
        if (expected->left == 0 || experts[i] != *expected->next) {
            expected->equal = 0;
            return;
        }
        ++expected->next;
        --expected->left;
    }
}

int colibri_selftest(colibri_context_t *ctx, float *output)
{
    if (ctx == NULL || ctx->model == NULL || output == NULL) {
        return COLIBRI_ERR_NULL;
    }
    clb_model m;
    clb_parse(ctx->model, &m);
    colibri_route_hook *const hook = ctx->on_route;
    void *const user = ctx->user;
    int result = m.header->golden_rows > 0 ? COLIBRI_OK : COLIBRI_ERR_SELFTEST;
    for (uint32_t n = 0; n < m.header->golden_rows && result == COLIBRI_OK; ++n) {
        const uint8_t *row = m.bytes + m.header->golden_offset + (size_t)n * m.header->golden_bytes;
        const clb_golden *golden = (const clb_golden *)(const void *)row;
        const float *input = (const float *)(const void *)(golden + 1);
        expected_routes expected = {(const uint16_t *)(const void *)(input + m.header->input_floats), golden->choices, 1};
        ctx->on_route = compare_routes;
        ctx->user = &expected;
        colibri_forward(ctx, input, output, 1);
        if (!expected.equal || expected.left != 0 ||
            clb_crc32(output, (uint64_t)m.header->output_floats * sizeof(float)) != golden->output_crc) {
            result = COLIBRI_ERR_SELFTEST;
        }
    }
    ctx->on_route = hook;
    ctx->user = user;
    return result;
}

static int known(int error)
{
    return error >= 0 && error < (int)(sizeof error_table / sizeof error_table[0]);
}

const char *colibri_error_name(int error)
{
    return known(error) ? error_table[error][0] : "COLIBRI_ERR_UNKNOWN";
}

const char *colibri_error_text(int error)
{
    return known(error) ? error_table[error][1] : "not an error code of this engine";
}

const char *colibri_version(void)
{
    return COLIBRI_VERSION;
}
