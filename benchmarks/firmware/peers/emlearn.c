/* emlearn's nets, one an expert with the head behind it; the routing around them, and the head's
 * bias, are by hand. */
#include "harness.h"
#include "emlearn.h" /* written by emlearn.convert */
#include "gate_fp32.h"

int peer_start(void) { return 0; }

float peer_forecast(const float *features) {
    float logits[EXPERTS];
    int chosen = 0;
    for (int e = 0; e < EXPERTS; ++e) {
        logits[e] = gate_bias[e];
        for (int i = 0; i < FEATURES; ++i) {
            logits[e] += gate_weight[e * FEATURES + i] * features[i];
        }
        chosen = logits[e] > logits[chosen] ? e : chosen;
    }
    float total = 0.0f;
    for (int e = 0; e < EXPERTS; ++e) {
        total += expf(logits[e] - logits[chosen]);
    }
    const float change = chosen == 0   ? expert0_regress1(features, FEATURES)
                         : chosen == 1 ? expert1_regress1(features, FEATURES)
                                       : expert2_regress1(features, FEATURES);
    return change / total + head_bias[0];
}
