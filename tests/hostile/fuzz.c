/* Hands mutated models to the engine, each in a heap buffer of exactly its size, under
 * AddressSanitizer and UndefinedBehaviorSanitizer, which abort on the first stray access.
 *
 *     fuzz BASE… < CASES
 *
 * A case: uint32 base (which BASE), size (bytes of it kept), flags, patches; then for each patch
 * uint32 offset, length and the bytes; a patch may reach past the base's end, up to `size`. Flag 1:
 * repair every checksum that can still be found, so that only the structural validation stands in
 * the way. For each case one line:
 *
 *     check diagnose status(batch 1) status(max_batch) selftest      -1: not run
 *
 * A language model is also run at the end of its context, asked for its last rows alone, and used
 * carelessly. Models that would take long are checked and not run. A hang ends with SIGALRM. */
#define _GNU_SOURCE
#include "colibri_inspect.h"
#include "colibri_lm.h"
#include "core/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { REPAIR = 1, MAX_BASES = 16, SECONDS = 20 };

static const uint64_t most_memory = 16u << 20, most_work = 20u * 1000 * 1000;

typedef struct {
    uint8_t *data;
    size_t size;
} bytes;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "fuzz: expected %s\n", #condition);                                    \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* Exactly `size` bytes, so that the sanitizer sees the first byte past them; never NULL. */
static void *exactly(size_t size, int fill) {
    void *data = NULL;
    EXPECT(posix_memalign(&data, 64, size) == 0 && data != NULL);
    memset(data, fill, size);
    return data;
}

static bytes read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL && fseek(file, 0, SEEK_END) == 0);
    bytes b = {.size = (size_t)ftell(file)};
    rewind(file);
    b.data = exactly(b.size, 0);
    EXPECT(fread(b.data, 1, b.size, file) == b.size);
    fclose(file);
    return b;
}

static int inside(uint64_t offset, uint64_t size, uint64_t whole) {
    return offset <= whole && size <= whole - offset;
}

/* `work`: what the base states; where it still stands, the model may take all there is, so that not
 * every change of a size is refused for its cost. */
static void repair(bytes model, uint64_t work) {
    if (model.size < sizeof(clb_header)) {
        return;
    }
    clb_header *h = (clb_header *)(void *)model.data;
    if (h->worst_work == work) {
        h->worst_work = UINT64_MAX - 1;
    }
    if (h->experts_offset % 8 == 0 && h->experts_offset >= sizeof *h &&
        inside(h->experts_offset, (uint64_t)h->experts * sizeof(clb_expert), model.size)) {
        clb_expert *experts = (clb_expert *)(void *)(model.data + h->experts_offset);
        for (uint32_t n = 0; n < h->experts; ++n) {
            if (inside(experts[n].offset, experts[n].bytes, model.size)) {
                experts[n].crc = clb_crc32(0, model.data + experts[n].offset, experts[n].bytes);
            }
        }
    }
    if (inside(h->meta_bytes, h->shared_bytes, model.size)) {
        h->shared_crc = clb_crc32(0, model.data + h->meta_bytes, h->shared_bytes);
    }
    if (h->meta_bytes >= sizeof *h && h->meta_bytes <= model.size) {
        h->meta_crc = clb_crc32(0, model.data + sizeof *h, h->meta_bytes - sizeof *h);
    }
    h->header_crc = clb_crc32(0, model.data, sizeof *h - sizeof h->header_crc);
}

static uint64_t times(uint64_t a, uint64_t b) {
    return a != 0 && b > UINT64_MAX / a ? UINT64_MAX : a * b;
}

