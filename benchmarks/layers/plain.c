/* The layer as one would write it by hand for gcc -O3: row-major float32, a token at a time, loops
 * the compiler vectorises. Weights file: int32 d, ff, experts, k, padded to 64 bytes; then router,
 * gate, up, down. */
#define _GNU_SOURCE
#include "backend.h"

#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int32_t d, ff, experts, k;
static const float *router, *gate, *up,
    *down;                    /* (experts, d), (experts, ff, d) twice, (experts, d, ff) */
static float *logit, *hidden; /* (experts), (ff) */

int backend_open(const char *path, int threads) {
    struct stat info;
    int file = open(path, O_RDONLY);
    (void)threads;
    if (file < 0 || fstat(file, &info)) {
        perror(path);
        return -1;
    }
    const int32_t *head = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (head == MAP_FAILED) {
        perror(path);
        return -1;
    }
    d = head[0], ff = head[1], experts = head[2], k = head[3];
    router = (const float *)(head + 16);
    gate = router + (size_t)experts * d;
    up = gate + (size_t)experts * ff * d;
    down = up + (size_t)experts * ff * d;
    logit = malloc((size_t)experts * sizeof *logit);
    hidden = malloc((size_t)ff * sizeof *hidden);
    return logit && hidden ? 0 : -1;
}

int backend_input_size(void) { return d; }

int backend_output_size(void) { return d; }

static float dot(const float *restrict a, const float *restrict b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static void expert(int e, const float *restrict x, float share, float *restrict y) {
    const float *g = gate + (size_t)e * ff * d, *u = up + (size_t)e * ff * d,
                *w = down + (size_t)e * d * ff;
    for (int i = 0; i < ff; i++) {
        float gated = dot(g + (size_t)i * d, x, d);
        hidden[i] = gated / (1 + expf(-gated)) * dot(u + (size_t)i * d, x, d);
    }
    for (int i = 0; i < d; i++)
        y[i] += share * dot(w + (size_t)i * ff, hidden, ff);
}

static void token(const float *restrict x, float *restrict y) {
    int chosen[64];
    float best[64], total = 0;
    for (int e = 0; e < experts; e++)
        logit[e] = dot(router + (size_t)e * d, x, d);
    for (int j = 0; j < k; j++) {
        int top = 0;
        for (int e = 1; e < experts; e++)
            if (logit[e] > logit[top]) top = e;
        chosen[j] = top;
        best[j] = logit[top];
        logit[top] = -3.0e38f;
    }
    float largest = best[0];
    for (int j = 0; j < k; j++) {
        best[j] = expf(best[j] - largest);
        total += best[j];
    }
    memset(y, 0, (size_t)d * sizeof *y);
    for (int j = 0; j < k; j++)
        expert(chosen[j], x, best[j] / total, y);
}

void backend_forward(const float *x, float *y, int batch) {
    for (int n = 0; n < batch; n++)
        token(x + (size_t)n * d, y + (size_t)n * d);
}
