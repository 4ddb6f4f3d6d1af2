/* Colibri, optional: text to token ids and back, from the tokenizer.bin that colibri.text.tokenizer
 * writes in Python. A separate library, libcolibri_lm.a. The same ids as the `tokenizers` library
 * in Python. No heap, no state, no system call.
 *
 *     colibri_tokenizer_t t;
 *     if (colibri_tokenizer_open(&t, tokenizer_bin, size) != COLIBRI_OK) { ... }
 *     colibri_tokenizer_encode(&t, text, bytes, COLIBRI_TOKENIZER_TEMPLATE, ids, room, &count,
 *                              scratch, sizeof scratch);
 *
 * An open tokenizer is only read: any number of threads may share one, each with its own scratch
 * memory. */
#ifndef COLIBRI_TOKENIZER_H
#define COLIBRI_TOKENIZER_H

#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An open tokenizer: pointers to the parts of tokenizer.bin. */
typedef struct {
    uint64_t opaque[48];
} colibri_tokenizer_t;

/* Option bits. */
enum colibri_tokenizer_option {
    COLIBRI_TOKENIZER_TEMPLATE =
        1, /* encode: add the tokens the model expects around a text, such as BOS */
    COLIBRI_TOKENIZER_SPECIAL =
        2, /* encode: recognise special tokens in the text. Not for untrusted text */
    COLIBRI_TOKENIZER_SKIP_SPECIAL = 4, /* decode: leave special tokens out */
    /* decode: the ids follow others that gave text (a special token that is left out gives none),
     * so that the first one's space is kept */
    COLIBRI_TOKENIZER_CONTINUE = 8
};

/* Open the `size` bytes at `tokenizer_bin`, aligned to 64 and left unchanged while `t` is used.
 * Everything is checked here, in time linear in `size`: COLIBRI_OK, or why the file cannot be
 * used. */
COLIBRI_API int colibri_tokenizer_open(colibri_tokenizer_t *t, const uint8_t *tokenizer_bin,
                                       size_t size);

/* Scratch memory with which colibri_tokenizer_encode can encode any text of `bytes` bytes. Text
 * that is valid UTF-8 and in normal form needs 20 bytes for each byte of its longest word only, and
 * the text's size where a space is put before it. */
COLIBRI_API size_t colibri_tokenizer_scratch(const colibri_tokenizer_t *t, size_t bytes);

/* Text to ids.
 *   text     `bytes` bytes of UTF-8; what is not valid is read as U+FFFD, as Python's
 *            errors="replace" does, whatever bytes the vocabulary has
 *   ids      room for `room` ids; NULL where room is 0
 *   count    the number of ids the text has, also where that is more than `room`
 *   scratch  of any alignment
 * COLIBRI_OK, COLIBRI_ERR_NULL, COLIBRI_ERR_SCRATCH, COLIBRI_ERR_OUTPUT where count is more than
 * room, or of a hostile file COLIBRI_ERR_TOO_SLOW. */
COLIBRI_API int colibri_tokenizer_encode(const colibri_tokenizer_t *t, const char *text,
                                         size_t bytes, int options, int32_t *ids, size_t room,
                                         size_t *count, void *scratch, size_t scratch_bytes);

/* Ids to bytes. A character may begin in one token and end in another: pass on what
 * colibri_utf8_complete counts. An id without a token has no bytes (a model may have
 * logits for it); a negative one is COLIBRI_ERR_TOKEN.
 *   out    room for `room` bytes, not ended with a zero
 *   bytes  the number of bytes the ids have, also where that is more than `room`
 * COLIBRI_OK, COLIBRI_ERR_NULL, COLIBRI_ERR_TOKEN, or COLIBRI_ERR_OUTPUT where bytes is more than
 * room. */
COLIBRI_API int colibri_tokenizer_decode(const colibri_tokenizer_t *t, const int32_t *ids,
                                         size_t count, int options, char *out, size_t room,
                                         size_t *bytes);

/* How many of `bytes` bytes can be printed: all but an incomplete last character. */
COLIBRI_API size_t colibri_utf8_complete(const char *text, size_t bytes);

/* The number of ids: they are 0 to this number - 1. */
COLIBRI_API int32_t colibri_tokenizer_vocabulary(const colibri_tokenizer_t *t);

/* The id that begins a text, or -1; whether an id ends the generated text; whether
 * COLIBRI_TOKENIZER_SKIP_SPECIAL leaves it out: it is special, or no token has it. */
COLIBRI_API int32_t colibri_tokenizer_bos(const colibri_tokenizer_t *t);
COLIBRI_API int colibri_tokenizer_ends(const colibri_tokenizer_t *t, int32_t id);
COLIBRI_API int colibri_tokenizer_special(const colibri_tokenizer_t *t, int32_t id);

#ifdef __cplusplus
}
#endif

#endif
