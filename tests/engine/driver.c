/* Runs a model between guard pages and writes the output rows, bit for bit, to standard output.
 *
 *     driver MODEL INPUT BATCH POISON PLACE MODE
 *
 *   INPUT   BATCH rows of float32
 *   POISON  byte the context block and the output are filled with beforehand
 *   PLACE   high: every block ends at a page nobody may touch; low: it begins after one; heap:
 *           plain allocations, left uninitialised, for valgrind
 *   MODE    plain; seccomp: forward runs where any system call kills; routes: the calls of on_route
 *           follow the output as int32 (layer, tokens, k, experts…); contexts: two contexts used in
 *           turn, then from two threads, must agree; twice: forward runs twice in the same context;
 *           selftest: the certificate runs too
 *
 * Exit status: 0, or the line of the expectation that failed. */
#define _GNU_SOURCE
#include "colibri_inspect.h"

#include <fcntl.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            static const char text[] = "driver: expected " #condition "\n";                        \
            syscall(SYS_write, 2, text, sizeof text - 1);                                          \
            syscall(SYS_exit, 1);                                                                  \
        }                                                                                          \
    } while (0)

static const char *place = "high";
static unsigned char poison;

/* A block of `size` bytes as PLACE says. */
typedef struct {
    unsigned char *data, *map; /* map: the pages between the guards */
    size_t size, pages;        /* pages: bytes of them */
} block;

static block make(size_t size, size_t alignment) {
    block b = {.size = size};
    if (strcmp(place, "heap") == 0) {
        void *data = NULL;
        EXPECT(posix_memalign(&data, alignment < sizeof(void *) ? sizeof(void *) : alignment,
                              size) == 0);
        b.data = data;
        return b;
    }
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    b.pages = (size + page - 1) / page * page;
    unsigned char *map =
        mmap(NULL, b.pages + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(map != MAP_FAILED);
    b.map = map + page;
    EXPECT(mprotect(b.map, b.pages, PROT_READ | PROT_WRITE) == 0);
    memset(b.map, poison, b.pages);
    b.data = strcmp(place, "low") == 0 ? b.map : b.map + (b.pages - size) / alignment * alignment;
    return b;
}

/* What lies beside the block up to the guards still holds the poison. */
static void expect_surroundings(const block *b) {
    for (size_t i = 0; i < b->pages; ++i) {
        const unsigned char *at = b->map + i;
        EXPECT(at >= b->data ? at < b->data + b->size || *at == poison : *at == poison);
    }
}

static block read_file(const char *path, size_t alignment) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    EXPECT(file >= 0 && fstat(file, &info) == 0);
    block b = make((size_t)info.st_size, alignment);
    for (size_t done = 0; done < b.size;) {
        const ssize_t n = read(file, b.data + done, b.size - done);
        EXPECT(n > 0);
        done += (size_t)n;
    }
    close(file);
    return b;
}

static void write_all(const void *data, size_t size) {
    for (size_t done = 0; done < size;) {
        const long n = syscall(SYS_write, 1, (const unsigned char *)data + done, size - done);
        EXPECT(n > 0);
        done += (size_t)n;
    }
}

/* --- on_route --- */

static int32_t recorded[1 << 16];
static size_t recorded_count;

static void record(void *user, int layer, const int32_t *experts, int tokens, int k) {
    EXPECT(user == &recorded_count);
    const size_t count = (size_t)tokens * (size_t)k;
    EXPECT(recorded_count + 3 + count <= sizeof recorded / sizeof *recorded);
    recorded[recorded_count++] = layer;
    recorded[recorded_count++] = tokens;
    recorded[recorded_count++] = k;
    memcpy(recorded + recorded_count, experts, count * sizeof *experts);
    recorded_count += count;
}

/* --- contexts --- */

typedef struct {
    colibri_context_t *ctx;
    const float *input;
    block output;
    const unsigned char *wanted;
    int batch;
} job;

static void run_job(const job *j) {
    memset(j->output.data, poison, j->output.size);
    j->ctx->position = 0; /* a new text, where it is one */
    colibri_forward(j->ctx, j->input, (float *)(void *)j->output.data, j->batch);
    EXPECT(j->ctx->status == COLIBRI_OK);
    EXPECT(memcmp(j->output.data, j->wanted, j->output.size) == 0);
}

