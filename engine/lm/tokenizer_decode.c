/* Ids to bytes, and what is known of an id. */
#include "tokenizer.h"

typedef struct {
    char *out;
    size_t room;
    size_t size;
} output;

static void put(output *o, uint8_t byte) {
    if (o->size < o->room) {
        o->out[o->size] = (char)byte;
    }
    ++o->size;
}

/* The bytes of a token, without a first space, or without all. */
static void put_token(const clb_tokenizer *t, uint32_t id, int drop_first, int drop_all,
                      output *o) {
    int drop = drop_first || drop_all;
    for (uint32_t at = t->starts[id]; at < t->starts[id + 1]; ++at) {
        if (!drop || t->bytes[at] != ' ') {
            put(o, t->bytes[at]);
        }
        drop = drop_all;
    }
}

/* Whether an id has no bytes. Models have more logits than there are tokens. */
static int is_left_out(const clb_tokenizer *t, uint32_t id, int options) {
    if (id >= t->head->vocab || !(t->kinds[id] & TOKEN_PRESENT)) return 1;
    return options & COLIBRI_TOKENIZER_SKIP_SPECIAL && t->kinds[id] & TOKEN_SPECIAL;
}

int colibri_tokenizer_decode(const colibri_tokenizer_t *tokenizer, const int32_t *ids, size_t count,
                             int options, char *out, size_t room, size_t *bytes) {
    const clb_tokenizer *t = opened(tokenizer);
    if (t == NULL || (ids == NULL && count > 0)) return COLIBRI_ERR_NULL;
    if ((out == NULL && room > 0) || bytes == NULL) return COLIBRI_ERR_NULL;
    const uint32_t flags = options & COLIBRI_TOKENIZER_CONTINUE ? 0 : t->head->flags;
    output o = {out, room, 0};
    int first = 1;
    int error = COLIBRI_OK;
    for (size_t n = 0; n < count && error == COLIBRI_OK; ++n) {
        const uint32_t id = (uint32_t)ids[n];
        if (ids[n] < 0) {
            error = COLIBRI_ERR_TOKEN;
        } else if (!is_left_out(t, id, options)) {
            const int drop_first = first && flags & FLAG_STRIP_ONE && o.size == 0;
            put_token(t, id, drop_first, first && flags & FLAG_STRIP_FIRST, &o);
            first = 0;
        }
    }
    *bytes = o.size;
    return error == COLIBRI_OK && o.size > room ? COLIBRI_ERR_OUTPUT : error;
}

int32_t colibri_tokenizer_vocabulary(const colibri_tokenizer_t *tokenizer) {
    const clb_tokenizer *t = opened(tokenizer);
    return t == NULL ? 0 : (int32_t)t->head->vocab;
}

int32_t colibri_tokenizer_bos(const colibri_tokenizer_t *tokenizer) {
    const clb_tokenizer *t = opened(tokenizer);
    return t == NULL || t->head->bos == CLB_NONE ? -1 : (int32_t)t->head->bos;
}

int colibri_tokenizer_ends(const colibri_tokenizer_t *tokenizer, int32_t id) {
    const clb_tokenizer *t = opened(tokenizer);
    const uint32_t ends = t == NULL || id < 0 ? 0 : t->head->eos;
    for (uint32_t n = 0; n < ends; ++n) {
        if (t->eos[n] == (uint32_t)id) return 1;
    }
    return 0;
}

int colibri_tokenizer_special(const colibri_tokenizer_t *tokenizer, int32_t id) {
    const clb_tokenizer *t = opened(tokenizer);
    if (t == NULL || id < 0) return 0;
    if ((uint32_t)id >= t->head->vocab) return 1;
    return (t->kinds[id] & (TOKEN_PRESENT | TOKEN_SPECIAL)) != TOKEN_PRESENT;
}
