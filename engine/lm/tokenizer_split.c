/* Cuts text: first at added tokens, then into the pieces of each stage's pattern. */
#include "tokenizer_split.h"

/* Whether `steps` were left to spend. */
static int spend(clb_budget *b, uint64_t steps) {
    const int enough = b->left >= steps;
    b->left -= enough ? steps : b->left;
    return enough;
}

/* --- added tokens --- */

/* Unicode's White_Space, which is closed. */
static int is_space(uint32_t c) {
    static const uint16_t ranges[][2] = {
        {0x9, 0xD},       {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
        {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000},
    };
    for (size_t n = 0; n < sizeof ranges / sizeof ranges[0]; ++n) {
        if (c >= ranges[n][0] && c <= ranges[n][1]) return 1;
    }
    return 0;
}

/* Where the character that ends at `at` begins. */
static size_t before(const uint8_t *text, size_t at) {
    while (at > 0 && within_character(text[--at])) {
    }
    return at;
}

static int is_space_at(const clb_finder *f, size_t at) {
    return is_space(utf8_read(f->text + at, f->text + f->size));
}

static int is_word_at(const clb_finder *f, size_t at) {
    return f->t->words[class_of(f->t, f->text + at, f->text + f->size)] != 0;
}

/* Whether text[start..stop) are whole characters, and not part of a word where the token asks for
 * whole words. */
static int stands_alone(const clb_finder *f, const clb_tok_node *node, size_t start, size_t stop) {
    const int last = stop == f->size;
    if (within_character(f->text[start]) || (!last && within_character(f->text[stop]))) return 0;
    if (!(node->flags & ADDED_SINGLE_WORD)) return 1;
    if (start > 0 && is_word_at(f, before(f->text, start))) return 0;
    return last || !is_word_at(f, stop);
}

/* The node of this byte among `count` sorted ones from `first` on, or NULL. */
static const clb_tok_node *child(const clb_tokenizer *t, uint32_t first, uint32_t count,
                                 uint8_t byte, size_t *steps) {
    while (count > 0) {
        const uint32_t half = count / 2;
        const clb_tok_node *middle = &t->nodes[first + half];
        ++*steps;
        if (middle->byte == byte) return middle;
        first += middle->byte < byte ? half + 1 : 0;
        count = middle->byte < byte ? count - half - 1 : half;
    }
    return NULL;
}

/* The longest added token at `at`: its node, or NULL; *length is its size in bytes. */
static const clb_tok_node *longest(const clb_finder *f, size_t at, size_t *length, size_t *steps) {
    const clb_tok_header *h = f->t->head;
    const size_t left = f->size - at;
    const size_t most = left < h->added_bytes ? left : h->added_bytes;
    const clb_tok_node *found = NULL;
    uint32_t first = f->normalised ? h->raw_nodes : 0;
    uint32_t count = f->normalised ? h->normal_nodes : h->raw_nodes;
    for (size_t n = 0; n < most; ++n) {
        const clb_tok_node *node = child(f->t, first, count, f->text[at + n], steps);
        if (node == NULL) break;
        if (node->token != CLB_NONE) {
            found = node;
            *length = n + 1;
        }
        first = node->first;
        count = node->count;
    }
    return found;
}

/* To the next byte with which an added token begins, or the end. */
static void skip_plain_text(clb_finder *f) {
    const uint8_t *begins = f->t->begins[f->normalised];
    size_t at = f->at;
    while (at < f->size && !(begins[f->text[at] >> 3] >> (f->text[at] & 7) & 1)) {
        ++at;
    }
    f->at = at;
}

typedef struct {
    const clb_tok_node *node; /* NULL: none */
    size_t start, stop;       /* the spaces it takes in included */
} added_token;

/* The spaces that the token takes in; 0 where the budget is spent. */
static int take_spaces(const clb_finder *f, clb_budget *budget, added_token *token) {
    const size_t stop = token->stop;
    if (token->node->flags & ADDED_LSTRIP) {
        while (token->start > f->done && is_space_at(f, before(f->text, token->start))) {
            token->start = before(f->text, token->start);
        }
    }
    if (!(token->node->flags & ADDED_RSTRIP)) return 1;
    while (token->stop < f->size && is_space_at(f, token->stop)) {
        token->stop += utf8_step(f->text + token->stop, f->text + f->size);
    }
    return spend(budget, token->stop - stop);
}

/* The added token at f->at, behind which the search goes on; 0 where the budget is spent. */
static int find_here(clb_finder *f, clb_budget *budget, added_token *token) {
    const size_t start = f->at;
    size_t length = 0;
    size_t steps = 1;
    const clb_tok_node *node = longest(f, start, &length, &steps);
    *token = (added_token){NULL, start, start + length};
    if (!spend(budget, steps)) return 0;
    f->at = node == NULL ? start + 1 : token->stop;
    if (node == NULL || (node->flags & ADDED_SPECIAL && !f->special)) return 1;
    if (!stands_alone(f, node, start, token->stop)) return 1;
    token->node = node;
    return take_spaces(f, budget, token);
}

/* The next added token; 0 where the budget is spent. */
static int find_next(clb_finder *f, clb_budget *budget, added_token *token) {
    *token = (added_token){NULL, f->size, f->size};
    for (skip_plain_text(f); f->at < f->size; skip_plain_text(f)) {
        if (!find_here(f, budget, token)) return 0;
        if (token->node != NULL) return 1;
    }
    return 1;
}

int clb_next_part(clb_finder *f, clb_budget *budget, size_t *begin, size_t *end, uint32_t *token) {
    added_token found;
    *token = f->token;
    f->token = CLB_NONE;
    if (*token != CLB_NONE) return 1;
    if (!find_next(f, budget, &found)) return 0;
    const int last = found.node == NULL;
    *begin = f->done;
    *end = last ? f->size : found.start;
    f->done = last ? f->size : found.stop;
    if (*begin < *end) {
        f->token = last ? CLB_NONE : found.node->token;
        return 1;
    }
    *token = last ? CLB_NONE : found.node->token;
    return !last;
}

/* --- patterns --- */

/* The end of the match at `begin`, or `begin`: none. *resume is where a search in vain may go on: a
 * position is skipped where a search begun there would be in the state this one was in. */
static size_t match(const clb_tokenizer *t, uint32_t stage, const uint8_t *text, size_t begin,
                    size_t end, clb_budget *budget, size_t *resume) {
    const uint16_t *table = t->tables[stage];
    const uint32_t columns = t->head->classes + 1;
    uint32_t state = 1;
    size_t at = begin;
    size_t last = begin;
    int skipping = 1;
    *resume = begin;
    while (at < end) {
        const uint32_t class = class_of(t, text + at, text + end);
        const uint32_t entry = table[state * columns + class];
        if (entry & MATCHED) {
            last = at;
        }
        state = entry & ~MATCHED;
        if (state == 0) break;
        at += utf8_step(text + at, text + end);
        skipping = skipping && (*resume == begin || state == (table[columns + class] & ~MATCHED));
        if (skipping) {
            *resume = at;
        }
    }
    if (at >= end && table[state * columns + columns - 1] & MATCHED) {
        last = end;
    }
    if (*resume == begin) {
        *resume = begin + utf8_step(text + begin, text + end);
    }
    return spend(budget, at - begin + 1) ? last : end;
}

size_t clb_next_piece(const clb_tokenizer *t, uint32_t stage, const uint8_t *text, size_t begin,
                      size_t end, clb_budget *budget, int *keep) {
    size_t resume;
    const size_t last = match(t, stage, text, begin, end, budget, &resume);
    if (last > begin) {
        *keep = t->stages[stage].keep != KEEP_GAPS;
        return last;
    }
    *keep = t->stages[stage].keep != KEEP_MATCHES;
    while (resume < end) {
        const size_t at = resume;
        if (match(t, stage, text, at, end, budget, &resume) > at) return at;
    }
    return end;
}
