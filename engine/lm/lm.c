/* colibri_lm.h: tokens through a context, and the next one drawn. */
#include "colibri_lm.h"

#include "ops/text.h"

enum { CHUNK = 512 }; /* ids converted at once */

static const clb_header *header_of(const colibri_context_t *ctx) { return clb_at(ctx->model, 0); }

static int is_ready(const colibri_context_t *ctx) { return ctx != NULL && ctx->model != NULL; }

/* Whether these tokens can follow `position` others. */
static int fits(const colibri_context_t *ctx, uint32_t position, const int32_t *tokens, int count) {
    const uint32_t most = ctx->context_tokens;
    if (tokens == NULL) return COLIBRI_ERR_NULL;
    if (ctx->busy) return COLIBRI_ERR_BUSY;
    if (count < 1) return COLIBRI_ERR_BATCH;
    if (position > most) return COLIBRI_ERR_CONTEXT;
    if ((uint32_t)count > most - position) return COLIBRI_ERR_CONTEXT;
    for (int i = 0; i < count; ++i) {
        if (ctx->input_size != 1 || tokens[i] < 0 || (uint32_t)tokens[i] >= ctx->output_size) {
            return COLIBRI_ERR_TOKEN;
        }
    }
    return COLIBRI_OK;
}

static void run(colibri_context_t *ctx, const int32_t *tokens, int count, float *output) {
    float ids[CHUNK];
    for (int i = 0; i < count; ++i) {
        ids[i] = (float)tokens[i];
    }
    colibri_forward(ctx, ids, output, count);
}

int colibri_lm_source(colibri_context_t *ctx, const int32_t *tokens, int count) {
    if (!is_ready(ctx)) return COLIBRI_ERR_NULL;
    if (header_of(ctx)->encoder_ops == 0) return COLIBRI_ERR_SOURCE;
    const int error = fits(ctx, 0, tokens, count);
    if (error != COLIBRI_OK) return error;
    if (count > ctx->max_batch || count > CHUNK) return COLIBRI_ERR_BATCH;
    float none; /* this run has no output */
    ctx->source = ctx->position = 0;
    run(ctx, tokens, count, &none);
    return ctx->status;
}

/* Tokens that run at once. */
static int largest_chunk(const colibri_context_t *ctx) {
    const clb_header *h = header_of(ctx);
    if (h->tail_op == h->main_ops) return 1; /* the last rows of a chunk cannot run alone */
    return ctx->max_batch < CHUNK ? ctx->max_batch : CHUNK;
}

int colibri_lm_evaluate(colibri_context_t *ctx, const int32_t *tokens, int count, float *logits) {
    if (!is_ready(ctx) || logits == NULL) return COLIBRI_ERR_NULL;
    const int error = fits(ctx, ctx->position, tokens, count);
    if (error != COLIBRI_OK) return error;
    if (header_of(ctx)->encoder_ops != 0 && ctx->source == 0) return COLIBRI_ERR_SOURCE;
    const int32_t tail = ctx->tail;
    const int most = largest_chunk(ctx);
    ctx->tail = 1;
    ctx->status = COLIBRI_OK;
    for (int at = 0; at < count && ctx->status == COLIBRI_OK;) {
        const int n = count - at < most ? count - at : most;
        run(ctx, tokens + at, n, logits);
        at += n;
    }
    ctx->tail = tail;
    return ctx->status;
}

/* Whether an operation still has all that a token at `position` looks at, when the text ends at
 * `end`. */
static int reaches(const clb_op *op, uint32_t position, uint32_t end) {
    if (op->code == CLB_OP_DELAY) {
        return position < op->delay.steps ? end <= op->delay.slots
                                          : end - (position - op->delay.steps) <= op->delay.slots;
    }
    if (op->code == CLB_OP_DELTA) {
        return position == end; /* its state is that of the whole text */
    }
    if (op->code == CLB_OP_ATTENTION && end > 0) {
        return (end - 1) / CLB_PAGE - clb_first_seen(op, position) / CLB_PAGE <
               op->attention.positions / CLB_PAGE;
    }
    return 1;
}

int colibri_lm_rewind(colibri_context_t *ctx, int position) {
    if (!is_ready(ctx)) return COLIBRI_ERR_NULL;
    if (ctx->busy) return COLIBRI_ERR_BUSY;
    const uint32_t to = (uint32_t)position;
    if (position < 0 || to > ctx->position) return COLIBRI_ERR_REWIND;
    const clb_header *header = header_of(ctx);
    /* A stream's firmware may have no records. */
    if (to > 0 && header->context_tokens == CLB_LIMIT) return COLIBRI_ERR_REWIND;
    const clb_op *ops = clb_at(ctx->model, header->ops_offset);
    for (uint32_t n = 0; n < header->main_ops && to > 0; ++n) {
        if (!reaches(&ops[n], to, ctx->position)) return COLIBRI_ERR_REWIND;
    }
    ctx->position = to;
    return COLIBRI_OK;
}

/* --- sampling --- */

/* Whether token a comes before token b: likelier, or the lower of two equally likely. */
static int before(const float *weights, int32_t a, int32_t b) {
    return weights[a] > weights[b] || (weights[a] == weights[b] && a < b);
}

