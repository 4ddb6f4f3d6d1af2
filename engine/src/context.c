/* A context, and a forward around a program: the same for the generic engine and for generated code. */
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

void clb_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size, clb_walk *program)
{
    if (ctx == NULL || ctx->model == NULL) {
        return;
    }
    ctx->status = input == NULL || output == NULL               ? COLIBRI_ERR_NULL
                  : batch_size < 1 || batch_size > ctx->max_batch ? COLIBRI_ERR_BATCH
                                                                  : COLIBRI_OK;
    if (ctx->status != COLIBRI_OK) {
        return;
    }
    clb_model model;
    clb_parse(ctx->model, &model);
    const uint32_t samples = (uint32_t)batch_size;
    const clb_frame frame = {.ops = model.ops, .tensors = model.tensors, .weights = model.bytes, .arena = (uint8_t *)ctx,
                             .input = input, .output = output, .ctx = ctx};
    program(&model, samples, &frame);
    const size_t floats = (size_t)samples * model.header->output_floats;
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