/* A rough count of the steps of one operation on one sample, at the end of a text of `tokens`. */
static uint64_t op_work(const clb_op *op, uint32_t tokens) {
    uint64_t work = op->rows;
    if (op->code == CLB_OP_CACHE || op->code == CLB_OP_ATTENTION) {
        const uint64_t seen = op->code == CLB_OP_CACHE            ? 1
                              : op->attention.window - 1 < tokens ? op->attention.window
                                                                  : tokens;
        return times(times(work, (uint64_t)op->dims[0] + op->dims[1]), seen + CLB_PAGE);
    }
    const int axes = op->code == CLB_OP_LINEAR   ? 2
                     : op->code == CLB_OP_REDUCE ? 3
                     : op->code <= CLB_OP_BINARY ? 4
                                                 : 1;
    for (int axis = 0; axis < axes; ++axis) {
        work = times(work, op->dims[axis]);
    }
    return work;
}

/* Of a whole forward of a proven model; saturates well above the limit. */
static uint64_t model_work(const clb_model *m) {
    uint64_t total = 0;
    for (uint32_t n = 0; n < m->header->main_ops && total <= most_work; ++n) {
        const clb_op *op = &m->ops[n];
        uint64_t work = op_work(op, m->header->context_tokens);
        if (op->code == CLB_OP_MOE) {
            const clb_layer *layer = &m->layers[op->w0];
            uint64_t worst = layer->experts + (uint64_t)layer->d_out;
            for (uint32_t e = 0; e < layer->experts && worst <= most_work; ++e) {
                const clb_expert *expert = &m->experts[layer->first_expert + e];
                if (e > 0 && expert[-1].first_op == expert->first_op &&
                    expert[-1].ops == expert->ops) {
                    /* the same program: this count takes no longer than the check it follows */
                    continue;
                }
                uint64_t own = expert->ops;
                for (uint32_t i = 0; i < expert->ops && own <= most_work; ++i) {
                    own += op_work(&m->ops[expert->first_op + i], 0) / 2;
                }
                worst = own > worst ? own : worst;
            }
            work = times(times(op->rows, layer->k), worst + layer->k);
        }
        work = times(work, m->header->max_batch);
        total += work < most_work ? work : most_work + 1;
    }
    return total;
}

/* `rows`: of the output, exactly. */
static int forward(colibri_context_t *ctx, int batch, int rows) {
    const size_t in = (size_t)batch * ctx->input_size, out = (size_t)rows * ctx->output_size;
    float *input = exactly(in * sizeof(float), 0), *output = exactly(out * sizeof(float), 0x11);
    for (size_t i = 0; i < in; ++i) {
        input[i] = (float)(i % 17) - 8.0f;
    }
    ctx->status = -2;
    colibri_forward(ctx, input, output, batch);
    const int status = ctx->status;
    free(input);
    free(output);
    return status;
}

/* A source text, with numbers in the context's head that a careless caller puts there; nothing is
 * written out. */
static void read_source(colibri_context_t *ctx, int batch) {
    const uint32_t careless[] = {ctx->context_tokens + 1, 1u << 31, UINT32_MAX};
    for (size_t i = 0; i < sizeof careless / sizeof *careless; ++i) {
        ctx->position = 0;
        ctx->source = careless[i];
        EXPECT(forward(ctx, 1, 1) == COLIBRI_ERR_CONTEXT && ctx->source == careless[i]);
    }
    int32_t *ids = exactly(sizeof *ids * 600, 0);
    const int expected = ctx->input_size == 1 ? COLIBRI_OK : COLIBRI_ERR_TOKEN;
    const int most = batch < 512 ? batch : 512;
    EXPECT(colibri_lm_source(ctx, ids, most) == expected);
    EXPECT(colibri_lm_source(ctx, ids, 0) == COLIBRI_ERR_BATCH &&
           colibri_lm_source(ctx, NULL, 1) == COLIBRI_ERR_NULL);
    EXPECT(colibri_lm_source(ctx, ids, INT32_MAX) == COLIBRI_ERR_CONTEXT);
    free(ids);
    ctx->tail = 1;
    ctx->position = UINT32_MAX; /* of no consequence */
    ctx->source = 0;
    EXPECT(forward(ctx, batch, 0) == COLIBRI_OK && ctx->source == (uint32_t)batch);
    ctx->source = ctx->context_tokens; /* more than was read: what the cache holds there is used */
}

