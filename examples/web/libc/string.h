/* What the engine uses of a C library, for WebAssembly, where there is none. Compile with -mbulk-memory, or the copies
 * of string.c call themselves. */
#include <stddef.h>

void *memcpy(void *restrict to, const void *restrict from, size_t n);
void *memmove(void *to, const void *from, size_t n);
void *memset(void *to, int value, size_t n);
int memcmp(const void *a, const void *b, size_t n);
