/* Colibri, optional: language models by tokens. If ctx->context_tokens is not 0, an input row is a
 * token id and an output row its logits. A context holds one text; ctx->position of its tokens have
 * been evaluated.
 *
 *     colibri_lm_evaluate(ctx, prompt, count, logits); // ctx->output_size floats
 *     colibri_sampler_t sampler = {.temperature = 0.8f, .top_p = 0.9f, .seed = 1};
 *     int32_t token = colibri_lm_sample(&sampler, logits, (int)ctx->output_size, scratch);
 *
 * No heap, no system call; the same tokens on every target. */
#ifndef COLIBRI_LM_H
#define COLIBRI_LM_H

#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Append `count` tokens to the text and return the logits of the last one.
 *   tokens  ids, 0 … vocabulary - 1
 *   count   at least 1; any number that fits the context: they run in chunks of ctx->max_batch
 *   logits  float32, ctx->output_size of them
 * Returns an enum colibri_error. On COLIBRI_ERR_NULL, _BATCH (no token), _TOKEN (also of a model
 * whose rows are more than an id) and _CONTEXT nothing has been evaluated; COLIBRI_ERR_SOURCE: an
 * encoder-decoder model has not read a source text. */
COLIBRI_API int colibri_lm_evaluate(colibri_context_t *ctx, const int32_t *tokens, int count,
                                    float *logits);

/* Encoder-decoder models: read a source text and begin an empty text for colibri_lm_evaluate.
 *   tokens  ids, 0 … vocabulary - 1
 *   count   1 … the least of ctx->max_batch, ctx->context_tokens and 512: it is read in
 *           one batch, because every token attends to all others
 * Returns an enum colibri_error; on COLIBRI_ERR_NULL, _BATCH, _TOKEN, _CONTEXT and
 * COLIBRI_ERR_SOURCE (of any other model) nothing has changed. */
COLIBRI_API int colibri_lm_source(colibri_context_t *ctx, const int32_t *tokens, int count);

/* Cut the text to its first `position` tokens, 0 … ctx->position. Layers with a sliding window keep
 * only the positions they need: going back further is COLIBRI_ERR_REWIND and changes nothing. A
 * stream can only go back to 0, and so can a model with a layer of the delta rule, whose state is
 * that of the whole text. */
COLIBRI_API int colibri_lm_rewind(colibri_context_t *ctx, int position);

/* How the next token is drawn. Filters apply in the order of the fields; a zero leaves one out. */
typedef struct colibri_sampler {
    const int32_t *history; /* tokens that count as seen, or NULL */
    int history_count;
    float
        /* logits of seen tokens are divided by it where positive, multiplied where negative */
        repetition_penalty;
    float
        /* logits are divided by it; 0: the largest wins, and nothing below has any effect */
        temperature;
    int top_k;     /* the k likeliest tokens */
    float top_p;   /* of those the likeliest with this total probability */
    float min_p;   /* of those the ones with at least this share of the largest probability */
    uint64_t seed; /* state of the generator; each draw advances it */
} colibri_sampler_t;

/* Draw a token.
 *   logits      float32 (vocabulary), overwritten; a NaN is never drawn
 *   scratch     int32 (vocabulary)
 * Returns its id. Ties are ordered by id, the lowest first. */
COLIBRI_API int32_t colibri_lm_sample(colibri_sampler_t *sampler, float *logits, int vocabulary,
                                      int32_t *scratch);

#ifdef __cplusplus
}
#endif

#endif
