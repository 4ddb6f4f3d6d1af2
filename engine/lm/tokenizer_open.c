/* Opens tokenizer.bin: proves that no number in it leads outside it, so that nothing after needs to
 * ask. */
#include "tokenizer_text.h"

#include <stddef.h>

typedef struct {
    const uint8_t *base;
    uint64_t at; /* may pass size, and then nothing is read */
    uint64_t size;
} reader;

/* The next section, at a multiple of 8 bytes. */
static const void *section(reader *r, uint64_t count, uint64_t bytes) {
    const uint8_t *found = r->base + (r->at < r->size ? r->at : r->size);
    r->at += (count * bytes + 7) / 8 * 8;
    return found;
}

/* CRC-32 as zlib computes it. A copy of the engine's, so that this library needs no other. */
static uint32_t crc32_of(const uint8_t *p, size_t bytes) {
    static const uint32_t table[16] = {0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC,
                                       0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
                                       0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C,
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
static int below(const uint32_t *numbers, uint64_t count, uint32_t limit, int or_none) {
    for (uint64_t n = 0; n < count; ++n) {
        const uint32_t number = numbers[n];
        const int none = or_none && number == CLB_NONE;
        if (number >= limit && !none) return 0;
    }
    return 1;
}

static int bytes_below(const uint8_t *numbers, uint64_t count, uint32_t limit) {
    for (uint64_t n = 0; n < count; ++n) {
        if (numbers[n] >= limit) return 0;
    }
    return 1;
}

static int is_character(uint32_t c) {
    const int surrogate = c >= 0xD800 && c <= 0xDFFF;
    return c <= LAST_POINT && !surrogate;
}

/* --- the header --- */

typedef struct {
    uint32_t word; /* of the header */
    uint32_t least;
    uint32_t most;
} range;

#define HEADER_RANGE(field, least, most) {offsetof(clb_tok_header, field) / 4, least, most},

static int ranges_fit(const clb_tok_header *h) {
    static const range ranges[] = {CLB_TOK_RANGES(HEADER_RANGE)};
    const uint32_t *words = (const uint32_t *)(const void *)h;
    for (size_t n = 0; n < sizeof ranges / sizeof ranges[0]; ++n) {
        const range *r = &ranges[n];
        const uint32_t value = words[r->word];
        if (value < r->least || value > r->most) return 0;
    }
    return 1;
}

/* Nodes that no other leads to, the first ones. */
static uint32_t roots_of(const clb_tok_header *h) { return h->raw_nodes + h->normal_nodes; }

static int header_fits(const clb_tok_header *h) {
    const int composes = (h->flags & FLAG_NFC) != 0;
    if (!ranges_fit(h)) return 0;
    if (h->longest > h->text_bytes) return 0;
    if (h->bos >= h->vocab && h->bos != CLB_NONE) return 0;
    if ((h->reserved[0] | h->reserved[1]) != 0) return 0;
    if (composes && h->nfc_blocks == 0) return 0;
    if (composes && h->nfc_records == 0) return 0;
    return roots_of(h) <= h->nodes;
}

/* --- tokens and merges --- */

/* Whether every byte that valid UTF-8 can have begins as a token. */
static int bytes_begin(const clb_tokenizer *t) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
        const int never = byte == 0xC0 || byte == 0xC1 || byte > 0xF4;
        if (!below(&t->byte_ids[byte], 1, t->head->vocab, never)) return 0;
    }
    return 1;
}

/* Whether tokens lie one behind the other, and fill their bytes. */
static int starts_fit(const clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    const uint32_t *starts = t->starts;
    for (uint32_t n = 0; n < h->vocab; ++n) {
        if (starts[n] > starts[n + 1]) return 0;
    }
    return starts[0] == 0 && starts[h->vocab] == h->text_bytes;
}

static int merges_fit(const clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    const uint32_t merges = h->merge_slots + h->merge_probes;
    for (uint32_t n = 0; n < merges; ++n) {
        const clb_tok_merge *m = &t->merges[n];
        if (m->left == CLB_NONE) continue;
        if (m->result >= h->vocab || m->rank == CLB_NONE) return 0;
    }
    return 1;
}

static int tokens_fit(const clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    if (!starts_fit(t) || !merges_fit(t) || !bytes_begin(t)) return 0;
    if (!bytes_below(t->kinds, h->vocab, TOKEN_ALL + 1)) return 0;
    const uint32_t hashed = h->hash_slots + h->hash_probes;
    const uint32_t ids = h->before + h->after + h->eos;
    if (!below(t->hash, hashed, h->vocab, 1)) return 0;
    return below(t->ids, ids, h->vocab, 0);
}

/* --- the tries of added tokens --- */

/* Whether the bytes of `count` nodes from `first` on rise, so that a binary search finds them. */
static int bytes_rise(const clb_tokenizer *t, uint32_t first, uint32_t count) {
    const clb_tok_node *nodes = &t->nodes[first];
    for (uint32_t n = 1; n < count; ++n) {
        if (nodes[n].byte <= nodes[n - 1].byte) return 0;
    }
    return 1;
}

