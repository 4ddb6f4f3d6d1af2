/* What an exported model.c with COLIBRI_GENERATED is made of: the engine's files as one unit, with the kernels of the machine
 * it is compiled for, of which only those the model uses are kept, and the five functions and the self-test for this one
 * model. Its program is code and needs no proof. The file defines before: CLB_TILE, CLB_FOLDED, CLB_USED_UNARY and the like, the names
 * of the functions where they have a prefix, colibri_model; and after: program. */
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

#include "context.c"
#include "elementwise.c"
#include "linear.c"
#include "moe.c"
#include "reduce.c"
#include "routing.c"
#include "rows.c"
#include "selftest.c"
#include "sequence.c"

CLB_WALK clb_walk program;

/* A layer's routing as a function of its own, with what its descriptor says in it. */
#define ROUTE(name, its_layer)                                                                                         \
    static void name(const clb_layer *layer, const clb_gate *gate, const float *logits, int32_t *experts,              \
                     float *weights)                                                                                   \
    {                                                                                                                  \
        (void)layer;                                                                                                   \
        clb_route(its_layer, gate, logits, experts, weights);                                                          \
    }

/* What the validator has proven of a number, for the compiler. */
#define AT_MOST(number, most) ((number) > (most) ? __builtin_unreachable() : (void)0)

static const clb_header *this_model(const uint8_t *model_bin)
{
    return model_bin == colibri_model ? (const clb_header *)(const void *)colibri_model : NULL;
}

colibri_context_t *colibri_init(void *mem, size_t mem_size, const uint8_t *model_bin)
{
    const clb_header *header = this_model(model_bin);
    return header != NULL ? clb_open(mem, mem_size, header, NULL) : NULL;
}

size_t colibri_model_size(const uint8_t *model_bin)
{
    const clb_header *header = this_model(model_bin);
    return header != NULL ? (size_t)header->context_bytes : 0;
}

int colibri_get_num_experts(const uint8_t *model_bin)
{
    const clb_header *header = this_model(model_bin);
    return header != NULL ? (int)header->experts : -COLIBRI_ERR_MAGIC;
}

void colibri_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size)
{
    clb_forward(ctx, input, output, batch_size, program);
}
