/* What the tokenizer's files share: the open tokenizer.bin (its bytes are in docs/format.md) and each file's entry points. */
#ifndef COLIBRI_LM_TOKENIZER_H
#define COLIBRI_LM_TOKENIZER_H

#include "colibri_tokenizer.h"
#include "format/format.h"

#include <string.h>

enum { /* flags of the file */
    BYTE_LEVEL = 1,
    METASPACE = 2,
    NFC = 4,
    PREFIX_ALWAYS = 8,
    PREFIX_MISSING = 16,
    PREFIX_START = 32,
    STRIP_ONE = 64,
    STRIP_FIRST = 128
};
enum { TOKEN_SPECIAL = 1, TOKEN_WHOLE = 2, TOKEN_PRESENT = 4 };
enum { ADDED_LSTRIP = 1, ADDED_RSTRIP = 2, ADDED_SINGLE_WORD = 4, ADDED_SPECIAL = 8 };
enum { KEEP_ALL = 0, DROP_MATCHES = 1, DROP_GAPS = 2 };
enum { MOST_STAGES = 8, MOST_PARTS = 8, MOST_ORDER = 63, BLOCK_INDEX = 0x1100 };
enum { LAST_POINT = 0x10FFFF, REPLACEMENT = 0xFFFD };
#define MATCHED 0x8000u

typedef struct {
    uint8_t magic[8];
    uint32_t version, total_bytes;
    uint32_t flags, vocab, text_bytes, longest;
    uint32_t hash_slots, hash_probes, merge_slots, merge_probes;
    uint32_t before, after, eos, bos;
    uint32_t nodes, raw_nodes, normal_nodes, added_bytes;
    uint32_t classes, blocks, stages, entries;
    uint32_t nfc_blocks, nfc_records, nfc_points, nfc_pairs;
    uint32_t body_crc, reserved[2], header_crc;
} CLB_ALIAS clb_tok_header;
_Static_assert(sizeof(clb_tok_header) == 128, "no padding");

typedef struct {
    uint32_t left, right, rank, result;
} CLB_ALIAS clb_tok_merge;

typedef struct {
    uint32_t first, token; /* of its children; NONE: no added token ends here */
    uint16_t count;
    uint8_t byte, flags;
} CLB_ALIAS clb_tok_node;

typedef struct {
    uint32_t states, keep;
} CLB_ALIAS clb_tok_stage;

typedef struct {
    uint8_t order, flags; /* canonical order of a mark; 1: nothing before it changes it, 2: it is not its own NFC */
    uint16_t count;       /* of its decomposition */
    uint32_t first;
} CLB_ALIAS clb_tok_record;

typedef struct {
    uint32_t first, second, whole;
} CLB_ALIAS clb_tok_pair;

typedef struct {
    const clb_tok_header *head; /* NULL: not open */
    const uint32_t *starts, *hash, *byte_ids, *before, *after, *eos, *points;
    const uint8_t *kinds, *bytes, *class_index, *class_blocks, *words, *ascii, *nfc_index;
    const clb_tok_merge *merges;
    const clb_tok_node *nodes;
    const clb_tok_stage *stages;
    const uint16_t *tables[MOST_STAGES], *nfc_blocks;
    const clb_tok_record *records;
    const clb_tok_pair *pairs;
    uint8_t begins[2][32]; /* bytes with which an added token begins, raw and normalised: one bit each */
} clb_tokenizer;
_Static_assert(sizeof(clb_tokenizer) <= sizeof(colibri_tokenizer_t), "the caller's memory holds the tokenizer");

/* --- UTF-8; text is valid wherever these are used, but for clb_utf8_check. Nothing is read from `end` on --- */

/* Bytes of the character that begins with `lead`. */
static inline size_t utf8_length(uint8_t lead)
{
    return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

static inline int within_character(uint8_t byte)
{
    return (byte & 0xC0) == 0x80;
}

/* Bytes from `p`, which is before `end`, to the next character. */
static inline size_t utf8_step(const uint8_t *p, const uint8_t *end)
{
    const size_t length = utf8_length(*p);
    const size_t left = (size_t)(end - p);
    return length < left ? length : left;
}

/* The character at `p`, which is before `end`; U+FFFD where it is cut off or none. */
static inline uint32_t utf8_read(const uint8_t *p, const uint8_t *end)
{
    if (p[0] < 0x80) {
        return p[0];
    }
    if (utf8_length(p[0]) > (size_t)(end - p)) {
        return REPLACEMENT;
    }
    if (p[0] < 0xE0) {
        return (p[0] & 31u) << 6 | (p[1] & 63u);
    }
    if (p[0] < 0xF0) {
        return (p[0] & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    }
    const uint32_t c = (p[0] & 7u) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
    return c <= LAST_POINT ? c : REPLACEMENT;
}

static inline uint32_t class_of(const clb_tokenizer *t, const uint8_t *p, const uint8_t *end)
{
    if (*p < 0x80) {
        return t->ascii[*p];
    }
    const uint32_t c = utf8_read(p, end);
    return t->class_blocks[(uint32_t)t->class_index[c >> 8] << 8 | (c & 255u)];
}

/* The length of the valid character at `p`, of which `left` bytes exist; else 0, and in *bad the bytes to replace by one
 * U+FFFD: the longest beginning of a valid character, or one byte. */
size_t clb_utf8_check(const uint8_t *p, size_t left, size_t *bad);

/* Whether NFC may change the text. */
int clb_nfc_needed(const clb_tokenizer *t, const uint8_t *text, size_t size);

/* Write the text's NFC; *written bytes. 0 where `room` does not suffice; 3 · size + 8 bytes always do. */
int clb_nfc(const clb_tokenizer *t, const uint8_t *text, size_t size, uint8_t *out, size_t room, size_t *written);

/* --- cutting text --------------------------------------------------------------------------------------------------- */

/* Work left before a file is held for hostile: real ones need a few steps a byte. */
typedef struct {
    uint64_t left;
} clb_budget;

static inline int spend(clb_budget *b, uint64_t steps)
{
    const int enough = b->left >= steps;
    b->left -= enough ? steps : b->left;
    return enough;
}

/* Looks for added tokens in a text, from its start to its end. */
typedef struct {
    const clb_tokenizer *t;
    const uint8_t *text;
    size_t size, at, done; /* searched, and handed out, up to here */
    int normalised, special;
    uint32_t token; /* found, to be handed out after the text before it; NONE: none */
} clb_finder;

/* The next stretch of text, or added token (then *token is its id, else NONE). 0 at the end, or where the budget is spent. */
int clb_next_part(clb_finder *f, clb_budget *budget, size_t *begin, size_t *end, uint32_t *token);

/* The end of the piece that begins at `begin` in text[..end) by one stage; *keep: whether the piece is part of the text. */
size_t clb_next_piece(const clb_tokenizer *t, uint32_t stage, const uint8_t *text, size_t begin, size_t end,
                      clb_budget *budget, int *keep);

#endif
