/* What all boards share: memory before main, output and end through semihosting. */
#include "board.h"

extern uint32_t fast_in_flash, fast_start, fast_end, data_in_flash, data_start, data_end, bss_start,
    bss_end;

void board_print(const char *text) { board_semihost(0x04, text); }

void board_exit(int code) {
    const uint32_t reason[2] = {0x20026, (uint32_t)code};
    for (;;) {
        board_semihost(0x20, reason);
    }
}

void board_fault(void) {
    board_print("fault\n");
    board_exit(99);
}

void board_memory(void) {
    for (uint32_t *from = &fast_in_flash, *to = &fast_start; to < &fast_end;) {
        *to++ = *from++;
    }
    for (uint32_t *from = &data_in_flash, *to = &data_start; to < &data_end;) {
        *to++ = *from++;
    }
    for (uint32_t *to = &bss_start; to < &bss_end;) {
        *to++ = 0;
    }
}

void board_report(const char *name, uint32_t value) {
    char text[12] = "0x00000000\n";
    for (int i = 0; i < 8; ++i) {
        text[9 - i] = "0123456789abcdef"[value >> 4 * i & 15];
    }
    board_print(name);
    board_print(" ");
    board_print(text);
}

enum { PAINT = 0xA5, PAINT_BYTES = 16 << 10, OWN_BYTES = 64 /* of the painter's own frame */ };

static uint8_t *lowest_painted(const uint8_t *top) {
    uint8_t *const low = (uint8_t *)&bss_end;
    return (uint32_t)(top - low) > PAINT_BYTES ? (uint8_t *)(uintptr_t)top - PAINT_BYTES : low;
}

void board_stack_paint(uint8_t *top) {
    for (volatile uint8_t *at = lowest_painted(top); at < top - OWN_BYTES; ++at) {
        *at = PAINT;
    }
}

uint32_t board_stack_used(const uint8_t *top) {
    const volatile uint8_t *at = lowest_painted(top);
    while (at < top && *at == PAINT) {
        ++at;
    }
    return (uint32_t)(top - at);
}
