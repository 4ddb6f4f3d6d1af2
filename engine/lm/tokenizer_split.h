/* Cutting text: at added tokens, and into the pieces of each stage's pattern. */
#ifndef COLIBRI_LM_TOKENIZER_SPLIT_H
#define COLIBRI_LM_TOKENIZER_SPLIT_H

#include "tokenizer_text.h"

/* Work left before a file is held for hostile: real ones need a few steps a byte. */
typedef struct {
    uint64_t left;
} clb_budget;

/* Looks for added tokens in a text, from its start to its end. */
typedef struct {
    const clb_tokenizer *t;
    const uint8_t *text;
    size_t size;
    size_t at;   /* searched up to here */
    size_t done; /* handed out up to here */
    int normalised;
    int special;    /* special tokens are looked for too */
    uint32_t token; /* found, to be handed out after the text before it; NONE: none */
} clb_finder;

/* The next stretch of text, or added token (then *token is its id, else NONE). 0 at the end, or
 * where the budget is spent. */
int clb_next_part(clb_finder *f, clb_budget *budget, size_t *begin, size_t *end, uint32_t *token);

/* The end of the piece that begins at `begin` in text[..end) by one stage; *keep: whether the piece
 * is part of the text. */
size_t clb_next_piece(const clb_tokenizer *t, uint32_t stage, const uint8_t *text, size_t begin,
                      size_t end, clb_budget *budget, int *keep);

#endif
