/* Flips bits of the model in memory, every STEP-th, one at a time: colibri_check_flash must find
 * each, in one call and in slices. Prints how many were flipped and what a whole check takes by the
 * board's clock. */
#include "colibri.h"
#include "colibri_inspect.h"
#include "model.h"
#include "parts.h" /* static const struct { const uint8_t *at; uint32_t bytes; } arrays[], STEP */

#if defined(__linux__)
#include <stdio.h>
#include <sys/mman.h>
static void writable(const uint8_t *at, uint32_t bytes) {
    const uintptr_t first = (uintptr_t)at & ~(uintptr_t)4095;
    mprotect((void *)first, (uintptr_t)at + bytes - first, PROT_READ | PROT_WRITE);
}
static uint32_t board_clock(void) { return 0; }
static void board_report(const char *name, uint32_t value) {
    printf("%s 0x%08x\n", name, (unsigned)value);
}
#else
#include "board.h"
static void writable(const uint8_t *at, uint32_t bytes) {
    (void)at, (void)bytes;
} /* the emulator's flash is */
#endif

/* Calls of `slice` bytes up to the end of a pass; the faults that they returned. */
static uint32_t faults(uint32_t slice) {
    colibri_scan_t scan = {0};
    uint32_t found = 0;
    while (scan.passes == 0) {
        found += colibri_check_flash(&scan, slice) == COLIBRI_ERR_CHECKSUM;
    }
    return scan.faults == found ? found : 1000;
}

int main(void) {
    uint32_t flipped = 0;
    if (faults(UINT32_MAX) != 0 || faults(7) != 0 || faults(64) != 0 ||
        colibri_check_flash(NULL, 1) != COLIBRI_ERR_NULL) {
        return 1;
    }
    const uint32_t before = board_clock();
    faults(UINT32_MAX);
    const uint32_t after = board_clock();
    colibri_scan_t other = {1000, 1u << 30, 5, 0, 0}; /* of another model */
    if (colibri_check_flash(&other, UINT32_MAX) != COLIBRI_OK || other.passes != 1) {
        return 2;
    }
    for (uint32_t n = 0; n < sizeof arrays / sizeof arrays[0]; ++n) {
        writable(arrays[n].at, arrays[n].bytes);
        for (uint32_t bit = n % STEP; bit < arrays[n].bytes * 8; bit += STEP, ++flipped) {
            volatile uint8_t *const byte = (volatile uint8_t *)(uintptr_t)arrays[n].at + bit / 8;
            *byte = (uint8_t)(*byte ^ 1u << bit % 8);
            const uint32_t found = faults(flipped % 8 == 0 ? 61 : UINT32_MAX);
            *byte = (uint8_t)(*byte ^ 1u << bit % 8);
            if (found != 1) {
                return 3;
            }
        }
    }
    board_report("flipped", flipped);
    board_report("instructions", after - before);
    return faults(UINT32_MAX) != 0;
}
