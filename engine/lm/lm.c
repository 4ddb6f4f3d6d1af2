/* colibri_lm.h: tokens through a context, and the next one drawn. */
#include "colibri_lm.h"

#include "ops/text.h"

enum { CHUNK = 512 }; /* ids converted at once */

/* Whether these tokens can follow `position` others. */
static int fits(const colibri_context_t *ctx, uint32_t position, const int32_t *tokens, int count)
{
    const uint32_t most = ctx->context_tokens;
    RETURN_IF(tokens == NULL, COLIBRI_ERR_NULL);
    RETURN_IF(ctx->busy, COLIBRI_ERR_BUSY);
    RETURN_IF(count < 1, COLIBRI_ERR_BATCH);
    RETURN_IF(position > most || (uint32_t)count > most - position, COLIBRI_ERR_CONTEXT);
    for (int i = 0; i < count; ++i) {
        RETURN_IF(ctx->input_size != 1 || tokens[i] < 0 || (uint32_t)tokens[i] >= ctx->output_size, COLIBRI_ERR_TOKEN);
    }
    return COLIBRI_OK;
}

static void run(colibri_context_t *ctx, const int32_t *tokens, int count, float *output)
{
    float ids[CHUNK];
    for (int i = 0; i < count; ++i) {
        ids[i] = (float)tokens[i];
    }
    colibri_forward(ctx, ids, output, count);
}

int colibri_lm_source(colibri_context_t *ctx, const int32_t *tokens, int count)
{
    RETURN_IF(ctx == NULL || ctx->model == NULL, COLIBRI_ERR_NULL);
    RETURN_IF(((const clb_header *)(const void *)ctx->model)->encoder_ops == 0, COLIBRI_ERR_SOURCE);
    const int error = fits(ctx, 0, tokens, count);
    RETURN_IF(error != COLIBRI_OK, error);
    RETURN_IF(count > ctx->max_batch || count > CHUNK, COLIBRI_ERR_BATCH);
    float none; /* this run has no output */
    ctx->source = ctx->position = 0;
    run(ctx, tokens, count, &none);
    return ctx->status;
}

int colibri_lm_evaluate(colibri_context_t *ctx, const int32_t *tokens, int count, float *logits)
{
    RETURN_IF(ctx == NULL || ctx->model == NULL || logits == NULL, COLIBRI_ERR_NULL);
    const clb_header *header = (const clb_header *)(const void *)ctx->model;
    const int error = fits(ctx, ctx->position, tokens, count);
    RETURN_IF(error != COLIBRI_OK, error);
    RETURN_IF(header->encoder_ops != 0 && ctx->source == 0, COLIBRI_ERR_SOURCE);
    const int32_t tail = ctx->tail, alone = header->tail_op == header->main_ops; /* all rows or one */
    ctx->tail = 1;
    ctx->status = COLIBRI_OK;
    for (int at = 0; at < count && ctx->status == COLIBRI_OK;) {
        const int most = alone ? 1 : ctx->max_batch < CHUNK ? ctx->max_batch : CHUNK;
        const int n = count - at < most ? count - at : most;
        run(ctx, tokens + at, n, logits);
        at += n;
    }
    ctx->tail = tail;
    return ctx->status;
}

/* Whether an operation still has all that a token at `position` looks at, when the text ends at `end`. */
static int reaches(const clb_op *op, uint32_t position, uint32_t end)
{
    if (op->code == CLB_OP_DELAY) {
        return position < op->delay.steps ? end <= op->delay.slots : end - (position - op->delay.steps) <= op->delay.slots;
    }
    if (op->code == CLB_OP_ATTENTION && end > 0) {
        return (end - 1) / CLB_PAGE - clb_first_seen(op, position) / CLB_PAGE < op->attention.positions / CLB_PAGE;
    }
    return 1;
}

int colibri_lm_rewind(colibri_context_t *ctx, int position)
{
    RETURN_IF(ctx == NULL || ctx->model == NULL, COLIBRI_ERR_NULL);
    const uint32_t to = (uint32_t)position;
    RETURN_IF(ctx->busy, COLIBRI_ERR_BUSY);
    RETURN_IF(position < 0 || to > ctx->position, COLIBRI_ERR_REWIND);
    const clb_header *header = (const clb_header *)(const void *)ctx->model;
    RETURN_IF(to > 0 && header->context_tokens == CLB_LIMIT, COLIBRI_ERR_REWIND); /* its firmware may have no records */
    const clb_op *ops = (const clb_op *)(const void *)(ctx->model + header->ops_offset);
    for (uint32_t n = 0; n < header->main_ops && to > 0; ++n) {
        RETURN_IF(!reaches(&ops[n], to, ctx->position), COLIBRI_ERR_REWIND);
    }
    ctx->position = to;
    return COLIBRI_OK;
}

