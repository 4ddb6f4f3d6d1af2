/* What the example needs of a board: a line of text to the debugger, an end, and a clock that counts instructions. */
#include <stdint.h>

/* The board's own file: a call to the debugger. The rest is board.c. */
int board_semihost(int operation, const void *argument);

/* Makes memory what C expects, before main. */
void board_memory(void);
void board_fault(void) __attribute__((noreturn, aligned(4)));

void board_print(const char *text);
void board_exit(int code) __attribute__((noreturn));

/* Virtual nanoseconds since the start; under the emulator's -icount shift=0, instructions. Wraps after 2^32. */
uint32_t board_clock(void);

/* Calls `handler` from a timer interrupt, again and again, after intervals of pseudo-random length (Cortex-M only; the
 * clock above stops being one). NULL ends it. */
void board_interrupt(void (*handler)(void));
