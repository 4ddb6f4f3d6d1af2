/* The two limits that matter here, in a second or two, so that they can be measured between other
 * samples: reading from memory and the peak of int8 arithmetic, one and two threads. The kernels
 * are those of ../limits/limits.c.
 *
 *     probe SAMPLES */
#define main limits_main
#include "../limits/limits.c"
#undef main

int main(int argc, char **argv) {
#if !defined(__AVX2__) || !defined(__FMA__)
    return limits_main();
#else
    int samples = argc > 1 && atoi(argv[1]) < MAX_SAMPLES ? atoi(argv[1]) : MAX_SAMPLES;
    size_t memory = (size_t)1 << 30;
    uint8_t *data = mmap(NULL, memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return 1;
    madvise(data, memory, MADV_HUGEPAGE);
    for (size_t i = 0; i < memory; i += 8)
        *(uint64_t *)(data + i) = i * 0x9E3779B97F4A7C15u;
    printf("[");
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        size_t part = (memory / (size_t)threads - AHEAD) / 1024 * 1024;
        measure("DRAM", threads, samples, read_sequential, data, part, (double)part);
        measure("DRAM streams", threads, samples, read_streams, data, part, (double)part);
        measure("int8", threads, samples, int8_chain, data, 0, 8 * 32.0);
#ifdef __AVX512VNNI__
        measure("int8 vpdpbusd 512", threads, samples, int8_vnni, data, 0, 12 * 64.0);
#endif
    }
    printf("]\n");
    return 0;
#endif
}
