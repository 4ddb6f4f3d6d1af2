/* From a token's logits to its k experts and their weights. Choosing looks at the logits; one function a score, reached
 * through a table, computes the weights. */
#include "internal.h"

typedef void clb_score_weights(const float *logits, uint32_t n, const int32_t *chosen, uint32_t k, float *weights);

/* A NaN logit is never preferred to a number. */
static float key(float logit)
{
    return logit == logit ? logit : -clb_inf();
}

/* The k largest, best first; an earlier expert stays ahead of a later equal one. */
static void choose(const float *logits, uint32_t n, uint32_t k, int32_t *chosen)
{
    uint32_t held = 0;
    for (uint32_t e = 0; e < n; ++e) {
        const float mine = key(logits[e]);
        if (held == k && !(mine > key(logits[chosen[k - 1]]))) {
            continue;
        }
        uint32_t at = held < k ? held++ : k - 1;
        while (at > 0 && mine > key(logits[chosen[at - 1]])) {
            chosen[at] = chosen[at - 1];
            --at;
        }
        chosen[at] = (int32_t)e;
    }
}

/* softmax over `n` logits, of which entry i is logits[i], or logits[of[i]] where `of` is given; at the chosen k. */
static void softmax_at(const float *logits, const int32_t *of, uint32_t n, const int32_t *chosen, uint32_t k,
                       float *weights)
{
    float best = -clb_inf(), lanes[CLB_LANES] = {0};
    for (uint32_t i = 0; i < n; ++i) {
        const float logit = logits[of == NULL ? (int32_t)i : of[i]];
        best = logit > best ? logit : best;
    }
    for (uint32_t i = 0; i < n; ++i) {
        lanes[i % CLB_LANES] += clb_exp(logits[of == NULL ? (int32_t)i : of[i]] - best);
    }
    const float sum = clb_lane_tree(lanes);
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = clb_exp(logits[chosen[j]] - best) / sum;
    }
}

static void score_softmax(const float *logits, uint32_t n, const int32_t *chosen, uint32_t k, float *weights)
{
    softmax_at(logits, NULL, n, chosen, k, weights);
}

static void score_sigmoid(const float *logits, uint32_t n, const int32_t *chosen, uint32_t k, float *weights)
{
    (void)n;
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = clb_sigmoid(logits[chosen[j]]);
    }
}

/* The chosen logits only: softmax after top-k. */
static void score_logit(const float *logits, uint32_t n, const int32_t *chosen, uint32_t k, float *weights)
{
    (void)n;
    softmax_at(logits, chosen, k, chosen, k, weights);
}

static clb_score_weights *const score_table[CLB_SCORE_COUNT] = {
    [CLB_SCORE_SOFTMAX] = score_softmax,
    [CLB_SCORE_SIGMOID] = score_sigmoid,
    [CLB_SCORE_LOGIT] = score_logit,
};

CLB_WALK void clb_route(const clb_layer *layer, const float *logits, int32_t *experts, float *weights)
{
    const uint32_t k = layer->k;
    choose(logits, layer->experts, k, experts);
    if (layer->normalize == CLB_NORMALIZE_ONE) {
        for (uint32_t j = 0; j < k; ++j) {
            weights[j] = 1.0f;
        }
    } else {
        score_table[layer->score](logits, layer->experts, experts, k, weights);
    }
    const float sum = layer->normalize == CLB_NORMALIZE_SUM ? clb_lane_sum(weights, 1, k) : 1.0f;
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = weights[j] / sum * layer->scale;
    }
}
