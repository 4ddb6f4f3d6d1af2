"""Builds `colibri._engine`, the C engine as a Python module (cffi, API mode); run by setup.py at installation."""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

ENGINE = Path(__file__).resolve().parents[2] / "engine"
FLAGS = ["-std=c11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]

ffi = FFI()
ffi.cdef("""
typedef struct { int32_t status; int32_t max_batch; uint32_t input_size, output_size; ...; } colibri_context_t;
colibri_context_t *colibri_init(void *mem, size_t mem_size, const uint8_t *model_bin);
void colibri_free(colibri_context_t *ctx);
size_t colibri_model_size(const uint8_t *model_bin);
int colibri_get_num_experts(const uint8_t *model_bin);
enum colibri_depth { COLIBRI_CHECK_STRUCTURE, COLIBRI_CHECK_WEIGHTS };
int colibri_check(const uint8_t *model_bin, size_t size, enum colibri_depth depth);
int colibri_diagnose(const void *mem, size_t mem_size, const uint8_t *model_bin);
int colibri_selftest(colibri_context_t *ctx, float *output);
const char *colibri_error_name(int error);
const char *colibri_error_text(int error);
const char *colibri_version(void);
void colibri_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size);
void forward_recording(colibri_context_t *ctx, const float *input, float *output, int batch_size, int32_t *choices);
void apply_unary(int func, float p0, float p1, const float *in, float *out, size_t n);
""")
ffi.set_source(
    "colibri._engine",
    """
#include "colibri_inspect.h"
#include "internal.h"

static void record(void *user, int layer, const int32_t *experts, int tokens, int k)
{
    int32_t **next = user;
    (void)layer;
    memcpy(*next, experts, (size_t)tokens * (size_t)k * sizeof **next);
    *next += (size_t)tokens * (size_t)k;
}

/* colibri_forward, with every choice of every layer copied to `choices`. */
static void forward_recording(colibri_context_t *ctx, const float *input, float *output, int batch_size,
                              int32_t *choices)
{
    ctx->on_route = record;
    ctx->user = &choices;
    colibri_forward(ctx, input, output, batch_size);
    ctx->on_route = NULL;
    ctx->user = NULL;
}

static void apply_unary(int func, float p0, float p1, const float *in, float *out, size_t n)
{
    clb_unary((uint32_t)func, p0, p1, in, out, n);
}
""",
    sources=[os.path.relpath(path) for path in sorted((ENGINE / "src").glob("*.c"))],
    include_dirs=[str(ENGINE / "include"), str(ENGINE / "src")],
    depends=[str(path) for path in sorted(ENGINE.glob("*/*.h"))],
    extra_compile_args=FLAGS,
)
