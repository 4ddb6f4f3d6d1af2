/* The generic engine: the walk over a model's program. */
#include "internal.h"

#define ENTRY(code, name) [CLB_OP_##code] = clb_##name,
static clb_kernel *const row_kernels[CLB_OP_COUNT] = {CLB_ROW_KERNELS(ENTRY)};
static clb_batch_kernel *const batch_kernels[CLB_OP_COUNT] = {CLB_BATCH_KERNELS(ENTRY)};

/* An operation, or a loop and all operations in it; returns how many these are. */
static uint32_t run_op(const clb_op *op, uint32_t first, uint32_t samples, clb_frame *frame) {
    const uint32_t loop = op->code == CLB_OP_LOOP;
    const uint32_t steps = loop ? op->loop.steps : 1;
    const uint32_t body = loop ? op->loop.body : 1;
    const int backward = loop && op->loop.backward;
    for (uint32_t step = 0; step < steps; ++step) {
        frame->step = backward ? steps - 1 - step : step;
        for (const clb_op *each = op + loop; each < op + loop + body; ++each) {
            clb_kernel *kernel = row_kernels[each->code];
            if (kernel == NULL) {
                clb_run_linear(each, first, samples, frame);
            } else {
                clb_run_rows(kernel, each, first, samples, frame);
            }
        }
    }
    frame->step = 0;
    return loop + body;
}

static void run_expert(uint32_t number, uint32_t count, clb_frame *frame) {
    const clb_expert *expert = &frame->model->experts[number];
    const clb_op *ops = &frame->model->ops[expert->first_op];
    frame->weights = frame->model->bytes + expert->offset;
    for (uint32_t n = 0; n < expert->ops;) {
        n += run_op(ops + n, 0, count, frame);
    }
    if (expert->ops == 0) {
        clb_no_expert(frame->routed, count);
    }
}

void clb_run_program(uint32_t samples, clb_frame *frame) {
    clb_model model;
    clb_parse(frame->ctx->model, &model);
    frame->model = &model;
    frame->tensors = model.tensors;
    const clb_header *h = model.header;
    const uint32_t encoder = h->encoder_ops;
    const int reads = encoder != 0 && frame->ctx->source == 0;
    const uint32_t end = reads ? encoder : h->main_ops;
    for (uint32_t n = reads ? 0 : encoder; n < end;) {
        const clb_op *op = &model.ops[n];
        const uint32_t first = n < h->tail_op ? 0 : frame->tail;
        if (op->code == CLB_OP_MOE) {
            clb_run_moe(&model.layers[op->moe.layer], op, clb_route, run_expert, samples, frame);
            ++n;
        } else if (batch_kernels[op->code] != NULL) { /* never in an expert */
            batch_kernels[op->code](op, samples, frame);
            ++n;
        } else {
            n += run_op(op, first, samples, frame);
        }
    }
}
