/* The generic engine: the walk over a model's program. */
#include "internal.h"

static clb_kernel *const kernels[CLB_OP_COUNT] = {
    [CLB_OP_QUANTIZE] = clb_quantize, [CLB_OP_MAP1] = clb_map,       [CLB_OP_MAP2] = clb_map,
    [CLB_OP_SOFTMAX] = clb_softmax,   [CLB_OP_LAYERNORM] = clb_norm, [CLB_OP_RMSNORM] = clb_norm,
    [CLB_OP_REDUCE] = clb_reduce,
};
static clb_sequence *const sequence[CLB_OP_COUNT] = {
    [CLB_OP_EMBED] = clb_embed,         [CLB_OP_ROPE] = clb_rope,   [CLB_OP_CACHE] = clb_cache,
    [CLB_OP_ATTENTION] = clb_attention, [CLB_OP_DELAY] = clb_delay,
};

/* An operation, or a loop and all operations in it; returns how many these are. */
static uint32_t run_op(const clb_op *op, uint32_t first, uint32_t samples, clb_frame *frame)
{
    const uint32_t loop = op->code == CLB_OP_LOOP, steps = loop ? op->dims[0] : 1, body = loop ? op->dims[1] : 1;
    for (uint32_t step = 0; step < steps; ++step) {
        frame->step = loop && op->dims[2] != 0 ? steps - 1 - step : step;
        for (const clb_op *each = op + loop; each < op + loop + body; ++each) {
            if (each->code == CLB_OP_LINEAR || each->code == CLB_OP_LINEAR_Q) {
                clb_run_linear(each, first, samples, frame);
            } else {
                clb_run_rows(kernels[each->code], each, first, samples, frame);
            }
        }
    }
    frame->step = 0;
    return loop + body;
}

static void run_expert(uint32_t number, uint32_t count, clb_frame *frame)
{
    const clb_expert *expert = &frame->model->experts[number];
    frame->weights = frame->model->bytes + expert->offset;
    for (uint32_t n = 0; n < expert->ops;) {
        n += run_op(&frame->model->ops[expert->first_op + n], 0, count, frame);
    }
    if (expert->ops == 0) {
        clb_no_expert(frame->routed, count);
    }
}

void clb_run_program(uint32_t samples, clb_frame *frame)
{
    clb_model model;
    clb_parse(frame->ctx->model, &model);
    frame->model = &model;
    frame->tensors = model.tensors;
    const uint32_t encoder = model.header->encoder_ops, reads = encoder != 0 && frame->ctx->source == 0;
    for (uint32_t n = reads ? 0 : encoder; n < (reads ? encoder : model.header->main_ops);) {
        const clb_op *op = &model.ops[n];
        if (op->code == CLB_OP_MOE) {
            clb_run_moe(&model.layers[op->w0], op, clb_route, run_expert, samples, frame);
            ++n;
        } else if (op->code > CLB_OP_MOE) { /* never in an expert */
            sequence[op->code](op, samples, frame);
            ++n;
        } else {
            n += run_op(op, n < model.header->tail_op ? 0 : frame->tail, samples, frame);
        }
    }
}
