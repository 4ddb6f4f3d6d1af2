/* One MoE layer: route every token, group the choices by expert, run each expert on its tokens
 * through pointers, and combine each token's results in the order of its choices. Activations are
 * never gathered into copies. */
#include "../core/internal.h"

/* The layer's workspace inside the context; a choice is (token, slot), numbered token · k +
 * slot. */
typedef struct {
    float *slots;   /* (choices, d_out); absent for k = 1, where experts write the output itself */
    float *weights; /* (choices) */
    int32_t *experts; /* (choices) */
    uint32_t *order;  /* (choices) grouped by expert */
    uint32_t *ends;   /* (experts + 1): after grouping, where each expert's part of `order` ends */
    float *keys;      /* the router's scratch */
} workspace;

CLB_STATIC_WALK workspace workspace_at(void *at, const clb_layer *layer, size_t choices) {
    workspace w;
    w.slots = at;
    w.weights = w.slots + (layer->k > 1 ? choices * layer->d_out : 0);
    w.experts = (int32_t *)(void *)(w.weights + choices);
    w.order = (uint32_t *)(void *)(w.experts + choices);
    w.ends = w.order + choices;
    w.keys = (float *)(void *)(w.ends + layer->experts + 1);
    return w;
}

/* Where an operand's space begins, for clb_row_of. */
CLB_STATIC_WALK const float *base_of(const clb_operand *v, const clb_frame *frame) {
    return clb_locate(v, frame, NULL, 0, 0) - v->offset / sizeof(float);
}

/* Take from their experts the choices beyond a capacity, in order, of each of the choices' equal
 * `parts` by itself. */
static void drop_overflow(const workspace *w, const clb_layer *layer, size_t parts,
                          size_t choices) {
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
static void group(const workspace *w, uint32_t experts, size_t choices) {
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

/* Each expert on its tokens, a tile at a time. */
CLB_STATIC_WALK void run_experts(const clb_layer *layer, const workspace *w, clb_program *program,
                                 clb_routed *routed, clb_frame *inside) {
    uint32_t next = 0;
    for (uint32_t e = 0; e < layer->experts; ++e) {
        while (next < w->ends[e]) {
            const uint32_t count = clb_min(w->ends[e] - next, layer->tile);
            routed->order = w->order + next;
            program(layer->first_expert + e, count, inside);
            next += count;
        }
    }
}

/* The sum of what token `t` got from its experts; zeros where none took it. */
CLB_STATIC_WALK void combine(const clb_layer *layer, const workspace *w, const clb_kernels *kernels,
                             size_t t, float *total) {
    const size_t k = layer->k;
    int first = 1;
    for (size_t i = t * k; i < (t + 1) * k; ++i) {
        if (w->experts[i] < 0) continue;
        const float weight = layer->apply == CLB_APPLY_OUTPUT ? w->weights[i] : 1.0f;
        const float *value = k == 1 ? total : w->slots + i * layer->d_out;
        kernels->mix(weight, value, total, layer->d_out, first);
        first = 0;
    }
    if (first) {
        memset(total, 0, layer->d_out * sizeof *total);
    }
}

CLB_WALK void clb_run_moe(const clb_layer *layer, const clb_op *op, clb_router *route,
                          clb_program *program, uint32_t samples, const clb_frame *frame) {
    const colibri_context_t *ctx = frame->ctx;
    const uint32_t k = layer->k;
    const uint32_t rows = op->rows;
    const size_t tokens = (size_t)samples * rows;
    const size_t choices = tokens * k;
    const float *x = base_of(&op->a, frame);
    const float *logits = base_of(&op->b, frame);
    const float *y = base_of(&op->out, frame);
    const workspace w = workspace_at(clb_work_at(op, frame), layer, choices);

    clb_gate gate = {.keys = w.keys, .kernels = CLB_KERNELS(ctx)};
    gate.bias = clb_tensor_at(frame, op->moe.bias);
    gate.scale = clb_tensor_at(frame, op->moe.scale);
    for (size_t t = 0; t < tokens; ++t) {
        const float *own = clb_row_of(&op->b, logits, rows, t);
        route(layer, &gate, own, w.experts + t * k, w.weights + t * k);
    }
    if (layer->capacity != 0) {
        const int text = CLB_USED_TEXT && ctx->context_tokens != 0; /* which is a whole */
        drop_overflow(&w, layer, text ? 1 : samples, choices);
    }
    if (ctx->on_route != NULL) {
        ctx->on_route(ctx->user, (int)op->moe.layer, w.experts, (int)tokens, (int)k);
        clb_standard(); /* a hook may have left another control word */
    }
    group(&w, layer->experts, choices);

    clb_routed routed = {.op = op, .x = x, .weights = w.weights, .k = k, .d_out = layer->d_out};
    routed.y = k == 1 ? (float *)(uintptr_t)y : w.slots;
    clb_frame inside = {.model = frame->model, .tensors = frame->tensors, .ctx = ctx};
    inside.arena = frame->arena;
    inside.routed = &routed;
    run_experts(layer, &w, program, &routed, &inside);
    for (size_t t = 0; t < tokens; ++t) {
        combine(layer, &w, CLB_KERNELS(ctx), t, clb_row_of(&op->out, y, rows, t));
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static int moe_fits(const clb_subject *s) {
    const clb_layer *l = &s->model->layers[s->op->moe.layer];
    if (!clb_is_vector(s->w1, l->experts) || !clb_is_vector(s->w2, l->experts)) return 0;
    const int biased_mixer = l->score == CLB_SCORE_SPARSE_MIXER && s->w1 != NULL;
    return !biased_mixer && s->samples * s->op->rows <= CLB_LIMIT / l->k;
}

static void moe_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const clb_layer *layer = &s->model->layers[s->op->moe.layer];
    clb_plain(uses, layer->d_in, layer->experts, layer->d_out);
    uses[CLB_A].cols = layer->quantized;
}

/* Of the router's scratch: a score for each expert, and with a bias or groups the keys of the
 * choice. */
static uint32_t key_words(const clb_layer *layer, int has_bias) {
    return (has_bias || layer->groups > 1 ? 4 : 1) * layer->experts;
}

/* Up to where the experts' scratch memory begins: see workspace_at. */
uint64_t clb_workspace_floats(const clb_op *op, const clb_layer *layer, uint64_t samples) {
    enum { ALIGNED = CLB_ALIGN_BUFFER / sizeof(float) };
    const uint64_t choices = samples * op->rows * layer->k;
    const uint64_t slots = layer->k > 1 ? choices * layer->d_out : 0;
    const uint64_t keys = key_words(layer, op->moe.bias != CLB_NONE);
    const uint64_t words = slots + 3 * choices + layer->experts + 1 + keys;
    return (words + ALIGNED - 1) / ALIGNED * ALIGNED;
}

static uint64_t moe_kept(const clb_subject *s) {
    const clb_op *op = s->op;
    return clb_workspace_floats(op, &s->model->layers[op->moe.layer], s->samples) + op->moe.scratch;
}

/* What it costs depends on its experts: see program.c. */
const clb_proof clb_moe_proof = {.fits = moe_fits, .uses = moe_uses, .kept = moe_kept};

#endif
