"""The one table of tokenizer.bin: its header, records, sections in their order, bits, limits and hash constants.

`tools/generate.py` writes engine/lm/tokenizer_format.h and the tables of docs/format.md from it; the writer
(`colibri.text.tokenizer_bin`) takes every name, type and number from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.format.spec import Field, Record, field_dtype

MAGIC = b"CLBTOKEN"
FORMAT_VERSION = 1
MAX_BYTES = (1 << 32) - 1  # `total_bytes` counts them


@dataclass(frozen=True)
class Names:
    """Named numbers of one field and what they mean: bits to be added together, or values that count from 0."""

    doc: str
    meanings: Mapping[str, str]
    bits: bool = True

    def __getitem__(self, name: str) -> int:
        place = list(self.meanings).index(name)
        return 1 << place if self.bits else place

    @property
    def most(self) -> int:
        """The largest value of the field."""
        return (1 << len(self.meanings)) - 1 if self.bits else len(self.meanings) - 1


NAMES = {
    "flag": Names("of the file", {
        "byte_level": "symbols begin as bytes; else as characters, or as bytes where no token is that character",
        "metaspace": "U+2581 and a space are one: it is stored, and looked for, as a space",
        "nfc": "text is brought into NFC",
        "prefix_always": "a space goes before every piece of text between added tokens",
        "prefix_missing": "with prefix_always: only after the second search for added tokens, and where the piece does "
        "not begin with a space",
        "prefix_start": "with prefix_missing: only at the start of the text",
        "strip_one": "decoding drops one space from the start of the output",
        "strip_first": "decoding drops all spaces of the first token",
    }),
    "token": Names("of a token", {
        "special": "it is a control token",
        "whole": "a piece with exactly its bytes becomes this token",
        "present": "the token exists",
    }),
    "added": Names("of an added token", {
        "lstrip": "it takes in the spaces before it",
        "rstrip": "it takes in the spaces behind it",
        "single_word": "it is found only where no word continues before or behind it",
        "special": "it is found only where special tokens are asked for",
    }),
    "point": Names("of a character, in its NFC record", {
        "stands": "nothing before it changes it",
        "changed": "it is not its own NFC",
    }),
    "keep": Names("of a stage: which pieces stay part of the text", {
        "all": "every piece",
        "gaps": "what is between matches",
        "matches": "matches",
    }, bits=False),
}  # fmt: skip
FLAG, TOKEN, ADDED, POINT, KEEP = NAMES.values()

LIMITS = {
    "MOST_STAGES": (8, "split patterns"),
    "MOST_PROBES": (255, "slots that a search in an index reads"),
    "MOST_ADDED_BYTES": (255, "bytes of an added token"),
    "MOST_ORDER": (63, "canonical order of a mark"),
    "MOST_PARTS": (8, "code points of a decomposition"),
    "BLOCK_SIZE": (256, "characters of a block"),
    "BLOCK_COUNT": (0x1100, "blocks of all characters"),
    "MATCHED": (0x8000, "in an entry of a table: a match ends before the character read"),
}
MOST_STAGES, MOST_PROBES, MOST_ADDED_BYTES, MOST_ORDER, MOST_PARTS, BLOCK_SIZE, BLOCK_COUNT, MATCHED = (
    value for value, _ in LIMITS.values()
)

HASHES = {
    "HASH_BASIS": (0x811C9DC5, "FNV-1a of a token's bytes"),
    "HASH_PRIME": (0x01000193, "FNV-1a"),
    "HASH_MIX": (0x85EBCA6B, "behind FNV-1a"),
    "MERGE_LEFT": (0x9E3779B1, "on the left symbol of a merge"),
    "MERGE_RIGHT": (0x85EBCA6B, "on the right symbol"),
    "MERGE_MIX": (0x2C1B3C6D, "on their sum"),
}
HASH_BASIS, HASH_PRIME, HASH_MIX, MERGE_LEFT, MERGE_RIGHT, MERGE_MIX = (value for value, _ in HASHES.values())


def _record(name: str, size: int, doc: str, *fields: tuple[str, str, int, str]) -> Record:
    return Record(name, size, doc, tuple(Field(*f) for f in fields))


HEADER = _record(
    "header", 128, "The first bytes of the file.",
    ("u8", "magic", 8, f"`{MAGIC.decode()}`"),
    ("u32", "version", 1, "format version; a reader accepts its own only"),
    ("u32", "total_bytes", 1, "size of the file"),
    ("u32", "flags", 1, "`flag` bits"),
    ("u32", "vocab", 1, "ids are 0 to this − 1"),
    ("u32", "text_bytes", 1, "bytes of all tokens together"),
    ("u32", "longest", 1, "bytes of the longest token that is marked whole"),
    ("u32", "hash_slots", 1, "home slots of the index of tokens by their bytes"),
    ("u32", "hash_probes", 1, "slots a search reads at most; as many are behind the home slots"),
    ("u32", "merge_slots", 1, "home slots of the index of merges"),
    ("u32", "merge_probes", 1, "slots a search reads at most; as many are behind the home slots"),
    ("u32", "before", 1, "ids put before a text"),
    ("u32", "after", 1, "ids put after a text"),
    ("u32", "eos", 1, "ids that end a text"),
    ("u32", "bos", 1, "the id that begins a text, or NONE"),
    ("u32", "nodes", 1, "nodes of the tries of added tokens, roots included"),
    ("u32", "raw_nodes", 1, "roots of the trie sought in raw text"),
    ("u32", "normal_nodes", 1, "roots of the trie sought in normalised text"),
    ("u32", "added_bytes", 1, "bytes of the longest added token"),
    ("u32", "classes", 1, "character classes"),
    ("u32", "blocks", 1, "blocks of characters' classes"),
    ("u32", "stages", 1, "split patterns"),
    ("u32", "entries", 1, "entries of all their tables"),
    ("u32", "nfc_blocks", 1, "blocks of NFC records; without NFC zero, as the next three"),
    ("u32", "nfc_records", 1, "different NFC records"),
    ("u32", "nfc_points", 1, "code points of all decompositions"),
    ("u32", "nfc_pairs", 1, "pairs of code points that compose"),
    ("u32", "body_crc", 1, "CRC-32 of everything after the header"),
    ("u32", "reserved", 2, "zero"),
    ("u32", "header_crc", 1, "CRC-32 of the header before this field"),
)  # fmt: skip

# What a field of the header may be; those that are not here may be anything, or are proven by the sections they count.
RANGES: dict[str, tuple[int, int]] = {
    "flags": (0, FLAG.most),
    "vocab": (1, (1 << 24) - 1),
    "hash_slots": (1, (1 << 26) - 1),
    "hash_probes": (0, MOST_PROBES),
    "merge_slots": (1, (1 << 26) - 1),
    "merge_probes": (0, MOST_PROBES),
    "before": (0, 64),
    "after": (0, 64),
    "eos": (0, 4096),
    "nodes": (0, (1 << 24) - 1),
    "raw_nodes": (0, 256),
    "normal_nodes": (0, 256),
    "added_bytes": (0, MOST_ADDED_BYTES),
    "classes": (1, 255),
    "blocks": (1, 256),
    "stages": (0, MOST_STAGES),
    "entries": (0, (1 << 24) - 1),
    "nfc_blocks": (0, 256),
    "nfc_records": (0, 65536),
    "nfc_points": (0, (1 << 20) - 1),
    "nfc_pairs": (0, (1 << 20) - 1),
}

MERGE = _record(
    "merge", 16, "How two neighbouring symbols merge.",
    ("u32", "left", 1, "the first symbol, NONE in an empty slot"),
    ("u32", "right", 1, "the second symbol"),
    ("u32", "rank", 1, "the pair of lowest rank merges first"),
    ("u32", "result", 1, "the symbol they become"),
)  # fmt: skip

NODE = _record(
    "node", 12, "A node of a trie of added tokens: a byte, and what may follow it.",
    ("u32", "first", 1, "its first child"),
    ("u32", "token", 1, "id of the added token that ends here, or NONE"),
    ("u16", "count", 1, "its children"),
    ("u8", "byte", 1, "the byte that leads to it"),
    ("u8", "flags", 1, "`added` bits of the token"),
)  # fmt: skip

STAGE = _record(
    "stage", 8, "One split pattern.",
    ("u32", "states", 1, "states of its automaton"),
    ("u32", "keep", 1, "a `keep` value"),
)  # fmt: skip

POINT_RECORD = _record(
    "record", 8, "What NFC does with a character; many share one.",
    ("u8", "order", 1, "canonical order of a mark, 0 of any other"),
    ("u8", "flags", 1, "`point` bits"),
    ("u16", "count", 1, "code points it decomposes to; 0: itself"),
    ("u32", "first", 1, "the first of them"),
)  # fmt: skip

PAIR = _record(
    "pair", 12, "Two code points that compose to one.",
    ("u32", "first", 1, "a starter"),
    ("u32", "second", 1, "what follows it"),
    ("u32", "whole", 1, "their composition"),
)  # fmt: skip

RECORDS = {r.name: r for r in (HEADER, MERGE, NODE, STAGE, POINT_RECORD, PAIR)}


@dataclass(frozen=True)
class Section:
    """A part of the file: elements of one type, as many as `times` · the sum of some header fields + `plus`."""

    name: str
    type: str  # of an element: a scalar's or a record's name
    doc: str
    counts: tuple[str, ...] = ()
    times: int = 1
    plus: int = 0
    flag: str = ""  # it has elements only in files with this flag

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of an element."""
        return RECORDS[self.type].dtype if self.type in RECORDS else field_dtype(self.type)

    def count(self, header: Mapping[str, int]) -> int:
        """The number of elements in a file with this header."""
        if self.flag and not header["flags"] & FLAG[self.flag]:
            return 0
        return self.times * sum(header[name] for name in self.counts) + self.plus


