/* From a piece of text to ids, and what one call of encode has: its output and its memory. */
#ifndef COLIBRI_LM_TOKENIZER_MERGE_H
#define COLIBRI_LM_TOKENIZER_MERGE_H

#include "tokenizer_split.h"

/* One call of encode. Scratch memory is a stack: what a piece takes is given back after it. */
typedef struct {
    const clb_tokenizer *t;
    int options;
    int error;
    int32_t *ids;
    size_t room;
    size_t count;
    uint8_t *free;
    size_t left;
    clb_budget budget;
} clb_encoder;

static inline void give_back(clb_encoder *e, uint8_t *free) {
    e->left += (size_t)(e->free - free);
    e->free = free;
}

static inline void emit(clb_encoder *e, uint32_t id) {
    if (e->count < e->room) {
        e->ids[e->count] = (int32_t)id;
    }
    ++e->count;
}

/* Scratch memory, aligned to 4; NULL, and an error, where there is not enough. */
void *clb_take(clb_encoder *e, size_t bytes);

/* The ids of a piece: the token that has its bytes, or what its symbols merge to. */
void clb_encode_piece(clb_encoder *e, const uint8_t *text, size_t size);

#endif
