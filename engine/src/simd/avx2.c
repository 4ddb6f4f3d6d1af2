/* AVX2 and F16C: a vector is one block of 8 output rows. */
#include "../core/internal.h"

#if defined(__x86_64__) && defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

#include "panel.h"
#include "vector.h"

#define WIDE 1

typedef __m256 vf;
typedef __m256i vi;
typedef struct {
    __m256i size, negative;
} q8x; /* four inputs everywhere: their magnitudes, and which are below 0 */
typedef __m256i q8w, q8sum, q4x, q4sum;

FORCE_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
FORCE_INLINE void add_to(float *p, vf v) { _mm256_storeu_ps(p, add(_mm256_loadu_ps(p), v)); }
FORCE_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
FORCE_INLINE vf broadcast(const float *p) { return _mm256_broadcast_ss(p); }
FORCE_INLINE vf to_float(vi v) { return _mm256_cvtepi32_ps(v); }
FORCE_INLINE vi words(int32_t n) { return _mm256_set1_epi32(n); }

FORCE_INLINE vf f32_at(place p) { return _mm256_loadu_ps(p.first); }
FORCE_INLINE vf f16_at(place p) { return _mm256_cvtph_ps(_mm_loadu_si128(p.first)); }
FORCE_INLINE vi bytes_at(place p) { return _mm256_loadu_si256(p.first); }

FORCE_INLINE vf byte_of(vi four, int i) {
    return to_float(_mm256_srai_epi32(_mm256_sllv_epi32(four, words(24 - 8 * i)), 24));
}

FORCE_INLINE vi quad(const int8_t *q) { return words(clb_four(q)); }
FORCE_INLINE vi pairs_to_words(vi pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

/* |x| is the unsigned operand. Where x is below 0 the weight w becomes -w - 1, which any byte can
 * be, and what that takes off the sum, all those |x|, is put in at the start. A pair of products
 * never passes 2 · 127 · 128 < 2^15. */
FORCE_INLINE q8sum q8_start(const clb_quantized *x, uint32_t start, uint32_t end) {
    const vi zero = _mm256_setzero_si256();
    vi sum = zero;
    for (uint32_t k = start; k < end; k += CLB_WEIGHT_GROUP) {
        const vi below = _mm256_min_epi8(_mm256_loadu_si256((const void *)(x->q + k)), zero);
        sum = _mm256_add_epi64(sum, _mm256_sad_epu8(_mm256_abs_epi8(below), zero));
    }
    const __m128i half =
        _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    return _mm256_broadcastd_epi32(_mm_add_epi64(half, _mm_unpackhi_epi64(half, half)));
}
FORCE_INLINE q8w q8_weights(vi weights) { return weights; }
FORCE_INLINE q8x q8_input(const int8_t *q) {
    return (q8x){_mm256_abs_epi8(quad(q)), _mm256_cmpgt_epi8(_mm256_setzero_si256(), quad(q))};
}
FORCE_INLINE q8sum q8_dot(q8sum sum, q8w weights, q8x x) {
    const vi pairs = _mm256_maddubs_epi16(x.size, _mm256_xor_si256(weights, x.negative));
    return _mm256_add_epi32(sum, pairs_to_words(pairs));
}

FORCE_INLINE vi q8_end(q8sum sum) { return sum; }

/* Eight products of pairs are added in 16 bits; one half of each starts at -8 · Σ inputs, all 32 of
 * them. Sums may wrap on their way, but end within 8 · 2 · 15 · 127 < 2^15 or, (weight - 8) · input
 * over 16 of them and -8 · input over the others, within 2 · 16 · 8 · 127 < 2^15. */
FORCE_INLINE q4sum q4_start(uint32_t inputs) {
    return _mm256_sub_epi16(_mm256_setzero_si256(),
                            _mm256_slli_epi32(words((int32_t)inputs), 16 + 3));
}
FORCE_INLINE q4x q4_input(const int8_t *q) { return quad(q); }
FORCE_INLINE q4sum q4_dot(q4sum pairs, vi nibbles, q4x x) {
    return _mm256_add_epi16(pairs, _mm256_maddubs_epi16(nibbles, x));
}
FORCE_INLINE vi q4_end(q4sum pairs) { return pairs_to_words(pairs); }
FORCE_INLINE vi low_nibbles(vi both) { return _mm256_and_si256(both, _mm256_set1_epi8(15)); }
FORCE_INLINE vi high_nibbles(vi both) { return low_nibbles(_mm256_srli_epi16(both, 4)); }

#define COVER(TILE) SHAPE(TILE, 4, 2) SHAPE(TILE, 2, 4) SHAPE(TILE, 1, 4)
#define COVER_INT4  COVER

#include "tile.h"

CLB_INTERNAL const clb_kernels clb_kernels_avx2 = KERNELS("avx2");

#endif
