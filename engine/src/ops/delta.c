/* The gated delta rule (Yang et al. 2025, arXiv:2412.06464): a memory of keys and values, a matrix
 * for each head of values. */
#include "../core/parallel.h"

typedef struct {
    const clb_op *op;
    const clb_frame *frame;
    uint32_t samples;
    uint32_t key;
    uint32_t value;
    uint32_t sharing; /* heads of values that share one of keys */
} delta;

/* What is read of one token and one head. */
typedef struct {
    const float *query;
    const float *key;
    const float *value; /* behind it: the logarithm of the decay, beta */
} heard;

/* total = Σ key[i] · scale · row i of the state, in the order of i */
CLB_STATIC_WALK void recall(const delta *t, const float *key, float scale, const float *state,
                            float *total) {
    const clb_kernels *kernels = CLB_KERNELS(t->frame->ctx);
    for (uint32_t i = 0; i < t->key; ++i) {
        const float weight = key[i] * scale;
        kernels->mix(weight, state, total, t->value, i == 0);
        state += t->value;
    }
}

/* Every row i of the state += key[i] · news */
CLB_STATIC_WALK void store(const delta *t, const float *key, const float *news, float *state) {
    const clb_kernels *kernels = CLB_KERNELS(t->frame->ctx);
    for (uint32_t i = 0; i < t->key; ++i) {
        kernels->mix(key[i], news, state, t->value, 0);
        state += t->value;
    }
}

/* The state (key, value) fades, learns what it does not yet say of the key, and answers. */
CLB_STATIC_WALK void take(const delta *t, heard token, float *state, float *out) {
    const clb_kernels *kernels = CLB_KERNELS(t->frame->ctx);
    const uint32_t n = t->value;
    const float decay = clb_exp(token.value[n]);
    const float beta = token.value[n + 1];
    kernels->mix(decay, state, state, (size_t)t->key * n, 1);
    recall(t, token.key, 1.0f, state, out);
    for (uint32_t j = 0; j < n; ++j) {
        const float missing = token.value[j] - out[j];
        out[j] = missing * beta;
    }
    store(t, token.key, out, state);
    recall(t, token.query, t->op->delta.scale, state, out);
}

/* The tokens of a batch, one after another. */
CLB_STATIC_WALK void learn(void *arg, uint32_t head) {
    const delta *t = arg;
    const clb_op *op = t->op;
    const clb_frame *frame = t->frame;
    const uint32_t key_head = head / t->sharing;
    const size_t key = (size_t)key_head + op->delta.key_heads; /* behind all queries */
    const size_t size = (size_t)t->key * t->value;
    float *state = clb_work_at(op, frame);
    state += head * size;
    if (frame->position == 0) { /* a new text */
        memset(state, 0, size * sizeof *state);
    }
    for (uint32_t s = 0; s < t->samples; ++s) {
        heard token;
        token.query = clb_locate(&op->a, frame, NULL, s, key_head);
        token.key = clb_locate(&op->a, frame, NULL, s, key);
        token.value = clb_locate(&op->b, frame, NULL, s, head);
        take(t, token, state, clb_out_row(op, frame, s, head));
    }
}

CLB_WALK void clb_delta(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    enum { SPREAD_FLOATS = 1 << 13 }; /* below, handing work to threads costs more than it saves */
    delta t;
    t.op = op;
    t.frame = frame;
    t.samples = samples;
    t.key = op->delta.key;
    t.value = op->delta.value;
    t.sharing = op->rows / op->delta.key_heads;
    const uint64_t floats = (uint64_t)op->rows * t.key * t.value;
    const _Bool large = floats * samples >= SPREAD_FLOATS;
    const _Bool threads = frame->ctx->parallel != NULL;
    CLB_SPREAD(frame->ctx, threads && large, learn, &t, op->rows);
}

#if !defined(COLIBRI_GENERATED)
#include "../check/proof.h"

static int delta_fits(const clb_subject *s) {
    const clb_op *op = s->op;
    return op->rows % op->delta.key_heads == 0;
}

/* The queries of all heads, then the keys; a row for each head of values. */
static void delta_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const clb_op *op = s->op;
    const uint64_t value = op->delta.value;
    clb_plain(uses, op->delta.key, value + 2, value);
    uses[CLB_A].rows = 2 * op->delta.key_heads;
}

static uint64_t delta_kept(const clb_subject *s) {
    const clb_op *op = s->op;
    const uint64_t state = (uint64_t)op->delta.key * op->delta.value;
    return clb_times(op->rows, state);
}

/* Recalling, learning, recalling. */
static uint64_t delta_macs(const clb_subject *s) { return clb_times(3, delta_kept(s)); }

static uint64_t delta_work(const clb_subject *s) {
    const clb_op *op = s->op;
    const uint64_t steps = 4ull * op->delta.key + 1;
    return clb_times(op->rows, steps * op->delta.value);
}

const clb_proof clb_delta_proof = {.fits = delta_fits,
                                   .uses = delta_uses,
                                   .macs = delta_macs,
                                   .work = delta_work,
                                   .kept = delta_kept};

#endif
