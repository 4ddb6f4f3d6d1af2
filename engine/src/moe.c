/* One MoE layer: route every token, group the choices by expert, run each expert on its tokens through pointers, and
 * combine each token's results in the order of its choices. Activations are never gathered into copies. */
#include "internal.h"

/* The layer's workspace inside the context; a choice is (token, slot), numbered token · k + slot. */
typedef struct {
    float *slots;     /* (choices, d_out); absent for k = 1, where experts write the output itself */
    float *weights;   /* (choices) */
    int32_t *experts; /* (choices) */
    uint32_t *order;  /* (choices) grouped by expert */
    uint32_t *ends;   /* (experts + 1): after grouping, where each expert's part of `order` ends */
} workspace;

CLB_STATIC_WALK workspace workspace_at(uint8_t *at, const clb_layer *layer, size_t choices)
{
    workspace w;
    w.slots = (float *)(void *)at;
    w.weights = w.slots + (layer->k > 1 ? choices * layer->d_out : 0);
    w.experts = (int32_t *)(void *)(w.weights + choices);
    w.order = (uint32_t *)(void *)(w.experts + choices);
    w.ends = w.order + choices;
    return w;
}

CLB_WALK float *clb_row_of(const clb_operand *v, const float *base, uint32_t rows, size_t token)
{
    /* Only what the validator has found to be written is written through this. */
    return (float *)(uintptr_t)base + v->offset / sizeof(float) + token / rows * v->sample_stride +
           token % rows * v->row_stride;
}

CLB_STATIC_WALK const float *base_of(const clb_operand *v, const clb_frame *frame)
{
    return v->space == CLB_SPACE_ARENA    ? (const float *)(const void *)frame->arena
           : v->space == CLB_SPACE_OUTPUT ? frame->output
                                          : frame->input;
}

/* Counting sort of the choices by expert, stable, so that an expert sees its tokens in order. */
static void group(const workspace *w, uint32_t experts, size_t choices)
{
    memset(w->ends, 0, (experts + 1u) * sizeof *w->ends);
    for (size_t i = 0; i < choices; ++i) {
        ++w->ends[w->experts[i] + 1];
    }
    for (uint32_t e = 0; e < experts; ++e) {
        w->ends[e + 1] += w->ends[e];
    }
    for (size_t i = 0; i < choices; ++i) {
        w->order[w->ends[w->experts[i]]++] = (uint32_t)i;
    }
}

CLB_WALK void clb_run_moe(const clb_layer *layer, const clb_op *op, clb_router *route, clb_program *program,
                          uint32_t samples, const clb_frame *frame)
{
    const colibri_context_t *ctx = frame->ctx;
    const uint32_t k = layer->k, rows = op->rows;
    const size_t tokens = (size_t)samples * rows, choices = tokens * k;
    const float *x = base_of(&op->a, frame), *logits = base_of(&op->b, frame), *y = base_of(&op->out, frame);
    const workspace w = workspace_at(frame->arena + op->work.offset, layer, choices);

    for (size_t t = 0; t < tokens; ++t) {
        route(layer, clb_row_of(&op->b, logits, rows, t), w.experts + t * k, w.weights + t * k);
    }
    if (ctx->on_route != NULL) {
        ctx->on_route(ctx->user, (int)op->w0, w.experts, (int)tokens, (int)k);
    }
    group(&w, layer->experts, choices);

    clb_routed routed = {.op = op, .x = x, .y = k == 1 ? (float *)(uintptr_t)y : w.slots, .k = k, .d_out = layer->d_out};
    clb_frame inside = {.model = frame->model, .tensors = frame->tensors, .arena = frame->arena, .routed = &routed, .ctx = ctx};
    uint32_t next = 0;
    for (uint32_t e = 0; e < layer->experts; ++e) {
        while (next < w.ends[e]) {
            const uint32_t count = clb_min(w.ends[e] - next, layer->tile);
            routed.order = w.order + next;
            program(layer->first_expert + e, count, &inside);
            next += count;
        }
    }

    for (size_t t = 0; t < tokens; ++t) {
        float *total = clb_row_of(&op->out, y, rows, t);
        for (uint32_t slot = 0; slot < k; ++slot) {
            const float weight = w.weights[t * k + slot];
            const float *value = k == 1 ? total : w.slots + (t * k + slot) * layer->d_out;
            CLB_KERNELS(ctx)->mix(weight, value, total, layer->d_out, slot == 0);
        }
    }
}
