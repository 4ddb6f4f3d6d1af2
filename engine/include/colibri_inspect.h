/* Colibri, optional: look at a model before running it, at errors, and at the engine itself. No state, no heap. */
#ifndef COLIBRI_INSPECT_H
#define COLIBRI_INSPECT_H

#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How much of a model colibri_check reads. */
enum colibri_depth {
    COLIBRI_CHECK_STRUCTURE = 0, /* header, program and directories, with their checksums: what colibri_init checks */
    COLIBRI_CHECK_WEIGHTS = 1    /* and every weight's checksum: reads the whole file */
};

/* COLIBRI_OK, or the enum colibri_error that makes `size` bytes at `model_bin` unusable. Reads nothing outside them. */
COLIBRI_API int colibri_check(const uint8_t *model_bin, size_t size, enum colibri_depth depth);

/* The enum colibri_error for which colibri_init would return NULL with the same arguments, else COLIBRI_OK. */
COLIBRI_API int colibri_diagnose(const void *mem, size_t mem_size, const uint8_t *model_bin);

/* Run the model's parity certificate: every golden input, its experts and its output bits.
 *   output  scratch, ctx->output_size floats
 * Returns COLIBRI_OK, COLIBRI_ERR_SELFTEST where a bit differs, or what colibri_forward's status said:
 * COLIBRI_ERR_ARITHMETIC before all. A context that is amid a text or a stream is left as it is, with
 * COLIBRI_ERR_UNFINISHED: a periodic test of it takes a second context of the same model, or a moment at which the past
 * may be forgotten (position = source = 0), as after colibri_init. Leaves on_route and user as they were. */
COLIBRI_API int colibri_selftest(colibri_context_t *ctx, float *output);

/* The name ("COLIBRI_ERR_…") and a sentence that says what to do; never NULL. */
COLIBRI_API const char *colibri_error_name(int error);
COLIBRI_API const char *colibri_error_text(int error);

/* The engine's version, COLIBRI_VERSION. */
COLIBRI_API const char *colibri_version(void);

#ifdef __cplusplus
}
#endif

#endif
