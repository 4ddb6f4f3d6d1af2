/* Tokens handed to experts and back, as pointers through rings or as copies, with the same work on
 * them.
 *
 *     ring pointers|copies|work TOKENS WIDTH ROUNDS     work: what both have in common; prints
 *                                                       nanoseconds a round */
#define _POSIX_C_SOURCE 200809L
#include "colibri_ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EXPERTS = 8, K = 2, MOST = 4096 };

typedef struct {
    const float *x;
    float *y; /* of the token's slot */
} task;

static colibri_ring_slot slots[EXPERTS][MOST];
static colibri_ring_t rings[EXPERTS];
static task tasks[MOST];

/* Stands for an expert: reads every input once and writes every output once. */
static void expert(const float *x, float *y, size_t width, float factor) {
    for (size_t i = 0; i < width; ++i) {
        y[i] = x[i] * factor;
    }
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        return 1;
    }
    const char kind = *argv[1];
    const size_t tokens = strtoul(argv[2], NULL, 10), width = strtoul(argv[3], NULL, 10);
    const size_t rounds = strtoul(argv[4], NULL, 10);
    const size_t choices = tokens * K, bytes = width * sizeof(float);
    float *x = calloc(tokens, bytes), *y = calloc(choices, bytes);
    float *in = calloc(choices, bytes), *out = calloc(choices, bytes);
    if (x == NULL || y == NULL || in == NULL || out == NULL || choices > MOST) {
        return 1;
    }
    for (int e = 0; e < EXPERTS; ++e) {
        colibri_ring_init(&rings[e], slots[e], MOST);
    }
    const double began = seconds();
    for (size_t n = 0; n < rounds; ++n) {
        size_t at = 0;
        if (kind == 'p') {
            for (size_t c = 0; c < choices; ++c) {
                tasks[c] = (task){x + c / K * width, y + c * width};
                colibri_ring_push(&rings[c * 5 % EXPERTS], &tasks[c]);
            }
        }
        for (size_t e = 0; e < EXPERTS; ++e) {
            if (kind == 'p') {
                for (task *t; (t = colibri_ring_pop(&rings[e])) != NULL;) {
                    expert(t->x, t->y, width, (float)e);
                }
                continue;
            }
            const size_t first = at;
            for (size_t c = 0; c < choices; ++c) {
                if (c * 5 % EXPERTS == e) {
                    if (kind == 'c') {
                        memcpy(in + at++ * width, x + c / K * width, bytes);
                    } else {
                        expert(x + c / K * width, y + c * width, width, (float)e);
                    }
                }
            }
            for (size_t i = first; i < at; ++i) {
                expert(in + i * width, out + i * width, width, (float)e);
            }
        }
        for (size_t e = 0, i = 0; kind == 'c' && e < EXPERTS; ++e) {
            for (size_t c = 0; c < choices; ++c) {
                if (c * 5 % EXPERTS == e) {
                    memcpy(y + c * width, out + i++ * width, bytes);
                }
            }
        }
    }
    printf("%.1f\n", (seconds() - began) * 1e9 / (double)rounds);
    return y[choices * width - 1] != 0.0f;
}
