/* Every target with 128-bit vectors, in the compiler's own vector types: NEON, RISC-V V (fixed at
 * 128 bits, so that any vector length will do), WebAssembly SIMD. A vector is one block of 8 output
 * rows, in two halves; only the integer products differ. */
#include "../core/internal.h"

#ifdef CLB_V128

#ifdef __aarch64__
#include <arm_neon.h>
#endif

#include "panel.h"
#include "vector.h"

#define WIDE 1
#define BOTH for (int h = 0; h < 2; ++h)

typedef float floats __attribute__((vector_size(16)));
typedef int32_t words __attribute__((vector_size(16)));
typedef uint32_t bits __attribute__((vector_size(16)));

typedef struct {
    floats half[2];
} vf;
typedef struct {
    words half[2];
} vi;

FORCE_INLINE vf broadcast(const float *p) { return (vf){{{*p, *p, *p, *p}, {*p, *p, *p, *p}}}; }
FORCE_INLINE vf add(vf a, vf b) { return (vf){{a.half[0] + b.half[0], a.half[1] + b.half[1]}}; }
FORCE_INLINE vf mul(vf a, vf b) { return (vf){{a.half[0] * b.half[0], a.half[1] * b.half[1]}}; }
FORCE_INLINE vf to_float(vi v) {
    return (vf){
        {__builtin_convertvector(v.half[0], floats), __builtin_convertvector(v.half[1], floats)}};
}
FORCE_INLINE vi same(int32_t n) { return (vi){{{n, n, n, n}, {n, n, n, n}}}; }

FORCE_INLINE vf f32_at(place p) {
    vf v;
    memcpy(&v, p.first, sizeof v);
    return v;
}
FORCE_INLINE void add_to(float *p, vf v) {
    v = add(f32_at((place){p, NULL}), v);
    memcpy(p, &v, sizeof v);
}

FORCE_INLINE vf f16_at(place p) {
    const uint16_t *bits_at = p.first;
    vf v;
    BOTH {
#ifdef __aarch64__
        v.half[h] = (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits_at + h * 4)));
#else /* as clb_half has it */
        typedef uint16_t halves __attribute__((vector_size(8)));
        halves packed;
        memcpy(&packed, bits_at + h * 4, sizeof packed);
        const bits wide = __builtin_convertvector(packed, bits);
        const bits rest = (wide & 0x7FFFu) << 13;
        const bits finite = (bits)((floats)rest * 0x1p112f);
        const bits special = (bits)(rest >= 0x0F800000u);
        v.half[h] = (floats)((wide & 0x8000u) << 16 | (special & (rest | 0x7F800000u)) |
                             (~special & finite));
#endif
    }
    return v;
}

FORCE_INLINE vi bytes_at(place p) {
    vi v;
    memcpy(&v, p.first, sizeof v);
    return v;
}

FORCE_INLINE words byte_in(words four, int i) { return (words)((bits)four << (24 - 8 * i)) >> 24; }

FORCE_INLINE vi byte_of_all(vi four, int i) {
    return (vi){{byte_in(four.half[0], i), byte_in(four.half[1], i)}};
}
FORCE_INLINE vf byte_of(vi four, int i) { return to_float(byte_of_all(four, i)); }

FORCE_INLINE vi low_nibbles(vi both) {
    return (vi){{both.half[0] & 0x0F0F0F0F, both.half[1] & 0x0F0F0F0F}};
}
FORCE_INLINE vi high_nibbles(vi both) {
    return low_nibbles((vi){{both.half[0] >> 4, both.half[1] >> 4}});
}

#ifdef __aarch64__ /* products of bytes */

typedef vi q8w;
typedef int8x16_t q8x;

FORCE_INLINE q8w q8_weights(vi weights) { return weights; }
FORCE_INLINE q8x q8_input(const int8_t *q) { return (int8x16_t)same(clb_four(q)).half[0]; }

#ifdef __ARM_FEATURE_DOTPROD
#define NAME "neon-dot"

typedef vi q8sum;

FORCE_INLINE q8sum sums_from(int32_t n) { return same(n); }
FORCE_INLINE q8sum q8_dot(q8sum sum, q8w weights, q8x x) {
    BOTH { sum.half[h] = (words)vdotq_s32((int32x4_t)sum.half[h], (int8x16_t)weights.half[h], x); }
    return sum;
}
FORCE_INLINE vi q8_end(q8sum sum) { return sum; }

#else
#define NAME "neon"

typedef struct {
    int32x4_t pair[4];
} q8sum; /* pairs of rows, each as two parts */

FORCE_INLINE q8sum sums_from(int32_t n) {
    const int32x4_t two = {n, 0, n, 0};
    return (q8sum){{two, two, two, two}};
}
FORCE_INLINE q8sum q8_dot(q8sum sum, q8w weights, q8x x) {
    BOTH {
        const int8x16_t w = (int8x16_t)weights.half[h];
        sum.pair[2 * h] = vpadalq_s16(sum.pair[2 * h], vmull_s8(vget_low_s8(w), vget_low_s8(x)));
        sum.pair[2 * h + 1] = vpadalq_s16(sum.pair[2 * h + 1], vmull_high_s8(w, x));
    }
    return sum;
}
FORCE_INLINE words paired(const int32x4_t *pair) { return (words)vpaddq_s32(pair[0], pair[1]); }
FORCE_INLINE vi q8_end(q8sum sum) { return (vi){{paired(sum.pair), paired(sum.pair + 2)}}; }

#endif

#else /* 32-bit products of bytes taken apart */
#ifdef __riscv_vector
#define NAME "rvv"
#else
#define NAME "wasm"
#endif

typedef struct {
    vi input[4];
} q8w;
typedef vi q8sum;
typedef const int8_t *q8x;

FORCE_INLINE q8sum sums_from(int32_t n) { return same(n); }
FORCE_INLINE q8x q8_input(const int8_t *q) { return q; }
FORCE_INLINE q8w q8_weights(vi weights) {
    q8w w;
    for (int i = 0; i < 4; ++i) {
        w.input[i] = byte_of_all(weights, i);
    }
    return w;
}
FORCE_INLINE q8sum q8_dot(q8sum sum, q8w weights, q8x x) {
    for (int i = 0; i < 4; ++i) {
        BOTH { sum.half[h] += weights.input[i].half[h] * x[i]; }
    }
    return sum;
}
FORCE_INLINE vi q8_end(q8sum sum) { return sum; }

#endif

/* Nibbles are small bytes. */
typedef q8sum q4sum;
typedef q8x q4x;

FORCE_INLINE q8sum q8_start(UNUSED const clb_quantized *x, UNUSED uint32_t start,
                            UNUSED uint32_t end) {
    return sums_from(0);
}
FORCE_INLINE q4sum q4_start(uint32_t inputs) { return sums_from((int32_t)(0u - 8u * inputs)); }
FORCE_INLINE q4x q4_input(const int8_t *q) { return q8_input(q); }
FORCE_INLINE q4sum q4_dot(q4sum sum, vi nibbles, q4x x) {
    return q8_dot(sum, q8_weights(nibbles), x);
}
FORCE_INLINE vi q4_end(q4sum sum) { return q8_end(sum); }

#ifdef __aarch64__
#define COVER(TILE) SHAPE(TILE, 4, 2) SHAPE(TILE, 2, 4) SHAPE(TILE, 1, 4)
#else
#define COVER(TILE) SHAPE(TILE, 2, 2) SHAPE(TILE, 1, 4)
#endif
#define COVER_INT4 COVER

#include "tile.h"

CLB_INTERNAL const clb_kernels CLB_V128 = KERNELS(NAME);

#endif
