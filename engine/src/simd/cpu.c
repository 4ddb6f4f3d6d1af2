/* Which kernels this processor runs best. Asked once, in colibri_init; a firmware build has one answer. */
#include "../internal.h"

#if defined(CLB_AVX2)

#include <cpuid.h>

/* AVX2, F16C, and an operating system that saves the wide registers. */
static int has_avx2(void)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_F16C)) {
        return 0;
    }
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 6u) == 6u && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

const clb_kernels *clb_best_kernels(void)
{
    return has_avx2() ? &clb_kernels_avx2 : &clb_kernels_plain;
}

#else

const clb_kernels *clb_best_kernels(void)
{
    return &clb_kernels_plain;
}

#endif
