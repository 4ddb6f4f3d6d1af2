/* What string.h declares, where no library has it. A compiler may turn a loop that copies into a
 * call of the very function the loop is in; the built-in functions are such calls too, but for
 * WebAssembly's, which are one instruction each. */
#include <stdint.h>
#include <string.h>

#ifdef __wasm_bulk_memory__

void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    return __builtin_memcpy(to, from, n);
}

void *memmove(void *to, const void *from, size_t n) { return __builtin_memmove(to, from, n); }

void *memset(void *to, int value, size_t n) { return __builtin_memset(to, value, n); }

#else

/* Nothing to the machine; to a compiler a step that cannot be part of a copy. */
#define STEP() __asm__ volatile("")

static void *copied(void *to, const void *from, size_t n) {
    uint8_t *x = to;
    const uint8_t *y = from;
    for (size_t i = 0; i < n; ++i) {
        x[i] = y[i];
        STEP();
    }
    return to;
}

void *memcpy(void *restrict to, const void *restrict from, size_t n) { return copied(to, from, n); }

void *memmove(void *to, const void *from, size_t n) {
    uint8_t *x = to;
    const uint8_t *y = from;
    if ((uintptr_t)to - (uintptr_t)from >= n) { /* `to` begins before `from`, or behind its end */
        return copied(to, from, n);
    }
    while (n-- > 0) {
        x[n] = y[n];
        STEP();
    }
    return to;
}

void *memset(void *to, int value, size_t n) {
    uint8_t *x = to;
    for (size_t i = 0; i < n; ++i) {
        x[i] = (uint8_t)value;
        STEP();
    }
    return to;
}

#endif

int memcmp(const void *a, const void *b, size_t n) {
    const uint8_t *x = a;
    const uint8_t *y = b;
    for (size_t i = 0; i < n; ++i) {
        if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
    }
    return 0;
}
