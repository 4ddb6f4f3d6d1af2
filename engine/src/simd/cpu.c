/* Which kernels this processor can run. Asked once, in colibri_init; a firmware build has one answer. */
#include "../internal.h"

#if defined(CLB_X86)

#include <cpuid.h>

/* An operating system that saves these registers: 6 the 256-bit ones, 0xE6 the 512-bit ones too. */
static int saves(unsigned registers)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) {
        return 0;
    }
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

static int has_avx2(void)
{
    unsigned a, b, c, d;
    return saves(6) && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (b & bit_AVX2);
}

static int has_avx512(void)
{
    const unsigned need = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d;
    return has_avx2() && saves(0xE6) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & need) == need &&
           (c & bit_AVX512VNNI);
}

#elif defined(CLB_NEON_DOT) && !defined(__ARM_FEATURE_DOTPROD)

/* ID_AA64ISAR0_EL1, field DP: Linux lets a program read it. */
static int has_dot(void)
{
    uint64_t features;
    __asm__("mrs %0, S3_0_C0_C6_0" : "=r"(features));
    return (features >> 44 & 15u) != 0;
}
#endif

const clb_kernels *clb_kernels_at(uint32_t n)
{
#if defined(CLB_X86)
    if (has_avx512() && n-- == 0) {
        return &clb_kernels_avx512;
    }
    if (has_avx2() && n-- == 0) {
        return &clb_kernels_avx2;
    }
#elif defined(CLB_NEON_DOT) && !defined(__ARM_FEATURE_DOTPROD)
    if (has_dot() && n-- == 0) {
        return &clb_kernels_neon_dot;
    }
#endif
#if defined(CLB_V128)
    if (n-- == 0) {
        return &CLB_V128;
    }
#endif
    return n == 0 ? &clb_kernels_plain : NULL;
}