/* At the end of the context, with a tail, and with numbers in the context's head that a careless
 * caller puts there. */
static void run_text(colibri_context_t *ctx) {
    static const int32_t tails[] = {1, 2, 0, -1, INT32_MIN, INT32_MAX};
    const clb_header *h = (const clb_header *)(const void *)ctx->model;
    const uint32_t tokens = h->context_tokens,
                   most = (uint32_t)ctx->max_batch < tokens ? (uint32_t)ctx->max_batch : tokens;
    const int batch = (int)most, has_tail = h->tail_op < h->main_ops;
    if (h->encoder_ops != 0) {
        read_source(ctx, batch);
    }
    for (size_t n = 0; n < sizeof tails / sizeof *tails; ++n) {
        const int part = tails[n] > 0 && tails[n] < batch,
                  rows = part && has_tail ? tails[n] : batch;
        ctx->tail = tails[n];
        ctx->position = tokens - most;
        EXPECT(forward(ctx, batch, rows) == (part && !has_tail ? COLIBRI_ERR_BATCH : COLIBRI_OK));
        const uint32_t after = tokens == CLB_LIMIT ? tokens / 2 : tokens; /* a stream goes on */
        EXPECT(ctx->position == (part && !has_tail ? tokens - most : after));
        const uint32_t careless[] = {tokens - most + 1,     tokens,    tokens + 1, 1u << 31,
                                     UINT32_MAX - most + 1, UINT32_MAX};
        for (size_t i = 0; i < sizeof careless / sizeof *careless; ++i) {
            ctx->position = careless[i];
            const int status = forward(ctx, batch, rows);
            EXPECT(status == COLIBRI_ERR_CONTEXT ||
                   (part && !has_tail && status == COLIBRI_ERR_BATCH));
            EXPECT(ctx->position == careless[i]);
            int32_t one = 0;
            float *logits = exactly(ctx->output_size * sizeof(float), 0);
            const int fits = careless[i] < tokens;
            const int evaluated = colibri_lm_evaluate(ctx, &one, 1, logits);
            EXPECT(evaluated == (!fits                  ? COLIBRI_ERR_CONTEXT
                                 : ctx->input_size == 1 ? COLIBRI_OK
                                                        : COLIBRI_ERR_TOKEN));
            free(logits);
        }
    }
    /* a text in pieces, over the whole context where that is short, and back */
    int32_t *ids = exactly(sizeof *ids * 100, 0);
    float *logits = exactly(ctx->output_size * sizeof(float), 0);
    ctx->position = 0;
    for (int i = 0; i < 100; ++i) {
        ids[i] = (int32_t)((uint32_t)i * 7 % ctx->output_size);
    }
    const int count = tokens < 100 ? (int)tokens : 100;
    const int wanted = ctx->input_size == 1 ? COLIBRI_OK : COLIBRI_ERR_TOKEN;
    EXPECT(colibri_lm_evaluate(ctx, ids, count, logits) == wanted);
    for (int back = count; wanted == COLIBRI_OK && back >= 0; back -= 9) {
        const int status = colibri_lm_rewind(ctx, back);
        EXPECT((status == COLIBRI_OK && ctx->position == (uint32_t)back) ||
               status == COLIBRI_ERR_REWIND);
    }
    EXPECT(colibri_lm_rewind(ctx, -1) == COLIBRI_ERR_REWIND &&
           colibri_lm_rewind(ctx, INT32_MIN) == COLIBRI_ERR_REWIND);
    ids[0] = (int32_t)ctx->output_size;
    EXPECT(colibri_lm_rewind(ctx, 0) == COLIBRI_OK &&
           colibri_lm_evaluate(ctx, ids, 1, logits) == COLIBRI_ERR_TOKEN);
    ids[0] = -1;
    EXPECT(colibri_lm_evaluate(ctx, ids, 1, logits) == COLIBRI_ERR_TOKEN && ctx->position == 0);
    EXPECT(colibri_lm_evaluate(ctx, ids, 0, logits) == COLIBRI_ERR_BATCH);
    EXPECT(colibri_lm_evaluate(ctx, ids, INT32_MAX, logits) == COLIBRI_ERR_CONTEXT);
    ctx->tail = 0;
    free(ids);
    free(logits);
}