/* The heap's root moves down to its place among `n`. */
static void sift(const float *weights, int32_t *heap, int n, int at) {
    const int32_t moved = heap[at];
    for (int child; (child = 2 * at + 1) < n; at = child) {
        child += child + 1 < n && before(weights, heap[child + 1], heap[child]);
        if (!before(weights, heap[child], moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* The tokens to draw from, by weight: of the heap's `n`, the `taken` first lie at its end,
 * backwards. */
typedef struct {
    const float *weights;
    int32_t *heap;
    int n;
    int taken;
    int kept;    /* the first ones, which may be drawn */
    float total; /* of their weights */
} candidates;

static int32_t token_at(candidates *c, int place) {
    while (c->taken <= place) {
        const int last = c->n - ++c->taken;
        const int32_t top = c->heap[0];
        c->heap[0] = c->heap[last];
        c->heap[last] = top;
        if (last > 0) {
            sift(c->weights, c->heap, last, 0);
        }
    }
    return c->heap[c->n - 1 - place];
}

static float weight_at(candidates *c, int place) { return c->weights[token_at(c, place)]; }

/* 24 bits of SplitMix64 (Steele et al. 2014), as a number from 0 to below 1. */
static float uniform(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (float)((z ^ z >> 31) >> 40) * 0x1p-24f;
}

static void penalise(const colibri_sampler_t *s, float *logits, int n, int32_t *seen) {
    const float penalty = s->repetition_penalty;
    memset(seen, 0, (size_t)n * sizeof *seen);
    for (int i = 0; s->history != NULL && i < s->history_count; ++i) {
        const int32_t id = s->history[i];
        if (id >= 0 && id < n && !seen[id]) {
            seen[id] = 1;
            logits[id] = logits[id] > 0.0f ? logits[id] / penalty : logits[id] * penalty;
        }
    }
}

static int32_t likeliest(const float *logits, int n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; ++i) {
        /* after NaNs alone */
        const int first_number = logits[best] != logits[best] && logits[i] == logits[i];
        best = logits[i] > logits[best] || first_number ? i : best;
    }
    return best;
}

/* Logits become weights, the likeliest token's 1; their sum. */
static float weigh(const colibri_sampler_t *s, float *logits, int n, int32_t best) {
    const float largest = logits[best];
    float lanes[CLB_LANES] = {0};
    for (int32_t i = 0; i < n; ++i) {
        const float weight = i == best ? 1.0f : clb_exp((logits[i] - largest) / s->temperature);
        logits[i] = weight >= 0.0f ? weight : 0.0f; /* a NaN */
        lanes[(uint32_t)i % CLB_LANES] += logits[i];
    }
    return clb_lane_tree(lanes);
}

static candidates all_tokens(const float *weights, int32_t *heap, int n, float total) {
    for (int32_t i = 0; i < n; ++i) {
        heap[i] = i;
    }
    for (int i = n / 2; i-- > 0;) {
        sift(weights, heap, n, i);
    }
    return (candidates){weights, heap, n, 0, n, total};
}

static void keep_first(candidates *c, int count) {
    if (count <= 0 || count >= c->n) return;
    c->kept = count;
    c->total = 0.0f;
    for (int i = 0; i < count; ++i) {
        c->total += weight_at(c, i);
    }
}

/* Of the kept ones those that make up top_p and weigh min_p; the likeliest always stays. */
static void keep_likely(candidates *c, float top_p, float min_p) {
    const int has_share = top_p > 0.0f && top_p < 1.0f;
    const float share = has_share ? top_p * c->total : clb_inf();
    float sum = 0.0f;
    int count = 0;
    if (!has_share && !(min_p > 0.0f)) return;
    while (count < c->kept && sum < share && weight_at(c, count) >= min_p) {
        sum += weight_at(c, count);
        ++count;
    }
    c->kept = count > 0 ? count : 1;
    c->total = count > 0 ? sum : 1.0f;
}

/* The token at this share of the total. */
static int32_t drawn_at(candidates *c, float share) {
    const float drawn = share * c->total;
    float sum = 0.0f;
    for (int i = 0; i < c->kept - 1; ++i) {
        sum += weight_at(c, i);
        if (sum > drawn) return token_at(c, i);
    }
    return token_at(c, c->kept - 1);
}

static int32_t sample(colibri_sampler_t *s, float *logits, int n, int32_t *scratch) {
    if (s->repetition_penalty > 0.0f && s->repetition_penalty != 1.0f) {
        penalise(s, logits, n, scratch);
    }
    const int32_t best = likeliest(logits, n);
    if (!(s->temperature > 0.0f)) return best;
    const float total = weigh(s, logits, n, best);
    candidates c = all_tokens(logits, scratch, n, total);
    keep_first(&c, s->top_k);
    keep_likely(&c, s->top_p, s->min_p);
    return drawn_at(&c, uniform(&s->seed));
}

int32_t colibri_lm_sample(colibri_sampler_t *sampler, float *logits, int vocabulary,
                          int32_t *scratch) {
    const clb_control found = clb_standard();
    const int32_t drawn = sample(sampler, logits, vocabulary, scratch);
    clb_restore(found);
    return drawn;
}
