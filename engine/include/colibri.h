/* Colibri: runs an exported Mixture-of-Experts model. Five functions, no heap, no system call, no
 * dependency.
 *
 *     static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES]; // from model.h
 *     colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
 *     colibri_forward(ctx, input, output, 1);
 *
 * One context belongs to one thread (or interrupt level) at a time; any number of contexts may
 * share a model. The same model and input give the same bits on every target, in every batch
 * position. colibri_inspect.h has functions that examine models and errors. */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLIBRI_VERSION "0.1.0"

#if defined(__GNUC__) && !defined(COLIBRI_API)
#define COLIBRI_API __attribute__((visibility("default")))
#elif !defined(COLIBRI_API)
#define COLIBRI_API
#endif

/* Error codes, also listed in docs/guide.md; colibri_error_text() returns the sentence at run
 * time. */
enum colibri_error {
    /* generated: errors */
    /* no error */
    COLIBRI_OK = 0,
    /* a pointer is null: pass the memory block, the model, the input and the output */
    COLIBRI_ERR_NULL = 1,
    /* the model or the memory block is not aligned to 64 bytes, or a row not to 4: use
     * aligned_alloc */
    COLIBRI_ERR_MISALIGNED = 2,
    /* this is not a Colibri model: the file does not start with COLIBRI; pass the exported
     * model.bin */
    COLIBRI_ERR_MAGIC = 3,
    /* the model's format version is not this engine's: export it again with the matching package */
    COLIBRI_ERR_VERSION = 4,
    /* the model is shorter than its header says: copy or download it again */
    COLIBRI_ERR_TRUNCATED = 5,
    /* the model's header is corrupt: its checksum or a field is wrong; export or copy it again */
    COLIBRI_ERR_HEADER = 6,
    /* a checksum of the model does not match its content: copy it again from a good source */
    COLIBRI_ERR_CHECKSUM = 7,
    /* the model's program is not valid: an operation reaches outside its memory or costs more than
     * stated; export it again */
    COLIBRI_ERR_PROGRAM = 8,
    /* a tensor's place, size or layout in the model is not valid: export it again */
    COLIBRI_ERR_TENSOR = 9,
    /* a routing descriptor of the model is not valid: export it again */
    COLIBRI_ERR_ROUTING = 10,
    /* an entry of the model's expert directory is not valid: export it again */
    COLIBRI_ERR_EXPERT = 11,
    /* the memory block is too small: give it colibri_model_size() bytes */
    COLIBRI_ERR_MEMORY = 12,
    /* the model does not fit this machine's address space: use a machine with 64-bit addresses */
    COLIBRI_ERR_TOO_LARGE = 13,
    /* this machine is big-endian, which the model format is not: run on a little-endian machine */
    COLIBRI_ERR_BIG_ENDIAN = 14,
    /* batch_size is not between 1 and the model's largest: split the batch or export with a larger
     * one */
    COLIBRI_ERR_BATCH = 15,
    /* the output is not what the model's certificate says, or it has none: the port or the memory
     * is faulty */
    COLIBRI_ERR_SELFTEST = 16,
    /* the model file cannot be opened or read: check path, permissions and that it is a regular
     * file */
    COLIBRI_ERR_OPEN_FAILED = 17,
    /* the system does not map the model: free address space, or close one of 64 guarded maps */
    COLIBRI_ERR_MMAP_FAILED = 18,
    /* the model file was changed while it was mapped: open it again; replace model files by
     * renaming */
    COLIBRI_ERR_CHANGED = 19,
    /* the medium cannot read a mapped page of the model: check the disk and copy the model again */
    COLIBRI_ERR_READ_FAILED = 20,
    /* the model has no expert of this number: pass 0 to colibri_get_num_experts() - 1 */
    COLIBRI_ERR_NO_EXPERT = 21,
    /* the limit on locked memory is reached: raise it (ulimit -l, LimitMEMLOCK=) or lock fewer
     * experts */
    COLIBRI_ERR_LOCK_LIMIT = 22,
    /* the system does not lock this memory: free some, or run where locking is allowed */
    COLIBRI_ERR_LOCK_FAILED = 23,
    /* the system gives this process no huge pages: allow them (transparent_hugepage=madvise) or go
     * without */
    COLIBRI_ERR_HUGE_PAGES = 24,
    /* the system does not release this memory: unlock these experts first */
    COLIBRI_ERR_RELEASE_FAILED = 25,
    /* a prefetching thread cannot be started: raise the limit (ulimit -u), free memory, or go
     * without */
    COLIBRI_ERR_THREAD_FAILED = 26,
    /* this system has no such service: read the model into memory and give that to colibri_init */
    COLIBRI_ERR_UNSUPPORTED = 27,
    /* the text does not fit the model's context: rewind, or export with a longer one (--context) */
    COLIBRI_ERR_CONTEXT = 28,
    /* a token id is not in the vocabulary: use the model's own tokenizer */
    COLIBRI_ERR_TOKEN = 29,
    /* the positions to go back to are no longer in the cache: rewind to 0 and evaluate the text
     * again */
    COLIBRI_ERR_REWIND = 30,
    /* this is not a tokenizer.bin, or it is damaged: write or copy it again */
    COLIBRI_ERR_TOKENIZER = 31,
    /* the scratch memory is too small for this text: give it colibri_tokenizer_scratch() bytes */
    COLIBRI_ERR_SCRATCH = 32,
    /* the output array is too small: give it room for as many elements as the count returned */
    COLIBRI_ERR_OUTPUT = 33,
    /* an encoder-decoder model, and no other, reads a source text first: see colibri_lm_source */
    COLIBRI_ERR_SOURCE = 34,
    /* this build or machine does not compute as IEEE 754 says: compile without options that change
     * floats (docs/arithmetic.md) */
    COLIBRI_ERR_ARITHMETIC = 35,
    /* the context is running already: a hook or another thread needs a context of its own */
    COLIBRI_ERR_BUSY = 36,
    /* the self-test would end the text or stream that this context holds: test a second context, or
     * set position and source to 0 */
    COLIBRI_ERR_UNFINISHED = 37,
    /* a token, merge or template of the tokenizer.bin is not valid: write it again */
    COLIBRI_ERR_VOCABULARY = 38,
    /* the added tokens of the tokenizer.bin are not tries of whole characters: write it again */
    COLIBRI_ERR_ADDED_TOKEN = 39,
    /* a split pattern or a character class of the tokenizer.bin is not valid: write it again */
    COLIBRI_ERR_PATTERN = 40,
    /* the normal form (NFC) of the tokenizer.bin is not valid: write it again */
    COLIBRI_ERR_NORMAL_FORM = 41,
    /* the patterns or added tokens of the tokenizer.bin take too much work for this text: write it
     * again */
    COLIBRI_ERR_TOO_SLOW = 42,
    /* the context's head was overwritten: look for a stray write, and start again with colibri_init
     * */
    COLIBRI_ERR_DAMAGED = 43,
    /* an operation of the model reads what none has written, or another row's, or overwrites what
     * it still reads: export it again */
    COLIBRI_ERR_ORDER = 44,
    /* end of errors */
};

