/* The gated delta rule (Yang et al. 2025, arXiv:2412.06464): a memory of keys and values, a matrix for
 * each head of values. */
#include "../core/parallel.h"

typedef struct {
    const clb_op *op;
    const clb_frame *frame;
    uint32_t samples;
} delta;

/* total = Σ key[i] · scale · row i of the state, in the order of i */
CLB_STATIC_WALK void recall(const delta *t, const float *key, float scale, const float *state,
                            float *total) {
    const uint32_t n = t->op->delta.value;
    for (uint32_t i = 0; i < t->op->delta.key; ++i) {
        CLB_KERNELS(t->frame->ctx)->mix(key[i] * scale, state + (size_t)i * n, total, n, i == 0);
    }
}

/* The tokens of a batch, one after another, on the state (key, value) of one head. */
CLB_STATIC_WALK void learn(void *arg, uint32_t head) {
    const delta *t = arg;
    const clb_op *op = t->op;
    const clb_frame *frame = t->frame;
    const clb_kernels *kernels = CLB_KERNELS(frame->ctx);
    const uint32_t n = op->delta.value;
    const uint32_t key_head = head / (op->rows / op->delta.key_heads);
    const size_t size = (size_t)op->delta.key * n;
    float *state = (float *)clb_work_at(op, frame) + head * size;
    if (frame->position == 0) { /* a new text */
        memset(state, 0, size * sizeof *state);
    }
    for (uint32_t s = 0; s < t->samples; ++s) {
        const float *q = clb_locate(&op->a, frame, NULL, s, key_head);
        const float *k = clb_locate(&op->a, frame, NULL, s, (size_t)op->delta.key_heads + key_head);
        const float *v = clb_locate(&op->b, frame, NULL, s, head); /* behind it: decay, beta */
        float *out = clb_out_row(op, frame, s, head);
        kernels->mix(clb_exp(v[n]), state, state, size, 1);
        recall(t, k, 1.0f, state, out);
        for (uint32_t j = 0; j < n; ++j) {
            out[j] = (v[j] - out[j]) * v[n + 1]; /* what the state has still to learn */
        }
        for (uint32_t i = 0; i < op->delta.key; ++i) {
            kernels->mix(k[i], out, state + (size_t)i * n, n, 0);
        }
        recall(t, q, op->delta.scale, state, out);
    }
}

CLB_WALK void clb_delta(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    enum { SPREAD_FLOATS = 1 << 13 }; /* below, handing work to threads costs more than it saves */
    delta t = {.op = op, .frame = frame, .samples = samples};
    const uint64_t floats = (uint64_t)op->rows * op->delta.key * op->delta.value;
    CLB_SPREAD(frame->ctx, frame->ctx->parallel != NULL && floats * samples >= SPREAD_FLOATS, learn,
               &t, op->rows);
}

#if !defined(COLIBRI_GENERATED)
#include "../check/proof.h"

static int delta_fits(const clb_subject *s) { return s->op->rows % s->op->delta.key_heads == 0; }

/* The queries of all heads, then the keys; a row for each head of values. */
static void delta_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const uint32_t value = s->op->delta.value;
    clb_plain(uses, s->op->delta.key, (uint64_t)value + 2, value);
    uses[CLB_A].rows = 2 * s->op->delta.key_heads;
}

static uint64_t delta_kept(const clb_subject *s) {
    return clb_times(s->op->rows, (uint64_t)s->op->delta.key * s->op->delta.value);
}

/* Recalling, learning, recalling. */
static uint64_t delta_macs(const clb_subject *s) { return clb_times(3, delta_kept(s)); }

static uint64_t delta_work(const clb_subject *s) {
    return clb_times(s->op->rows, (4ull * s->op->delta.key + 1) * s->op->delta.value);
}

const clb_proof clb_delta_proof = {delta_fits, delta_uses, delta_macs, delta_work, delta_kept};

#endif
