/* Characters: UTF-8, their classes and their normal form. Text is valid wherever these are used,
 * but for clb_utf8_check. Nothing is read from `end` on. */
#ifndef COLIBRI_LM_TOKENIZER_TEXT_H
#define COLIBRI_LM_TOKENIZER_TEXT_H

#include "tokenizer.h"

enum { REPLACEMENT = 0xFFFD };

/* Bytes of the character that begins with `lead`. */
static inline size_t utf8_length(uint8_t lead) {
    if (lead < 0x80) return 1;
    if (lead < 0xE0) return 2;
    if (lead < 0xF0) return 3;
    return 4;
}

static inline int within_character(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* Bytes from `p`, which is before `end`, to the next character. */
static inline size_t utf8_step(const uint8_t *p, const uint8_t *end) {
    const size_t length = utf8_length(*p);
    const size_t left = (size_t)(end - p);
    if (length < left) return length;
    return left;
}

/* The bits so far, and those of one more byte. */
static inline uint32_t append(uint32_t bits, uint8_t byte) { return bits << 6 | (byte & 63u); }

/* The character at `p`, which is before `end`; U+FFFD where it is cut off or none. */
static inline uint32_t utf8_read(const uint8_t *p, const uint8_t *end) {
    const size_t length = utf8_length(*p);
    const size_t left = (size_t)(end - p);
    uint32_t c = *p;
    if (length == 1) return c;
    if (length > left) return REPLACEMENT;
    c = append(c, p[1]);
    if (length == 2) return c & 0x7FF;
    c = append(c, p[2]);
    if (length == 3) return c & 0xFFFF;
    c = append(c, p[3]) & 0x1FFFFF;
    if (c > LAST_POINT) return REPLACEMENT;
    return c;
}

static inline uint32_t class_of(const clb_tokenizer *t, const uint8_t *p, const uint8_t *end) {
    if (*p < 0x80) return t->ascii[*p];
    const uint32_t c = utf8_read(p, end);
    const uint32_t block = t->class_index[c >> 8];
    return t->class_blocks[block << 8 | (c & 255u)];
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
