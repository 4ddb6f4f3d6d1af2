"""Build script of `colibri._engine`, the C engine as a Python module (cffi, API mode); run by setup.py."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

ENGINE = Path(__file__).resolve().parents[2] / "engine"

ffi = FFI()
ffi.cdef("""
typedef struct {
    int32_t status; int32_t max_batch; uint32_t input_size, output_size, position, context_tokens; int32_t tail;
    uint32_t source; int32_t busy; ...;
} colibri_context_t;
colibri_context_t *colibri_init(void *mem, size_t mem_size, const uint8_t *model_bin);
void colibri_free(colibri_context_t *ctx);
size_t colibri_model_size(const uint8_t *model_bin);
int colibri_get_num_experts(const uint8_t *model_bin);
enum colibri_depth { COLIBRI_CHECK_STRUCTURE, COLIBRI_CHECK_WEIGHTS };
int colibri_check(const uint8_t *model_bin, size_t size, enum colibri_depth depth);
int colibri_diagnose(const void *mem, size_t mem_size, const uint8_t *model_bin);
uint64_t colibri_worst_work(const uint8_t *model_bin);
int colibri_selftest(colibri_context_t *ctx, float *output);
const char *colibri_error_name(int error);
const char *colibri_error_text(int error);
const char *colibri_version(void);
void colibri_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size);
void forward_rows(colibri_context_t *ctx, const float *input, float *output, int batch_size);
void forward_recording(colibri_context_t *ctx, const float *input, float *output, int batch_size, int32_t *choices,
                       float *logits);
typedef struct {
    const int32_t *history; int history_count; float repetition_penalty, temperature; int top_k; float top_p, min_p;
    uint64_t seed;
} colibri_sampler_t;
int colibri_lm_evaluate(colibri_context_t *ctx, const int32_t *tokens, int count, float *logits);
int colibri_lm_source(colibri_context_t *ctx, const int32_t *tokens, int count);
int colibri_lm_rewind(colibri_context_t *ctx, int position);
int32_t colibri_lm_sample(colibri_sampler_t *sampler, float *logits, int vocabulary, int32_t *scratch);
typedef struct { ...; } colibri_pool_t;
int colibri_pool_start(colibri_pool_t *pool, int threads);
void colibri_pool_stop(colibri_pool_t *pool);
void use_pool(colibri_context_t *ctx, colibri_pool_t *pool);
typedef struct { ...; } colibri_map_t;
#define COLIBRI_MAP_UNCHECKED ...
int colibri_map_open(colibri_map_t *map, const char *path, int options);
const uint8_t *colibri_map_model(const colibri_map_t *map);
int colibri_map_status(const colibri_map_t *map);
void colibri_map_close(colibri_map_t *map);
typedef struct { ...; } route_counts;
void count_routes(colibri_context_t *ctx, route_counts *to, uint64_t *counts);
void use_kernels(colibri_context_t *ctx, uint32_t n);
const char *kernels_name(uint32_t n);
uintptr_t arithmetic_standard(void);
void arithmetic_restore(uintptr_t found);
int arithmetic_sound(void);
void scale_costs(const float *weight, const float *energy, const float *scales, float *costs, size_t candidates,
                 size_t groups, size_t groups_of_row, size_t width, float least, float most, float price);
""")
ffi.set_source(
    "colibri._engine",
    """
/* _engine_call.c has the module's own PyInit__engine, which adds its function to what cffi makes. */
#define PyInit__engine colibri_cffi_init

#include "colibri_host.h"
#include "colibri_inspect.h"
#include "colibri_lm.h"
#include "core/internal.h"

void scale_costs(const float *weight, const float *energy, const float *scales, float *costs, size_t candidates,
                 size_t groups, size_t groups_of_row, size_t width, float least, float most, float price);

typedef struct {
    const colibri_context_t *ctx;
    const float *input;
    float *output;
    int32_t *choices;
    float *logits; /* NULL: not wanted */
} recording;

