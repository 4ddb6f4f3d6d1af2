/* From a token's logits to its k experts and their weights. Without bias and groups the choice looks at the logits, else at
 * the scores; one function a score, reached through a table, computes them. */
#include "internal.h"

#include <math.h> /* sqrtf only */

/* Of `k` experts, or of the first k where `chosen` is NULL. */
typedef void clb_score(const float *logits, uint32_t n, const int32_t *chosen, uint32_t k, float *weights);

/* A NaN is never preferred to a number. */
static float key(float x)
{
    return x == x ? x : -clb_inf();
}

static float logit_at(const float *logits, const int32_t *of, uint32_t i)
{
    return logits[of == NULL ? (int32_t)i : of[i]];
}

/* The k largest, best first; an earlier expert stays ahead of a later equal one. */
static void choose(const float *keys, uint32_t n, uint32_t k, int32_t *chosen)
{
    uint32_t held = 0;
    for (uint32_t e = 0; e < n; ++e) {
        const float mine = key(keys[e]);
        if (held == k && !(mine > key(keys[chosen[k - 1]]))) {
            continue;
        }
        uint32_t at = held < k ? held++ : k - 1;
        while (at > 0 && mine > key(keys[chosen[at - 1]])) {
            chosen[at] = chosen[at - 1];
            --at;
        }
        chosen[at] = (int32_t)e;
    }
}

/* softmax over `n` logits, of all or of those in `of`; at the chosen k. */
static void softmax_at(const float *logits, const int32_t *of, uint32_t n, const int32_t *chosen, uint32_t k,
                       float *weights)
{
    float best = -clb_inf(), lanes[CLB_LANES] = {0};
    for (uint32_t i = 0; i < n; ++i) {
        const float logit = logit_at(logits, of, i);
        best = logit > best ? logit : best;
    }
    for (uint32_t i = 0; i < n; ++i) {
        lanes[i % CLB_LANES] += clb_exp(logit_at(logits, of, i) - best);
    }
    const float sum = clb_lane_tree(lanes);
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = clb_exp(logit_at(logits, chosen, j) - best) / sum;
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
        weights[j] = clb_sigmoid(logit_at(logits, chosen, j));
    }
}

static void score_sqrt_softplus(const float *logits, uint32_t n, const int32_t *chosen, uint32_t k, float *weights)
{
    (void)n;
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = sqrtf(clb_softplus(logit_at(logits, chosen, j)));
    }
}

/* As a key the logit itself; as a weight the softmax of the chosen, for that is what `softmax` after top-k asks for. */
static void score_logit(const float *logits, uint32_t n, const int32_t *chosen, uint32_t k, float *weights)
{
    (void)n;
    if (chosen == NULL) {
        memcpy(weights, logits, k * sizeof *weights);
    } else {
        softmax_at(logits, chosen, k, chosen, k, weights);
    }
}

static clb_score *const score_table[CLB_SCORE_COUNT] = {
    [CLB_SCORE_SOFTMAX] = score_softmax, [CLB_SCORE_SIGMOID] = score_sigmoid, [CLB_SCORE_LOGIT] = score_logit,
    [CLB_SCORE_SQRT_SOFTPLUS] = score_sqrt_softplus,
};

CLB_INTERNAL uint32_t clb_key_words(const clb_layer *layer, int has_bias)
{
    return has_bias || layer->groups > 1 ? 3 * layer->experts : 0;
}

/* Give the experts of groups that do not take part the key -inf. */
static void keep_groups(const clb_layer *layer, float *keys)
{
    const uint32_t size = layer->experts / layer->groups;
    float *ranks = keys + layer->experts;
    int32_t *kept = (int32_t *)(void *)(ranks + layer->groups);
    for (uint32_t g = 0; g < layer->groups; ++g) {
        float best = -clb_inf(), second = -clb_inf();
        for (uint32_t e = g * size; e < (g + 1) * size; ++e) {
            const float mine = key(keys[e]);
            second = mine > best ? best : mine > second ? mine : second;
            best = mine > best ? mine : best;
        }
        ranks[g] = layer->group_rule == CLB_GROUP_RULE_TOP2 ? best + second : best;
    }
    choose(ranks, layer->groups, layer->kept_groups, kept);
    memset(ranks, 0, layer->groups * sizeof *ranks);
    for (uint32_t j = 0; j < layer->kept_groups; ++j) {
        ranks[kept[j]] = 1.0f;
    }
    for (uint32_t e = 0; e < layer->experts; ++e) {
        keys[e] = ranks[e / size] != 0.0f ? keys[e] : -clb_inf();
    }
}

/* Each chosen logit's softmax among those not chosen before it and not far below it. */
static void sparse_mix(const clb_layer *layer, const float *logits, const int32_t *chosen, float *weights)
{
    for (uint32_t j = 0; j < layer->k; ++j) {
        const float top = logits[chosen[j]];
        float lanes[CLB_LANES] = {0};
        for (uint32_t e = 0; e < layer->experts; ++e) {
            const float size = clb_abs(logits[e]) < top ? top : clb_abs(logits[e]);
            int out = (top - logits[e]) / size > 2.0f * layer->epsilon;
            for (uint32_t before = 0; before < j; ++before) {
                out |= chosen[before] == (int32_t)e;
            }
            lanes[e % CLB_LANES] += out ? 0.0f : clb_exp(logits[e] - top);
        }
        weights[j] = clb_exp(top - top) / clb_lane_tree(lanes);
    }
}

CLB_WALK void clb_route(const clb_layer *layer, const clb_gate *gate, const float *logits, int32_t *experts, float *weights)
{
    const uint32_t k = layer->k;
    if (clb_key_words(layer, gate->bias != NULL) == 0) {
        choose(logits, layer->experts, k, experts);
    } else {
        score_table[layer->score](logits, layer->experts, NULL, layer->experts, gate->keys);
        for (uint32_t e = 0; gate->bias != NULL && e < layer->experts; ++e) {
            gate->keys[e] += gate->bias[e];
        }
        if (layer->groups > 1) {
            keep_groups(layer, gate->keys);
        }
        choose(gate->keys, layer->experts, k, experts);
    }
    if (layer->score == CLB_SCORE_SPARSE_MIXER) {
        sparse_mix(layer, logits, experts, weights);
    } else if (layer->normalize == CLB_NORMALIZE_ONE) {
        for (uint32_t j = 0; j < k; ++j) {
            weights[j] = 1.0f;
        }
    } else {
        score_table[layer->score](logits, layer->experts, experts, k, weights);
    }
    float sum = 1.0f;
    if (layer->normalize == CLB_NORMALIZE_SUM) {
        sum = clb_lane_sum(weights, 1, k) + layer->epsilon;
    } else if (layer->normalize == CLB_NORMALIZE_CLAMPED) {
        sum = clb_lane_sum(weights, 1, k);
        sum = sum < layer->epsilon ? layer->epsilon : sum;
    }
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = weights[j] / sum * layer->scale;
        weights[j] = gate->scale != NULL ? weights[j] * gate->scale[experts[j]] : weights[j];
    }
}
