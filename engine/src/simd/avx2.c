/* The kernels for AVX2 and F16C. A vector is 8 output rows; a tile of blocks × rows is held in registers so that every
 * weight and every input loaded is used several times. Same sums in the same order as plain.c. */
#include "../internal.h"

#if defined(__x86_64__) && defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

#include "../vector.h"

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define TWICE _Pragma("unroll 2")
#else
#define UNROLL _Pragma("GCC unroll 8")
#define TWICE _Pragma("GCC unroll 2")
#endif
#define INLINE static inline __attribute__((always_inline))

enum { AHEAD = 1024 }; /* bytes a stream of weights is fetched ahead */

typedef float totals[CLB_PANEL][CLB_TILE][CLB_LANES];

/* Eight weights of one input, from the three formats a float row can meet. */
enum format { F32, F16, I8 };

INLINE __m256 weights_at(enum format format, const uint8_t *block, uint32_t k)
{
    if (format == F32) {
        return _mm256_loadu_ps((const float *)(const void *)block + (size_t)k * CLB_LANES);
    }
    if (format == F16) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(block + (size_t)k * CLB_LANES * 2)));
    }
    const __m256i quad = _mm256_loadu_si256((const __m256i *)(const void *)(block + 32 + (size_t)(k / 4) * 32));
    const __m256i moved = _mm256_sllv_epi32(quad, _mm256_set1_epi32(24 - 8 * (int)(k % 4)));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(moved, 24));
}

/* The streams of `blocks` blocks, a cache line each; one row reads them faster than it computes. */
INLINE void prefetch(const uint8_t *at, size_t stride, uint32_t blocks)
{
    UNROLL for (uint32_t b = 0; b < blocks; ++b) {
        _mm_prefetch((const char *)(at + b * stride) + AHEAD, _MM_HINT_T0);
    }
}

INLINE void float_tile(enum format format, const uint8_t *w, size_t stride, uint32_t blocks, const float *const *x,
                       uint32_t rows, uint32_t start, uint32_t end, float (*total)[CLB_TILE][CLB_LANES], uint32_t at_row)
{
    __m256 chain[4][4];
    UNROLL for (uint32_t b = 0; b < blocks; ++b) {
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            chain[b][r] = _mm256_setzero_ps();
        }
    }
    TWICE for (uint32_t k = start; k < end; ++k) {
        const uint32_t each = format == F32 ? 32 : format == F16 ? 16 : 8; /* bytes of an input's weights */
        if (rows == 1 && k % (64 / each) == 0) {
            prefetch(w + (size_t)k * each, stride, blocks);
        }
        __m256 input[4];
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            input[r] = _mm256_broadcast_ss(x[r] + k);
        }
        UNROLL for (uint32_t b = 0; b < blocks; ++b) {
            const __m256 weight = weights_at(format, w + b * stride, k);
            UNROLL for (uint32_t r = 0; r < rows; ++r) {
                chain[b][r] = _mm256_add_ps(chain[b][r], _mm256_mul_ps(weight, input[r]));
            }
        }
    }
    UNROLL for (uint32_t b = 0; b < blocks; ++b) {
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            _mm256_storeu_ps(total[b][at_row + r], _mm256_add_ps(_mm256_loadu_ps(total[b][at_row + r]), chain[b][r]));
        }
    }
}

/* Quads of int8: |x| is the unsigned operand, the weight takes x's sign, so that two products never pass
 * 2 · 127 · 127 < 2^15. */
INLINE void int8_tile(const uint8_t *w, size_t stride, uint32_t blocks, const clb_record *x, uint32_t rows,
                      uint32_t start, uint32_t end, float (*total)[CLB_TILE][CLB_LANES], uint32_t at_row)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[4][4];
    UNROLL for (uint32_t b = 0; b < blocks; ++b) {
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            sum[b][r] = _mm256_setzero_si256();
        }
    }
    TWICE for (uint32_t k = start; k < end; k += 4) {
        if (rows == 1 && k % 8 == 0) {
            prefetch(w + 32 + (size_t)k * CLB_LANES, stride, blocks);
        }
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            int32_t quad;
            memcpy(&quad, x[r].q + k, sizeof quad);
            const __m256i input = _mm256_set1_epi32(quad), size = _mm256_abs_epi8(input);
            UNROLL for (uint32_t b = 0; b < blocks; ++b) {
                const uint8_t *at = w + b * stride + 32 + (size_t)k * CLB_LANES;
                const __m256i weight = _mm256_loadu_si256((const __m256i *)(const void *)at);
                const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(weight, input));
                sum[b][r] = _mm256_add_epi32(sum[b][r], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    UNROLL for (uint32_t r = 0; r < rows; ++r) {
        const __m256 scale = _mm256_broadcast_ss(x[r].scale + start / CLB_ACTIVATION_GROUP);
        UNROLL for (uint32_t b = 0; b < blocks; ++b) {
            const __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[b][r]), scale);
            _mm256_storeu_ps(total[b][at_row + r], _mm256_add_ps(_mm256_loadu_ps(total[b][at_row + r]), part));
        }
    }
}