/* The logits are still where the router read them: the layer's own operation says where. */
static void record_logits(recording *r, int layer, size_t tokens)
{
    clb_model model;
    clb_parse(r->ctx->model, &model);
    const clb_op *op = model.ops;
    while (op->code != CLB_OP_MOE || op->moe.layer != (uint32_t)layer) {
        ++op;
    }
    const clb_frame frame = {.arena = (uint8_t *)(uintptr_t)r->ctx, .input = r->input, .output = r->output};
    const float *base = clb_locate(&op->b, &frame, NULL, 0, 0) - op->b.offset / sizeof(float);
    const size_t experts = model.layers[layer].experts;
    for (size_t t = 0; t < tokens; ++t) {
        memcpy(r->logits, clb_row_of(&op->b, base, op->rows, t), experts * sizeof *r->logits);
        r->logits += experts;
    }
}

static void record(void *user, int layer, const int32_t *experts, int tokens, int k)
{
    recording *r = user;
    const size_t choices = (size_t)tokens * (size_t)k;
    memcpy(r->choices, experts, choices * sizeof *experts);
    r->choices += choices;
    if (r->logits != NULL) {
        record_logits(r, layer, (size_t)tokens);
    }
}

/* colibri_forward; where an encoder-decoder model has read no source text, the rows, first read as one. */
static void forward_rows(colibri_context_t *ctx, const float *input, float *output, int batch_size)
{
    const int read = ctx->source != 0;
    colibri_forward(ctx, input, output, batch_size);
    /* only then is what the context says of its model true */
    if (ctx->status == COLIBRI_OK && !read && ((const clb_header *)(const void *)ctx->model)->encoder_ops != 0) {
        colibri_forward(ctx, input, output, batch_size);
    }
}

/* forward_rows, with every choice of every layer copied to `choices`, and what they were chosen by to `logits`. A
 * hook that was there sees nothing of it. */
static void forward_recording(colibri_context_t *ctx, const float *input, float *output, int batch_size,
                              int32_t *choices, float *logits)
{
    recording r = {ctx, input, output, choices, logits};
    colibri_route_hook *const hook = ctx->on_route;
    void *const user = ctx->user;
    ctx->on_route = record;
    ctx->user = &r;
    forward_rows(ctx, input, output, batch_size);
    ctx->on_route = hook;
    ctx->user = user;
}

typedef struct {
    uint64_t *counts; /* of every expert in the model's directory */
    const clb_layer *layers;
} route_counts;

static void count(void *user, int layer, const int32_t *experts, int tokens, int k)
{
    const route_counts *to = user;
    uint64_t *counts = to->counts + to->layers[layer].first_expert;
    for (int i = 0; i < tokens * k; ++i) {
        if (experts[i] >= 0) { /* a choice may find no expert */
            ++counts[experts[i]];
        }
    }
}

/* From now on, every choice of the context's forwards is counted. */
static void count_routes(colibri_context_t *ctx, route_counts *to, uint64_t *counts)
{
    clb_model model;
    clb_parse(ctx->model, &model);
    to->counts = counts;
    to->layers = model.layers;
    ctx->on_route = count;
    ctx->user = to;
}

static void use_pool(colibri_context_t *ctx, colibri_pool_t *pool)
{
    ctx->parallel = colibri_pool_run;
    ctx->parallel_user = pool;
}

/* The name of the n-th best kernels this machine can run; NULL where there are no more. */
static const char *kernels_name(uint32_t n)
{
    const clb_kernels *kernels = clb_kernels_at(n);
    return kernels == NULL ? NULL : kernels->name;
}

/* For what NumPy computes: see arithmetic.h. */
static uintptr_t arithmetic_standard(void)
{
    return clb_standard();
}

static void arithmetic_restore(uintptr_t found)
{
    clb_restore(found);
}

static int arithmetic_sound(void)
{
    return clb_sound();
}

static void use_kernels(colibri_context_t *ctx, uint32_t n)
{
    clb_use_kernels(ctx, clb_kernels_at(n));
}
""",
    sources=["src/colibri/_engine_call.c", "src/colibri/_scale_costs.c"],
    include_dirs=[str(ENGINE / "include"), str(ENGINE / "src")],
    depends=[str(path) for path in sorted(ENGINE.rglob("*.[ch]"))],
    extra_compile_args=["-std=c11", "-O2", "-ffp-contract=off"],
)
