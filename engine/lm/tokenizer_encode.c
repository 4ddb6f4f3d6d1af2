/* Text to ids: repairs and normalises text, and has it cut into pieces that become ids. */
#include "tokenizer_merge.h"

/* Cut a text without added tokens, stage after stage: a piece of one is cut by the next. */
static void encode_text(clb_encoder *e, const uint8_t *text, size_t size) {
    const uint32_t stages = e->t->head->stages;
    size_t ends[MOST_STAGES + 1] = {size};
    uint32_t level = 0;
    for (size_t at = 0; e->error == COLIBRI_OK;) {
        while (level > 0 && at == ends[level]) {
            --level;
        }
        if (at == ends[level]) break;
        if (level == stages) {
            clb_encode_piece(e, text + at, ends[level] - at);
            at = ends[level];
            continue;
        }
        int keep;
        const size_t end = clb_next_piece(e->t, level, text, at, ends[level], &e->budget, &keep);
        if (keep) {
            ends[++level] = end;
        } else {
            at = end;
        }
    }
}

/* --- normalising --- */

static int is_metaspace(const uint8_t *text, size_t size) {
    return size >= 3 && memcmp(text, "\xE2\x96\x81", 3) == 0;
}

/* Spaces for U+2581, in place; the new size. */
static size_t plain_spaces(uint8_t *text, size_t size) {
    size_t end = 0;
    for (size_t at = 0; at < size; ++at) {
        if (is_metaspace(text + at, size - at)) {
            text[end++] = ' ';
            at += 2;
        } else {
            text[end++] = text[at];
        }
    }
    return end;
}

static int has_metaspace(const uint8_t *text, size_t size) {
    for (size_t at = 0; at < size; ++at) {
        if (is_metaspace(text + at, size - at)) return 1;
    }
    return 0;
}

/* A copy of the text behind `gap` bytes; NULL where scratch memory does not suffice. */
static uint8_t *copied(clb_encoder *e, const uint8_t *text, size_t size, size_t gap) {
    uint8_t *copy = clb_take(e, gap + size);
    if (copy != NULL) {
        memcpy(copy + gap, text, size);
    }
    return copy;
}

/* The text's NFC, of *size bytes, behind `gap` bytes; NULL where scratch memory does not suffice.
 */
static uint8_t *composed(clb_encoder *e, const uint8_t *text, size_t *size, size_t gap) {
    uint8_t *copy = e->free;
    if (e->left < gap || !clb_nfc(e->t, text, *size, copy + gap, e->left - gap, size)) {
        e->error = COLIBRI_ERR_SCRATCH;
        return NULL;
    }
    e->free += gap + *size;
    e->left -= gap + *size;
    return copy;
}

/* The text as patterns see it; NULL where scratch memory does not suffice. */
static const uint8_t *normalised(clb_encoder *e, const uint8_t *text, size_t *size) {
    const uint32_t flags = e->t->head->flags;
    const uint32_t prefix = flags & (FLAG_PREFIX_ALWAYS | FLAG_PREFIX_MISSING);
    const size_t space = prefix == FLAG_PREFIX_ALWAYS ? 1 : 0;
    const int nfc = flags & FLAG_NFC && clb_nfc_needed(e->t, text, *size);
    const int marks = flags & FLAG_METASPACE && has_metaspace(text, *size);
    if (!nfc && !marks && !space) return text;
    uint8_t *copy = nfc ? composed(e, text, size, space) : copied(e, text, *size, space);
    if (copy == NULL) return NULL;
    if (space) {
        copy[0] = ' ';
    }
    *size += space;
    *size = marks ? plain_spaces(copy, *size) : *size;
    return copy;
}

/* --- from text to pieces --- */

static int lacks_space(const clb_encoder *e, uint8_t first, int at_start) {
    const uint32_t flags = e->t->head->flags;
    if (!(flags & FLAG_PREFIX_MISSING) || first == ' ') return 0;
    return !(flags & FLAG_PREFIX_START) || at_start;
}

/* Normalised text without added tokens. */
static void encode_part(clb_encoder *e, const uint8_t *text, size_t size, int at_start) {
    if (!lacks_space(e, text[0], at_start)) {
        encode_text(e, text, size);
        return;
    }
    uint8_t *copy = copied(e, text, size, 1);
    if (copy != NULL) {
        copy[0] = ' ';
        encode_text(e, copy, size + 1);
    }
}

static clb_finder find_added(const clb_encoder *e, const uint8_t *text, size_t size, int normal) {
    const int special = e->options & COLIBRI_TOKENIZER_SPECIAL;
    return (clb_finder){e->t, text, size, 0, 0, normal, special, CLB_NONE};
}

/* The next stretch of text between added tokens, whose ids are put out; 0 at the end. */
static int next_text(clb_encoder *e, clb_finder *f, size_t *begin, size_t *end) {
    uint32_t token;
    while (e->error == COLIBRI_OK && clb_next_part(f, &e->budget, begin, end, &token)) {
        if (token == CLB_NONE) return 1;
        emit(e, token);
    }
    return 0;
}

