/* Colibri, optional: look at a model before running it, at errors, and at the engine itself. No
 * state, no heap. */
#ifndef COLIBRI_INSPECT_H
#define COLIBRI_INSPECT_H

#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How much of a model colibri_check reads. */
enum colibri_depth {
    COLIBRI_CHECK_STRUCTURE =
        0, /* header, program and directories, with their checksums: what colibri_init checks */
    COLIBRI_CHECK_WEIGHTS = 1 /* and every weight's checksum: reads the whole file */
};

/* COLIBRI_OK, or the enum colibri_error that makes `size` bytes at `model_bin` unusable. Reads
 * nothing outside them. May be called again at any time: of a model in RAM, COLIBRI_CHECK_STRUCTURE
 * finds every bit that has flipped in what steers the engine, in the time it takes to read that. */
COLIBRI_API int colibri_check(const uint8_t *model_bin, size_t size, enum colibri_depth depth);

/* The enum colibri_error for which colibri_init would return NULL with the same arguments, else
 * COLIBRI_OK. */
COLIBRI_API int colibri_diagnose(const void *mem, size_t mem_size, const uint8_t *model_bin);

/* The most elementary steps (an element computed, a product added) that one row takes, along the
 * costliest route; 0 where the pointer or the header is not valid. colibri_init refuses a model
 * that needs more than its header says, so a caller that takes files from elsewhere may compare
 * this with a limit of its own before: a step takes from a fraction of a nanosecond on a large
 * processor to tens of cycles on a small one. */
COLIBRI_API uint64_t colibri_worst_work(const uint8_t *model_bin);

/* Run the model's parity certificate: every golden input, its experts and its output bits.
 *   output  scratch, ctx->output_size floats
 * Returns COLIBRI_OK, COLIBRI_ERR_SELFTEST where a bit differs, or what colibri_forward's status
 * said: COLIBRI_ERR_ARITHMETIC before all. A context that is amid a text or a stream is left as it
 * is, with COLIBRI_ERR_UNFINISHED: a periodic test of it takes a second context of the same model,
 * or a moment at which the past may be forgotten (position = source = 0), as after colibri_init.
 * Leaves on_route and user as they were. */
COLIBRI_API int colibri_selftest(colibri_context_t *ctx, float *output);

/* How far PREFIX_check_flash, which model.h declares for firmware, has come in the model's bytes.
 * All zeros to begin with. */
typedef struct colibri_scan {
    uint32_t part, at, crc; /* its own */
    uint32_t passes;        /* how often it has come to the end of the model */
    uint32_t faults;        /* damaged parts it has met */
} colibri_scan_t;

/* The name ("COLIBRI_ERR_…") and a sentence that says what to do; never NULL. */
COLIBRI_API const char *colibri_error_name(int error);
COLIBRI_API const char *colibri_error_text(int error);

/* The engine's version, COLIBRI_VERSION. */
COLIBRI_API const char *colibri_version(void);

#ifdef __cplusplus
}
#endif

#endif