/* --- sampling --- */

/* Whether token a comes before token b: likelier, or the lower of two equally likely. */
static int before(const float *weights, int32_t a, int32_t b)
{
    return weights[a] > weights[b] || (weights[a] == weights[b] && a < b);
}

/* The heap's root moves down to its place among `n`. */
static void sift(const float *weights, int32_t *heap, int n, int at)
{
    const int32_t moved = heap[at];
    for (int child; (child = 2 * at + 1) < n; at = child) {
        child += child + 1 < n && before(weights, heap[child + 1], heap[child]);
        if (!before(weights, heap[child], moved)) {
            break;
        }
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Tokens by weight: the `taken` first lie at the heap's end, backwards. */
typedef struct {
    const float *weights;
    int32_t *heap;
    int n, taken;
} order;

static int32_t token_at(order *o, int place)
{
    while (o->taken <= place) {
        const int last = o->n - ++o->taken;
        const int32_t top = o->heap[0];
        o->heap[0] = o->heap[last];
        o->heap[last] = top;
        if (last > 0) {
            sift(o->weights, o->heap, last, 0);
        }
    }
    return o->heap[o->n - 1 - place];
}

/* 24 bits of SplitMix64 (Steele et al. 2014), as a number from 0 to below 1. */
static float uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (float)((z ^ z >> 31) >> 40) * 0x1p-24f;
}

static void penalise(const colibri_sampler_t *s, float *logits, int n, int32_t *seen)
{
    memset(seen, 0, (size_t)n * sizeof *seen);
    for (int i = 0; s->history != NULL && i < s->history_count; ++i) {
        const int32_t id = s->history[i];
        if (id >= 0 && id < n && !seen[id]) {
            seen[id] = 1;
            logits[id] = logits[id] > 0.0f ? logits[id] / s->repetition_penalty : logits[id] * s->repetition_penalty;
        }
    }
}

static int32_t sample(colibri_sampler_t *s, float *logits, int n, int32_t *scratch)
{
    if (s->repetition_penalty > 0.0f && s->repetition_penalty != 1.0f) {
        penalise(s, logits, n, scratch);
    }
    int32_t best = 0;
    for (int32_t i = 1; i < n; ++i) {
        const int first_number = logits[best] != logits[best] && logits[i] == logits[i]; /* after NaNs alone */
        best = logits[i] > logits[best] || first_number ? i : best;
    }
    RETURN_IF(!(s->temperature > 0.0f), best);
    const float largest = logits[best];
    float *weights = logits, lanes[CLB_LANES] = {0}, total;
    for (int32_t i = 0; i < n; ++i) {
        const float weight = i == best ? 1.0f : clb_exp((logits[i] - largest) / s->temperature);
        weights[i] = weight >= 0.0f ? weight : 0.0f; /* a NaN */
        lanes[(uint32_t)i % CLB_LANES] += weights[i];
        scratch[i] = i;
    }
    order o = {.weights = weights, .heap = scratch, .n = n};
    for (int i = n / 2; i-- > 0;) {
        sift(weights, scratch, n, i);
    }
    int kept = n;
    total = clb_lane_tree(lanes);
    if (s->top_k > 0 && s->top_k < n) {
        kept = s->top_k;
        total = 0.0f;
        for (int i = 0; i < kept; ++i) {
            total += weights[token_at(&o, i)];
        }
    }
    if ((s->top_p > 0.0f && s->top_p < 1.0f) || s->min_p > 0.0f) {
        const float share = s->top_p > 0.0f && s->top_p < 1.0f ? s->top_p * total : clb_inf();
        float sum = 0.0f;
        int i = 0;
        for (; i < kept && sum < share && weights[token_at(&o, i)] >= s->min_p; ++i) {
            sum += weights[token_at(&o, i)];
        }
        kept = i > 0 ? i : 1; /* the likeliest always stays */
        total = i > 0 ? sum : 1.0f;
    }
    const float drawn = uniform(&s->seed) * total;
    float sum = 0.0f;
    for (int i = 0; i < kept - 1; ++i) {
        sum += weights[token_at(&o, i)];
        RETURN_IF(sum > drawn, token_at(&o, i));
    }
    return token_at(&o, kept - 1);
}

int32_t colibri_lm_sample(colibri_sampler_t *sampler, float *logits, int vocabulary, int32_t *scratch)
{
    const clb_control found = clb_standard();
    const int32_t drawn = sample(sampler, logits, vocabulary, scratch);
    clb_restore(found);
    return drawn;
}
