/* Cuts text: first at added tokens, then into the pieces of each stage's pattern. */
#include "tokenizer.h"

/* Unicode's White_Space, which is closed. */
static int is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* Where the character that ends at `at` begins. */
static size_t before(const uint8_t *text, size_t at)
{
    while (at > 0 && within_character(text[--at])) {
    }
    return at;
}

static int is_space_at(const clb_finder *f, size_t at)
{
    return is_space(utf8_read(f->text + at, f->text + f->size));
}

static int is_word_at(const clb_finder *f, size_t at)
{
    return f->t->words[class_of(f->t, f->text + at, f->text + f->size)] != 0;
}

/* Whether text[start..stop) are whole characters, and not part of a word where the token asks for
 * whole words. */
static int stands_alone(const clb_finder *f, const clb_tok_node *node, size_t start, size_t stop)
{
    const int last = stop == f->size;
    if (within_character(f->text[start]) || (!last && within_character(f->text[stop]))) {
        return 0;
    }
    if (!(node->flags & ADDED_SINGLE_WORD)) {
        return 1;
    }
    return !(start > 0 && is_word_at(f, before(f->text, start))) && (last || !is_word_at(f, stop));
}

/* The longest added token at `at`: its node, or NULL; *length is its size in bytes. */
static const clb_tok_node *longest(const clb_finder *f, size_t at, size_t *length, size_t *steps)
{
    const clb_tok_header *h = f->t->head;
    const clb_tok_node *found = NULL;
    uint32_t first = f->normalised ? h->raw_nodes : 0, count = f->normalised ? h->normal_nodes : h->raw_nodes;
    size_t n = 0;
    while (at + n < f->size && n < h->added_bytes) {
        const uint8_t byte = f->text[at + n];
        while (count > 0) { /* children are sorted */
            const uint32_t half = count / 2, middle = first + half;
            ++*steps;
            if (f->t->nodes[middle].byte == byte) {
                first = middle;
                break;
            }
            first = f->t->nodes[middle].byte < byte ? middle + 1 : first;
            count = f->t->nodes[middle].byte < byte ? count - half - 1 : half;
        }
        if (count == 0) {
            break;
        }
        const clb_tok_node *node = &f->t->nodes[first];
        ++n;
        if (node->token != CLB_NONE) {
            found = node;
            *length = n;
        }
        first = node->first;
        count = node->count;
    }
    return found;
}

int clb_next_part(clb_finder *f, clb_budget *budget, size_t *begin, size_t *end, uint32_t *token)
{
    const clb_tokenizer *t = f->t;
    const uint8_t *begins = t->begins[f->normalised];
    *token = f->token;
    f->token = CLB_NONE;
    if (*token != CLB_NONE) {
        return 1;
    }
    while (f->at < f->size) {
        const uint8_t byte = f->text[f->at];
        if (!(begins[byte >> 3] >> (byte & 7) & 1)) {
            ++f->at;
            continue;
        }
        size_t length = 0, steps = 1, start = f->at;
        const clb_tok_node *node = longest(f, start, &length, &steps);
        size_t stop = start + length;
        if (!spend(budget, steps)) {
            return 0;
        }
        f->at = node == NULL ? start + 1 : stop;
        if (node == NULL || (node->flags & ADDED_SPECIAL && !f->special)) {
            continue;
        }
        if (!stands_alone(f, node, start, stop)) {
            continue;
        }
        if (node->flags & ADDED_LSTRIP) {
            while (start > f->done && is_space_at(f, before(f->text, start))) {
                start = before(f->text, start);
            }
        }
        if (node->flags & ADDED_RSTRIP) {
            const size_t from = stop;
            while (stop < f->size && is_space_at(f, stop)) {
                stop += utf8_step(f->text + stop, f->text + f->size);
            }
            if (!spend(budget, stop - from)) {
                return 0;
            }
        }
        *begin = f->done;
        *end = start;
        f->done = stop;
        if (*begin < *end) {
            f->token = node->token;
            *token = CLB_NONE;
        } else {
            *token = node->token;
        }
        return 1;
    }
    *begin = f->done;
    *end = f->size;
    f->done = f->size;
    return *begin < *end;
}

/* The end of the match at `begin`, or `begin`: none. *resume is where a search in vain may go on: a position is skipped
 * where a search begun there would be in the state this one was in. */
static size_t match(const clb_tokenizer *t, uint32_t stage, const uint8_t *text, size_t begin, size_t end,
                    clb_budget *budget, size_t *resume)
{
    const uint16_t *table = t->tables[stage];
    const uint32_t columns = t->head->classes + 1;
    uint32_t state = 1;
    size_t at = begin, last = begin;
    int skipping = 1;
    *resume = begin;
    while (at < end) {
        const uint32_t class = class_of(t, text + at, text + end);
        const uint32_t entry = table[state * columns + class];
        if (entry & MATCHED) {
            last = at;
        }
        state = entry & ~MATCHED;
        if (state == 0) {
            break;
        }
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
    if (!spend(budget, at - begin + 1)) {
        last = end;
    }
    return last;
}

size_t clb_next_piece(const clb_tokenizer *t, uint32_t stage, const uint8_t *text, size_t begin, size_t end,
                      clb_budget *budget, int *keep)
{
    size_t resume, last = match(t, stage, text, begin, end, budget, &resume);
    if (last > begin) {
        *keep = t->stages[stage].keep != DROP_MATCHES;
        return last;
    }
    *keep = t->stages[stage].keep != DROP_GAPS;
    while (resume < end) {
        const size_t at = resume;
        if (match(t, stage, text, at, end, budget, &resume) > at) {
            return at;
        }
    }
    return end;
}
