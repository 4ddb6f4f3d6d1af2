/* The five functions, the same for the generic engine and for generated code. */
#include "internal.h"

CLB_INTERNAL int clb_check_memory(const void *mem, size_t mem_size, uint64_t context_bytes) {
    _Static_assert(sizeof(colibri_context_t) <= CLB_HEAD_BYTES,
                   "the context's head is reserved once for all targets");
    return mem == NULL                               ? COLIBRI_ERR_NULL
           : (uintptr_t)mem % CLB_ALIGN_CONTEXT != 0 ? COLIBRI_ERR_MISALIGNED
           : mem_size < context_bytes                ? COLIBRI_ERR_MEMORY
                                                     : COLIBRI_OK;
}

/* A bijection of the sum so far, so that a change within one word is always noticed. */
static inline uint32_t sealed(uint32_t sum, uint32_t word) { return (sum ^ word) * 0x9E3779B1u; }

CLB_INTERNAL NOINLINE uint32_t clb_seal(const colibri_context_t *ctx) {
    const uint64_t model = (uintptr_t)ctx->model;
    const uint64_t kernels = (uintptr_t)ctx->kernels;
    uint32_t sum = sealed(1, (uint32_t)model);
    sum = sealed(sum, (uint32_t)(model >> 32));
    sum = sealed(sum, (uint32_t)kernels);
    sum = sealed(sum, (uint32_t)(kernels >> 32));
    sum = sealed(sum, (uint32_t)ctx->max_batch);
    sum = sealed(sum, ctx->input_size);
    sum = sealed(sum, ctx->output_size);
    return sealed(sum, ctx->context_tokens);
}

colibri_context_t *colibri_init(void *mem, size_t mem_size, const uint8_t *model_bin) {
    clb_model model;
    if (clb_validate(model_bin, UINT64_MAX, &model) != COLIBRI_OK ||
        clb_check_memory(mem, mem_size, model.header->context_bytes) != COLIBRI_OK) {
        return NULL;
    }
    const clb_header *header = model.header;
    colibri_context_t *ctx = mem;
    memset(mem, 0, (size_t)header->cleared_bytes);
    ctx->status = COLIBRI_OK;
    ctx->max_batch = (int32_t)header->max_batch;
    ctx->input_size = header->input_floats;
    ctx->output_size = header->output_floats;
    ctx->model = model_bin;
    ctx->context_tokens = header->context_tokens;
    clb_use_kernels(ctx, clb_kernels_at(0));
    return ctx;
}

size_t colibri_model_size(const uint8_t *model_bin) {
    const clb_header *header;
    return clb_read_header(model_bin, &header) == COLIBRI_OK ? (size_t)header->context_bytes : 0;
}

int colibri_get_num_experts(const uint8_t *model_bin) {
    const clb_header *header;
    const int error = clb_read_header(model_bin, &header);
    return error == COLIBRI_OK ? (int)header->experts : -error;
}

/* Whether a text that has come to `position` has room for more of at most `tokens` tokens. */
FORCE_INLINE int has_room(const colibri_context_t *ctx, uint32_t tokens, uint32_t position,
                          uint32_t more) {
    if (tokens == 0) return 1;
    return position <= tokens && more <= tokens - position && ctx->source <= tokens;
}

/* The rows of a context that runs nothing else; an enum colibri_error. */
CLB_STATIC_WALK int run(colibri_context_t *ctx, const float *input, float *output, int batch_size) {
    if (ctx->seal != clb_seal(ctx)) return COLIBRI_ERR_DAMAGED;
    const clb_header *header = clb_at(ctx->model, 0);
    const uint32_t samples = (uint32_t)batch_size;
    const uint32_t tokens = CLB_USED_TEXT ? header->context_tokens : 0;
    /* The source text, before the text. */
    const int reads = CLB_USED_SOURCE && header->encoder_ops != 0 && ctx->source == 0;
    /* Of the output the last rows alone. */
    const int some = ctx->tail > 0 && ctx->tail < batch_size;
    const int part = CLB_USED_BATCH && !reads && some;
    const uint32_t position = reads ? 0 : ctx->position;
    const int room = has_room(ctx, tokens, position, samples);
    /* Else a load may fault. */
    const int aligned = ((uintptr_t)input | (uintptr_t)output) % sizeof(float) == 0;
    if (input == NULL || output == NULL) return COLIBRI_ERR_NULL;
    if (batch_size < 1 || batch_size > ctx->max_batch) return COLIBRI_ERR_BATCH;
    if (part && (!CLB_USED_TEXT || header->tail_op == header->main_ops)) return COLIBRI_ERR_BATCH;
    if (!aligned) return COLIBRI_ERR_MISALIGNED;
    if (!room) return COLIBRI_ERR_CONTEXT;
    if (!CLB_KERNELS(ctx)->sound()) return COLIBRI_ERR_ARITHMETIC;
    const uint32_t tail = CLB_USED_TEXT && part ? samples - (uint32_t)ctx->tail : 0;
    /* Nothing before the tail is written to the output, which begins with the tail's first row. */
    float *const rows =
        (float *)((uintptr_t)output - (uintptr_t)tail * ctx->output_size * sizeof(float));
    clb_frame frame = {.weights = ctx->model,
                       .arena = (uint8_t *)ctx,
                       .input = input,
                       .output = rows,
                       .ctx = ctx,
                       .tail = tail,
                       .position = CLB_USED_TEXT ? position : 0};
    clb_run_program(samples, &frame);
    ctx->source = reads ? samples : ctx->source;
    ctx->position += tokens != 0 && !reads ? samples : 0;
    ctx->position -= tokens == CLB_LIMIT && ctx->position >= CLB_LIMIT / 4 * 3
                         ? CLB_LIMIT / 2
                         : 0; /* a stream goes on */
    const size_t floats = reads ? 0 : (size_t)(samples - tail) * ctx->output_size;
    for (size_t i = 0; i < floats; ++i) {
        output[i] = output[i] == output[i] ? output[i] : clb_nan();
    }
    return COLIBRI_OK;
}

void colibri_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size) {
    if (ctx == NULL || ctx->model == NULL) return;
    ctx->status = COLIBRI_ERR_BUSY;
    if (ctx->busy) return;
    ctx->busy = 1;
    const clb_control found = clb_standard();
    const int status = run(ctx, input, output, batch_size);
    clb_restore(found);
    ctx->busy = 0;
    ctx->status = status;
}

void colibri_free(colibri_context_t *ctx) {
    if (ctx != NULL) {
        ctx->model = NULL;
    }
}
