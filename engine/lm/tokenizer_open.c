/* Opens tokenizer.bin: proves that no number in it leads outside it, so that nothing after needs to ask. */
#include "tokenizer.h"

typedef struct {
    const uint8_t *base;
    uint64_t at, size; /* at may pass size, and then nothing is read */
} reader;

/* The next section, at a multiple of 8 bytes. */
static const void *section(reader *r, uint64_t count, uint64_t bytes)
{
    const uint8_t *found = r->base + (r->at < r->size ? r->at : r->size);
    r->at += (count * bytes + 7) / 8 * 8;
    return found;
}

/* CRC-32 as zlib computes it. A copy of the engine's, so that this library needs no other. */
static uint32_t crc32_of(const uint8_t *p, size_t bytes)
{
    static const uint32_t table[16] = {0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC, 0x76DC4190, 0x6B6B51F4,
                                       0x4DB26158, 0x5005713C, 0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C,
                                       0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C};
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t n = 0; n < bytes; ++n) {
        crc ^= p[n];
        crc = crc >> 4 ^ table[crc & 15u];
        crc = crc >> 4 ^ table[crc & 15u];
    }
    return ~crc;
}

/* Whether all `count` numbers are less than `limit`, or NONE where that is allowed. */
static int below(const uint32_t *numbers, uint64_t count, uint32_t limit, int or_none)
{
    for (uint64_t n = 0; n < count; ++n) {
        if (numbers[n] >= limit && !(or_none && numbers[n] == CLB_NONE)) {
            return 0;
        }
    }
    return 1;
}

static int bytes_below(const uint8_t *numbers, uint64_t count, uint32_t limit)
{
    for (uint64_t n = 0; n < count; ++n) {
        if (numbers[n] >= limit) {
            return 0;
        }
    }
    return 1;
}

static int is_character(uint32_t c)
{
    return c < 0xD800 || (c > 0xDFFF && c <= 0x10FFFF);
}

static int header_fits(const clb_tok_header *h)
{
    const uint32_t probes = 255;
    return h->flags < 256 && h->vocab >= 1 && h->vocab < 1u << 24 && h->longest <= h->text_bytes && h->hash_slots >= 1 &&
           h->hash_slots < 1u << 26 && h->hash_probes <= probes && h->merge_slots >= 1 && h->merge_slots < 1u << 26 &&
           h->merge_probes <= probes && h->before <= 64 && h->after <= 64 && h->eos <= 4096 &&
           (h->bos < h->vocab || h->bos == CLB_NONE) && h->nodes < 1u << 24 && h->raw_nodes <= 256 &&
           h->normal_nodes <= 256 && h->added_bytes <= 255 && h->classes >= 1 && h->classes <= 255 && h->blocks >= 1 &&
           h->blocks <= 256 && h->stages <= MOST_STAGES && h->entries < 1u << 24 && h->nfc_blocks <= 256 &&
           h->nfc_records <= 65536 && h->nfc_points < 1u << 20 && h->nfc_pairs < 1u << 20 &&
           (!(h->flags & NFC) || (h->nfc_blocks >= 1 && h->nfc_records >= 1));
}

/* Whether every byte that valid UTF-8 can have begins as a token. */
static int bytes_begin(const clb_tokenizer *t)
{
    for (uint32_t byte = 0; byte < 256; ++byte) {
        const int never = byte == 0xC0 || byte == 0xC1 || byte > 0xF4;
        if (!below(&t->byte_ids[byte], 1, t->head->vocab, never)) {
            return 0;
        }
    }
    return 1;
}

static int tokens_fit(const clb_tokenizer *t)
{
    const clb_tok_header *h = t->head;
    const uint32_t all_kinds = TOKEN_SPECIAL | TOKEN_WHOLE | TOKEN_PRESENT;
    for (uint32_t n = 0; n < h->vocab; ++n) {
        if (t->starts[n] > t->starts[n + 1]) {
            return 0;
        }
    }
    if (t->starts[0] != 0 || t->starts[h->vocab] != h->text_bytes) {
        return 0;
    }
    for (uint32_t n = 0; n < h->merge_slots + h->merge_probes; ++n) {
        const clb_tok_merge *m = &t->merges[n];
        if (m->left != CLB_NONE && (m->result >= h->vocab || m->rank == CLB_NONE)) {
            return 0;
        }
    }
    if (!bytes_begin(t) || !bytes_below(t->kinds, h->vocab, all_kinds + 1)) {
        return 0;
    }
    return below(t->hash, h->hash_slots + h->hash_probes, h->vocab, 1) &&
           below(t->before, h->before + h->after + h->eos, h->vocab, 0);
}

/* --- the tries of added tokens --- */

