/* What this machine can do at best: read bandwidth of each cache level, of memory and by working
 * set, and the peaks of float32 and int8 arithmetic, with one and two threads. Prints one JSON
 * array. What is compiled in follows -march=native: AVX2 and FMA at least; AVX-512, its VNNI and
 * AMX where the processor has them.
 *
 *     limits L1_BYTES L2_BYTES L3_BYTES SAMPLES */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if !defined(__AVX2__) || !defined(__FMA__)
int main(void) {
    fprintf(stderr, "limits: these kernels are written for AVX2 and FMA; this processor's limits "
                    "were not measured\n");
    return 2;
}
#else
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { MAX_THREADS = 2, MAX_SAMPLES = 64, STREAMS = 4, AHEAD = 1024 };

#ifdef __AVX512F__ /* the widest loads: the first cache gives no more to narrower ones */
typedef __m512i wide;
#define ZERO()    _mm512_setzero_si512()
#define XOR(a, b) _mm512_xor_si512(a, b)
#define LOAD(p)   _mm512_load_si512(p)
#else
typedef __m256i wide;
#define ZERO()    _mm256_setzero_si256()
#define XOR(a, b) _mm256_xor_si256(a, b)
#define LOAD(p)   _mm256_load_si256(p)
#endif

typedef struct job job;
typedef uint64_t kernel(const job *);