/* Called once for each MoE layer of each colibri_forward, after routing and before the experts run.
 *   layer    0 … layers-1, in the order they run
 *   experts  chosen experts, shape (tokens, k), each 0 … experts-1, best first, or -1 where a
 *            capacity was full and the choice was dropped; if experts were pruned on request,
 *            the field `index` of the file's expert directory has their numbers in the original
 *            model
 *   tokens   rows routed: batch_size times the tokens of a sample
 * A hook must return and may not use the context: a colibri_forward inside a hook only sets the
 * status to COLIBRI_ERR_BUSY. A hook may change the floating-point control word; this does not
 * affect the results. */
typedef void colibri_route_hook(void *user, int layer, const int32_t *experts, int tokens, int k);

/* The caller's parallel loop: call task(arg, i) once for every i below `count`, on any threads in
 * any order, and return when all are done. The results do not depend on how the work is
 * distributed. */
typedef void colibri_parallel_hook(void *user, void (*task)(void *arg, uint32_t index), void *arg,
                                   uint32_t count);

/* The head of the memory block given to colibri_init. The caller may read all fields, and may set
 * the hooks and their user pointers after colibri_init. */
typedef struct colibri_context {
    int32_t
        /* enum colibri_error: result of the last colibri_forward; COLIBRI_OK after colibri_init */
        status;
    int32_t max_batch;            /* largest batch_size */
    uint32_t input_size;          /* floats of one input row: the model's inputs concatenated */
    uint32_t output_size;         /* floats of one output row: the model's outputs concatenated */
    colibri_route_hook *on_route; /* NULL: none */
    void *user;                   /* passed to on_route */
    const uint8_t *model;         /* the model this context runs; NULL once freed */
    colibri_parallel_hook *parallel; /* NULL: the calling thread does all the work */
    void *parallel_user;             /* passed to parallel */
    const void *kernels;             /* internal: the kernels for this processor */
    uint32_t
        /* language models: tokens of the text evaluated so far; set it to 0 for a new text */
        position;
    uint32_t context_tokens; /* most tokens of a text; 0: rows are independent */
    int32_t tail;            /* output rows wanted, the last ones of a batch; 0: all */
    uint32_t
        /* encoder-decoder models: tokens of the source text; 0: the next run reads it and writes
         * no output */
        source;
    uint32_t seal; /* internal: checksum of the fields that may not change after colibri_init */
    int32_t busy;  /* internal: colibri_forward is running */
} colibri_context_t;

