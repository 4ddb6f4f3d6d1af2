/* Runs a model while its caller's control word is everything but the standard one.
 *
 *     control MODEL INPUT BATCH
 *
 *   INPUT   BATCH rows of float32
 *
 * A line for each thing that is not as it must be; nothing and exit status 0 where all is. */
#include "colibri_host.h"
#include "colibri_inspect.h"
#include "core/internal.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Denormal results, denormal operands, both; up, down, to zero; to zero with both; traps. */
#if defined(__SSE__)
static const uint32_t words[] = {0x9F80, 0x1FC0, 0x9FC0, 0x5F80, 0x3F80, 0x7F80, 0xFFC0, 0x0000};
/* Flush, default NaN, both; up, down, to zero; alternative half precision. */
#elif defined(__aarch64__)
static const uint32_t words[] = {1u << 24, 1u << 25, 3u << 24, 1u << 22,
                                 2u << 22, 3u << 22, 1u << 26};
#endif
enum { WORDS = sizeof words / sizeof *words, TASKS = 8 };

static void *read_all(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    void *data = aligned_alloc(64, (*bytes + 63) / 64 * 64);
    if (fread(data, 1, *bytes, file) != *bytes) {
        exit(2);
    }
    fclose(file);
    return data;
}

static int failed;

static void expect(int holds, const char *what, unsigned word) {
    if (!holds) {
        printf("%s, word %#x\n", what, word);
        failed = 1;
    }
}

/* A trap that the standard word masks. */
static void trapped(int number) {
    (void)number;
    static const char line[] = "arithmetic traps: the caller's word is in force\n";
    _exit(write(1, line, sizeof line - 1) < 0 ? 4 : 3);
}

/* --- hooks that leave another control word, on this thread or in threads of their own --- */

static uint32_t foreign;
static colibri_context_t *running;
static float *scratch;

static void meddle(void *user, int layer, const int32_t *experts, int tokens, int k) {
    (void)user, (void)layer, (void)experts, (void)tokens, (void)k;
    clb_write_control(foreign);
}

typedef struct {
    void (*task)(void *arg, uint32_t index);
    void *arg;
    uint32_t first, count;
} share;

static void *take(void *arg) {
    const share *s = arg;
    clb_write_control(foreign);
    for (uint32_t i = s->first; i < s->count; i += 2) {
        s->task(s->arg, i);
        expect((clb_read_control() & CLB_CONTROL) == (foreign & CLB_CONTROL),
               "a task keeps its word", foreign);
    }
    return NULL;
}

static unsigned loops;

static void in_threads(void *user, void (*task)(void *arg, uint32_t index), void *arg,
                       uint32_t count) {
    (void)user;
    share halves[2] = {{task, arg, 0, count}, {task, arg, 1, count}};
    pthread_t other;
    pthread_create(&other, NULL, take, &halves[1]);
    take(&halves[0]);
    pthread_join(other, NULL);
    ++loops;
}

/* --- hooks that call the context they are called from --- */

static void call_again(void) {
    static int within; /* a forward that is not refused comes here again, without an end */
    const uint32_t size = running->output_size;
    float *const own = scratch, *const zeros = scratch + size;
    if (within) {
        return;
    }
    within = 1;
    own[0] = 7.0f;
    colibri_forward(running, zeros, own, 1);
    expect(running->status == COLIBRI_ERR_BUSY && own[0] == 7.0f, "a forward within one is refused",
           0);
    expect(colibri_selftest(running, own) == COLIBRI_ERR_BUSY, "a self-test within one is refused",
           0);
    within = 0;
}

static void route_again(void *user, int layer, const int32_t *experts, int tokens, int k) {
    (void)user, (void)layer, (void)experts, (void)tokens, (void)k;
    call_again();
}

static void spread_again(void *user, void (*task)(void *arg, uint32_t index), void *arg,
                         uint32_t count) {
    (void)user;
    call_again();
    for (uint32_t i = 0; i < count; ++i) {
        task(arg, i);
    }
    call_again();
}

/* --- a quantised row --- */