/* Whether the nodes lie level by level, the children of each behind those of the one before: so
 * every node but the roots has one parent, before it, and every search ends. */
static int forest_fits(const clb_tokenizer *t, uint32_t roots) {
    const uint32_t nodes = t->head->nodes;
    uint32_t claimed = roots;
    for (uint32_t n = 0; n < nodes; ++n) {
        const clb_tok_node *node = &t->nodes[n];
        if (n >= claimed || node->first != claimed) return 0;
        if (node->count > nodes - claimed) return 0;
        if (!bytes_rise(t, node->first, node->count)) return 0;
        claimed += node->count;
    }
    return claimed == nodes;
}

/* The parent of a node in a forest that fits, NONE of a root's. Parents of rising nodes rise: *from
 * is the one before. */
static uint32_t parent_of(const clb_tokenizer *t, uint32_t node, uint32_t roots, uint32_t *from) {
    if (node == CLB_NONE || node < roots) return CLB_NONE;
    const clb_tok_node *parent = &t->nodes[*from];
    while (parent->first + parent->count <= node) {
        ++parent;
        ++*from;
    }
    return *from;
}

enum {
    LONGEST = 4 /* bytes of a character */
};

/* Whether the way to a node, of which way[0] is the last, ends with a whole character. */
static int ends_whole(const clb_tokenizer *t, const uint32_t way[LONGEST]) {
    for (size_t n = 0; n < LONGEST && way[n] != CLB_NONE; ++n) {
        const uint8_t byte = t->nodes[way[n]].byte;
        if (!within_character(byte)) return utf8_length(byte) == n + 1;
    }
    return 0;
}

/* Whether a node ends no token that cuts characters; way[0] is its number. */
static int node_fits(const clb_tokenizer *t, const uint32_t way[LONGEST], uint32_t roots) {
    const clb_tok_node *node = &t->nodes[way[0]];
    if (node->flags > ADDED_ALL) return 0;
    if (way[0] < roots && within_character(node->byte)) return 0;
    if (node->token == CLB_NONE) return 1;
    return node->token < t->head->vocab && ends_whole(t, way);
}

/* Text is valid UTF-8, so a token that begins with a character and ends with one cuts it between
 * two. */
static int added_tokens_fit(const clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    const uint32_t roots = roots_of(h);
    uint32_t from[LONGEST] = {0};
    if (!bytes_rise(t, 0, h->raw_nodes)) return 0;
    if (!bytes_rise(t, h->raw_nodes, h->normal_nodes)) return 0;
    if (!forest_fits(t, roots)) return 0;
    for (uint32_t n = 0; n < h->nodes; ++n) {
        uint32_t way[LONGEST] = {n};
        for (size_t up = 1; up < LONGEST; ++up) {
            way[up] = parent_of(t, way[up - 1], roots, &from[up]);
        }
        if (!node_fits(t, way, roots)) return 0;
    }
    return 1;
}

/* --- patterns --- */

/* Whether a stage's table, of which `left` entries are left, leads to its own states only. */
static int table_fits(const clb_tok_stage *stage, const uint16_t *table, uint64_t columns,
                      uint64_t left) {
    const uint64_t states = stage->states;
    const uint64_t entries = states * columns;
    if (states < 2 || states > MATCHED) return 0;
    if (stage->keep >= KEEP_COUNT || entries > left) return 0;
    for (uint64_t n = 0; n < entries; ++n) {
        if ((table[n] & ~MATCHED) >= states) return 0;
    }
    return 1;
}

/* Finds each stage's table on the way. */
static int patterns_fit(clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    const uint64_t columns = (uint64_t)h->classes + 1;
    uint64_t used = 0;
    for (uint32_t n = 0; n < h->stages; ++n) {
        const clb_tok_stage *stage = &t->stages[n];
        const uint16_t *table = t->entries + used;
        const uint64_t left = h->entries - used;
        t->tables[n] = table;
        if (!table_fits(stage, table, columns, left)) return 0;
        used += stage->states * columns;
    }
    const uint64_t points = (uint64_t)h->blocks * BLOCK_SIZE;
    if (used != h->entries) return 0;
    if (!bytes_below(t->class_index, BLOCK_COUNT, h->blocks)) return 0;
    return bytes_below(t->class_blocks, points, h->classes);
}

/* --- the normal form --- */

static int records_fit(const clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    const uint32_t points = h->nfc_points;
    for (uint32_t n = 0; n < h->nfc_records; ++n) {
        const clb_tok_record *r = &t->records[n];
        if (r->order > MOST_ORDER || r->count > MOST_PARTS) return 0;
        if (r->first > points || r->count > points - r->first) return 0;
    }
    return 1;
}

