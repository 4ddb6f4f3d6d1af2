/* The arithmetic that gives one answer everywhere: IEEE 754 binary32, each operation rounded by
 * itself to nearest even, denormals kept. Compilers are held to it here, whatever their flags; the
 * processor for as long as a forward runs. What neither can be held to is noticed. */
#ifndef COLIBRI_ARITHMETIC_H
#define COLIBRI_ARITHMETIC_H

#if defined(__FAST_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__ASSOCIATIVE_MATH__) ||     \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "Colibri gives the same bits everywhere; -ffast-math, and its parts do not."
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "Floats must be computed as floats: on 32-bit x86 compile with -msse2 -mfpmath=sse."
#endif
#if defined(__ARM_FEATURE_MVE) && (__ARM_FEATURE_MVE & 2)
#error "Helium's float vectors flush denormals: compile with -mcpu=cortex-m55+nomve.fp or the like."
#endif

/* Multiply and add stay apart: both compilers join them by default where the machine can. To gcc,
 * whose macros do not tell associative-math alone: sums keep their order; nobody reads errno or the
 * exception flags; and bytes are read as the records that lie there. Loops over a few floats stay
 * loops: a call of memcpy takes longer on small cores. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off", "no-associative-math", "signed-zeros")
#pragma GCC optimize("no-math-errno", "no-trapping-math", "no-strict-aliasing")
#pragma GCC optimize("no-tree-loop-distribute-patterns")
#endif

#include "elementary.h"

/* The control word: CLB_CONTROL are the bits of it that decide what a result is or whether it
 * traps. */
#if defined(__SSE__) /* MXCSR; traps are masked by ones */
typedef uint32_t clb_control;
#define CLB_CONTROL             0xFFC0u
#define CLB_STANDARD            0x1F80u
#define CLB_READ_CONTROL(word)  __asm__ volatile("stmxcsr %0" : "=m"(word))
#define CLB_WRITE_CONTROL(word) __asm__ volatile("ldmxcsr %0" : : "m"(word) : "memory")
#elif defined(__aarch64__) && defined(__ARM_FP) /* FPCR */
typedef uint64_t clb_control;
#define CLB_CONTROL             (~0ull)
#define CLB_STANDARD            0u
#define CLB_READ_CONTROL(word)  __asm__ volatile("mrs %0, fpcr" : "=r"(word))
#define CLB_WRITE_CONTROL(word) __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory")
#elif defined(__ARM_FP)
/* FPSCR; its other bits are conditions, exceptions and Helium's vector length */
typedef uint32_t clb_control;
#define CLB_CONTROL             0x07C89F00u
#define CLB_STANDARD            0u
#define CLB_READ_CONTROL(word)  __asm__ volatile("vmrs %0, fpscr" : "=r"(word))
#define CLB_WRITE_CONTROL(word) __asm__ volatile("vmsr fpscr, %0" : : "r"(word) : "memory")
#elif defined(__riscv_flen) || defined(__riscv_zfinx) /* frm: there are no traps, and no flushing */
typedef uintptr_t clb_control;
#define CLB_CONTROL             7u
#define CLB_STANDARD            0u
#define CLB_READ_CONTROL(word)  __asm__ volatile("frrm %0" : "=r"(word))
#define CLB_WRITE_CONTROL(word) __asm__ volatile("fsrm %0" : : "r"(word) : "memory")
#else /* none, or none that is known: then clb_sound has the word */
typedef uint32_t clb_control;
#define CLB_CONTROL             0u
#define CLB_STANDARD            0u
#define CLB_READ_CONTROL(word)  ((word) = 0)
#define CLB_WRITE_CONTROL(word) ((void)(word))
#endif

static inline clb_control clb_read_control(void) {
    clb_control word;
    CLB_READ_CONTROL(word);
    return word;
}
static inline void clb_write_control(clb_control word) { CLB_WRITE_CONTROL(word); }

/* Compute as the standard says from here on; what clb_restore takes. Writing costs more than
 * looking. */
static inline clb_control clb_standard(void) {
    const clb_control found = clb_read_control();
    if ((found & CLB_CONTROL) != CLB_STANDARD) {
        clb_write_control((found & ~(clb_control)CLB_CONTROL) | CLB_STANDARD);
    }
    return found;
}

static inline void clb_restore(clb_control found) {
    if ((found & CLB_CONTROL) != CLB_STANDARD) {
        clb_write_control(found);
    }
}

/* x, of which the compiler knows nothing. */
static inline float clb_opaque(float x) {
    uint32_t bits = clb_bits(x);
    __asm__ volatile("" : "+r"(bits));
    return clb_from_bits(bits);
}

/* Whether arithmetic is what it must be, as this file was compiled and as the processor is set. */
static inline int clb_sound(void) {
    const float one = clb_opaque(1.0f);
    const float above = clb_opaque(0x1.001p+0f);
    const float denormal = clb_opaque(0x1p-100f) * 0x1p-40f;
    uint32_t wrong = clb_bits(denormal * 0x1p+60f) ^ 0x17800000u; /* 2^-80: denormals are kept */
    wrong |= clb_bits(one + 0x1p-26f) ^ 0x3F800000u;              /* 1: sums are not rounded up */
    wrong |= clb_bits(one - 0x1p-26f) ^ 0x3F800000u;              /* nor down */
    wrong |= clb_bits(above * above - 0x1.002p+0f); /* a product is rounded before it is added */
#ifdef __clang__ /* which has no macro for each part of -ffast-math */
    const float inf = clb_opaque(clb_inf());
    const float nan = clb_opaque(clb_nan());
    wrong |= clb_bits(one + 0x1p+25f - 0x1p+25f);         /* sums keep their order */
    wrong |= clb_bits(9.0f * one / 127.0f) ^ 0x3D912245u; /* a quotient is no product */
    wrong |= clb_bits(clb_opaque(-0.0f) + 0.0f);          /* zeros have signs */
    wrong |= nan == nan;
    wrong |= inf < clb_inf();
#endif
    __asm__ volatile(""
                     : "+r"(wrong)); /* computed here, where the control word is the standard one */
    return wrong == 0;
}

#endif
