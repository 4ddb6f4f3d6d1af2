/* Text to ids and back: repairs and normalises text, has it cut into pieces, and merges each piece's symbols. */
#include "tokenizer.h"

/* One call of encode. Scratch memory is a stack: what a piece takes is given back after it. */
typedef struct {
    const clb_tokenizer *t;
    int options, error;
    int32_t *ids;
    size_t room, count;
    uint8_t *free;
    size_t left;
    clb_budget budget;
} encoder;

static void *take(encoder *e, size_t bytes)
{
    const size_t gap = (0u - (uintptr_t)e->free) & 3u;
    if (e->left < gap || e->left - gap < bytes) {
        e->error = COLIBRI_ERR_SCRATCH;
        return NULL;
    }
    uint8_t *found = e->free + gap;
    e->free = found + bytes;
    e->left -= gap + bytes;
    return found;
}

static void give_back(encoder *e, uint8_t *free)
{
    e->left += (size_t)(e->free - free);
    e->free = free;
}

static void emit(encoder *e, uint32_t id)
{
    if (e->count < e->room) {
        e->ids[e->count] = (int32_t)id;
    }
    ++e->count;
}

/* --- the vocabulary ------------------------------------------------------------------------------------------------- */

/* The token of these bytes, NONE where there is none. */
static uint32_t find_token(const clb_tokenizer *t, const uint8_t *bytes, size_t size)
{
    uint32_t h = 0x811C9DC5u;
    for (size_t n = 0; n < size; ++n) {
        h = (h ^ bytes[n]) * 0x01000193u;
    }
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h ^= h >> 13;
    const uint32_t *slot = t->hash + ((uint64_t)h * t->head->hash_slots >> 32);
    for (uint32_t n = 0; n < t->head->hash_probes && slot[n] != CLB_NONE; ++n) {
        const uint32_t start = t->starts[slot[n]];
        if (t->starts[slot[n] + 1] - start == size && memcmp(t->bytes + start, bytes, size) == 0) {
            return slot[n];
        }
    }
    return CLB_NONE;
}

/* How two symbols merge, NULL where they do not. */
static const clb_tok_merge *find_merge(const clb_tokenizer *t, uint32_t left, uint32_t right)
{
    uint32_t h = left * 0x9E3779B1u + right * 0x85EBCA6Bu;
    h = (h ^ h >> 15) * 0x2C1B3C6Du;
    h ^= h >> 16;
    const clb_tok_merge *m = t->merges + ((uint64_t)h * t->head->merge_slots >> 32);
    for (uint32_t n = 0; n < t->head->merge_probes && m[n].left != CLB_NONE; ++n) {
        if (m[n].left == left && m[n].right == right) {
            return &m[n];
        }
    }
    return NULL;
}

/* --- merging -------------------------------------------------------------------------------------------------------- */

/* A piece's symbols, a list in an array, and a tree that finds the pair to merge first: the lowest rank, then the first.
 * tree[n] is the better of its children 2n and 2n + 1; from `size` on children are the pairs themselves. */
typedef struct {
    uint32_t size, *ids, *next, *previous, *ranks, *tree;
} symbols;

static uint32_t better(const symbols *s, uint32_t a, uint32_t b)
{
    return s->ranks[a] < s->ranks[b] || (s->ranks[a] == s->ranks[b] && a < b) ? a : b;
}

static uint32_t winner(const symbols *s, uint32_t node)
{
    return node >= s->size ? node - s->size : s->tree[node];
}

/* The pair at `n` has a new rank. */
static void update(symbols *s, uint32_t n)
{
    for (uint32_t node = (n + s->size) / 2; node > 0; node /= 2) {
        const uint32_t best = better(s, winner(s, 2 * node), winner(s, 2 * node + 1));
        if (best == s->tree[node] && best != n) {
            break;
        }
        s->tree[node] = best;
    }
}

static void rank_pair(const clb_tokenizer *t, symbols *s, uint32_t n)
{
    const clb_tok_merge *m = s->next[n] == s->size ? NULL : find_merge(t, s->ids[n], s->ids[s->next[n]]);
    s->ranks[n] = m == NULL ? CLB_NONE : m->rank;
}