/* Whether the bytes of `count` nodes from `first` on rise, so that a binary search finds them. */
static int bytes_rise(const clb_tokenizer *t, uint32_t first, uint32_t count)
{
    for (uint32_t n = 1; n < count; ++n) {
        if (t->nodes[first + n].byte <= t->nodes[first + n - 1].byte) {
            return 0;
        }
    }
    return 1;
}

/* Whether the nodes lie level by level, the children of each behind those of the one before: so
 * every node but the roots has one parent, before it, and every search ends. */
static int forest_fits(const clb_tokenizer *t, uint32_t roots)
{
    const uint32_t nodes = t->head->nodes;
    uint32_t claimed = roots;
    for (uint32_t n = 0; n < nodes; ++n) {
        const clb_tok_node *node = &t->nodes[n];
        if (n >= claimed || node->first != claimed || node->count > nodes - claimed) {
            return 0;
        }
        if (!bytes_rise(t, node->first, node->count)) {
            return 0;
        }
        claimed += node->count;
    }
    return claimed == nodes;
}

/* The parent of a node in a forest that fits, NONE of a root's. Parents of rising nodes rise: *from
 * is the one before. */
static uint32_t parent_of(const clb_tokenizer *t, uint32_t node, uint32_t roots, uint32_t *from)
{
    if (node == CLB_NONE || node < roots) {
        return CLB_NONE;
    }
    while (t->nodes[*from].first + t->nodes[*from].count <= node) {
        ++*from;
    }
    return *from;
}

enum { LONGEST = 4 }; /* bytes of a character */

/* Whether the way to a node, of which way[0] is the last, ends with a whole character. */
static int ends_whole(const clb_tokenizer *t, const uint32_t way[LONGEST])
{
    for (size_t n = 0; n < LONGEST && way[n] != CLB_NONE; ++n) {
        const uint8_t byte = t->nodes[way[n]].byte;
        if (!within_character(byte)) {
            return utf8_length(byte) == n + 1;
        }
    }
    return 0;
}

/* Text is valid UTF-8, so a token that begins with a character and ends with one cuts it between
 * two. */
static int added_tokens_fit(const clb_tokenizer *t)
{
    const clb_tok_header *h = t->head;
    const uint32_t roots = h->raw_nodes + h->normal_nodes;
    const uint32_t all_flags = ADDED_LSTRIP | ADDED_RSTRIP | ADDED_SINGLE_WORD | ADDED_SPECIAL;
    uint32_t from[LONGEST] = {0};
    if (!bytes_rise(t, 0, h->raw_nodes) || !bytes_rise(t, h->raw_nodes, h->normal_nodes)) {
        return 0;
    }
    if (!forest_fits(t, roots)) {
        return 0;
    }
    for (uint32_t n = 0; n < h->nodes; ++n) {
        const clb_tok_node *node = &t->nodes[n];
        uint32_t way[LONGEST] = {n};
        for (size_t up = 1; up < LONGEST; ++up) {
            way[up] = parent_of(t, way[up - 1], roots, &from[up]);
        }
        if (node->flags > all_flags || (n < roots && within_character(node->byte))) {
            return 0;
        }
        if (node->token != CLB_NONE && (node->token >= h->vocab || !ends_whole(t, way))) {
            return 0;
        }
    }
    return 1;
}

static int patterns_fit(clb_tokenizer *t, const uint16_t *entries)
{
    const clb_tok_header *h = t->head;
    uint64_t used = 0;
    for (uint32_t n = 0; n < h->stages; ++n) {
        const uint64_t states = t->stages[n].states, count = states * (h->classes + 1);
        if (states < 2 || states > MATCHED || t->stages[n].keep > DROP_GAPS || count > h->entries - used) {
            return 0;
        }
        t->tables[n] = entries + used;
        for (uint64_t i = 0; i < count; ++i) {
            if ((t->tables[n][i] & ~MATCHED) >= states) {
                return 0;
            }
        }
        used += count;
    }
    return used == h->entries && bytes_below(t->class_index, BLOCK_INDEX, h->blocks) &&
           bytes_below(t->class_blocks, (uint64_t)h->blocks * 256, h->classes);
}

static int nfc_fits(const clb_tokenizer *t)
{
    const clb_tok_header *h = t->head;
    if (!(h->flags & NFC)) {
        return 1;
    }
    for (uint32_t n = 0; n < h->nfc_blocks * 256; ++n) {
        if (t->nfc_blocks[n] >= h->nfc_records) {
            return 0;
        }
    }
    for (uint32_t n = 0; n < h->nfc_records; ++n) {
        const clb_tok_record *r = &t->records[n];
        if (r->order > MOST_ORDER || r->count > MOST_PARTS || r->first > h->nfc_points ||
            r->count > h->nfc_points - r->first) {
            return 0;
        }
    }
    for (uint32_t n = 0; n < h->nfc_points; ++n) {
        if (!is_character(t->points[n])) {
            return 0;
        }
    }
    for (uint32_t n = 0; n < h->nfc_pairs; ++n) {
        if (!is_character(t->pairs[n].whole)) {
            return 0;
        }
    }
    return bytes_below(t->nfc_index, BLOCK_INDEX, h->nfc_blocks);
}