/* Groups of 32 nibbles, weight + 8 in 0 … 15: eight products of pairs stay within 8 · 2 · 15 · 127 < 2^15. */
INLINE void int4_tile(const uint8_t *w, size_t stride, uint32_t blocks, const clb_record *x, uint32_t rows,
                      uint32_t start, uint32_t end, float (*total)[CLB_TILE][CLB_LANES], uint32_t at_row)
{
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    __m256 inner[4][4];
    UNROLL for (uint32_t b = 0; b < blocks; ++b) {
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            inner[b][r] = _mm256_setzero_ps();
        }
    }
    for (uint32_t g = start / CLB_WEIGHT_GROUP; g < clb_ceil(end, CLB_WEIGHT_GROUP); ++g) {
        UNROLL for (uint32_t b = 0; b < blocks; ++b) {
            const uint8_t *group = w + b * stride + (size_t)g * (CLB_LANES * 18);
            if (rows == 1) {
                _mm_prefetch((const char *)group + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)group + AHEAD + 64, _MM_HINT_T0);
            }
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)group));
            UNROLL for (uint32_t r = 0; r < rows; ++r) {
                const int8_t *q = x[r].q + (size_t)g * CLB_WEIGHT_GROUP;
                __m256i pairs = _mm256_setzero_si256();
                UNROLL for (uint32_t c = 0; c < 4; ++c) {
                    const __m256i both =
                        _mm256_loadu_si256((const __m256i *)(const void *)(group + 16 + (size_t)c * 32));
                    int32_t left, right;
                    memcpy(&left, q + c * 4, sizeof left);
                    memcpy(&right, q + 16 + c * 4, sizeof right);
                    const __m256i lo = _mm256_and_si256(both, low);
                    const __m256i hi = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(lo, _mm256_set1_epi32(left)));
                    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(hi, _mm256_set1_epi32(right)));
                }
                const __m256i offset = _mm256_slli_epi32(_mm256_set1_epi32(x[r].sum[g]), 3);
                const __m256i sum = _mm256_sub_epi32(_mm256_madd_epi16(pairs, ones), offset);
                inner[b][r] = _mm256_add_ps(inner[b][r], _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale));
            }
        }
    }
    UNROLL for (uint32_t r = 0; r < rows; ++r) {
        const __m256 scale = _mm256_broadcast_ss(x[r].scale + start / CLB_ACTIVATION_GROUP);
        UNROLL for (uint32_t b = 0; b < blocks; ++b) {
            const __m256 part = _mm256_mul_ps(inner[b][r], scale);
            _mm256_storeu_ps(total[b][at_row + r], _mm256_add_ps(_mm256_loadu_ps(total[b][at_row + r]), part));
        }
    }
}

/* One group of inputs at a time, whose weights stay in the first cache while all rows of the tile pass over them: cover
 * blocks × rows with register tiles TILE(first block, blocks, first row, rows) of constant size: 4 × 2, or where few
 * are left 4 × 1, 1 × 2, 1 × 1; a float row, cheaper to load than a block, goes four at a time. */
#define COVER_FOUR(TILE)                                                                                               \
    for (; row + 4 <= tile->rows; row += 4) {                                                                          \
        uint32_t b = 0;                                                                                                \
        for (; b + 2 <= blocks; b += 2) {                                                                              \
            TILE(b, 2, row, 4);                                                                                        \
        }                                                                                                              \
        for (; b < blocks; ++b) {                                                                                      \
            TILE(b, 1, row, 4);                                                                                        \
        }                                                                                                              \
    }