/* The symbols that text begins as. */
static uint32_t first_symbols(const clb_tokenizer *t, const uint8_t *text, size_t size, uint32_t *ids)
{
    uint32_t count = 0;
    for (size_t at = 0; at < size;) {
        const size_t length = t->head->flags & BYTE_LEVEL ? 1 : utf8_step(text + at, text + size);
        const uint32_t whole = t->head->flags & BYTE_LEVEL ? CLB_NONE : find_token(t, text + at, length);
        if (whole != CLB_NONE) {
            ids[count++] = whole;
        } else {
            for (size_t n = 0; n < length; ++n) {
                ids[count++] = t->byte_ids[text[at + n]];
            }
        }
        at += length;
    }
    return count;
}

static void merge_piece(encoder *e, const uint8_t *text, size_t size)
{
    const clb_tokenizer *t = e->t;
    uint8_t *const before = e->free;
    symbols s;
    if (size > UINT32_MAX / 4) {
        e->error = COLIBRI_ERR_SCRATCH;
        return;
    }
    s.ids = take(e, size * 4);
    if (s.ids == NULL) {
        return;
    }
    s.size = first_symbols(t, text, size, s.ids);
    s.next = take(e, (size_t)s.size * 16);
    if (s.next != NULL) {
        s.previous = s.next + s.size;
        s.ranks = s.previous + s.size;
        s.tree = s.ranks + s.size;
        for (uint32_t n = 0; n < s.size; ++n) {
            s.next[n] = n + 1;
            s.previous[n] = n - 1;
            rank_pair(t, &s, n);
        }
        s.tree[0] = 0;
        for (uint32_t node = s.size; node-- > 1;) {
            s.tree[node] = better(&s, winner(&s, 2 * node), winner(&s, 2 * node + 1));
        }
        for (;;) {
            const uint32_t n = s.size > 1 ? s.tree[1] : 0;
            if (s.ranks[n] == CLB_NONE) {
                break;
            }
            const uint32_t gone = s.next[n], after = s.next[gone];
            s.ids[n] = find_merge(t, s.ids[n], s.ids[gone])->result;
            s.next[n] = after;
            if (after < s.size) {
                s.previous[after] = n;
            }
            s.ranks[gone] = CLB_NONE;
            update(&s, gone);
            rank_pair(t, &s, n);
            update(&s, n);
            if (n > 0) {
                rank_pair(t, &s, s.previous[n]);
                update(&s, s.previous[n]);
            }
        }
        for (uint32_t n = 0; n < s.size; n = s.next[n]) {
            emit(e, s.ids[n]);
        }
    }
    give_back(e, before);
}

static void encode_piece(encoder *e, const uint8_t *text, size_t size)
{
    if (size <= e->t->head->longest) {
        const uint32_t id = find_token(e->t, text, size);
        if (id != CLB_NONE && e->t->kinds[id] & TOKEN_WHOLE) {
            emit(e, id);
            return;
        }
    }
    merge_piece(e, text, size);
}

/* --- from text to pieces -------------------------------------------------------------------------------------------- */

