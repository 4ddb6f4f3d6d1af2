/* Characters: which bytes are valid UTF-8, and the normal form NFC. Knows nothing of tokens. */
#include "tokenizer_text.h"

size_t clb_utf8_check(const uint8_t *p, size_t left, size_t *bad) {
    const uint8_t lead = p[0];
    *bad = 1;
    if (lead < 0x80) return 1;
    if (lead < 0xC2 || lead > 0xF4) return 0;
    /* The second byte rules out overlong forms, surrogates and what lies beyond U+10FFFF. */
    const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    const size_t length = utf8_length(lead);
    if (left < 2 || p[1] < low || p[1] > high) return 0;
    for (size_t n = 2; n < length; ++n) {
        if (n >= left || !within_character(p[n])) {
            *bad = n;
            return 0;
        }
    }
    return length;
}

size_t colibri_utf8_complete(const char *text, size_t bytes) {
    const uint8_t *p = (const uint8_t *)text;
    for (size_t back = 1; back <= 3 && back <= bytes; ++back) {
        const uint8_t byte = p[bytes - back];
        if (!within_character(byte)) { /* the last character's first byte */
            const int leads = byte >= 0xC2 && byte <= 0xF4;
            size_t bad;
            const size_t length = clb_utf8_check(p + bytes - back, back, &bad);
            return leads && length == 0 && bad == back ? bytes - back : bytes;
        }
    }
    return bytes;
}

static size_t utf8_write(uint32_t c, uint8_t *out) {
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (uint8_t)(0xC0 | c >> 6);
        out[1] = (uint8_t)(0x80 | (c & 63u));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xE0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 63u));
        out[2] = (uint8_t)(0x80 | (c & 63u));
        return 3;
    }
    out[0] = (uint8_t)(0xF0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 63u));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 63u));
    out[3] = (uint8_t)(0x80 | (c & 63u));
    return 4;
}

/* --- NFC, Unicode Standard Annex 15 --- */

/* Hangul syllables: where leading consonants, vowels and trailing consonants begin, and how many
 * there are. */
enum {
    S_BASE = 0xAC00,
    L_BASE = 0x1100,
    V_BASE = 0x1161,
    T_BASE = 0x11A7,
    L_COUNT = 19,
    V_COUNT = 21,
    T_COUNT = 28,
    S_COUNT = L_COUNT * V_COUNT * T_COUNT
};

/* All characters of lower lead bytes are in normal form, whatever follows decides. */
enum { FIRST_LEAD = 0xCC };

static const clb_tok_record *record_of(const clb_tokenizer *t, uint32_t c) {
    return &t->records[t->nfc_blocks[(uint32_t)t->nfc_index[c >> 8] << 8 | (c & 255u)]];
}

static int stable(const clb_tokenizer *t, const uint8_t *p, const uint8_t *end) {
    return (record_of(t, utf8_read(p, end))->flags & (POINT_STANDS | POINT_CHANGED)) ==
           POINT_STANDS;
}

static int stands(const clb_tokenizer *t, const uint8_t *p, const uint8_t *end) {
    return (record_of(t, utf8_read(p, end))->flags & POINT_STANDS) != 0;
}

int clb_nfc_needed(const clb_tokenizer *t, const uint8_t *text, size_t size) {
    for (size_t at = 0; at < size;) {
        if (text[at] < FIRST_LEAD) {
            ++at;
        } else if (stable(t, text + at, text + size)) {
            at += utf8_step(text + at, text + size);
        } else {
            return 1;
        }
    }
    return 0;
}

/* A place in a text's decomposition: a character of the text, and a part of it. */
typedef struct {
    size_t at;
    uint32_t part;
} place;

/* Part `n` of a Hangul syllable, counted from the first one. */
static uint32_t hangul_part(uint32_t syllable, uint32_t n) {
    const uint32_t parts[3] = {L_BASE + syllable / (V_COUNT * T_COUNT),
                               V_BASE + syllable / T_COUNT % V_COUNT, T_BASE + syllable % T_COUNT};
    return parts[n];
}

/* The decomposition's character at `p` in text[..end), which moves on; *order is 0 but for
 * marks. */
static uint32_t next_point(const clb_tokenizer *t, const uint8_t *text, size_t end, place *p,
                           uint32_t *order) {
    const uint32_t c = utf8_read(text + p->at, text + end);
    const uint32_t syllable = c - S_BASE;
    const clb_tok_record *r = record_of(t, c);
    uint32_t found = c;
    uint32_t count = r->count;
    if (syllable < S_COUNT) {
        count = syllable % T_COUNT == 0 ? 2 : 3;
        found = hangul_part(syllable, p->part);
    } else if (count > 0) {
        found = t->points[r->first + p->part];
    }
    *order = record_of(t, found)->order;
    if (++p->part >= count) {
        p->at += utf8_step(text + p->at, text + end);
        p->part = 0;
    }
    return found;
}

