/* Merges a piece's symbols to ids. Knows the vocabulary, and nothing of where the piece is from. */
#include "tokenizer_merge.h"

void *clb_take(clb_encoder *e, size_t bytes) {
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

/* --- the vocabulary --- */

static int has_bytes(const clb_tokenizer *t, uint32_t id, const uint8_t *bytes, size_t size) {
    const uint32_t start = t->starts[id];
    return t->starts[id + 1] - start == size && memcmp(t->bytes + start, bytes, size) == 0;
}

/* The token of these bytes, NONE where there is none. */
static uint32_t find_token(const clb_tokenizer *t, const uint8_t *bytes, size_t size) {
    uint32_t h = HASH_BASIS;
    for (size_t n = 0; n < size; ++n) {
        h = (h ^ bytes[n]) * HASH_PRIME;
    }
    h = (h ^ h >> 16) * HASH_MIX;
    h ^= h >> 13;
    const uint32_t *slot = t->hash + ((uint64_t)h * t->head->hash_slots >> 32);
    for (uint32_t n = 0; n < t->head->hash_probes && slot[n] != CLB_NONE; ++n) {
        if (has_bytes(t, slot[n], bytes, size)) return slot[n];
    }
    return CLB_NONE;
}

/* How two symbols merge, NULL where they do not. */
static const clb_tok_merge *find_merge(const clb_tokenizer *t, uint32_t left, uint32_t right) {
    uint32_t h = left * MERGE_LEFT + right * MERGE_RIGHT;
    h = (h ^ h >> 15) * MERGE_MIX;
    h ^= h >> 16;
    const clb_tok_merge *m = t->merges + ((uint64_t)h * t->head->merge_slots >> 32);
    for (uint32_t n = 0; n < t->head->merge_probes && m[n].left != CLB_NONE; ++n) {
        if (m[n].left == left && m[n].right == right) return &m[n];
    }
    return NULL;
}

/* --- merging --- */

/* A piece's symbols, a list in an array, and a tree that finds the pair to merge first: the lowest
 * rank, then the first. tree[n] is the better of its children 2n and 2n + 1; from `size` on
 * children are the pairs themselves. */
typedef struct {
    uint32_t size;
    uint32_t *ids;
    uint32_t *next; /* `size`: none */
    uint32_t *previous;
    uint32_t *ranks; /* of the pair that begins at a symbol, NONE: it does not merge */
    uint32_t *tree;
} symbols;

static uint32_t better(const symbols *s, uint32_t a, uint32_t b) {
    const uint32_t rank_a = s->ranks[a];
    const uint32_t rank_b = s->ranks[b];
    if (rank_a == rank_b) return a < b ? a : b;
    return rank_a < rank_b ? a : b;
}

static uint32_t winner(const symbols *s, uint32_t node) {
    return node >= s->size ? node - s->size : s->tree[node];
}

static uint32_t best_below(const symbols *s, uint32_t node) {
    return better(s, winner(s, 2 * node), winner(s, 2 * node + 1));
}

/* The pair at `n` has a new rank. */
static void update(symbols *s, uint32_t n) {
    for (uint32_t node = (n + s->size) / 2; node > 0; node /= 2) {
        const uint32_t best = best_below(s, node);
        if (best == s->tree[node] && best != n) break;
        s->tree[node] = best;
    }
}

static void rank_pair(const clb_tokenizer *t, symbols *s, uint32_t n) {
    const uint32_t next = s->next[n];
    const clb_tok_merge *m = next == s->size ? NULL : find_merge(t, s->ids[n], s->ids[next]);
    s->ranks[n] = m == NULL ? CLB_NONE : m->rank;
}

/* The symbols of text by characters, or by bytes where no token is a character. */
static uint32_t character_symbols(const clb_tokenizer *t, const uint8_t *text, size_t size,
                                  uint32_t *ids) {
    uint32_t count = 0;
    for (size_t at = 0; at < size;) {
        const size_t length = utf8_step(text + at, text + size);
        const uint32_t whole = find_token(t, text + at, length);
        if (whole != CLB_NONE) {
            ids[count++] = whole;
        }
        for (size_t n = 0; whole == CLB_NONE && n < length; ++n) {
            ids[count++] = t->byte_ids[text[at + n]];
        }
        at += length;
    }
    return count;
}

/* The symbols that text begins as. */
static uint32_t first_symbols(const clb_tokenizer *t, const uint8_t *text, size_t size,
                              uint32_t *ids) {
    if (!(t->head->flags & FLAG_BYTE_LEVEL)) return character_symbols(t, text, size, ids);
    for (size_t n = 0; n < size; ++n) {
        ids[n] = t->byte_ids[text[n]];
    }
    return (uint32_t)size;
}

/* Memory for the symbols of a piece, and their ids; 0 where there is not enough. */
static int begin_symbols(clb_encoder *e, symbols *s, const uint8_t *text, size_t size) {
    if (size > UINT32_MAX / 4) {
        e->error = COLIBRI_ERR_SCRATCH;
        return 0;
    }
    s->ids = clb_take(e, size * sizeof *s->ids);
    if (s->ids == NULL) return 0;
    s->size = first_symbols(e->t, text, size, s->ids);
    s->next = clb_take(e, (size_t)s->size * 4 * sizeof *s->next);
    if (s->next == NULL) return 0;
    s->previous = s->next + s->size;
    s->ranks = s->previous + s->size;
    s->tree = s->ranks + s->size;
    return 1;
}

static void rank_all(const clb_tokenizer *t, symbols *s) {
    for (uint32_t n = 0; n < s->size; ++n) {
        s->next[n] = n + 1;
        s->previous[n] = n - 1;
        rank_pair(t, s, n);
    }
    s->tree[0] = 0;
    for (uint32_t node = s->size; node-- > 1;) {
        s->tree[node] = best_below(s, node);
    }
}

/* The pair at `n` becomes one symbol. */
static void merge_pair(const clb_tokenizer *t, symbols *s, uint32_t n) {
    const uint32_t gone = s->next[n];
    const uint32_t after = s->next[gone];
    s->ids[n] = find_merge(t, s->ids[n], s->ids[gone])->result;
    s->next[n] = after;
    if (after < s->size) {
        s->previous[after] = n;
    }
    s->ranks[gone] = CLB_NONE;
    update(s, gone);
    rank_pair(t, s, n);
    update(s, n);
    if (n > 0) {
        rank_pair(t, s, s->previous[n]);
        update(s, s->previous[n]);
    }
}

static void merge_piece(clb_encoder *e, const uint8_t *text, size_t size) {
    uint8_t *const before = e->free;
    symbols s;
    if (begin_symbols(e, &s, text, size)) {
        const uint32_t root = s.size > 1 ? 1 : 0; /* tree[0] is the first pair */
        rank_all(e->t, &s);
        while (s.ranks[s.tree[root]] != CLB_NONE) {
            merge_pair(e->t, &s, s.tree[root]);
        }
        for (uint32_t n = 0; n < s.size; n = s.next[n]) {
            emit(e, s.ids[n]);
        }
    }
    give_back(e, before);
}

void clb_encode_piece(clb_encoder *e, const uint8_t *text, size_t size) {
    if (size <= e->t->head->longest) {
        const uint32_t id = find_token(e->t, text, size);
        if (id != CLB_NONE && e->t->kinds[id] & TOKEN_WHOLE) {
            emit(e, id);
            return;
        }
    }
    merge_piece(e, text, size);
}