/* Cut a text without added tokens, stage after stage: a piece of one is cut by the next. */
static void encode_text(encoder *e, const uint8_t *text, size_t size)
{
    const uint32_t stages = e->t->head->stages;
    size_t ends[MOST_STAGES + 1] = {size};
    uint32_t level = 0;
    for (size_t at = 0; e->error == COLIBRI_OK;) {
        while (level > 0 && at == ends[level]) {
            --level;
        }
        if (at == ends[level]) {
            break;
        }
        if (level == stages) {
            encode_piece(e, text + at, ends[level] - at);
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

/* A copy of `text` with a space before it. */
static uint8_t *with_space(encoder *e, const uint8_t *text, size_t size)
{
    uint8_t *copy = take(e, size + 1);
    if (copy != NULL) {
        copy[0] = ' ';
        memcpy(copy + 1, text, size);
    }
    return copy;
}

static int is_metaspace(const uint8_t *text, size_t size)
{
    return size >= 3 && memcmp(text, "\xE2\x96\x81", 3) == 0;
}

/* Spaces for U+2581, in place; the new size. */
static size_t plain_spaces(uint8_t *text, size_t size)
{
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

static int has_metaspace(const uint8_t *text, size_t size)
{
    for (size_t at = 0; at < size; ++at) {
        if (is_metaspace(text + at, size - at)) {
            return 1;
        }
    }
    return 0;
}

/* Text between raw added tokens: normalise it, take out the other added tokens, encode what is between. */
static void encode_section(encoder *e, const uint8_t *text, size_t size, int at_start)
{
    const uint32_t flags = e->t->head->flags;
    const int nfc = flags & NFC && clb_nfc_needed(e->t, text, size);
    const int marks = flags & METASPACE && has_metaspace(text, size);
    const int space = (flags & (PREFIX_ALWAYS | PREFIX_MISSING)) == PREFIX_ALWAYS;
    if (nfc || marks || space) {
        const size_t start = space ? 1 : 0;
        uint8_t *copy;
        if (nfc) {
            copy = e->free;
            if (e->left < start || !clb_nfc(e->t, text, size, copy + start, e->left - start, &size)) {
                e->error = COLIBRI_ERR_SCRATCH;
                return;
            }
            e->free += start + size;
            e->left -= start + size;
        } else {
            copy = take(e, start + size);
            if (copy == NULL) {
                return;
            }
            memcpy(copy + start, text, size);
        }
        copy[0] = space ? ' ' : copy[0];
        size = marks ? plain_spaces(copy, start + size) : start + size;
        text = copy;
    }
    clb_finder f = {e->t, text, size, 0, 0, 1, e->options & COLIBRI_TOKENIZER_SPECIAL, CLB_NONE};
    size_t begin, end;
    uint32_t token;
    while (e->error == COLIBRI_OK && clb_next_part(&f, &e->budget, &begin, &end, &token)) {
        if (token != CLB_NONE) {
            emit(e, token);
            continue;
        }
        uint8_t *const before = e->free;
        const uint8_t *part = text + begin;
        size_t bytes = end - begin;
        if (flags & PREFIX_MISSING && *part != ' ' && (!(flags & PREFIX_START) || (at_start && begin == 0))) {
            part = with_space(e, part, bytes++);
        }
        if (part != NULL) {
            encode_text(e, part, bytes);
        }
        give_back(e, before);
    }
}

/* The text with U+FFFD for what is not UTF-8: itself where all is. NULL where scratch memory does not suffice. */
static const uint8_t *repaired(encoder *e, const uint8_t *text, size_t *size)
{
    size_t at = 0, bad;
    while (at < *size) {
        uint64_t eight;
        if (*size - at >= sizeof eight) {
            memcpy(&eight, text + at, sizeof eight);
            if ((eight & 0x8080808080808080u) == 0) {
                at += sizeof eight;
                continue;
            }
        }
        const size_t length = clb_utf8_check(text + at, *size - at, &bad);
        if (length == 0) {
            break;
        }
        at += length;
    }
    if (at == *size) {
        return text;
    }
    uint8_t *copy = e->free;
    size_t end = at;
    if (e->left < at) {
        e->error = COLIBRI_ERR_SCRATCH;
        return NULL;
    }
    memcpy(copy, text, at);
    while (at < *size) {
        const size_t length = clb_utf8_check(text + at, *size - at, &bad);
        const size_t written = length == 0 ? 3 : length;
        if (e->left - end < written) {
            e->error = COLIBRI_ERR_SCRATCH;
            return NULL;
        }
        memcpy(copy + end, length == 0 ? (const uint8_t *)"\xEF\xBF\xBD" : text + at, written);
        at += length == 0 ? bad : length;
        end += written;
    }
    *size = end;
    e->free += end;
    e->left -= end;
    return copy;
}

size_t colibri_tokenizer_scratch(const colibri_tokenizer_t *tokenizer, size_t bytes)
{
    (void)tokenizer;
    /* Repaired, normalised, with a space: three copies of at most three times the size. And 20 bytes for each symbol. */
    const size_t most = (SIZE_MAX - 256) / 72;
    return bytes > most ? SIZE_MAX : bytes * 69 + 128;
}

int colibri_tokenizer_encode(const colibri_tokenizer_t *tokenizer, const char *text, size_t bytes, int options,
                             int32_t *ids, size_t room, size_t *count, void *scratch, size_t scratch_bytes)
{
    const clb_tokenizer *t = (const clb_tokenizer *)(const void *)tokenizer;
    if (t == NULL || t->head == NULL || (text == NULL && bytes > 0) || (ids == NULL && room > 0) || count == NULL ||
        (scratch == NULL && scratch_bytes > 0)) {
        return COLIBRI_ERR_NULL;
    }
    encoder e = {.t = t, .options = options, .ids = ids, .room = room, .free = scratch, .left = scratch_bytes};
    e.budget.left = ((uint64_t)bytes + 64) * 512;
    *count = 0;
    if (options & COLIBRI_TOKENIZER_TEMPLATE) {
        for (uint32_t n = 0; n < t->head->before; ++n) {
            emit(&e, t->before[n]);
        }
    }
    const uint8_t *whole = bytes == 0 ? (const uint8_t *)"" : repaired(&e, (const uint8_t *)text, &bytes);
    if (whole != NULL) {
        clb_finder f = {t, whole, bytes, 0, 0, 0, options & COLIBRI_TOKENIZER_SPECIAL, CLB_NONE};
        size_t begin, end;
        uint32_t token;
        while (e.error == COLIBRI_OK && clb_next_part(&f, &e.budget, &begin, &end, &token)) {
            if (token != CLB_NONE) {
                emit(&e, token);
                continue;
            }
            uint8_t *const before = e.free;
            encode_section(&e, whole + begin, end - begin, begin == 0);
            give_back(&e, before);
        }
    }
    if (options & COLIBRI_TOKENIZER_TEMPLATE) {
        for (uint32_t n = 0; n < t->head->after; ++n) {
            emit(&e, t->after[n]);
        }
    }
    if (e.error == COLIBRI_OK && e.budget.left == 0) {
        return COLIBRI_ERR_TOO_SLOW;
    }
    *count = e.error == COLIBRI_OK ? e.count : 0;
    return e.error != COLIBRI_OK ? e.error : e.count > room ? COLIBRI_ERR_OUTPUT : COLIBRI_OK;
}

/* --- ids to bytes --------------------------------------------------------------------------------------------------- */

int colibri_tokenizer_decode(const colibri_tokenizer_t *tokenizer, const int32_t *ids, size_t count, int options,
                             char *out, size_t room, size_t *bytes)
{
    const clb_tokenizer *t = (const clb_tokenizer *)(const void *)tokenizer;
    if (t == NULL || t->head == NULL || (ids == NULL && count > 0) || (out == NULL && room > 0) || bytes == NULL) {
        return COLIBRI_ERR_NULL;
    }
    const uint32_t flags = options & COLIBRI_TOKENIZER_CONTINUE ? 0 : t->head->flags;
    int first_token = 1;
    *bytes = 0;
    for (size_t n = 0; n < count; ++n) {
        if (ids[n] < 0) {
            return COLIBRI_ERR_TOKEN;
        }
        if ((uint32_t)ids[n] >= t->head->vocab || !(t->kinds[ids[n]] & TOKEN_PRESENT)) {
            continue; /* models have more logits than there are tokens */
        }
        if (options & COLIBRI_TOKENIZER_SKIP_SPECIAL && t->kinds[ids[n]] & TOKEN_SPECIAL) {
            continue;
        }
        int drop_one = flags & STRIP_ONE && *bytes == 0 && first_token;
        for (uint32_t at = t->starts[ids[n]]; at < t->starts[ids[n] + 1]; ++at) {
            const int space = t->bytes[at] == ' ';
            const int dropped = space && (drop_one || (flags & STRIP_FIRST && first_token));
            drop_one = 0;
            if (dropped) {
                continue;
            }
            if (*bytes < room) {
                out[*bytes] = (char)t->bytes[at];
            }
            ++*bytes;
        }
        first_token = 0;
    }
    return *bytes > room ? COLIBRI_ERR_OUTPUT : COLIBRI_OK;
}

int32_t colibri_tokenizer_vocabulary(const colibri_tokenizer_t *tokenizer)
{
    const clb_tokenizer *t = (const clb_tokenizer *)(const void *)tokenizer;
    return t == NULL || t->head == NULL ? 0 : (int32_t)t->head->vocab;
}

int32_t colibri_tokenizer_bos(const colibri_tokenizer_t *tokenizer)
{
    const clb_tokenizer *t = (const clb_tokenizer *)(const void *)tokenizer;
    return t == NULL || t->head == NULL || t->head->bos == CLB_NONE ? -1 : (int32_t)t->head->bos;
}

int colibri_tokenizer_ends(const colibri_tokenizer_t *tokenizer, int32_t id)
{
    const clb_tokenizer *t = (const clb_tokenizer *)(const void *)tokenizer;
    for (uint32_t n = 0; t != NULL && t->head != NULL && n < t->head->eos; ++n) {
        if (id >= 0 && t->eos[n] == (uint32_t)id) {
            return 1;
        }
    }
    return 0;
}

int colibri_tokenizer_special(const colibri_tokenizer_t *tokenizer, int32_t id)
{
    const clb_tokenizer *t = (const clb_tokenizer *)(const void *)tokenizer;
    if (t == NULL || t->head == NULL || id < 0) {
        return 0;
    }
    if ((uint32_t)id >= t->head->vocab) {
        return 1;
    }
    return (t->kinds[id] & (TOKEN_PRESENT | TOKEN_SPECIAL)) != TOKEN_PRESENT;
}
