/* The open tokenizer: where the sections of its tokenizer.bin are. tokenizer_open.c has proven that
 * no number in them leads outside them. Each file uses only those before it: tokenizer_text.c (its
 * characters), _open.c (the proof), _split.c, _merge.c, _encode.c and _decode.c. */
#ifndef COLIBRI_LM_TOKENIZER_H
#define COLIBRI_LM_TOKENIZER_H

#include "colibri_tokenizer.h"
#include "tokenizer_format.h"

#include <string.h>

enum { LAST_POINT = 0x10FFFF };

#define SECTION_POINTER(name, type, flag, count) const type *name;

typedef struct {
    const clb_tok_header *head; /* NULL: not open */
    CLB_TOK_SECTIONS(SECTION_POINTER)
    const uint32_t *after; /* in ids: those put after a text */
    const uint32_t *eos;
    const uint8_t *ascii;                /* classes of the first block */
    const uint16_t *tables[MOST_STAGES]; /* in entries: those of each stage */
    uint8_t begins[2][32]; /* bytes that begin an added token, raw and normalised: one bit each */
} clb_tokenizer;
_Static_assert(sizeof(clb_tokenizer) <= sizeof(colibri_tokenizer_t),
               "the caller's memory holds it");

/* The open tokenizer in the caller's memory, NULL where there is none. */
static inline const clb_tokenizer *opened(const colibri_tokenizer_t *tokenizer) {
    const clb_tokenizer *t = (const clb_tokenizer *)(const void *)tokenizer;
    return t == NULL || t->head == NULL ? NULL : t;
}

#endif