struct job {
    int cpu;
    kernel *run;
    const uint8_t *data; /* read kernels: this thread's part */
    size_t bytes;
    long repeats;
    pthread_barrier_t *start;
    double begin, end;
    uint64_t sink; /* keeps the compiler from dropping the work */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t fold(const void *vector) {
    uint64_t part[4];
    memcpy(part, vector, sizeof part);
    return part[0] ^ part[1] ^ part[2] ^ part[3];
}

/* --- reading --- */

static uint64_t read_sequential(const job *j) {
    wide a = ZERO(), b = a, c = a, d = a;
    for (long r = 0; r < j->repeats; r++) {
        for (size_t i = 0; i < j->bytes; i += 4 * sizeof(wide)) {
            const wide *p = (const wide *)(j->data + i);
            a = XOR(a, LOAD(p));
            b = XOR(b, LOAD(p + 1));
            c = XOR(c, LOAD(p + 2));
            d = XOR(d, LOAD(p + 3));
        }
        __asm__ volatile("" : "+x"(a), "+x"(b) : : "memory"); /* each repeat reads anew */
    }
    a = XOR(XOR(a, b), XOR(c, d));
    return fold(&a);
}

static uint64_t read_streams(const job *j) {
    wide sum[STREAMS] = {0};
    size_t part = j->bytes / STREAMS / 64 * 64;
    for (long r = 0; r < j->repeats; r++)
        for (size_t i = 0; i < part; i += 64)
            for (int s = 0; s < STREAMS; s++) {
                const uint8_t *p = j->data + (size_t)s * part + i;
                _mm_prefetch((const char *)p + AHEAD, _MM_HINT_T0);
                for (size_t n = 0; n < 64; n += sizeof(wide))
                    sum[s] = XOR(sum[s], LOAD((const wide *)(p + n)));
            }
    wide total = XOR(XOR(sum[0], sum[1]), XOR(sum[2], sum[3]));
    return fold(&total);
}

/* --- arithmetic --- Independent chains hide the latency. Each is a variable of its own, for an
 * array with an asm on it stays in memory; the empty asm keeps each step in place, and an operand
 * through it keeps the compiler from computing a product once. */

#define KEEP(v)        __asm__ volatile("" : "+x"(v))
#define EACH8(STEP)    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
#define EACH12(STEP)   EACH8(STEP) STEP(8) STEP(9) STEP(10) STEP(11)
#define FLOAT_CHAIN(i) __m256 acc##i = _mm256_set1_ps((float)i);
#define FLOAT_TOTAL(i) total = _mm256_add_ps(total, acc##i);
#define INT_CHAIN(i)   __m256i acc##i = _mm256_setzero_si256();
#define INT_TOTAL(i)   total = _mm256_add_epi32(total, acc##i);

static uint64_t float_fused(const job *j) {
    __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f), total = y;
    EACH12(FLOAT_CHAIN)
#define STEP(i)                                                                                    \
    acc##i = _mm256_fmadd_ps(acc##i, x, y);                                                        \
    KEEP(acc##i);
    for (long r = 0; r < j->repeats; r++) {
        EACH12(STEP)
    }
#undef STEP
    EACH12(FLOAT_TOTAL)
    return fold(&total);
}

/* A multiply, then an add: the arithmetic the engine allows itself. */
static uint64_t float_separate(const job *j) {
    __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1.001f), total = y;
    EACH8(FLOAT_CHAIN)
#define STEP(i)                                                                                    \
    {                                                                                              \
        KEEP(x);                                                                                   \
        __m256 p = _mm256_mul_ps(x, y);                                                            \
        KEEP(p);                                                                                   \
        acc##i = _mm256_add_ps(acc##i, p);                                                         \
        KEEP(acc##i);                                                                              \
    }
    for (long r = 0; r < j->repeats; r++) {
        EACH8(STEP)
    }
#undef STEP
    EACH8(FLOAT_TOTAL)
    return fold(&total);
}

/* 8-bit products summed into 32 bits: maddubs, madd with ones, add; 32 multiply-accumulates a
 * step. */
static uint64_t int8_chain(const job *j) {
    __m256i u = _mm256_set1_epi8(3), s = _mm256_set1_epi8(-2), one = _mm256_set1_epi16(1),
            total = one;
    EACH8(INT_CHAIN)
#define STEP(i)                                                                                    \
    {                                                                                              \
        KEEP(u);                                                                                   \
        __m256i p = _mm256_maddubs_epi16(u, s);                                                    \
        KEEP(p);                                                                                   \
        p = _mm256_madd_epi16(p, one);                                                             \
        KEEP(p);                                                                                   \
        acc##i = _mm256_add_epi32(acc##i, p);                                                      \
        KEEP(acc##i);                                                                              \
    }
    for (long r = 0; r < j->repeats; r++) {
        EACH8(STEP)
    }
#undef STEP
    EACH8(INT_TOTAL)
    return fold(&total);
}

/* The same with two products added in 16 bits before widening (operands of about 7 bits): 64 a
 * step. */
static uint64_t int8_paired(const job *j) {
    __m256i u = _mm256_set1_epi8(3), s = _mm256_set1_epi8(-2), one = _mm256_set1_epi16(1),
            total = one;
    EACH8(INT_CHAIN)
#define STEP(i)                                                                                    \
    {                                                                                              \
        KEEP(u);                                                                                   \
        __m256i p = _mm256_maddubs_epi16(u, s);                                                    \
        KEEP(u);                                                                                   \
        __m256i q = _mm256_maddubs_epi16(u, s);                                                    \
        p = _mm256_madd_epi16(_mm256_add_epi16(p, q), one);                                        \
        KEEP(p);                                                                                   \
        acc##i = _mm256_add_epi32(acc##i, p);                                                      \
        KEEP(acc##i);                                                                              \
    }
    for (long r = 0; r < j->repeats; r++) {
        EACH8(STEP)
    }
#undef STEP
    EACH8(INT_TOTAL)
    return fold(&total);
}

#ifdef __AVX512F__
#define WIDE_FLOAT_CHAIN(i) __m512 acc##i = _mm512_set1_ps((float)i);
#define WIDE_FLOAT_TOTAL(i) total = _mm512_add_ps(total, acc##i);

static uint64_t float_fused_512(const job *j) {
    __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f), total = y;
    EACH12(WIDE_FLOAT_CHAIN)
#define STEP(i)                                                                                    \
    acc##i = _mm512_fmadd_ps(acc##i, x, y);                                                        \
    KEEP(acc##i);
    for (long r = 0; r < j->repeats; r++) {
        EACH12(STEP)
    }
#undef STEP
    EACH12(WIDE_FLOAT_TOTAL)
    return fold(&total);
}

static uint64_t float_separate_512(const job *j) {
    __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1.001f), total = y;
    EACH8(WIDE_FLOAT_CHAIN)
#define STEP(i)                                                                                    \
    {                                                                                              \
        KEEP(x);                                                                                   \
        __m512 p = _mm512_mul_ps(x, y);                                                            \
        KEEP(p);                                                                                   \
        acc##i = _mm512_add_ps(acc##i, p);                                                         \
        KEEP(acc##i);                                                                              \
    }
    for (long r = 0; r < j->repeats; r++) {
        EACH8(STEP)
    }
#undef STEP
    EACH8(WIDE_FLOAT_TOTAL)
    return fold(&total);
}
#endif

#ifdef __AVX512VNNI__
#define WIDE_INT_CHAIN(i) __m512i acc##i = _mm512_setzero_si512();
#define WIDE_INT_TOTAL(i) total = _mm512_add_epi32(total, acc##i);

/* One instruction multiplies and sums four 8-bit products into 32 bits: 64 multiply-accumulates a
 * step. */
static uint64_t int8_vnni(const job *j) {
    __m512i u = _mm512_set1_epi8(3), s = _mm512_set1_epi8(-2), total = u;
    EACH12(WIDE_INT_CHAIN)
#define STEP(i)                                                                                    \
    acc##i = _mm512_dpbusd_epi32(acc##i, u, s);                                                    \
    KEEP(acc##i);
    for (long r = 0; r < j->repeats; r++) {
        EACH12(STEP)
    }
#undef STEP
    EACH12(WIDE_INT_TOTAL)
    return fold(&total);
}
#endif

#ifdef __AMX_INT8__
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, TILES = 8 };

/* Tiles of 16 rows of 64 bytes: 16 * 16 * 64 multiply-accumulates a step, four independent sums. */
static uint64_t int8_amx(const job *j) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    uint32_t sum[16 * 16];
    for (int t = 0; t < TILES; t++)
        shape.bytes[t] = 64, shape.rows[t] = 16;
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, j->data, 64);
    _tile_loadd(5, j->data, 64);
    _tile_loadd(6, j->data, 64);
    _tile_loadd(7, j->data, 64);
    for (long r = 0; r < j->repeats; r++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sum, 64);
    _tile_release();
    return sum[0];
}
#endif

/* --- running --- */

static void *work(void *argument) {
    job *j = argument;
    cpu_set_t
        /* each thread on a processor of its own: samples are shorter than the scheduler's
         * reaction */
        cpu;
    CPU_ZERO(&cpu);
    CPU_SET(j->cpu, &cpu);
    pthread_setaffinity_np(pthread_self(), sizeof cpu, &cpu);
    pthread_barrier_wait(j->start);
    j->begin = now();
    j->sink = j->run(j);
    j->end = now();
    return NULL;
}

/* Seconds from the first thread's begin to the last one's end. */
static double together(int threads, kernel *run, const uint8_t *data, size_t bytes, long repeats) {
    pthread_t ids[MAX_THREADS];
    job jobs[MAX_THREADS];
    pthread_barrier_t start;
    static int turn;
    int cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
    double begin = 1e300, end = 0;
    turn++; /* a single thread uses the processors in turn: one of them may be busy */
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    for (int t = 0; t < threads; t++) {
        jobs[t] = (job){
            (t + turn) % cpus, run, data + (size_t)t * bytes, bytes, repeats, &start, 0, 0, 0};
        pthread_create(&ids[t], NULL, work, &jobs[t]);
    }
    for (int t = 0; t < threads; t++) {
        pthread_join(ids[t], NULL);
        begin = jobs[t].begin < begin ? jobs[t].begin : begin;
        end = jobs[t].end > end ? jobs[t].end : end;
    }
    pthread_barrier_destroy(&start);
    return end - begin;
}

static int descending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Prints the best and the median of `samples` rates in 10^9 units a second. The best is the limit:
 * on a shared machine everything that disturbs a sample makes it slower. */
static void measure(const char *name, int threads, int samples, kernel *run, const uint8_t *data,
                    size_t bytes, double units) {
    double rate[MAX_SAMPLES];
    long repeats = 1;
    while (together(threads, run, data, bytes, repeats) < 0.01 && repeats < (1L << 40))
        repeats *= 2;
    for (int n = 0; n < samples; n++)
        rate[n] =
            units * (double)repeats * threads / together(threads, run, data, bytes, repeats) / 1e9;
    qsort(rate, (size_t)samples, sizeof *rate, descending);
    static int printed;
    printf("%s\n  {\"name\": \"%s\", \"threads\": %d, \"bytes\": %zu, \"best\": %.4g, \"median\": "
           "%.4g}",
           printed++ ? "," : "", name, threads, bytes * (size_t)threads, rate[0],
           rate[samples / 2]);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 5) return 1;
    size_t l1 = strtoull(argv[1], NULL, 10), l2 = strtoull(argv[2], NULL, 10),
           l3 = strtoull(argv[3], NULL, 10);
    int samples = atoi(argv[4]) < MAX_SAMPLES ? atoi(argv[4]) : MAX_SAMPLES;
    size_t memory =
        (size_t)512
        << 20; /* at least: a set three times the last cache finds little of itself there */
    while (memory < 3 * l3 && memory < (size_t)2 << 30)
        memory *= 2;
    uint8_t *data = mmap(NULL, memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        perror("limits");
        return 1;
    }
    madvise(data, memory, MADV_HUGEPAGE);
    for (size_t i = 0; i < memory; i += 8)
        *(uint64_t *)(data + i) = i * 0x9E3779B97F4A7C15u;

