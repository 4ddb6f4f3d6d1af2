/* What an exported model.c with COLIBRI_GENERATED is made of: the engine's files as one unit, with
 * the kernels of the machine it is compiled for, of which only those the model uses are kept, and
 * the five functions and the self-test for this one model. Its program is code and needs no proof.
 * The file defines before: CLB_TILE, CLB_FOLDED, CLB_USED_UNARY and the like, CLB_DIGEST,
 * CLB_PARTS, CLB_GOLDEN_AT, the names of the functions where they have a prefix, colibri_model; and
 * after: clb_run_program. */
#include "core/internal.h"

#ifdef CLB_V128
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

/* What check/file.c does for the generic engine: this model needs no proof, and there is no other.
 * The bytes may come from a file of their own, so that they can be another export's than the
 * program. */
static inline int clb_read_header(const uint8_t *model, const clb_header **header) {
    *header = clb_at(colibri_model, 0);
    if (model != colibri_model) return COLIBRI_ERR_MAGIC;
    return (*header)->header_crc == CLB_DIGEST ? COLIBRI_OK : COLIBRI_ERR_HEADER;
}

static inline int clb_validate(const uint8_t *model, uint64_t size, clb_model *parsed) {
    (void)size;
    return clb_read_header(model, &parsed->header);
}

/* A context has none: they are known here. */
static inline const clb_kernels *clb_kernels_at(uint32_t n) {
    (void)n;
    return NULL;
}

#include "core/checksum.c"
#include "core/context.c"
#include "core/layout.c"
#include "core/rows.c"
#include "core/rowwise.c"
#include "core/sums.c"
#include "ops/attention.c"
#include "ops/cache.c"
#include "ops/delay.c"
#include "ops/delta.c"
#include "ops/elementwise.c"
#include "ops/embed.c"
#include "ops/linear.c"
#include "ops/moe.c"
#include "ops/norms.c"
#include "ops/reduce.c"
#include "ops/rope.c"
#include "ops/routing.c"
#include "check/selftest.c"

/* The model's bytes in flash, and their checksums. */
static const struct {
    const uint8_t *bytes_at;
    uint32_t bytes, crc;
} parts[] = {CLB_PARTS};

/* A slice of the model's bytes, and on from the beginning behind the last; a call ends there
 * too. */
int colibri_check_flash(colibri_scan_t *scan, uint32_t bytes) {
    enum { PARTS = sizeof parts / sizeof parts[0] };
    if (scan == NULL) return COLIBRI_ERR_NULL;
    /* No scan, or that of another model. */
    if (scan->part >= PARTS || scan->at >= parts[scan->part].bytes) {
        scan->part = scan->at = scan->crc = 0;
    }
    int result = COLIBRI_OK;
    while (bytes > 0) {
        const uint32_t n = scan->part;
        const uint32_t count = clb_min(bytes, parts[n].bytes - scan->at);
        scan->crc = clb_crc32(scan->crc, parts[n].bytes_at + scan->at, count);
        scan->at += count;
        bytes -= count;
        if (scan->at < parts[n].bytes) break;
        if (scan->crc != parts[n].crc) {
            result = COLIBRI_ERR_CHECKSUM;
            ++scan->faults;
        }
        scan->at = scan->crc = 0;
        if (++scan->part == PARTS) {
            scan->part = 0;
            ++scan->passes;
            break;
        }
    }
    return result;
}

/* A layer's routing as a function of its own, with what its descriptor says in it. */
#define ROUTE(name, its_layer)                                                                     \
    static void name(const clb_layer *layer, const clb_gate *gate, const float *logits,            \
                     int32_t *experts, float *weights) {                                           \
        (void)layer;                                                                               \
        clb_route(its_layer, gate, logits, experts, weights);                                      \
    }

/* What the validator has proven of a number, for the compiler. */
#define AT_MOST(number, most) ((number) > (most) ? __builtin_unreachable() : (void)0)