/* The pair of `a` and `b`, NULL where they do not compose. */
static const clb_tok_pair *find_pair(const clb_tokenizer *t, uint32_t a, uint32_t b) {
    size_t low = 0;
    size_t high = t->head->nfc_pairs;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const clb_tok_pair *p = &t->pairs[middle];
        if (p->first < a || (p->first == a && p->second < b)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const clb_tok_pair *p = &t->pairs[low];
    return low < t->head->nfc_pairs && p->first == a && p->second == b ? p : NULL;
}

/* What `a` and `b` compose to; 0: nothing. */
static uint32_t compose(const clb_tokenizer *t, uint32_t a, uint32_t b) {
    if (a - L_BASE < L_COUNT && b - V_BASE < V_COUNT) {
        return S_BASE + ((a - L_BASE) * V_COUNT + (b - V_BASE)) * T_COUNT;
    }
    if (a - S_BASE < S_COUNT && (a - S_BASE) % T_COUNT == 0 && b - T_BASE - 1 < T_COUNT - 1) {
        return a + (b - T_BASE);
    }
    const clb_tok_pair *pair = find_pair(t, a, b);
    return pair == NULL ? 0 : pair->whole;
}

/* Composes characters in canonical order. The last starter may still grow, so its place is kept
 * free before its marks. */
typedef struct {
    const clb_tokenizer *t;
    uint8_t *out;
    size_t room;
    size_t starter_at;
    size_t end;          /* of what is written */
    uint32_t starter;    /* NONE: none yet */
    uint32_t last_order; /* 0: no marks behind the starter */
    int full;
} composer;

enum { GAP = 4 };

static void finish(composer *c) {
    if (c->starter != CLB_NONE) {
        const size_t marks = c->starter_at + GAP;
        const size_t length = utf8_write(c->starter, c->out + c->starter_at);
        memmove(c->out + c->starter_at + length, c->out + marks, c->end - marks);
        c->end -= GAP - length;
        c->starter = CLB_NONE;
    }
    c->last_order = 0;
}

static void feed(composer *c, uint32_t point, uint32_t order) {
    if (c->starter != CLB_NONE && (c->last_order == 0 || c->last_order < order)) {
        const uint32_t whole = compose(c->t, c->starter, point);
        if (whole != 0) {
            c->starter = whole;
            return;
        }
    }
    if (order == 0) {
        finish(c);
    }
    if (c->room - c->end < 2 * GAP) {
        c->full = 1;
    } else if (order == 0) {
        c->starter = point;
        c->starter_at = c->end;
        c->end += GAP;
    } else {
        c->end += utf8_write(point, c->out + c->end);
        c->last_order = order;
    }
}

static int is_before(place a, place b) { return a.at < b.at || (a.at == b.at && a.part < b.part); }

/* Where marks from `from` on end; bits of the orders they have in *present. */
static place end_of_marks(const clb_tokenizer *t, const uint8_t *text, place from, size_t end,
                          uint64_t *present) {
    place after = from;
    for (place p = from; p.at < end; after = p) {
        uint32_t order;
        next_point(t, text, end, &p, &order);
        if (order == 0) break;
        *present |= (uint64_t)1 << order;
    }
    return after;
}

/* Marks from `from` on, in the order of their classes: one pass for each class there is. Returns
 * where they end. */
static place feed_marks(composer *c, const uint8_t *text, place from, size_t end) {
    uint64_t present = 0;
    const place after = end_of_marks(c->t, text, from, end, &present);
    for (uint32_t wanted = 1; wanted <= MOST_ORDER; ++wanted) {
        if (!(present >> wanted & 1)) continue;
        for (place p = from; is_before(p, after);) {
            uint32_t order;
            const uint32_t point = next_point(c->t, text, end, &p, &order);
            if (order == wanted) {
                feed(c, point, order);
            }
        }
    }
    return after;
}

static void compose_stretch(composer *c, const uint8_t *text, size_t begin, size_t end) {
    for (place p = {begin, 0}; p.at < end;) {
        place next = p;
        uint32_t order;
        const uint32_t point = next_point(c->t, text, end, &next, &order);
        if (order == 0) {
            feed(c, point, 0);
            p = next;
        } else {
            p = feed_marks(c, text, p, end);
        }
    }
    finish(c);
}

/* Where the next character that may change is, from `at` on, or the end; *base: the last character
 * before it, or itself, that stands by itself. */
static size_t next_change(const clb_tokenizer *t, const uint8_t *text, size_t at, size_t size,
                          size_t *base) {
    const uint8_t *const stop = text + size;
    while (at < size && (text[at] < FIRST_LEAD || stable(t, text + at, stop))) {
        *base = at;
        at += utf8_step(text + at, stop);
    }
    if (at < size && stands(t, text + at, stop)) {
        *base = at;
    }
    return at;
}

/* The next character behind `at` that stands by itself, or the end. */
static size_t next_standing(const clb_tokenizer *t, const uint8_t *text, size_t at, size_t size) {
    do {
        at += utf8_step(text + at, text + size);
    } while (at < size && !stands(t, text + at, text + size));
    return at;
}

/* Copies text as it is; 0 where `room` does not suffice. */
static int copy_plain(composer *c, const uint8_t *text, size_t size) {
    if (c->room - c->end < size) return 0;
    memcpy(c->out + c->end, text, size);
    c->end += size;
    return 1;
}

int clb_nfc(const clb_tokenizer *t, const uint8_t *text, size_t size, uint8_t *out, size_t room,
            size_t *written) {
    composer c = {.t = t, .out = out, .room = room, .starter = CLB_NONE};
    /* Only a stretch from a character that stands by itself to the next, with one that does not in
     * it, can change. */
    for (size_t done = 0; done < size && !c.full;) {
        size_t base = done;
        const size_t change = next_change(t, text, done, size, &base);
        const size_t plain = change < size ? base : size;
        if (!copy_plain(&c, text + done, plain - done)) return 0;
        done = plain;
        if (change < size) {
            done = next_standing(t, text, change, size);
            compose_stretch(&c, text, base, done);
        }
    }
    *written = c.end;
    return !c.full;
}
