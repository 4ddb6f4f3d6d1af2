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
        "  la t0, fault\n"
        "  csrw mtvec, t0\n"
        "  j start\n"
        ".previous");

extern uint32_t data_in_flash, data_start, data_end, bss_start, bss_end;

/* The three instructions that a debugger knows, none of them compressed, in one page. */
static int semihost(int operation, const void *argument)
{
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

void board_print(const char *text)
{
    semihost(0x04, text);
}

void board_exit(int code)
{
    const uint32_t reason[2] = {0x20026, (uint32_t)code};
    for (;;) {
        semihost(0x20, reason);
    }
}

uint32_t board_clock(void)
{
    uint32_t instructions;
    __asm__ volatile("csrr %0, minstret" : "=r"(instructions));
    return instructions;
}

__attribute__((aligned(4), used)) void fault(void)
{
    board_print("fault\n");
    board_exit(99);
}

void start(void)
{
    for (uint32_t *from = &data_in_flash, *to = &data_start; to < &data_end;) {
        *to++ = *from++;
    }
    for (uint32_t *to = &bss_start; to < &bss_end;) {
        *to++ = 0;
    }
    board_exit(main());
}
