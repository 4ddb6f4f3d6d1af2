/* Characters: UTF-8, their classes and their normal form. Text is valid wherever these are used,
 * but for clb_utf8_check. Nothing is read from `end` on. */
#ifndef COLIBRI_LM_TOKENIZER_TEXT_H
#define COLIBRI_LM_TOKENIZER_TEXT_H

#include "tokenizer.h"

enum { REPLACEMENT = 0xFFFD };

/* Bytes of the character that begins with `lead`. */
static inline size_t utf8_length(uint8_t lead) {
    return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

static inline int within_character(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* Bytes from `p`, which is before `end`, to the next character. */
static inline size_t utf8_step(const uint8_t *p, const uint8_t *end) {
    const size_t length = utf8_length(*p);
    const size_t left = (size_t)(end - p);
    return length < left ? length : left;
}

/* The character at `p`, which is before `end`; U+FFFD where it is cut off or none. */
static inline uint32_t utf8_read(const uint8_t *p, const uint8_t *end) {
    if (p[0] < 0x80) return p[0];
    if (utf8_length(p[0]) > (size_t)(end - p)) return REPLACEMENT;
    if (p[0] < 0xE0) return (p[0] & 31u) << 6 | (p[1] & 63u);
    if (p[0] < 0xF0) return (p[0] & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    const uint32_t c = (p[0] & 7u) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
    return c <= LAST_POINT ? c : REPLACEMENT;
}

static inline uint32_t class_of(const clb_tokenizer *t, const uint8_t *p, const uint8_t *end) {
    if (*p < 0x80) return t->ascii[*p];
    const uint32_t c = utf8_read(p, end);
    return t->class_blocks[(uint32_t)t->class_index[c >> 8] << 8 | (c & 255u)];
}

/* The length of the valid character at `p`, of which `left` bytes exist; else 0, and in *bad the
 * bytes to replace by one U+FFFD: the longest beginning of a valid character, or one byte. */
size_t clb_utf8_check(const uint8_t *p, size_t left, size_t *bad);

/* Whether NFC may change the text. */
int clb_nfc_needed(const clb_tokenizer *t, const uint8_t *text, size_t size);

/* Write the text's NFC; *written bytes. 0 where `room` does not suffice; 3 · size + 8 bytes always
 * do. */
int clb_nfc(const clb_tokenizer *t, const uint8_t *text, size_t size, uint8_t *out, size_t room,
            size_t *written);

#endif
