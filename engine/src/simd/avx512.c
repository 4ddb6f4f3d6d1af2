/* AVX-512 with VNNI: a vector is two blocks of 8 output rows. */
#include "../core/internal.h"

#if defined(__x86_64__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

#include "panel.h"
#include "vector.h"

#define WIDE 2

typedef __m512 vf;
typedef __m512i vi, q8w, q8x, q8sum;
typedef const int8_t *q4x;
typedef struct {
    vi next, other;
} q4sum; /* products are added to two sums in turn: each waits for the one before it */

FORCE_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
FORCE_INLINE void add_to(float *p, vf v) { _mm512_storeu_ps(p, add(_mm512_loadu_ps(p), v)); }
FORCE_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
FORCE_INLINE vf broadcast(const float *p) { return _mm512_set1_ps(*p); }
FORCE_INLINE vf to_float(vi v) { return _mm512_cvtepi32_ps(v); }
FORCE_INLINE vi words(int32_t n) { return _mm512_set1_epi32(n); }

FORCE_INLINE vi bytes_at(place p) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256(p.first));
    return _mm512_inserti64x4(first, _mm256_loadu_si256(p.second), 1);
}

FORCE_INLINE vf f32_at(place p) { return _mm512_castsi512_ps(bytes_at(p)); }

FORCE_INLINE vf f16_at(place p) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128(p.first));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(first, _mm_loadu_si128(p.second), 1));
}

FORCE_INLINE vf byte_of(vi four, int i) {
    return to_float(_mm512_srai_epi32(_mm512_sllv_epi32(four, words(24 - 8 * i)), 24));
}

/* The weight plus 128 is the unsigned operand, so 128 · Σ inputs is taken off from the start; over
 * a group of 128 inputs all stays within 2 · 128 · 255 · 127 < 2^23. */
FORCE_INLINE q8sum q8_start(const clb_quantized *x, uint32_t start, uint32_t end) {
    return words((int32_t)(0u - 128u * inputs_of(x, start, end)));
}
FORCE_INLINE q8w q8_weights(vi weights) {
    return _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
}
FORCE_INLINE q8x q8_input(const int8_t *q) { return words(clb_four(q)); }
FORCE_INLINE q8sum q8_dot(q8sum sum, q8w weights, q8x x) {
    __asm__("vpdpbusd %2, %1, %0"
            : "+v"(sum)
            : "v"(weights), "v"(x)); /* gcc copies registers around the intrinsic */
    return sum;
}

FORCE_INLINE vi q8_end(q8sum sum) { return sum; }

FORCE_INLINE q4sum q4_start(uint32_t inputs) {
    return (q4sum){words((int32_t)(0u - 8u * inputs)), words(0)};
}
FORCE_INLINE q4x q4_input(const int8_t *q) { return q; }
FORCE_INLINE q4sum q4_dot(q4sum sum, vi nibbles, q4x x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sum.next)
            : "v"(nibbles), "m"(*(const int8_t (*)[4])x));
    return (q4sum){sum.other, sum.next};
}
FORCE_INLINE vi q4_end(q4sum sum) { return _mm512_add_epi32(sum.next, sum.other); }
FORCE_INLINE vi low_nibbles(vi both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
FORCE_INLINE vi high_nibbles(vi both) { return low_nibbles(_mm512_srli_epi16(both, 4)); }

#define COVER(TILE)      SHAPE(TILE, 8, 2) SHAPE(TILE, 4, 4) SHAPE(TILE, 2, 4) SHAPE(TILE, 1, 4)
#define COVER_INT4(TILE) SHAPE(TILE, 8, 1) SHAPE(TILE, 4, 2) SHAPE(TILE, 2, 2) SHAPE(TILE, 1, 4)

#include "tile.h"

CLB_INTERNAL const clb_kernels clb_kernels_avx512 = KERNELS("avx512");

#endif
