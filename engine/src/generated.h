/* What an exported model.c with COLIBRI_GENERATED is made of: the kernels of the machine it is compiled for, only those the
 * model uses, and four of the five functions for this one model, whose program is code and needs no proof. The file defines
 * before: CLB_USED_UNARY and the like, MODEL_OPS_OFFSET, colibri_model; and after: program. */
#include "internal.h"

#if defined(CLB_V128)
#include "simd/v128.c"
#define MODEL_KERNELS CLB_V128
#elif defined(__AVX512VNNI__)
#include "simd/avx512.c"
#define MODEL_KERNELS clb_kernels_avx512
#elif defined(__AVX2__) && defined(__F16C__)
#include "simd/avx2.c"
#define MODEL_KERNELS clb_kernels_avx2
#else
#include "simd/plain.c"
#define MODEL_KERNELS clb_kernels_plain
#endif

/* Operation `n` of the model's program. */
#define OP(n) ((const clb_op *)(const void *)(colibri_model + MODEL_OPS_OFFSET) + (n))

static clb_walk program;

/* Whether these are the bytes this code was generated for. */
static int is_this_model(const uint8_t *model_bin)
{
    return model_bin != NULL && (uintptr_t)model_bin % CLB_ALIGN_MODEL == 0 &&
           memcmp(model_bin, colibri_model, sizeof(clb_header)) == 0;
}

colibri_context_t *colibri_init(void *mem, size_t mem_size, const uint8_t *model_bin)
{
    if (!is_this_model(model_bin)) {
        return NULL;
    }
    clb_model model;
    clb_parse(model_bin, &model);
    return clb_open(mem, mem_size, &model, &MODEL_KERNELS);
}

size_t colibri_model_size(const uint8_t *model_bin)
{
    return is_this_model(model_bin) ? COLIBRI_MODEL_CONTEXT_BYTES : 0;
}

int colibri_get_num_experts(const uint8_t *model_bin)
{
    return is_this_model(model_bin) ? (int)COLIBRI_MODEL_EXPERTS : -COLIBRI_ERR_MAGIC;
}

void colibri_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size)
{
    clb_forward(ctx, input, output, batch_size, program);
}
