/* Colibri, optional: inspect a model before running it, error texts, and the engine's version. No
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
 * nothing outside them. May be called again at any time: for a model in RAM,
 * COLIBRI_CHECK_STRUCTURE finds every flipped bit of the header and metadata, in the time it takes
 * to read them. */
COLIBRI_API int colibri_check(const uint8_t *model_bin, size_t size, enum colibri_depth depth);

/* The enum colibri_error for which colibri_init would return NULL with the same arguments, else
 * COLIBRI_OK. */
COLIBRI_API int colibri_diagnose(const void *mem, size_t mem_size, const uint8_t *model_bin);

/* The most elementary steps (an element computed, a product added) that one row takes, along the
 * costliest route: an upper bound; 0 if the pointer or the header is not valid. colibri_init
 * refuses a model that needs more than its header says, so a caller can first compare untrusted
 * files with its own limit. A step takes from a fraction of a nanosecond on a large processor to
 * tens of cycles on a small one. */
COLIBRI_API uint64_t colibri_worst_work(const uint8_t *model_bin);

/* Run the model's parity certificate: every golden input, its experts and its output bits.
 *   output  scratch, ctx->output_size floats
 * Returns COLIBRI_OK, COLIBRI_ERR_SELFTEST if a bit differs, or the status of colibri_forward, such
 * as COLIBRI_ERR_ARITHMETIC. In the middle of a text or a stream it changes nothing and returns
 * COLIBRI_ERR_UNFINISHED: test a second context of the same model periodically, or set position and
 * source to 0 first, as after colibri_init. on_route and user are restored. */
COLIBRI_API int colibri_selftest(colibri_context_t *ctx, float *output);

/* Progress of PREFIX_check_flash, declared in model.h for firmware, through the model's bytes.
 * Initialise to zeros. */
typedef struct colibri_scan {
    uint32_t part, at, crc; /* internal */
    uint32_t passes;        /* complete passes over the model */
    uint32_t faults;        /* damaged parts found */
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
