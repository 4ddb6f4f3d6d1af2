/* A context, and what every forward begins and ends with; the same for the generic engine and for generated code. */
#include "internal.h"

colibri_context_t *clb_open(void *mem, size_t mem_size, const clb_model *model, const clb_kernels *kernels)
{
    if (clb_check_memory(mem, mem_size, model) != COLIBRI_OK) {
        return NULL;
    }
    colibri_context_t *ctx = mem;
    memset(ctx, 0, CLB_HEAD_BYTES);
    ctx->status = COLIBRI_OK;
    ctx->max_batch = (int32_t)model->header->max_batch;
    ctx->input_size = model->header->input_floats;
    ctx->output_size = model->header->output_floats;
    ctx->model = model->bytes;
    ctx->kernels = kernels;
    return ctx;
}

int clb_accept(colibri_context_t *ctx, const float *input, const float *output, int batch_size)
{
    if (ctx == NULL || ctx->model == NULL) {
        return 0;
    }
    ctx->status = input == NULL || output == NULL               ? COLIBRI_ERR_NULL
                  : batch_size < 1 || batch_size > ctx->max_batch ? COLIBRI_ERR_BATCH
                                                                  : COLIBRI_OK;
    return ctx->status == COLIBRI_OK;
}

void clb_settle(float *output, size_t floats)
{
    for (size_t i = 0; i < floats; ++i) {
        output[i] = output[i] == output[i] ? output[i] : clb_nan();
    }
}

void colibri_free(colibri_context_t *ctx)
{
    if (ctx != NULL) {
        ctx->model = NULL;
    }
}
