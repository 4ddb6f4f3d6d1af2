/* What all boards share: memory before main, output and end through semihosting. */
#include "board.h"

extern uint32_t data_in_flash, data_start, data_end, bss_start, bss_end;

void board_print(const char *text)
{
    board_semihost(0x04, text);
}

void board_exit(int code)
{
    const uint32_t reason[2] = {0x20026, (uint32_t)code};
    for (;;) {
        board_semihost(0x20, reason);
    }
}

void board_fault(void)
{
    board_print("fault\n");
    board_exit(99);
}

void board_memory(void)
{
    for (uint32_t *from = &data_in_flash, *to = &data_start; to < &data_end;) {
        *to++ = *from++;
    }
    for (uint32_t *to = &bss_start; to < &bss_end;) {
        *to++ = 0;
    }
}