/* Prepare a context inside `mem`.
 *   mem        64-byte aligned, owned by the caller; must outlive the context and not move; all of
 *              it but attention's caches is cleared, so its old content cannot reach an output
 *   mem_size   bytes of it, at least colibri_model_size(model_bin)
 *   model_bin  64-byte aligned, must outlive the context and not change: the structure of the whole
 *              file is validated here, so colibri_forward needs no checks. Reads up to the size in
 *              the header: check a file's length with colibri_check first.
 * Returns the context, or NULL; colibri_diagnose (colibri_inspect.h) returns the reason for the
 * same arguments. */
COLIBRI_API colibri_context_t *colibri_init(void *mem, size_t mem_size, const uint8_t *model_bin);

/* Run the model on `batch_size` rows.
 *   input   float32, row-major, shape (batch_size, ctx->input_size), aligned to 4 bytes
 *   output  float32, row-major, shape (batch_size, ctx->output_size), aligned to 4 bytes; must not
 *           overlap `input`
 *   batch_size  1 … ctx->max_batch
 * Sets ctx->status. On an error the output is not written:
 *   COLIBRI_ERR_NULL, _BATCH, _MISALIGNED, _BUSY  misuse
 *   COLIBRI_ERR_ARITHMETIC  this build or machine does not follow IEEE 754
 *   COLIBRI_ERR_DAMAGED     a field of the context's head that no caller may set has changed
 * A null or freed ctx does nothing. If the floating-point control word is not the standard one, it
 * is set during the call and restored. NaN and infinity in the input follow IEEE 754; a router
 * treats a NaN logit as the lowest; a NaN in the output is always 0x7FC00000. No system call,
 * bounded stack: usable in an interrupt handler if the processor or the handler saves the
 * floating-point registers. A Cortex-M with an FPU saves them with the reset values of FPCCR.ASPEN
 * and LSPEN; with ASPEN off the interrupted code computes wrong numbers. */
COLIBRI_API void colibri_forward(colibri_context_t *ctx, const float *input, float *output,
                                 int batch_size);

/* End the context: later colibri_forward calls do nothing. There is nothing to release; NULL is
 * allowed. */
COLIBRI_API void colibri_free(colibri_context_t *ctx);

/* Bytes of memory that a context of this model needs, exactly; 0 if the pointer or the header is
 * not valid. */
COLIBRI_API size_t colibri_model_size(const uint8_t *model_bin);

/* Number of experts in all MoE layers together; -(enum colibri_error) if the pointer or the header
 * is not valid. */
COLIBRI_API int colibri_get_num_experts(const uint8_t *model_bin);

#ifdef __cplusplus
}
#endif

#endif
