/* From a token's logits to its k experts and their weights. Without bias and groups the choice
 * looks at the logits, else at the scores. */
#include "../core/internal.h"

/* A NaN is never preferred to a number. */
static float key(float x) { return x == x ? x : -clb_inf(); }

static void pick(const float *logits, const int32_t *of, uint32_t n, float *picked) {
    for (uint32_t i = 0; i < n; ++i) {
        picked[i] = logits[of == NULL ? (int32_t)i : of[i]];
    }
}

/* The k largest, best first; an earlier expert stays ahead of a later equal one. */
CLB_STATIC_WALK void choose(const float *keys, uint32_t n, uint32_t k, int32_t *chosen) {
    uint32_t held = 0;
    for (uint32_t e = 0; e < n; ++e) {
        const float mine = key(keys[e]);
        if (held == k && !(mine > key(keys[chosen[k - 1]]))) continue;
        uint32_t at = held < k ? held++ : k - 1;
        while (at > 0 && mine > key(keys[chosen[at - 1]])) {
            chosen[at] = chosen[at - 1];
            --at;
        }
        chosen[at] = (int32_t)e;
    }
}

/* The scores of n experts, of all or of those in `of`, each but for the divisor that is
 * returned. */
CLB_STATIC_WALK float scores_of(uint32_t score, const clb_kernels *kernels, const float *logits,
                                const int32_t *of, uint32_t n, float *scores) {
    pick(logits, of, n, scores);
    if (score == CLB_SCORE_SOFTMAX) return clb_exp_sum(scores, n, kernels);
    if (score == CLB_SCORE_SIGMOID) {
        clb_each(CLB_UNARY_SIGMOID, scores, n, kernels);
    } else if (score == CLB_SCORE_SQRT_SOFTPLUS) {
        kernels->unary(CLB_UNARY_SOFTPLUS, 0.0f, 0.0f, scores, scores, n);
        kernels->unary(CLB_UNARY_SQRT, 0.0f, 0.0f, scores, scores, n);
    }
    return 1.0f; /* of CLB_SCORE_LOGIT nothing more */
}

/* Give the experts of groups that do not take part the key -inf. A function of its own: its loops
 * have all registers. */
static NOINLINE void keep_groups(const clb_layer *layer, float *keys) {
    const uint32_t size = layer->experts / layer->groups;
    float *ranks = keys + layer->experts;
    int32_t *kept = (int32_t *)(void *)(ranks + layer->groups);
    for (uint32_t g = 0; g < layer->groups; ++g) {
        float best = -clb_inf();
        float second = -clb_inf();
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
static void sparse_mix(const clb_layer *layer, const float *logits, const int32_t *chosen,
                       float *weights) {
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

CLB_WALK void clb_route(const clb_layer *layer, const clb_gate *gate, const float *logits,
                        int32_t *experts, float *weights) {
    const uint32_t n = layer->experts;
    const uint32_t k = layer->k;
    float *scores = gate->keys;
    float *keys = scores + n;
    float divisor = 1.0f;
    float sum = 1.0f;
    if (gate->bias != NULL || layer->groups > 1) {
        divisor = scores_of(layer->score, gate->kernels, logits, NULL, n, scores);
        for (uint32_t e = 0; e < n; ++e) {
            keys[e] = scores[e] / divisor;
            keys[e] = gate->bias != NULL ? keys[e] + gate->bias[e] : keys[e];
        }
        if (layer->groups > 1) {
            keep_groups(layer, keys);
        }
        choose(keys, n, k, experts);
        pick(scores, experts, k, weights);
    } else {
        choose(logits, n, k, experts);
        if (layer->score == CLB_SCORE_SPARSE_MIXER) {
            sparse_mix(layer, logits, experts, weights);
        } else if (layer->score == CLB_SCORE_SOFTMAX) { /* which is over all */
            divisor = scores_of(CLB_SCORE_SOFTMAX, gate->kernels, logits, NULL, n, scores);
            pick(scores, experts, k, weights);
        } else if (layer->normalize != CLB_NORMALIZE_SOFTMAX) {
            divisor = scores_of(layer->score, gate->kernels, logits, experts, k, weights);
        }
    }
    if (layer->normalize == CLB_NORMALIZE_SOFTMAX) {
        divisor = scores_of(CLB_SCORE_SOFTMAX, gate->kernels, logits, experts, k, weights);
    }
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = layer->normalize == CLB_NORMALIZE_ONE ? 1.0f : weights[j] / divisor;
    }
    if (layer->normalize == CLB_NORMALIZE_SUM || layer->normalize == CLB_NORMALIZE_CLAMPED) {
        const float all = clb_lane_sum(weights, 1, k);
        const float least = all < layer->epsilon ? layer->epsilon : all;
        sum = layer->normalize == CLB_NORMALIZE_SUM ? all + layer->epsilon : least;
    }
    for (uint32_t j = 0; j < k; ++j) {
        weights[j] = weights[j] / sum * layer->scale;
        weights[j] = gate->scale != NULL ? weights[j] * gate->scale[experts[j]] : weights[j];
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

/* Rules that fit together; a sparse mixer remembers up to 8 choices. */
static int rules_fit(const clb_layer *l) {
    const int softmax = l->normalize == CLB_NORMALIZE_SOFTMAX;
    const int plain = l->normalize == CLB_NORMALIZE_NONE && l->groups == 1 && l->k <= 8;
    if (l->score == CLB_SCORE_SPARSE_MIXER && !plain) return 0;
    return l->score == CLB_SCORE_LOGIT ? softmax || l->normalize == CLB_NORMALIZE_ONE : !softmax;
}

int clb_layer_fits(const clb_header *h, const clb_layer *l, uint32_t first_expert) {
    if (!clb_words_fit(CLB_RANGES_OF_LAYER, l)) return 0;
    if (l->first_expert != first_expert || l->experts > h->experts - first_expert) return 0;
    if (l->experts % l->groups != 0 || l->kept_groups > l->groups) return 0;
    const uint64_t eligible = (uint64_t)l->kept_groups * (l->experts / l->groups);
    const int finite = l->scale - l->scale == 0.0f && l->epsilon - l->epsilon == 0.0f;
    if (l->quantized != 0 && clb_quantized_floats(l->quantized) != l->d_in) return 0;
    if (!finite || l->epsilon < 0.0f) return 0;
    return l->k <= eligible && rules_fit(l);
}

#endif
