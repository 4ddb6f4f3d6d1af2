/* The bytes of tokenizer.bin. Generated from colibri.format.tokenizer_spec; see docs/format.md. */
#ifndef COLIBRI_LM_TOKENIZER_FORMAT_H
#define COLIBRI_LM_TOKENIZER_FORMAT_H

#include "format/format.h"

#define TOKENIZER_MAGIC   "CLBTOKEN"
#define TOKENIZER_VERSION 1u

/* Limits. */
#define MOST_STAGES      8u     /* split patterns */
#define MOST_PROBES      255u   /* slots that a search in an index reads */
#define MOST_ADDED_BYTES 255u   /* bytes of an added token */
#define MOST_ORDER       63u    /* canonical order of a mark */
#define MOST_PARTS       8u     /* code points of a decomposition */
#define BLOCK_SIZE       256u   /* characters of a block */
#define BLOCK_COUNT      4352u  /* blocks of all characters */
#define MATCHED          32768u /* in an entry of a table: a match ends before the character read */

/* Hashes. */
#define HASH_BASIS  0x811C9DC5u /* FNV-1a of a token's bytes */
#define HASH_PRIME  0x01000193u /* FNV-1a */
#define HASH_MIX    0x85EBCA6Bu /* behind FNV-1a */
#define MERGE_LEFT  0x9E3779B1u /* on the left symbol of a merge */
#define MERGE_RIGHT 0x85EBCA6Bu /* on the right symbol */
#define MERGE_MIX   0x2C1B3C6Du /* on their sum */

/* Bits of the file. */
enum clb_tok_flag {
    /* symbols begin as bytes; else as characters, or as bytes where no token is that character */
    FLAG_BYTE_LEVEL = 1,
    /* U+2581 and a space are one: it is stored, and looked for, as a space */
    FLAG_METASPACE = 2,
    /* text is brought into NFC */
    FLAG_NFC = 4,
    /* a space goes before every piece of text between added tokens */
    FLAG_PREFIX_ALWAYS = 8,
    /* with prefix_always: only after the second search for added tokens, and where the piece does
     * not begin with a space */
    FLAG_PREFIX_MISSING = 16,
    /* with prefix_missing: only at the start of the text */
    FLAG_PREFIX_START = 32,
    /* decoding drops one space from the start of the output */
    FLAG_STRIP_ONE = 64,
    /* decoding drops all spaces of the first token */
    FLAG_STRIP_FIRST = 128,
    FLAG_ALL = 255
};

/* Bits of a token. */
enum clb_tok_token {
    TOKEN_SPECIAL = 1, /* it is a control token */
    TOKEN_WHOLE = 2,   /* a piece with exactly its bytes becomes this token */
    TOKEN_PRESENT = 4, /* the token exists */
    TOKEN_ALL = 7
};

/* Bits of an added token. */
enum clb_tok_added {
    ADDED_LSTRIP = 1,      /* it takes in the spaces before it */
    ADDED_RSTRIP = 2,      /* it takes in the spaces behind it */
    ADDED_SINGLE_WORD = 4, /* it is found only where no word continues before or behind it */
    ADDED_SPECIAL = 8,     /* it is found only where special tokens are asked for */
    ADDED_ALL = 15
};

/* Bits of a character, in its NFC record. */
enum clb_tok_point {
    POINT_STANDS = 1,  /* nothing before it changes it */
    POINT_CHANGED = 2, /* it is not its own NFC */
    POINT_ALL = 3
};

/* Values of a stage: which pieces stay part of the text. */
enum clb_tok_keep {
    KEEP_ALL = 0,     /* every piece */
    KEEP_GAPS = 1,    /* what is between matches */
    KEEP_MATCHES = 2, /* matches */
    KEEP_COUNT = 3
};

/* The first bytes of the file. */
typedef struct {
    uint8_t magic[8];      /* CLBTOKEN */
    uint32_t version;      /* format version; a reader accepts its own only */
    uint32_t total_bytes;  /* size of the file */
    uint32_t flags;        /* flag bits */
    uint32_t vocab;        /* ids are 0 to this - 1 */
    uint32_t text_bytes;   /* bytes of all tokens together */
    uint32_t longest;      /* bytes of the longest token that is marked whole */
    uint32_t hash_slots;   /* home slots of the index of tokens by their bytes */
    uint32_t hash_probes;  /* slots a search reads at most; as many are behind the home slots */
    uint32_t merge_slots;  /* home slots of the index of merges */
    uint32_t merge_probes; /* slots a search reads at most; as many are behind the home slots */
    uint32_t before;       /* ids put before a text */
    uint32_t after;        /* ids put after a text */
    uint32_t eos;          /* ids that end a text */
    uint32_t bos;          /* the id that begins a text, or NONE */
    uint32_t nodes;        /* nodes of the tries of added tokens, roots included */
    uint32_t raw_nodes;    /* roots of the trie sought in raw text */
    uint32_t normal_nodes; /* roots of the trie sought in normalised text */
    uint32_t added_bytes;  /* bytes of the longest added token */
    uint32_t classes;      /* character classes */
    uint32_t blocks;       /* blocks of characters' classes */
    uint32_t stages;       /* split patterns */
    uint32_t entries;      /* entries of all their tables */
    uint32_t nfc_blocks;   /* blocks of NFC records; without NFC zero, as the next three */
    uint32_t nfc_records;  /* different NFC records */
    uint32_t nfc_points;   /* code points of all decompositions */
    uint32_t nfc_pairs;    /* pairs of code points that compose */
    uint32_t body_crc;     /* CRC-32 of everything after the header */
    uint32_t reserved[2];  /* zero */
    uint32_t header_crc;   /* CRC-32 of the header before this field */
} CLB_ALIAS clb_tok_header;
_Static_assert(sizeof(clb_tok_header) == 128, "no padding");