/* Whether characters decompose to characters, and compose to some. */
static int points_fit(const clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    for (uint32_t n = 0; n < h->nfc_points; ++n) {
        if (!is_character(t->points[n])) return 0;
    }
    for (uint32_t n = 0; n < h->nfc_pairs; ++n) {
        if (!is_character(t->pairs[n].whole)) return 0;
    }
    return 1;
}

static int nfc_fits(const clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    if (!(h->flags & FLAG_NFC)) return 1;
    for (uint32_t n = 0; n < h->nfc_blocks * BLOCK_SIZE; ++n) {
        if (t->nfc_blocks[n] >= h->nfc_records) return 0;
    }
    return records_fit(t) && points_fit(t) && bytes_below(t->nfc_index, BLOCK_COUNT, h->nfc_blocks);
}

/* --- the whole file --- */

static void find_beginnings(clb_tokenizer *t) {
    const clb_tok_header *h = t->head;
    const uint32_t roots = roots_of(h);
    for (uint32_t n = 0; n < roots; ++n) {
        const uint8_t byte = t->nodes[n].byte;
        const uint8_t bit = (uint8_t)(1u << (byte & 7));
        const int normal = n >= h->raw_nodes;
        t->begins[normal][byte >> 3] |= bit;
    }
}

static int is_little_endian(void) {
    const union {
        uint32_t number;
        uint8_t bytes[4];
    } one = {1};
    return one.bytes[0] == 1;
}

static const clb_tok_header *header_of(const void *file) { return file; }

/* Whether the file is a tokenizer.bin of this version, whole and undamaged. */
static int check_bytes(const uint8_t *file, size_t size) {
    const clb_tok_header *h = header_of(file);
    if (!is_little_endian()) return COLIBRI_ERR_BIG_ENDIAN;
    if ((uintptr_t)file % CLB_ALIGN_MODEL != 0) return COLIBRI_ERR_MISALIGNED;
    if (size < sizeof *h) return COLIBRI_ERR_TRUNCATED;
    if (memcmp(h->magic, TOKENIZER_MAGIC, sizeof h->magic) != 0) return COLIBRI_ERR_TOKENIZER;
    if (h->version != TOKENIZER_VERSION) return COLIBRI_ERR_VERSION;
    const uint32_t header_crc = crc32_of(file, offsetof(clb_tok_header, header_crc));
    if (header_crc != h->header_crc) return COLIBRI_ERR_TOKENIZER;
    if (h->total_bytes < sizeof *h) return COLIBRI_ERR_TOKENIZER;
    if (size < h->total_bytes) return COLIBRI_ERR_TRUNCATED;
    const size_t body = h->total_bytes - sizeof *h;
    const uint32_t body_crc = crc32_of(file + sizeof *h, body);
    return body_crc == h->body_crc ? COLIBRI_OK : COLIBRI_ERR_CHECKSUM;
}

static uint64_t if_flags(const clb_tok_header *head, uint32_t flags, uint64_t count) {
    return (head->flags & flags) == flags ? count : 0;
}

#define PLACE_SECTION(name, type, flag, count)                                                     \
    t->name = section(&r, if_flags(head, flag, count), sizeof(type));

/* Whether the sections that the header counts are as long as the file. */
static int place_sections(clb_tokenizer *t, const clb_tok_header *head) {
    reader r = {(const uint8_t *)head, sizeof *head, head->total_bytes};
    CLB_TOK_SECTIONS(PLACE_SECTION)
    t->head = head;
    t->after = t->ids + head->before;
    t->eos = t->after + head->after;
    return r.at == r.size;
}

static int open_file(clb_tokenizer *t, const uint8_t *file, size_t size) {
    const clb_tok_header *h = header_of(file);
    const int error = check_bytes(file, size);
    if (error != COLIBRI_OK) return error;
    if (!header_fits(h) || !place_sections(t, h)) return COLIBRI_ERR_TOKENIZER;
    if (!tokens_fit(t)) return COLIBRI_ERR_VOCABULARY;
    if (!added_tokens_fit(t)) return COLIBRI_ERR_ADDED_TOKEN;
    if (!patterns_fit(t)) return COLIBRI_ERR_PATTERN;
    if (!nfc_fits(t)) return COLIBRI_ERR_NORMAL_FORM;
    const uint32_t first = t->class_index[0];
    t->ascii = t->class_blocks + first * BLOCK_SIZE;
    find_beginnings(t);
    return COLIBRI_OK;
}

int colibri_tokenizer_open(colibri_tokenizer_t *tokenizer, const uint8_t *tokenizer_bin,
                           size_t size) {
    if (tokenizer == NULL || tokenizer_bin == NULL) return COLIBRI_ERR_NULL;
    clb_tokenizer *t = (clb_tokenizer *)(void *)tokenizer;
    memset(tokenizer, 0, sizeof *tokenizer);
    const int error = open_file(t, tokenizer_bin, size);
    if (error != COLIBRI_OK) {
        memset(tokenizer, 0, sizeof *tokenizer);
    }
    return error;
}