    printf("[");
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        size_t share = (size_t)threads;
        /* Half of a private cache for each thread, a quarter of the shared one in all: neighbours
         * use it too. */
        size_t parts[] = {l1 / 2, l2 / 2, l3 / 4 / share, memory / share};
        const char *names[] = {"L1", "L2", "L3", "DRAM"};
        for (int n = 0; n < 4; n++)
            if (parts[n])
                measure(names[n], threads, samples, read_sequential, data, parts[n] / 1024 * 1024,
                        (double)(parts[n] / 1024 * 1024));
        size_t part = (memory / share - AHEAD) / 1024 * 1024;
        measure("DRAM streams", threads, samples, read_streams, data, part, (double)part);
        for (size_t set = (size_t)16 << 10; set <= memory; set *= 2) {
            size_t piece = (set / share - (set == memory ? AHEAD : 0)) / 1024 * 1024;
            measure("working set", threads, samples / 4 + 1, read_sequential, data, piece,
                    (double)piece);
            if (set > l2 * share)
                measure("working set streams", threads, samples / 4 + 1, read_streams, data, piece,
                        (double)piece);
        }
        measure("fp32 fused", threads, samples, float_fused, data, 0, 12 * 8.0);
        measure("fp32 multiply add", threads, samples, float_separate, data, 0, 8 * 8.0);
        measure("int8", threads, samples, int8_chain, data, 0, 8 * 32.0);
        measure("int8 paired", threads, samples, int8_paired, data, 0, 8 * 64.0);
#ifdef __AVX512F__
        measure("fp32 fused 512", threads, samples, float_fused_512, data, 0, 12 * 16.0);
        measure("fp32 multiply add 512", threads, samples, float_separate_512, data, 0, 8 * 16.0);
#endif
#ifdef __AVX512VNNI__
        measure("int8 vpdpbusd 512", threads, samples, int8_vnni, data, 0, 12 * 64.0);
#endif
#ifdef __AMX_INT8__
        if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0)
            measure("int8 amx", threads, samples, int8_amx, data, 0, 4 * 16384.0);
#endif
    }
    printf("\n]\n");
    return 0;
}
#endif