/* How two neighbouring symbols merge. */
typedef struct {
    uint32_t left;   /* the first symbol, NONE in an empty slot */
    uint32_t right;  /* the second symbol */
    uint32_t rank;   /* the pair of lowest rank merges first */
    uint32_t result; /* the symbol they become */
} CLB_ALIAS clb_tok_merge;
_Static_assert(sizeof(clb_tok_merge) == 16, "no padding");

/* A node of a trie of added tokens: a byte, and what may follow it. */
typedef struct {
    uint32_t first; /* its first child */
    uint32_t token; /* id of the added token that ends here, or NONE */
    uint16_t count; /* its children */
    uint8_t byte;   /* the byte that leads to it */
    uint8_t flags;  /* added bits of the token */
} CLB_ALIAS clb_tok_node;
_Static_assert(sizeof(clb_tok_node) == 12, "no padding");

/* One split pattern. */
typedef struct {
    uint32_t states; /* states of its automaton */
    uint32_t keep;   /* a keep value */
} CLB_ALIAS clb_tok_stage;
_Static_assert(sizeof(clb_tok_stage) == 8, "no padding");

/* What NFC does with a character; many share one. */
typedef struct {
    uint8_t order;  /* canonical order of a mark, 0 of any other */
    uint8_t flags;  /* point bits */
    uint16_t count; /* code points it decomposes to; 0: itself */
    uint32_t first; /* the first of them */
} CLB_ALIAS clb_tok_record;
_Static_assert(sizeof(clb_tok_record) == 8, "no padding");

/* Two code points that compose to one. */
typedef struct {
    uint32_t first;  /* a starter */
    uint32_t second; /* what follows it */
    uint32_t whole;  /* their composition */
} CLB_ALIAS clb_tok_pair;
_Static_assert(sizeof(clb_tok_pair) == 12, "no padding");

/* Fields of the header that have a range: name, least, most. */
#define CLB_TOK_RANGES(RANGE)                                                                      \
    RANGE(flags, 0u, 255u)                                                                         \
    RANGE(vocab, 1u, 16777215u)                                                                    \
    RANGE(hash_slots, 1u, 67108863u)                                                               \
    RANGE(hash_probes, 0u, 255u)                                                                   \
    RANGE(merge_slots, 1u, 67108863u)                                                              \
    RANGE(merge_probes, 0u, 255u)                                                                  \
    RANGE(before, 0u, 64u)                                                                         \
    RANGE(after, 0u, 64u)                                                                          \
    RANGE(eos, 0u, 4096u)                                                                          \
    RANGE(nodes, 0u, 16777215u)                                                                    \
    RANGE(raw_nodes, 0u, 256u)                                                                     \
    RANGE(normal_nodes, 0u, 256u)                                                                  \
    RANGE(added_bytes, 0u, 255u)                                                                   \
    RANGE(classes, 1u, 255u)                                                                       \
    RANGE(blocks, 1u, 256u)                                                                        \
    RANGE(stages, 0u, 8u)                                                                          \
    RANGE(entries, 0u, 16777215u)                                                                  \
    RANGE(nfc_blocks, 0u, 256u)                                                                    \
    RANGE(nfc_records, 0u, 65536u)                                                                 \
    RANGE(nfc_points, 0u, 1048575u)                                                                \
    RANGE(nfc_pairs, 0u, 1048575u)

/* Sections in their order: name, type of an element, the flag they belong to or 0, number of
 * elements by `head`, whose fields are in their ranges. */
#define CLB_TOK_SECTIONS(SECTION)                                                                  \
    SECTION(starts, uint32_t, 0, head->vocab + 1)                                                  \
    SECTION(kinds, uint8_t, 0, head->vocab)                                                        \
    SECTION(bytes, uint8_t, 0, head->text_bytes)                                                   \
    SECTION(hash, uint32_t, 0, head->hash_slots + head->hash_probes)                               \
    SECTION(merges, clb_tok_merge, 0, head->merge_slots + head->merge_probes)                      \
    SECTION(byte_ids, uint32_t, 0, 256)                                                            \
    SECTION(ids, uint32_t, 0, head->before + head->after + head->eos)                              \
    SECTION(nodes, clb_tok_node, 0, head->nodes)                                                   \
    SECTION(class_index, uint8_t, 0, 4352)                                                         \
    SECTION(class_blocks, uint8_t, 0, head->blocks * 256)                                          \
    SECTION(words, uint8_t, 0, 256)                                                                \
    SECTION(stages, clb_tok_stage, 0, head->stages)                                                \
    SECTION(entries, uint16_t, 0, head->entries)                                                   \
    SECTION(nfc_index, uint8_t, FLAG_NFC, 4352)                                                    \
    SECTION(nfc_blocks, uint16_t, FLAG_NFC, head->nfc_blocks * 256)                                \
    SECTION(records, clb_tok_record, FLAG_NFC, head->nfc_records)                                  \
    SECTION(points, uint32_t, FLAG_NFC, head->nfc_points)                                          \
    SECTION(pairs, clb_tok_pair, FLAG_NFC, head->nfc_pairs)

#endif
