/* Nanoseconds that routing one token takes beyond the product that made its logits: experts, k,
 * kind, then the time. */
#include "core/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MOST = 512, TOKENS = 256 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    static float logits[TOKENS][MOST], keys[4 * MOST], bias[MOST], weights[8];
    static int32_t experts[8];
    if (argc != 4) {
        return 1;
    }
    const uint32_t n = (uint32_t)atoi(argv[1]), k = (uint32_t)atoi(argv[2]);
    const char kind = argv[3][0];
    clb_layer layer = {.experts = n, .k = k, .scale = 1.0f, .groups = 1, .kept_groups = 1};
    clb_gate gate = {.keys = keys, .kernels = clb_kernels_at(0)};
    if (kind == 's') { /* softmax over all, renormalised */
        layer.normalize = CLB_NORMALIZE_SUM;
    } else if (kind == 'l') { /* softmax after top-k: the same weights from k exponentials */
        layer.score = CLB_SCORE_LOGIT;
        layer.normalize = CLB_NORMALIZE_SOFTMAX;
    } else { /* sigmoid with bias and groups */
        layer.score = CLB_SCORE_SIGMOID;
        layer.normalize = CLB_NORMALIZE_SUM;
        layer.groups = 4;
        layer.kept_groups = 2;
        layer.group_rule = CLB_GROUP_RULE_TOP2;
        gate.bias = bias;
    }
    uint32_t seed = 1;
    for (int t = 0; t < TOKENS; ++t) {
        for (uint32_t e = 0; e < n; ++e) {
            seed = seed * 1664525u + 1013904223u;
            logits[t][e] = (float)(int32_t)seed * 0x1p-29f;
        }
    }
    double best = 1e18; /* of many rounds: a neighbour's noise only adds */
    for (int round = 0; round < 400; ++round) {
        const double begin = now();
        for (int t = 0; t < TOKENS; ++t) {
            clb_route(&layer, &gate, logits[t], experts, weights);
            __asm__ volatile("" : : "r"(experts), "r"(weights) : "memory");
        }
        const double took = (now() - begin) / TOKENS;
        best = took < best ? took : best;
    }
    printf("%.1f\n", best);
    return 0;
}