#define COVER(TILE)                                                                                                    \
    for (; row + 2 <= tile->rows; row += 2) {                                                                          \
        uint32_t b = 0;                                                                                                \
        for (; b + 4 <= blocks; b += 4) {                                                                              \
            TILE(b, 4, row, 2);                                                                                        \
        }                                                                                                              \
        for (; b < blocks; ++b) {                                                                                      \
            TILE(b, 1, row, 2);                                                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    for (; row < tile->rows; ++row) {                                                                                  \
        uint32_t b = 0;                                                                                                \
        for (; b + 4 <= blocks; b += 4) {                                                                              \
            TILE(b, 4, row, 1);                                                                                        \
        }                                                                                                              \
        for (; b < blocks; ++b) {                                                                                      \
            TILE(b, 1, row, 1);                                                                                        \
        }                                                                                                              \
    }

#define FLOAT_TILE(b, nb, row, nr)                                                                                     \
    float_tile(format, matrix + (b)*stride, stride, nb, tile->a + (row), nr, start, end, total + (b), row)

INLINE void float_product(enum format format, const uint8_t *matrix, size_t stride, uint32_t blocks,
                          const clb_tile *tile, uint32_t cols, totals total)
{
    for (uint32_t start = 0; start < cols; start += CLB_GROUP) {
        const uint32_t end = start + clb_min(cols - start, CLB_GROUP);
        uint32_t row = 0;
        COVER_FOUR(FLOAT_TILE)
        COVER(FLOAT_TILE)
    }
}

static void product_f32(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                        totals total)
{
    float_product(F32, matrix, stride, blocks, tile, cols, total);
}

static void product_f16(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                        totals total)
{
    float_product(F16, matrix, stride, blocks, tile, cols, total);
}

static void product_i8(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                       totals total)
{
    float_product(I8, matrix, stride, blocks, tile, cols, total);
}

#define QUANTIZED(TILE)                                                                                                \
    clb_record x[CLB_TILE];                                                                                            \
    for (uint32_t i = 0; i < tile->rows; ++i) {                                                                        \
        x[i] = clb_record_at(tile->a[i], cols);                                                                        \
    }                                                                                                                  \
    for (uint32_t start = 0; start < cols; start += CLB_ACTIVATION_GROUP) {                                            \
        const uint32_t end = start + clb_min(cols - start, CLB_ACTIVATION_GROUP);                                      \
        uint32_t row = 0;                                                                                              \
        COVER(TILE)                                                                                                    \
    }
#define INT8_TILE(b, nb, row, nr) int8_tile(matrix + (b)*stride, stride, nb, x + (row), nr, start, end, total + (b), row)
#define INT4_TILE(b, nb, row, nr) int4_tile(matrix + (b)*stride, stride, nb, x + (row), nr, start, end, total + (b), row)

static void product_q_i8(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                         totals total)
{
    QUANTIZED(INT8_TILE)
}

static void product_q_i4(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                         totals total)
{
    QUANTIZED(INT4_TILE)
}

/* As plain.c has it; a maximum and a sum of integers do not depend on their order. */
static void quantize(const float *x, float *record, uint32_t cols)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), bound = _mm256_set1_ps(127.5f);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const uint32_t groups = clb_ceil(cols, CLB_WEIGHT_GROUP);
    int32_t *sums = (int32_t *)(void *)(record + clb_ceil(cols, CLB_ACTIVATION_GROUP));
    int8_t *q = (int8_t *)(void *)(sums + groups);
    float part[CLB_ACTIVATION_GROUP];
    for (uint32_t start = 0; start < cols; start += CLB_ACTIVATION_GROUP) {
        const uint32_t n = clb_min(cols - start, CLB_ACTIVATION_GROUP), full = clb_ceil(n, CLB_WEIGHT_GROUP);
        const float *in = x + start;
        if (n < CLB_ACTIVATION_GROUP) {
            memset(part, 0, sizeof part);
            memcpy(part, in, n * sizeof(float));
            in = part;
        }
        __m256 most = _mm256_setzero_ps(), nan = most;
        for (uint32_t i = 0; i < full * CLB_WEIGHT_GROUP; i += CLB_LANES) {
            const __m256 v = _mm256_loadu_ps(in + i);
            most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v));
            nan = _mm256_or_ps(nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        }
        float lanes[CLB_LANES], largest = 0.0f;
        _mm256_storeu_ps(lanes, most);
        for (uint32_t i = 0; i < CLB_LANES; ++i) {
            largest = lanes[i] > largest ? lanes[i] : largest;
        }
        largest = _mm256_movemask_ps(nan) != 0 ? clb_nan() : largest;
        const __m256 factor = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
        record[start / CLB_ACTIVATION_GROUP] = largest / 127.0f;
        for (uint32_t g = 0; g < full; ++g) {
            __m256i words[4];
            UNROLL for (uint32_t i = 0; i < 4; ++i) {
                const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(in + g * CLB_WEIGHT_GROUP + i * CLB_LANES), factor);
                const __m256 kept = _mm256_cmp_ps(_mm256_andnot_ps(sign, v), bound, _CMP_LT_OQ);
                words[i] = _mm256_cvtps_epi32(_mm256_and_ps(v, kept)); /* nearest even: the mode nobody changes */
            }
            const __m256i low = _mm256_packs_epi32(words[0], words[1]), high = _mm256_packs_epi32(words[2], words[3]);
            const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
            const uint32_t at = start / CLB_WEIGHT_GROUP + g;
            _mm256_storeu_si256((__m256i *)(void *)(q + (size_t)at * CLB_WEIGHT_GROUP), bytes);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
            __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            sum = _mm256_add_epi32(sum, _mm256_permute2x128_si256(sum, sum, 1));
            sum = _mm256_hadd_epi32(sum, sum);
            sums[at] = _mm256_extract_epi32(sum, 0) + _mm256_extract_epi32(sum, 1);
        }
    }
}

const clb_kernels clb_kernels_avx2 = {
    .name = "avx2",
    .products = {[CLB_LAYOUT_ROWS8_F32] = product_f32, [CLB_LAYOUT_ROWS8_F16] = product_f16,
                 [CLB_LAYOUT_ROWS8_I8] = product_i8},
    .products_q = {[CLB_LAYOUT_ROWS8_I8] = product_q_i8, [CLB_LAYOUT_ROWS8_I4] = product_q_i4},
    .quantize = quantize,
    .unary = unary,
    .binary = binary,
    .mix = mix,
};

#endif