/* Text between raw added tokens: normalise it, take out the other added tokens, encode the rest. */
static void encode_section(clb_encoder *e, const uint8_t *text, size_t size, int at_start) {
    size_t begin;
    size_t end;
    text = normalised(e, text, &size);
    if (text == NULL) return;
    clb_finder f = find_added(e, text, size, 1);
    while (next_text(e, &f, &begin, &end)) {
        uint8_t *const before = e->free;
        encode_part(e, text + begin, end - begin, at_start && begin == 0);
        give_back(e, before);
    }
}

/* Text of valid characters. */
static void encode_valid(clb_encoder *e, const uint8_t *text, size_t size) {
    size_t begin;
    size_t end;
    clb_finder f = find_added(e, text, size, 0);
    while (next_text(e, &f, &begin, &end)) {
        uint8_t *const before = e->free;
        encode_section(e, text + begin, end - begin, begin == 0);
        give_back(e, before);
    }
}

/* --- repairing --- */

/* Bytes of the text before the first that is not UTF-8. */
static size_t valid_bytes(const uint8_t *text, size_t size) {
    size_t at = 0;
    while (at < size) {
        uint64_t eight;
        size_t bad;
        if (size - at >= sizeof eight) {
            memcpy(&eight, text + at, sizeof eight);
            if ((eight & 0x8080808080808080u) == 0) {
                at += sizeof eight;
                continue;
            }
        }
        const size_t length = clb_utf8_check(text + at, size - at, &bad);
        if (length == 0) break;
        at += length;
    }
    return at;
}

/* The text with U+FFFD for what is not UTF-8: itself where all is. NULL where scratch memory does
 * not suffice. */
static const uint8_t *repaired(clb_encoder *e, const uint8_t *text, size_t *size) {
    uint8_t *copy = e->free;
    size_t at = valid_bytes(text, *size);
    size_t end = at;
    if (at == *size) return text;
    if (e->left < at) {
        e->error = COLIBRI_ERR_SCRATCH;
        return NULL;
    }
    memcpy(copy, text, at);
    while (at < *size) {
        size_t bad;
        const size_t length = clb_utf8_check(text + at, *size - at, &bad);
        const uint8_t *source = length == 0 ? (const uint8_t *)"\xEF\xBF\xBD" : text + at;
        const size_t written = length == 0 ? 3 : length;
        if (e->left - end < written) {
            e->error = COLIBRI_ERR_SCRATCH;
            return NULL;
        }
        memcpy(copy + end, source, written);
        at += length == 0 ? bad : length;
        end += written;
    }
    *size = end;
    e->free += end;
    e->left -= end;
    return copy;
}

/* --- encoding --- */

size_t colibri_tokenizer_scratch(const colibri_tokenizer_t *tokenizer, size_t bytes) {
    (void)tokenizer;
    /* Repaired, normalised, with a space: three copies of at most three times the size. And 20
     * bytes for each symbol. */
    const size_t most = (SIZE_MAX - 256) / 72;
    return bytes > most ? SIZE_MAX : bytes * 69 + 128;
}

static void encode_all(clb_encoder *e, const uint8_t *text, size_t size) {
    const clb_tok_header *head = e->t->head;
    const int around = e->options & COLIBRI_TOKENIZER_TEMPLATE;
    for (uint32_t n = 0; around && n < head->before; ++n) {
        emit(e, e->t->ids[n]);
    }
    const uint8_t *whole = size == 0 ? (const uint8_t *)"" : repaired(e, text, &size);
    if (whole != NULL) {
        encode_valid(e, whole, size);
    }
    for (uint32_t n = 0; around && n < head->after; ++n) {
        emit(e, e->t->after[n]);
    }
}

static int is_missing(const void *memory, size_t size) { return memory == NULL && size > 0; }

int colibri_tokenizer_encode(const colibri_tokenizer_t *tokenizer, const char *text, size_t bytes,
                             int options, int32_t *ids, size_t room, size_t *count, void *scratch,
                             size_t scratch_bytes) {
    const clb_tokenizer *t = opened(tokenizer);
    if (t == NULL || count == NULL || is_missing(text, bytes)) return COLIBRI_ERR_NULL;
    if (is_missing(ids, room) || is_missing(scratch, scratch_bytes)) return COLIBRI_ERR_NULL;
    clb_encoder e = {.t = t,
                     .options = options,
                     .ids = ids,
                     .room = room,
                     .free = scratch,
                     .left = scratch_bytes,
                     .budget = {((uint64_t)bytes + 64) * 512}};
    *count = 0;
    encode_all(&e, (const uint8_t *)text, bytes);
    if (e.error != COLIBRI_OK) return e.error;
    if (e.budget.left == 0) return COLIBRI_ERR_TOO_SLOW;
    *count = e.count;
    return e.count > room ? COLIBRI_ERR_OUTPUT : COLIBRI_OK;
}