static void *run_many(void *argument) {
    for (int n = 0; n < 200; ++n) {
        run_job(argument);
    }
    return NULL;
}

/* Context 1 takes the whole batch, context 2 its last row alone: what one leaves behind must not
 * reach the other. */
static void try_contexts(const block *model, colibri_context_t *first, const float *input,
                         const block *output, int batch) {
    const block memory = make(colibri_model_size(model->data), 64);
    colibri_context_t *second = colibri_init(memory.data, memory.size, model->data);
    EXPECT(second != NULL);
    const size_t row = second->output_size * sizeof(float), last = (size_t)batch - 1;
    job jobs[2] = {
        {first, input, make(output->size, 4), output->data, batch},
        {second, input + last * second->input_size, make(row, 4), output->data + last * row, 1}};
    if (second->context_tokens != 0) { /* a text's last token is one of the text */
        jobs[1] = jobs[0];
        jobs[1].ctx = second;
        jobs[1].output = make(output->size, 4);
    }
    for (int n = 0; n < 10; ++n) {
        run_job(&jobs[n % 2]);
    }
    pthread_t threads[2];
    for (int n = 0; n < 2; ++n) {
        EXPECT(pthread_create(&threads[n], NULL, run_many, &jobs[n]) == 0);
    }
    for (int n = 0; n < 2; ++n) {
        EXPECT(pthread_join(threads[n], NULL) == 0);
    }
}

int main(int argc, char **argv) {
    EXPECT(argc == 7);
    poison = (unsigned char)strtoul(argv[4], NULL, 0);
    place = argv[5];
    const char *mode = argv[6];
    const int batch = atoi(argv[3]);

    const block model = read_file(argv[1], 64), input = read_file(argv[2], 4);
    if (model.map != NULL) {
        EXPECT(mprotect(model.map, model.pages, PROT_READ) == 0 &&
               mprotect(input.map, input.pages, PROT_READ) == 0);
    }
    EXPECT(colibri_check(model.data, model.size, COLIBRI_CHECK_WEIGHTS) == COLIBRI_OK);
    const block memory = make(colibri_model_size(model.data), 64);
    EXPECT(memory.size > 0);
    colibri_context_t *ctx = colibri_init(memory.data, memory.size, model.data);
    EXPECT((void *)ctx == memory.data && ctx->status == COLIBRI_OK && ctx->on_route == NULL &&
           ctx->user == NULL);
    EXPECT(ctx->model == model.data && batch >= 1 && batch <= ctx->max_batch);
    EXPECT(input.size == (size_t)batch * ctx->input_size * sizeof(float));
    const block output = make((size_t)batch * ctx->output_size * sizeof(float), 4);
    const float *x = (const float *)(const void *)input.data;
    float *y = (float *)(void *)output.data;

    if (strcmp(mode, "seccomp") == 0) {
        EXPECT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    } else if (strcmp(mode, "routes") == 0) {
        ctx->on_route = record;
        ctx->user = &recorded_count;
    } else if (strcmp(mode, "twice") == 0) {
        colibri_forward(ctx, x, y, batch);
        memset(y, poison, output.size);
        EXPECT(ctx->position == (ctx->context_tokens != 0 ? (uint32_t)batch : 0));
        ctx->position = 0;
    } else if (strcmp(mode, "selftest") == 0) {
        const block scratch = make(ctx->output_size * sizeof(float), 4);
        ctx->on_route = record;
        EXPECT(colibri_selftest(ctx, (float *)(void *)scratch.data) == COLIBRI_OK);
        EXPECT(recorded_count == 0 && ctx->on_route == record && ctx->user == NULL);
        ctx->on_route = NULL;
        expect_surroundings(&scratch);
    }
    colibri_forward(ctx, x, y, batch);
    EXPECT(ctx->status == COLIBRI_OK);
    if (strcmp(mode, "contexts") == 0) {
        try_contexts(&model, ctx, x, &output, batch);
    }
    expect_surroundings(&memory);
    expect_surroundings(&output);
    write_all(output.data, output.size);
    write_all(recorded, recorded_count * sizeof *recorded);
    /* exit_group, which a plain return ends in, is not among the calls seccomp's strict mode
     * leaves. */
    syscall(SYS_exit, 0);
}
