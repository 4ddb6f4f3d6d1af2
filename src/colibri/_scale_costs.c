/* What each of a few scales would cost a group of weights: the inner loop of quantising, which
 * NumPy would do in nine passes over temporaries. Belongs to colibri._engine;
 * colibri/quantize/formats.py says what it is for. */
#include <stddef.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define FOR_EACH_CPU
#endif

enum { LANES = 8, LEAF = 128 };

typedef struct {
    const float *weight, *energy; /* energy NULL: all 1 */
    float scale, least, most, price;
} group;

/* energy * error^2 of one weight; the integer is rounded to nearest even by an addition that leaves
 * no fraction bits. */
static inline __attribute__((always_inline)) float error_of(const group *g, float divisor,
                                                            size_t i) {
    const float halfway = 12582912.0f;
    float q = g->weight[i] / divisor;
    q = q < g->least ? g->least : q;
    q = q > g->most ? g->most : q;
    q = (q + halfway) - halfway;
    float error = g->weight[i] - q * g->scale;
    error *= error;
    error = g->energy != NULL ? error * g->energy[i] : error;
    return error < g->price ? error : g->price;
}

/* The sum over places first ... first + n, n <= LEAF, in the order in which NumPy adds them. */
static inline __attribute__((always_inline)) float leaf(const group *g, size_t first, size_t n) {
    const float divisor = g->scale == 0.0f ? 1.0f : g->scale;
    float sums[LANES] = {0}, total = 0.0f;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t j = 0; j < LANES; ++j) {
            sums[j] += error_of(g, divisor, first + i + j);
        }
    }
    total =
        ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (; i < n; ++i) {
        total += error_of(g, divisor, first + i);
    }
    return total;
}

static float pairwise(float (*sum)(const group *, size_t, size_t), const group *g, size_t first,
                      size_t n) {
    if (n <= LEAF) {
        return sum(g, first, n);
    }
    const size_t half = n / 2 - n / 2 % LANES;
    return pairwise(sum, g, first, half) + pairwise(sum, g, first + half, n - half);
}

FOR_EACH_CPU static float weighted(const group *g, size_t first, size_t n) {
    return leaf(g, first, n);
}

FOR_EACH_CPU static float plain(const group *g, size_t first, size_t n) {
    const group same = {g->weight, NULL, g->scale, g->least, g->most, g->price};
    return leaf(&same, first, n);
}

/* costs[c][k]: the sum of min(price, energy * error^2) over group k of `width` weights with scale
 * scales[c][k]; energies are those of `groups_of_row` groups, over and over. */
void scale_costs(const float *weight, const float *energy, const float *scales, float *costs,
                 size_t candidates, size_t groups, size_t groups_of_row, size_t width, float least,
                 float most, float price) {
    for (size_t k = 0; k < groups; ++k) {
        group g = {weight + k * width,
                   energy == NULL ? NULL : energy + k % groups_of_row * width,
                   0,
                   least,
                   most,
                   price};
        for (size_t c = 0; c < candidates; ++c) {
            g.scale = scales[c * groups + k];
            costs[c * groups + k] = pairwise(energy == NULL ? plain : weighted, &g, 0, width);
        }
    }
}
