/* AUTO: sizes of this model. Written by colibri 0.1.0; do not edit. */
#ifndef COLIBRI_MODEL_H
#define COLIBRI_MODEL_H

#include <stdint.h>

#define COLIBRI_MODEL_DIGEST 0x9d7adcacu /* of model.bin: a checksum over all of it */
#define COLIBRI_MODEL_BYTES 17536u /* of model.bin */
#define COLIBRI_MODEL_FLASH_BYTES 7040u /* of the model in firmware, where experts need no pages of their own */
#define COLIBRI_MODEL_CONTEXT_BYTES 1536u /* RAM a context takes: colibri_model_size() */
#define COLIBRI_MODEL_MAX_BATCH 8u /* largest batch_size */
#define COLIBRI_MODEL_INPUT_SIZE 8u /* floats of one input row */
#define COLIBRI_MODEL_OUTPUT_SIZE 8u /* floats of one output row */
#define COLIBRI_MODEL_LAYERS 1u /* MoE layers */
#define COLIBRI_MODEL_EXPERTS 4u /* experts in all layers: colibri_get_num_experts() */
#define COLIBRI_MODEL_WORST_MACS 544u /* multiply-accumulates of one row, costliest route */
#define COLIBRI_MODEL_WORST_WORK 624u /* elementary steps of one row at most, these products included */
#define COLIBRI_MODEL_WORST_WEIGHT_BYTES 2624u /* weight bytes one row reads, costliest route */
/* input args_0: shape [8], floats 0 to 7 of a row */
/* output moe_0: shape [8], floats 0 to 7 of a row */

/* Whether a context's model has rows of the sizes above: ask first where model.bin can be replaced
   without compiling the program again. */
#define COLIBRI_MODEL_FITS(ctx) \
    ((ctx)->input_size == COLIBRI_MODEL_INPUT_SIZE && (ctx)->output_size == COLIBRI_MODEL_OUTPUT_SIZE)

#ifdef __cplusplus
extern "C" {
#endif

extern const uint8_t colibri_model[]; /* 64-byte aligned */

/* In model.c compiled with COLIBRI_GENERATED only: check the next `bytes` bytes of the model in flash against their
 * checksums, as from a watchdog's loop. Behind the last byte it begins again, and a call ends there: with UINT32_MAX
 * one call is a whole pass, of 7040 bytes at some 10 instructions each. `scan` is all zeros before the first
 * call. Returns COLIBRI_OK; COLIBRI_ERR_CHECKSUM where a part that ends in this slice is damaged; COLIBRI_ERR_NULL. */
struct colibri_scan; /* colibri_inspect.h */
int colibri_check_flash(struct colibri_scan *scan, uint32_t bytes);

#ifdef __cplusplus
}
#endif

#if defined(__cplusplus) && __cplusplus >= 201103L
#define COLIBRI_MODEL_ASSERT static_assert
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define COLIBRI_MODEL_ASSERT _Static_assert
#endif
#if defined(COLIBRI_MODEL_ASSERT)
COLIBRI_MODEL_ASSERT(COLIBRI_MODEL_CONTEXT_BYTES >= 128u, "the context holds its own head");
COLIBRI_MODEL_ASSERT(COLIBRI_MODEL_BYTES <= SIZE_MAX / 4 && COLIBRI_MODEL_CONTEXT_BYTES <= SIZE_MAX / 4,
               "the model does not fit this target's address space");
#endif

#endif
