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
    float *keys;      /* the router's scratch */
} workspace;

CLB_STATIC_WALK workspace workspace_at(uint8_t *at, const clb_layer *layer, size_t choices)
{
    workspace w;
    w.slots = (float *)(void *)at;
    w.weights = w.slots + (layer->k > 1 ? choices * layer->d_out : 0);
    w.experts = (int32_t *)(void *)(w.weights + choices);
    w.order = (uint32_t *)(void *)(w.experts + choices);
    w.ends = w.order + choices;
    w.keys = (float *)(void *)(w.ends + layer->experts + 1);
    return w;
}

CLB_WALK float *clb_row_of(const clb_operand *v, const float *base, uint32_t rows, size_t token)
{
    /* Only what the validator has found to be written is written through this. */
    return (float *)(uintptr_t)base + v->offset / sizeof(float) + token / rows * v->sample_stride +
           token % rows * v->row_stride;
}

/* Where an operand's space begins, for clb_row_of. */
CLB_STATIC_WALK const float *base_of(const clb_operand *v, const clb_frame *frame)
{
    return clb_locate(v, frame, NULL, 0, 0) - v->offset / sizeof(float);
}

/* Take from their experts the choices beyond a capacity, in order, of each of the choices' equal `parts` by itself. */
static void drop_overflow(const workspace *w, const clb_layer *layer, size_t parts, size_t choices)
{
    choices /= parts;
    for (size_t s = 0; s < parts; ++s) {
        memset(w->ends, 0, layer->experts * sizeof *w->ends);
        for (size_t i = s * choices; i < (s + 1) * choices; ++i) {
            if (++w->ends[w->experts[i]] > layer->capacity) {
                w->experts[i] = -1;
            }
        }
    }
}

/* Counting sort of the choices by expert, stable, so that an expert sees its tokens in order. */
static void group(const workspace *w, uint32_t experts, size_t choices)
{
    memset(w->ends, 0, (experts + 1u) * sizeof *w->ends);
    for (size_t i = 0; i < choices; ++i) {
        w->ends[w->experts[i] + 1] += w->experts[i] >= 0;
    }
    for (uint32_t e = 0; e < experts; ++e) {
        w->ends[e + 1] += w->ends[e];
    }
    for (size_t i = 0; i < choices; ++i) {
        if (w->experts[i] >= 0) {
            w->order[w->ends[w->experts[i]]++] = (uint32_t)i;
        }
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

    const clb_gate gate = {(const float *)(const void *)clb_tensor_at(frame, op->w1),
                           (const float *)(const void *)clb_tensor_at(frame, op->w2), w.keys, CLB_KERNELS(ctx)};
    for (size_t t = 0; t < tokens; ++t) {
        route(layer, &gate, clb_row_of(&op->b, logits, rows, t), w.experts + t * k, w.weights + t * k);
    }
    if (layer->capacity != 0) {
        drop_overflow(&w, layer, CLB_USED_TEXT && ctx->context_tokens != 0 ? 1 : samples, choices); /* a text is a whole */
    }
    if (ctx->on_route != NULL) {
        ctx->on_route(ctx->user, (int)op->w0, w.experts, (int)tokens, (int)k);
        clb_standard(); /* a hook may have left another control word */
    }
    group(&w, layer->experts, choices);

    clb_routed routed = {.op = op, .x = x, .y = k == 1 ? (float *)(uintptr_t)y : w.slots, .weights = w.weights,
                         .k = k, .d_out = layer->d_out};
    clb_frame inside = {.model = frame->model, .tensors = frame->tensors, .arena = frame->arena,
                        .routed = &routed, .ctx = ctx};
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
        int first = 1;
        for (size_t i = t * k; i < (t + 1) * k; ++i) {
            if (w.experts[i] >= 0) {
                const float weight = layer->apply == CLB_APPLY_OUTPUT ? w.weights[i] : 1.0f;
                CLB_KERNELS(ctx)->mix(weight, k == 1 ? total : w.slots + i * layer->d_out, total, layer->d_out, first);
                first = 0;
            }
        }
        if (first) { /* no expert took it */
            memset(total, 0, layer->d_out * sizeof *total);
        }
    }
}