static void run_case(bytes model) {
    const int check = colibri_check(model.data, model.size, COLIBRI_CHECK_WEIGHTS);
    const int structure = colibri_check(model.data, model.size, COLIBRI_CHECK_STRUCTURE);
    EXPECT(structure == check || (structure == COLIBRI_OK && check == COLIBRI_ERR_CHECKSUM));
    EXPECT(colibri_error_name(check)[0] == 'C' &&
           strcmp(colibri_error_name(check), "COLIBRI_ERR_UNKNOWN") != 0);
    int result[4] = {-1, -1, -1, -1}; /* diagnose, forward of 1, of max_batch, selftest */
    if (structure == COLIBRI_OK) {
        const size_t size = colibri_model_size(model.data);
        EXPECT(size > 0 && colibri_get_num_experts(model.data) >= 0);
        clb_model parsed;
        clb_parse(model.data, &parsed);
        const uint64_t floats =
            (uint64_t)parsed.header->input_floats + parsed.header->output_floats;
        const uint64_t rows = parsed.header->max_batch * floats;
        if (size <= most_memory && rows <= most_memory / sizeof(float)) {
            void *memory = exactly(size, 0x5A);
            EXPECT(colibri_init(memory, size - 1, model.data) == NULL);
            result[0] = colibri_diagnose(memory, size, model.data);
            colibri_context_t *ctx = colibri_init(memory, size, model.data);
            EXPECT((ctx != NULL) == (result[0] == COLIBRI_OK));
            if (ctx != NULL && model_work(&parsed) <= most_work) {
                result[1] = forward(ctx, 1, 1);
                ctx->position = 0;
                result[2] = forward(ctx, ctx->max_batch, ctx->max_batch);
                if (ctx->context_tokens != 0) {
                    run_text(ctx);
                }
                ctx->position = ctx->source = 0; /* a self-test does not end a text */
                float *scratch = exactly(ctx->output_size * sizeof(float), 0);
                ctx->position = ctx->source = 0; /* its text may be forgotten */
                result[3] = colibri_selftest(ctx, scratch);
                free(scratch);
            }
            free(memory);
        }
    }
    printf("%d %d %d %d %d\n", check, result[0], result[1], result[2], result[3]);
}

int main(int argc, char **argv) {
    bytes base[MAX_BASES];
    EXPECT(argc >= 2 && argc <= MAX_BASES + 1);
    for (int n = 1; n < argc; ++n) {
        base[n - 1] = read_file(argv[n]);
    }
    setvbuf(stdout, NULL, _IOLBF, 1 << 12); /* the lines before a crash must arrive */
    uint32_t head[4], patch[2];
    while (fread(head, sizeof head, 1, stdin) == 1) {
        EXPECT(head[0] < (uint32_t)(argc - 1));
        const bytes *from = &base[head[0]];
        const bytes model = {exactly(head[1], 0), head[1]};
        if (head[1] > 0) {
            memcpy(model.data, from->data, head[1] < from->size ? head[1] : from->size);
        }
        for (uint32_t n = 0; n < head[3]; ++n) {
            EXPECT(fread(patch, sizeof patch, 1, stdin) == 1 &&
                   inside(patch[0], patch[1], model.size));
            EXPECT(fread(model.data + patch[0], 1, patch[1], stdin) == patch[1]);
        }
        if ((head[2] & REPAIR) != 0) {
            repair(model, ((const clb_header *)(const void *)from->data)->worst_work);
        }
        alarm(SECONDS);
        run_case(model);
        free(model.data);
    }
    for (int n = 1; n < argc; ++n) {
        free(base[n - 1].data);
    }
    return 0;
}