def _index_doc(key: str, slots: str, probes: str, steps: str) -> str:
    return (f"an index with linear probing: an element is at its home slot or at most {probes} − 1 behind, before the "
            f"first NONE. Home: {key}; {steps}; h · {slots} >> 32")  # fmt: skip


SECTIONS = (
    Section("starts", "u32", "where each token's bytes begin, and the last one's end", ("vocab",), plus=1),
    Section("kinds", "u8", "`token` bits of each", ("vocab",)),
    Section("bytes", "u8", "what each token is decoded to", ("text_bytes",)),
    Section("hash", "u32", "ids or NONE, " + _index_doc(
        f"FNV-1a of the bytes, from 0x{HASH_BASIS:X} by 0x{HASH_PRIME:08X}", "hash_slots", "hash_probes",
        f"h ^= h >> 16; h *= 0x{HASH_MIX:X}; h ^= h >> 13"), ("hash_slots", "hash_probes")),
    Section("merges", "merge", _index_doc(
        f"h = left · 0x{MERGE_LEFT:X} + right · 0x{MERGE_RIGHT:X}", "merge_slots", "merge_probes",
        f"h ^= h >> 15; h *= 0x{MERGE_MIX:X}; h ^= h >> 16"), ("merge_slots", "merge_probes")),
    Section("byte_ids", "u32", "the symbol a byte begins as, or falls back to; NONE is allowed for the 13 bytes that "
            "UTF-8 never has (C0, C1, F5 to FF)", plus=256),
    Section("ids", "u32", "put before a text, put after it, and those that end it", ("before", "after", "eos")),
    Section("nodes", "node", "the roots of tokens sought in raw text, those of tokens sought in normalised text, then "
            "the children of each node together, sorted, behind those of the node before. Tokens begin and end with "
            "whole characters", ("nodes",)),
    Section("class_index", "u8", f"block of code point / {BLOCK_SIZE}", plus=BLOCK_COUNT),
    Section("class_blocks", "u8", "classes of the characters of each block", ("blocks",), times=BLOCK_SIZE),
    Section("words", "u8", "1 where a class is part of a word (for single_word)", plus=256),
    Section("stages", "stage", "the split patterns, in the order they cut", ("stages",)),
    Section("entries", "u16", f"states × (classes + 1) of each stage: the next state, plus 0x{MATCHED:X} where a match "
            "ends before the character read; the last column stands for the end of the text. A search begins in state "
            "1 and ends in 0; the last match counts", ("entries",)),
    Section("nfc_index", "u8", f"block of code point / {BLOCK_SIZE}", plus=BLOCK_COUNT, flag="nfc"),
    Section("nfc_blocks", "u16", "records of the characters of each block", ("nfc_blocks",), times=BLOCK_SIZE,
            flag="nfc"),
    Section("records", "record", "record 0 is that of a character that NFC leaves alone. Hangul is arithmetic",
            ("nfc_records",), flag="nfc"),
    Section("points", "u32", "the decompositions, one behind the other", ("nfc_points",), flag="nfc"),
    Section("pairs", "pair", "sorted by first, then second", ("nfc_pairs",), flag="nfc"),
)  # fmt: skip
SECTION = {s.name: s for s in SECTIONS}
