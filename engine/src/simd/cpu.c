/* Which kernels this processor can run. Asked once, in colibri_init; a firmware build has one
 * answer. */
#include "../core/internal.h"

#ifdef CLB_X86

#include <cpuid.h>

/* Whether the processor has F16C and these features of its leaf 7, and the operating system saves
 * these registers: 6 the 256-bit ones, 0xE6 the 512-bit ones too. */
static int has(uint32_t registers, uint32_t in_b, uint32_t in_c) {
    uint32_t a;
    uint32_t b;
    uint32_t c;
    uint32_t d;
    uint32_t saved;
    uint32_t high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if ((c & bit_OSXSAVE) == 0 || (c & bit_F16C) == 0) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & registers) != registers) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & in_b) == in_b && (c & in_c) == in_c;
}

#endif

const clb_kernels *clb_kernels_at(uint32_t n) {
#ifdef CLB_X86
    const unsigned wide = bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (has(0xE6, wide, bit_AVX512VNNI) && n-- == 0) return &clb_kernels_avx512;
    if (has(6, bit_AVX2, 0) && n-- == 0) return &clb_kernels_avx2;
#elif defined(CLB_NEON_DOT) && !defined(__ARM_FEATURE_DOTPROD)
    uint64_t features; /* ID_AA64ISAR0_EL1, of it the field DP: Linux lets a program read it */
    __asm__("mrs %0, S3_0_C0_C6_0" : "=r"(features));
    if ((features >> 44 & 15u) != 0 && n-- == 0) return &clb_kernels_neon_dot;
#endif
#ifdef CLB_V128
    if (n-- == 0) return &CLB_V128;
#endif
    return n == 0 ? &clb_kernels_plain : NULL;
}
