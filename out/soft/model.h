/* SoftMoE: sizes of this model. Written by colibri 0.1.0; do not edit. */
#ifndef COLIBRI_MODEL_H
#define COLIBRI_MODEL_H

#include <stdint.h>

#define COLIBRI_MODEL_BYTES 9920u /* flash the model takes */
#define COLIBRI_MODEL_CONTEXT_BYTES 5248u /* RAM a context takes: colibri_model_size() */
#define COLIBRI_MODEL_MAX_BATCH 4u /* largest batch_size */
#define COLIBRI_MODEL_INPUT_SIZE 96u /* floats of one input row */
#define COLIBRI_MODEL_OUTPUT_SIZE 96u /* floats of one output row */
#define COLIBRI_MODEL_LAYERS 0u /* MoE layers */
#define COLIBRI_MODEL_EXPERTS 0u /* experts in all layers: colibri_get_num_experts() */
#define COLIBRI_MODEL_WORST_MACS 4352u /* multiply-accumulates of one row, costliest route */
#define COLIBRI_MODEL_WORST_WEIGHT_BYTES 4864u /* weight bytes one row reads, costliest route */
/* input x: shape [6, 16], floats 0 to 95 of a row */
/* output reshape_24: shape [6, 16], floats 0 to 95 of a row */

extern const uint8_t colibri_model[COLIBRI_MODEL_BYTES]; /* 64-byte aligned */

#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(COLIBRI_MODEL_CONTEXT_BYTES >= 128u, "the context holds its own head");
_Static_assert(COLIBRI_MODEL_BYTES <= SIZE_MAX / 4 && COLIBRI_MODEL_CONTEXT_BYTES <= SIZE_MAX / 4,
               "the model does not fit this target's address space");
#endif

#endif
