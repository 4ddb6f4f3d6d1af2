/* Start-up of a Cortex-M, bare metal, with semihosting for output. */
#include "board.h"

#ifndef BOARD_MHZ
#define BOARD_MHZ 25 /* of the emulated mps2 boards; one tick is 1000 / MHz ns */
#endif

extern uint32_t stack_top;
int main(void);

int board_semihost(int operation, const void *argument) {
    register int r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

static volatile uint32_t *const systick =
    (volatile uint32_t *)0xE000E010; /* control, reload, current */
static uint32_t wraps, seed = 1;
static void (*volatile interrupt)(void);

static void systick_handler(void) {
    ++wraps;
    if (interrupt != 0) {
        seed = seed * 1664525u + 1013904223u;
        systick[1] = 200 + (seed >> 20); /* ticks: up to 4,295 */
        systick[2] = 0;
        interrupt();
    }
}

void board_interrupt(void (*handler)(void)) {
    interrupt = handler;
    systick[1] = handler != 0 ? 200 : 0xFFFFFF;
    systick[2] = 0;
}

uint32_t board_clock(void) {
    uint32_t before, current;
    do {
        before = wraps;
        current = systick[2];
    } while (before != wraps);
    return (uint32_t)(((uint64_t)(before + 1) * 0x1000000u - current) * 1000u / BOARD_MHZ);
}

void reset(void) {
    *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* CPACR: the FPU, and Helium */
    __asm__ volatile("dsb\n isb" ::: "memory");
    board_memory();
    systick[1] = 0xFFFFFF;
    systick[2] = 0;
    systick[0] = 7; /* the processor's clock, with its interrupt */
    board_exit(main());
}

__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    &stack_top, reset, board_fault, board_fault, board_fault, board_fault, board_fault,    0, 0,
    0,          0,     board_fault, board_fault, 0,           board_fault, systick_handler};
