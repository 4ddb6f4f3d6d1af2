/* What a firmware needs of a board: lines of text to the debugger, an end, a clock that counts
 * instructions, and the depth of the stack. */
#include <stdint.h>

/* The board's own file: a call to the debugger. The rest is board.c. */
int board_semihost(int operation, const void *argument);

/* Makes memory what C expects, before main. */
void board_memory(void);
void board_fault(void) __attribute__((noreturn, aligned(4)));

void board_print(const char *text);
void board_exit(int code) __attribute__((noreturn));

/* Virtual nanoseconds since the start; under the emulator's -icount shift=0, instructions. Wraps
 * after 2^32. */
uint32_t board_clock(void);

/* A line: the name and the value, as 0x and eight digits. */
void board_report(const char *name, uint32_t value);

/* How deep the stack has grown below `top`, which board_stack_paint got too: bytes, up to 16
 * KiB. */
void board_stack_paint(uint8_t *top);
uint32_t board_stack_used(const uint8_t *top);

static inline __attribute__((always_inline)) uint8_t *board_stack_pointer(void) {
    uint8_t *sp;
#ifdef __riscv
    __asm__ volatile("mv %0, sp" : "=r"(sp));
#else
    __asm__ volatile("mov %0, sp" : "=r"(sp));
#endif
    return sp;
}

/* Calls `handler` from a timer interrupt, again and again, after intervals of pseudo-random length
 * (Cortex-M only; the clock above stops being one). NULL ends it. */
void board_interrupt(void (*handler)(void));