static void quantise_in(uint32_t word) {
    enum { COLS = 300 };
    _Alignas(64) static float x[COLS], record[4 * COLS];
    for (uint32_t n = 0; clb_kernels_at(n) != NULL; ++n) {
        for (uint32_t seed = 1; seed < 200; ++seed) {
            uint32_t state = seed;
            for (uint32_t i = 0; i < COLS; ++i) {
                state = state * 1664525u + 1013904223u;
                x[i] = (float)(int32_t)state * 0x1p-31f;
            }
            clb_write_control(word);
            clb_kernels_at(n)->quantize(x, record, COLS);
            clb_write_control(CLB_STANDARD);
            const clb_quantized r = clb_quantized_at(record, COLS);
            for (uint32_t i = 0; i < COLS; ++i) {
                expect(r.q[i] >= -127 && r.q[i] * x[i] >= 0.0f,
                       "a quantised input is within 127 and has its sign", word);
            }
        }
    }
}

int main(int argc, char **argv) {
    size_t bytes;
    setvbuf(stdout, NULL, _IOLBF, 0); /* what a crash leaves is told */
    signal(SIGFPE, trapped);
    const uint8_t *model = read_all(argv[1], &bytes);
    const float *input = read_all(argv[2], &bytes);
    const int batch = atoi(argv[argc - 1]);
    const size_t need = (colibri_model_size(model) + 63) / 64 * 64;
    colibri_context_t *ctx = running = colibri_init(aligned_alloc(64, need), need, model);
    const size_t size = (size_t)batch * ctx->output_size * sizeof(float);
    float *want = malloc(size), *have = malloc(size);
    scratch = calloc(2 * (ctx->output_size + ctx->input_size), sizeof *scratch);
    colibri_pool_t pool;
    for (uint32_t n = 0; clb_kernels_at(n) != NULL; ++n) {
        clb_use_kernels(ctx, clb_kernels_at(n));
        colibri_forward(ctx, input, want, batch);
        for (unsigned w = 0; w < WORDS; ++w) {
            foreign = words[w];
            const unsigned standard_too =
                foreign == 0x0000 && CLB_STANDARD != 0; /* hooks would trap by themselves */
            for (int hooks = 0; hooks < (standard_too ? 1 : 4); ++hooks) {
                ctx->on_route = hooks & 1 ? meddle : NULL;
                ctx->parallel = hooks & 2 ? in_threads : NULL;
                memset(have, 0, size);
                clb_write_control(foreign);
                colibri_forward(ctx, input, have, batch);
                const clb_control after = clb_read_control();
                clb_write_control(CLB_STANDARD);
                expect(ctx->status == COLIBRI_OK && memcmp(have, want, size) == 0,
                       "a forward gives its bits", foreign);
                expect((after & CLB_CONTROL) == foreign, "a forward restores the word", foreign);
                clb_write_control(foreign);
                const int result = colibri_selftest(ctx, have);
                clb_write_control(CLB_STANDARD);
                expect(result == COLIBRI_OK, "the self-test passes", foreign);
            }
            /* a worker of the ready-made pool has the word of the thread that started it */
            clb_write_control(foreign);
            colibri_pool_start(&pool, 2);
            ctx->parallel = colibri_pool_run;
            ctx->parallel_user = &pool;
            ctx->on_route = NULL;
            memset(have, 0, size);
            colibri_forward(ctx, input, have, batch);
            colibri_pool_stop(&pool);
            clb_write_control(CLB_STANDARD);
            expect(memcmp(have, want, size) == 0, "the pool gives its bits", foreign);
            quantise_in(foreign == 0x0000 && CLB_STANDARD != 0 ? CLB_STANDARD : foreign);
        }
        ctx->on_route = route_again;
        ctx->parallel = spread_again;
        memset(have, 0, size);
        colibri_forward(ctx, input, have, batch);
        expect(ctx->status == COLIBRI_OK && memcmp(have, want, size) == 0,
               "the outer forward is intact", 0);
        ctx->on_route = NULL;
        ctx->parallel = NULL;
    }
    expect(loops > 0, "loops were spread", 0);
    return failed;
}