static void find_beginnings(clb_tokenizer *t)
{
    for (uint32_t n = 0; n < t->head->raw_nodes + t->head->normal_nodes; ++n) {
        uint8_t *bits = t->begins[n >= t->head->raw_nodes];
        bits[t->nodes[n].byte >> 3] |= (uint8_t)(1u << (t->nodes[n].byte & 7));
    }
}

static int open_file(clb_tokenizer *t, const uint8_t *file, size_t size)
{
    const union {
        uint32_t number;
        uint8_t bytes[4];
    } one = {1};
    const clb_tok_header *h = (const clb_tok_header *)(const void *)file;
    if (one.bytes[0] != 1) {
        return COLIBRI_ERR_BIG_ENDIAN;
    }
    if ((uintptr_t)file % CLB_ALIGN_MODEL != 0) {
        return COLIBRI_ERR_MISALIGNED;
    }
    if (size < sizeof *h) {
        return COLIBRI_ERR_TRUNCATED;
    }
    if (memcmp(h->magic, "CLBTOKEN", 8) != 0) {
        return COLIBRI_ERR_TOKENIZER;
    }
    if (h->version != 1) {
        return COLIBRI_ERR_VERSION;
    }
    if (crc32_of(file, sizeof *h - sizeof h->header_crc) != h->header_crc || h->total_bytes < sizeof *h) {
        return COLIBRI_ERR_TOKENIZER;
    }
    if (size < h->total_bytes) {
        return COLIBRI_ERR_TRUNCATED;
    }
    if (crc32_of(file + sizeof *h, h->total_bytes - sizeof *h) != h->body_crc) {
        return COLIBRI_ERR_CHECKSUM;
    }
    if (!header_fits(h) || (h->reserved[0] | h->reserved[1]) != 0) {
        return COLIBRI_ERR_TOKENIZER;
    }
    reader r = {file, sizeof *h, h->total_bytes};
    t->starts = section(&r, (uint64_t)h->vocab + 1, 4);
    t->kinds = section(&r, h->vocab, 1);
    t->bytes = section(&r, h->text_bytes, 1);
    t->hash = section(&r, h->hash_slots + h->hash_probes, 4);
    t->merges = section(&r, h->merge_slots + h->merge_probes, sizeof(clb_tok_merge));
    t->byte_ids = section(&r, 256, 4);
    t->before = section(&r, h->before + h->after + h->eos, 4);
    t->nodes = section(&r, h->nodes, sizeof(clb_tok_node));
    t->class_index = section(&r, BLOCK_INDEX, 1);
    t->class_blocks = section(&r, (uint64_t)h->blocks * 256, 1);
    t->words = section(&r, 256, 1);
    t->stages = section(&r, h->stages, sizeof(clb_tok_stage));
    const uint16_t *entries = section(&r, h->entries, 2);
    if (h->flags & NFC) {
        t->nfc_index = section(&r, BLOCK_INDEX, 1);
        t->nfc_blocks = section(&r, (uint64_t)h->nfc_blocks * 256, 2);
        t->records = section(&r, h->nfc_records, sizeof(clb_tok_record));
        t->points = section(&r, h->nfc_points, 4);
        t->pairs = section(&r, h->nfc_pairs, sizeof(clb_tok_pair));
    }
    if (r.at != r.size || h->raw_nodes + h->normal_nodes > h->nodes) {
        return COLIBRI_ERR_TOKENIZER;
    }
    t->head = h;
    if (!tokens_fit(t)) {
        return COLIBRI_ERR_VOCABULARY;
    }
    if (!added_tokens_fit(t)) {
        return COLIBRI_ERR_ADDED_TOKEN;
    }
    if (!patterns_fit(t, entries)) {
        return COLIBRI_ERR_PATTERN;
    }
    if (!nfc_fits(t)) {
        return COLIBRI_ERR_NORMAL_FORM;
    }
    t->after = t->before + h->before;
    t->eos = t->after + h->after;
    t->ascii = t->class_blocks + (uint32_t)t->class_index[0] * 256;
    find_beginnings(t);
    return COLIBRI_OK;
}

int colibri_tokenizer_open(colibri_tokenizer_t *tokenizer, const uint8_t *tokenizer_bin, size_t size)
{
    if (tokenizer == NULL || tokenizer_bin == NULL) {
        return COLIBRI_ERR_NULL;
    }
    clb_tokenizer *t = (clb_tokenizer *)(void *)tokenizer;
    memset(tokenizer, 0, sizeof *tokenizer);
    const int error = open_file(t, tokenizer_bin, size);
    if (error != COLIBRI_OK) {
        memset(tokenizer, 0, sizeof *tokenizer);
    }
    return error;
}
