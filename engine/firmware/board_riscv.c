/* Start-up of a 32-bit RISC-V core, bare metal, with semihosting for output. */
#include "board.h"

int main(void);
void start(void) __attribute__((noreturn, used));

__asm__(".section .vectors, \"ax\"\n"
        ".globl reset\n"
        "reset:\n"
        ".option push\n"
        ".option norelax\n"
        "  la gp, __global_pointer$\n"
        ".option pop\n"
        "  la sp, stack_top\n"
        "  la t0, board_fault\n"
        "  csrw mtvec, t0\n"
        "  j start\n"
        ".previous");

/* The three instructions that a debugger knows, none of them compressed, in one page. */
int board_semihost(int operation, const void *argument) {
    register int a0 __asm__("a0") = operation;
    register const void *a1 __asm__("a1") = argument;
    __asm__ volatile(".balign 16\n"
                     ".option push\n"
                     ".option norvc\n"
                     "slli x0, x0, 0x1f\n"
                     "ebreak\n"
                     "srai x0, x0, 7\n"
                     ".option pop"
                     : "+r"(a0)
                     : "r"(a1)
                     : "memory");
    return a0;
}

uint32_t board_clock(void) {
    uint32_t instructions;
    __asm__ volatile("csrr %0, minstret" : "=r"(instructions));
    return instructions;
}

void start(void) {
    board_memory();
    board_exit(main());
}
