"""Writer of tokenizer.bin, the tokenizer for C, from a Hugging Face tokenizer.json; docs/format.md describes the bytes.

What the C tokenizer (`engine/lm`) does not do exactly as the `tokenizers` library is refused by name.
"""

from __future__ import annotations

import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colibri.common.names import brief
from colibri.errors import ExportError
from colibri.format.spec import NONE, align
from colibri.text import split_regex, unicode_probe
from colibri.text.split_regex import Alphabet, Alt, Cat, Node, Repeat, Set

MAGIC = b"CLBTOKEN"
FORMAT_VERSION = 1
HEADER_BYTES = 128

FLAGS = {
    "byte_level": 1,  # symbols begin as bytes; else as characters, or as bytes where the vocabulary lacks one
    "metaspace": 2,  # U+2581 stands for a space, in the vocabulary and in text
    "nfc": 4,
    "prefix_always": 8,  # a space goes before every piece of text between added tokens
    "prefix_missing": 16,  # but not where the piece begins with one
    "prefix_start": 32,  # and only where the piece is the text's start
    "strip_one": 64,  # decoding takes one space off the start of the output
    "strip_first": 128,  # decoding takes all spaces out of the first token
}
SPECIAL, WHOLE, PRESENT = 1, 2, 4  # of a token: control token; a piece with its bytes is this token; it exists
LSTRIP, RSTRIP, SINGLE_WORD, CONTROL = 1, 2, 4, 8  # of an added token
KEEP_ALL, DROP_MATCHES, DROP_GAPS = 0, 1, 2  # of a stage
MOST_STAGES, MOST_ADDED_BYTES, MOST_PROBES = 8, 255, 255

NEVER_BYTES = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))  # in no valid UTF-8

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
METASPACE = "\u2581"
HASH = 0x85EBCA6B


def refuse(what: str) -> ExportError:
    """The error for something that only the Python tokenizer does."""
    return ExportError(
        f"{what}, which the C tokenizer does not do: use the Python tokenizer (colibri.text.tokenizer.Tokenizer)"
    )


def byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in a byte-level vocabulary (GPT-2's)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


@dataclass
class _Plan:
    """What tokenizer.json asks for, in the terms of tokenizer.bin."""

    flags: set[str] = field(default_factory=set)
    stages: list[tuple[Node, int, str]] = field(default_factory=list)  # pattern, what is kept, its source
    decode: Callable[[str], bytes] = str.encode


# --- reading tokenizer.json -------------------------------------------------------------------------------------------


def _parts(node: Any, name: str) -> list[dict[str, Any]]:
    """A processor and, where it is a sequence, its parts."""
    if node is None:
        return []
    if node.get("type") == "Sequence":
        return [part for item in node[name] for part in _parts(item, name)]
    return [node]


def _normalizer(spec: dict[str, Any], plan: _Plan) -> None:
    replaced = prepended = False
    for part in _parts(spec.get("normalizer"), "normalizers"):
        kind = part["type"]
        if kind == "NFC":
            plan.flags.add("nfc")
        elif kind == "Replace" and part["pattern"] == {"String": " "} and part["content"] == METASPACE:
            replaced = True
        elif kind == "Prepend" and part["prepend"] == METASPACE and not prepended:
            prepended = True
        else:
            raise refuse(f"the tokenizer has the normalizer {_told(part)}")
    if prepended and not replaced:
        raise refuse("the tokenizer prepends U+2581 without replacing spaces by it")
    if replaced:
        plan.flags |= {"metaspace"} | ({"prefix_always"} if prepended else set())


def _pre_tokenizer(spec: dict[str, Any], plan: _Plan) -> None:
    parts = _parts(spec.get("pre_tokenizer"), "pretokenizers")
    for place, part in enumerate(parts):
        kind = part["type"]
        if "byte_level" in plan.flags:
            raise refuse(f"the tokenizer has the pre-tokenizer {_told(part)} after ByteLevel")
        if kind == "ByteLevel":
            if "metaspace" in plan.flags:
                raise refuse("the tokenizer has both a metaspace and a byte-level pre-tokenizer")
            plan.flags.add("byte_level")
            if part.get("add_prefix_space", True):
                if place > 0:
                    raise refuse("the tokenizer adds a space to the pieces of an earlier pre-tokenizer")
                plan.flags |= {"prefix_always", "prefix_missing"}
            if part.get("use_regex", True):
                plan.stages.append((split_regex.parse(GPT2), KEEP_ALL, GPT2))
        elif kind == "Metaspace":
            if place > 0 or part.get("replacement", METASPACE) != METASPACE or "metaspace" in plan.flags:
                raise refuse(f"the tokenizer has the pre-tokenizer {_told(part)} in an unusual place or form")
            scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never")
            plan.flags.add("metaspace")
            if scheme != "never":
                plan.flags |= {"prefix_always", "prefix_missing"} | ({"prefix_start"} if scheme == "first" else set())
            if part.get("split", True):
                plan.stages.append((_merged(Set("\\x{2581}"), next_=True), KEEP_ALL, METASPACE))
        elif kind == "Digits":
            digit: Node = Set(unicode_probe.DIGITS)
            whole = digit if part.get("individual_digits", False) else Repeat(digit, 1, None)
            plan.stages.append((whole, KEEP_ALL, "Digits"))
        elif kind == "Split":
            _split(part, plan)
        else:
            raise refuse(f"the tokenizer has the pre-tokenizer {_told(part)}")
    if len(plan.stages) > MOST_STAGES - 1:
        raise refuse(f"the tokenizer cuts text in {len(plan.stages)} stages")


def _split(part: dict[str, Any], plan: _Plan) -> None:
    ((kind, pattern),) = part["pattern"].items()
    behavior, invert = part["behavior"], part.get("invert", False)
    node = split_regex.parse(pattern) if kind == "Regex" else split_regex.literal(pattern)
    keep = KEEP_ALL
    if behavior == "Removed":
        keep = DROP_GAPS if invert else DROP_MATCHES
    elif behavior in ("MergedWithPrevious", "MergedWithNext", "Contiguous"):
        if not isinstance(node, Set):
            raise refuse(f"the tokenizer has {_told(part)}, a {behavior} split on more than one character")
        one = Set(node.atom, not node.inverted) if invert else node
        node = Repeat(one, 1, None) if behavior == "Contiguous" else _merged(one, behavior == "MergedWithNext")
    elif behavior != "Isolated":
        raise refuse(f"the tokenizer has {_told(part)}")
    plan.stages.append((node, keep, pattern))


def _merged(one: Set, next_: bool) -> Node:
    """Pieces that end (`next_`: begin) with the delimiter `one`."""
    other = Set(one.atom, not one.inverted)
    many = Repeat(other, 0, None)
    return Alt((Cat((one, many) if next_ else (many, one)), Repeat(other, 1, None)))


def _decoder(spec: dict[str, Any], plan: _Plan) -> None:
    parts = _parts(spec.get("decoder"), "decoders")
    kinds = [part["type"] for part in parts]
    if "byte_level" in plan.flags:
        if kinds != ["ByteLevel"]:
            raise refuse(f"the byte-level tokenizer has the decoder {_told(spec.get('decoder'))}")
        letters = byte_alphabet()
        plan.decode = lambda text: bytes(letters[c] for c in text) if set(text) <= set(letters) else text.encode()
        return
    spaces = False
    if parts and parts[0] == {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}:
        spaces = True
        kinds.pop(0)
    if kinds[:2] == ["ByteFallback", "Fuse"]:
        kinds = kinds[2:]
        if kinds == ["Strip"]:
            strip = parts[-1]
            if (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
                raise refuse(f"the tokenizer has the decoder {_told(strip)}")
            plan.flags.add("strip_one")
            kinds = []
    elif kinds in (["ByteFallback", "Metaspace"], ["Metaspace"]) and not spaces:
        spaces = True
        if (parts[-1].get("prepend_scheme") or "always") != "never":
            plan.flags.add("strip_first")
        kinds = []
    if kinds or spaces != ("metaspace" in plan.flags):
        raise refuse(f"the tokenizer has the decoder {_told(spec.get('decoder'))}")
    fallback = any(part["type"] == "ByteFallback" for part in parts)

    def decode(text: str) -> bytes:
        if fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return (text.replace(METASPACE, " ") if spaces else text).encode()

    plan.decode = decode


def _template(spec: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for part in _parts(spec.get("post_processor"), "processors"):
        kind = part["type"]
        if kind == "ByteLevel":
            continue  # moves offsets only
        if kind in ("BertProcessing", "RobertaProcessing"):
            before.insert(0, int(part["cls"][1]))
            after.append(int(part["sep"][1]))
        elif kind == "TemplateProcessing":
            ids = {name: token["ids"] for name, token in part["special_tokens"].items()}
            seen = 0
            left: list[int] = []
            right: list[int] = []
            for item in part["single"]:
                seen += "Sequence" in item
                if "SpecialToken" in item:
                    (right if seen else left).extend(map(int, ids[item["SpecialToken"]["id"]]))
            if seen != 1:
                raise refuse(f"the tokenizer has the post-processor {_told(part)}")
            before, after = left + before, after + right
        else:
            raise refuse(f"the tokenizer has the post-processor {_told(part)}")
    return before, after


def _told(part: Any) -> str:
    text = json.dumps(part, ensure_ascii=False)
    return text if len(text) < 160 else text[:157] + "…"


# --- the writer -------------------------------------------------------------------------------------------------------


def write_c(tokenizer: str | Path | bytes, *, bos: int | None = None, eos: Sequence[int] = ()) -> bytes:
    """The bytes of tokenizer.bin for a tokenizer.json, given as its path or its content.

    bos, eos: ids that the C tokenizer hands to whoever generates text; they do not change how text is encoded.

    Raises ExportError where the file is not a tokenizer, or asks for what the C tokenizer does not do.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ExportError("writing tokenizer.bin needs the tokenizers library: pip install 'colibri-moe[lm]'") from None
    try:
        content = tokenizer if isinstance(tokenizer, bytes) else Path(tokenizer).read_bytes()
        spec = json.loads(content)
        library = Tokenizer.from_str(content.decode())
    except OSError as error:
        raise ExportError(f"{tokenizer!s} cannot be read ({error.strerror}): pass a tokenizer.json") from None
    except Exception as error:  # the library raises bare exceptions
        raise ExportError(f"this is not a tokenizer.json that the tokenizers library reads: {brief(error)}") from None
    try:
        return _Writer(spec, library, bos, tuple(eos)).write()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ExportError(
            f"tokenizer.json is not of the form expected ({error!r}): use the Python tokenizer"
        ) from error


class _Writer:
    def __init__(self, spec: dict[str, Any], library: Any, bos: int | None, eos: tuple[int, ...]) -> None:
        self.spec, self.library, self.bos, self.eos = spec, library, bos, eos
        self.model: dict[str, Any] = spec["model"]
        self.plan = _Plan()
        self.sections: list[bytes] = []

    def write(self) -> bytes:
        self.check_model()
        plan = self.plan
        _normalizer(self.spec, plan)
        _pre_tokenizer(self.spec, plan)
        _decoder(self.spec, plan)
        before, after = _template(self.spec)
        self.vocab: dict[str, int] = self.model["vocab"]
        # The library numbers added tokens anew where the file's numbers leave a gap.
        self.added: list[dict[str, Any]] = [
            token | {"id": self.library.token_to_id(token["content"])}
            for token in self.spec.get("added_tokens") or []
            if token["content"]
        ]
        # The library's own word: in its vocabulary an added token may have been normalised.
        ids = {*self.vocab.values(), *(a["id"] for a in self.added)}
        self.text: dict[int, str] = {i: self.library.id_to_token(i) for i in ids}
        self.size = max(self.text, default=-1) + 1
        if not 0 < self.size < 1 << 24 or len(set(self.vocab.values())) != len(self.vocab):
            raise refuse("the vocabulary is empty, has over 16 million ids, or has an id twice")
        for i in (*before, *after, *self.eos, *([] if self.bos is None else [self.bos])):
            if i not in self.text:
                raise ExportError(f"token {i} is not in the vocabulary of {self.size} tokens")
        self.merges = self.read_merges()
        self.add_safe_cuts()

        head: dict[str, int] = {"flags": sum(FLAGS[name] for name in plan.flags), "vocab": self.size}
        head |= self.tokens()
        head |= self.merge_table()
        self.put(np.array(self.byte_ids(), "<u4"))
        self.put(np.array([*before, *after, *self.eos], "<u4"))
        head |= {"before": len(before), "after": len(after), "eos": len(self.eos)}
        head |= {"bos": NONE if self.bos is None else self.bos}
        head |= self.added_tokens()
        head |= self.patterns()
        head |= self.normalization()
        body = b"".join(self.sections)
        names = [
            "flags", "vocab", "text_bytes", "longest", "hash_slots", "hash_probes", "merge_slots", "merge_probes",
            "before", "after", "eos", "bos", "nodes", "raw_nodes", "normal_nodes", "added_bytes", "classes", "blocks",
            "stages", "entries", "nfc_blocks", "nfc_records", "nfc_points", "nfc_pairs",
        ]  # fmt: skip
        total = HEADER_BYTES + len(body)
        if total >= 1 << 32:
            raise refuse("the tokenizer takes more than 4 GB")
        header = MAGIC + struct.pack("<2I", FORMAT_VERSION, total)
        header += struct.pack(f"<{len(names)}I", *(head.pop(name) for name in names))
        assert not head
        header += struct.pack("<I", zlib.crc32(body)) + bytes(HEADER_BYTES - 4 - len(header) - 4)
        return header + struct.pack("<I", zlib.crc32(header)) + body

    def put(self, data: bytes | np.ndarray[Any, Any]) -> None:
        """Append a section, at a multiple of 8 bytes."""
        data = data if isinstance(data, bytes) else data.tobytes()
        self.sections.append(data + bytes(-len(data) % 8))

    def check_model(self) -> None:
        model = self.model
        if model.get("type", "BPE") != "BPE" or "merges" not in model:
            raise refuse(f"the tokenizer's model is {model.get('type', 'unknown')}, not BPE")
        if model.get("dropout"):
            raise refuse("the tokenizer's BPE drops merges at random (dropout)")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise refuse(f"the tokenizer's BPE has {name} {model[name]!r}")

    def read_merges(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(left id, right id) -> (rank, id of both together)."""
        merges = {}
        for rank, merge in enumerate(self.model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            merges[self.vocab[left], self.vocab[right]] = rank, self.vocab[left + right]
        return merges

    def add_safe_cuts(self) -> None:
        """Cut before spaces where no merge reaches across: the same tokens, from pieces the vocabulary holds whole."""
        if "metaspace" not in self.plan.flags or "byte_level" in self.plan.flags:
            return
        if all(METASPACE not in self.text[token].lstrip(METASPACE) for _, token in self.merges.values()):
            space, other = Set("\\x{2581}"), Repeat(Set("\\x{2581}", True), 0, None)
            cut = Alt((Cat((Repeat(space, 1, None), other)), Repeat(Set("\\x{2581}", True), 1, None)))
            self.plan.stages.append((cut, KEEP_ALL, "cuts between words"))

    def tokens(self) -> dict[str, int]:
        """Bytes and kind of each token, and the index of those that text can be."""
        plan = self.plan
        ignore_merges = bool(self.model.get("ignore_merges"))
        if ignore_merges and "byte_level" not in plan.flags:
            raise refuse("the tokenizer has ignore_merges without byte-level symbols")
        decoded = [plan.decode(self.text[i]) if i in self.text else b"" for i in range(self.size)]
        kinds = np.zeros(self.size, np.uint8)
        kinds[list(self.text)] = PRESENT
        kinds[[a["id"] for a in self.added if a["special"]]] |= SPECIAL
        letters = byte_alphabet()
        byte_level, metaspace = "byte_level" in plan.flags, "metaspace" in plan.flags
        indexed: list[tuple[bytes, int]] = []
        longest = 0
        tokenize = self.library.model.tokenize
        for text, i in self.vocab.items():
            if byte_level:
                if not set(text) <= letters.keys():
                    continue  # never a piece of text
                key = bytes(letters[c] for c in text)
            else:
                if not text or (metaspace and " " in text):
                    continue
                key = (text.replace(METASPACE, " ") if metaspace else text).encode()
            if not key:
                continue
            if ignore_merges or [token.id for token in tokenize(text)] == [i]:
                kinds[i] |= WHOLE
                longest = max(longest, len(key))
                indexed.append((key, i))
            elif not byte_level and len(text) == 1:
                indexed.append((key, i))
        # A piece is compared with a token's bytes, so those are the key, whatever decoding would make of the token.
        for key, i in indexed:
            if decoded[i] != key:
                if kinds[i] & SPECIAL or not re.fullmatch(b"<0x..>", key):
                    raise refuse(f"the token {self.text[i]!r} is decoded to other bytes than it is encoded from")
                kinds[i] &= ~np.uint8(WHOLE)
        indexed = [(key, i) for key, i in indexed if decoded[i] == key]
        starts = np.zeros(self.size + 1, "<u4")
        starts[1:] = np.cumsum([len(d) for d in decoded])
        self.put(starts)
        self.put(kinds)
        self.put(b"".join(decoded))
        hashes = np.array([_hash(key) for key, _ in indexed], np.uint64)
        places, slots, probes = _place(hashes)
        table = np.full(slots + probes, NONE, "<u4")
        table[places] = [i for _, i in indexed]
        self.put(table)
        return {"text_bytes": int(starts[-1]), "longest": longest, "hash_slots": slots, "hash_probes": probes}

    def merge_table(self) -> dict[str, int]:
        pairs = np.array([(*pair, *found) for pair, found in self.merges.items()], np.uint64).reshape(-1, 4)
        mixed = (pairs[:, 0] * np.uint64(0x9E3779B1) + pairs[:, 1] * np.uint64(HASH)) & np.uint64(0xFFFFFFFF)
        mixed = ((mixed ^ mixed >> np.uint64(15)) * np.uint64(0x2C1B3C6D)) & np.uint64(0xFFFFFFFF)
        places, slots, probes = _place(mixed ^ mixed >> np.uint64(16))
        table = np.full((slots + probes, 4), NONE, "<u4")
        table[places] = pairs
        self.put(table)
        return {"merge_slots": slots, "merge_probes": probes}

    def byte_ids(self) -> list[int]:
        """The symbol that each byte begins as, or falls back to."""
        if "byte_level" in self.plan.flags:
            names = {b: c for c, b in byte_alphabet().items()}
        else:
            if not self.model.get("byte_fallback"):
                raise refuse("the tokenizer's BPE is neither byte-level nor has it byte_fallback")
            names = {b: f"<0x{b:02X}>" for b in range(256)}
            if "metaspace" in self.plan.flags and METASPACE not in self.vocab:
                raise refuse("the vocabulary lacks U+2581, which stands for spaces")
        missing = [b for b in sorted(names) if b not in NEVER_BYTES and names[b] not in self.vocab]
        if missing:
            raise refuse(f"the vocabulary lacks {len(missing)} of the 256 bytes (the first: 0x{missing[0]:02X})")
        return [self.vocab.get(names[b], NONE) for b in range(256)]

    def added_tokens(self) -> dict[str, int]:
        """Two tries, for what is looked for before and after normalisation."""
        raw: dict[bytes, dict[str, Any]] = {}
        normal: dict[bytes, dict[str, Any]] = {}
        normalize = self.library.normalizer
        for token in self.added:
            if token["normalized"]:
                text = token["content"] if normalize is None else normalize.normalize_str(token["content"])
                if "metaspace" in self.plan.flags:
                    # From here on spaces and U+2581 are one; the library's pre-tokenizer makes them so only later.
                    in_normalizer = self.spec.get("normalizer") is not None and METASPACE in normalize.normalize_str(
                        "a b"
                    )
                    if token["lstrip"] or token["rstrip"] or (not in_normalizer and {" ", METASPACE} & set(text)):
                        raise refuse(f"the added token {token['content']!r} takes spaces in after normalisation")
                    text = text.replace(METASPACE, " ")
                normal[text.encode()] = token
            else:
                raw[token["content"].encode()] = token
        nodes, (raw_nodes, normal_nodes) = _tries(raw, normal)
        longest = max(map(len, [*raw, *normal]), default=0)
        if longest > MOST_ADDED_BYTES:
            raise refuse(f"an added token has {longest} bytes")
        layout = np.dtype([("first", "<u4"), ("token", "<u4"), ("count", "<u2"), ("byte", "u1"), ("flags", "u1")])
        self.put(np.array(nodes, layout))
        return {"nodes": len(nodes), "raw_nodes": raw_nodes, "normal_nodes": normal_nodes, "added_bytes": longest}

    def patterns(self) -> dict[str, int]:
        """The characters' classes and one automaton for each stage."""
        stages = self.plan.stages
        names = [atom for node, _, _ in stages for atom in split_regex.atoms(node)]
        words = any(a["single_word"] for a in self.added)
        alphabet = Alphabet.of([*names, *(["\\x{2581}"] if "metaspace" in self.plan.flags else []),
                                *([unicode_probe.WORD] if words else [])])  # fmt: skip
        classes = alphabet.classes
        tables = [split_regex.compile_pattern(node, alphabet, source) for node, _, source in stages]
        self.check(alphabet, tables)
        if "metaspace" in self.plan.flags:
            classes = classes.copy()
            classes[ord(" ")] = classes[ord(METASPACE)]  # which is what patterns see in its place
        blocks, index = np.unique(classes.reshape(-1, 256), axis=0, return_inverse=True)
        if len(blocks) > 256:
            raise refuse(f"the tokenizer's patterns need {len(blocks)} blocks of characters")
        attributes = np.zeros(256, np.uint8)
        if words:
            column = alphabet.names.index(unicode_probe.WORD)
            attributes[: alphabet.size] = [row[column] for row in alphabet.members]
        self.put(index.astype(np.uint8))
        self.put(blocks)
        self.put(attributes)
        self.put(np.array([(len(t), keep) for t, (_, keep, _) in zip(tables, stages, strict=True)], "<u4"))
        entries = np.concatenate([t.reshape(-1) for t in tables]) if tables else np.zeros(0, np.uint16)
        self.put(entries.astype("<u2"))
        return {"classes": alphabet.size, "blocks": len(blocks), "stages": len(stages), "entries": len(entries)}

    def check(self, alphabet: Alphabet, tables: list[Any]) -> None:
        """Raise ExportError where a table cuts a random text in other places than the library would."""
        from tokenizers import Regex
        from tokenizers import pre_tokenizers as pre

        chance = random.Random(0)
        points = np.arange(unicode_probe.CODE_POINTS)
        points = points[(points < 0xD800) | (points > 0xDFFF)]
        by_class = [points[alphabet.classes[points] == n] for n in range(alphabet.size)]
        by_class = [p for p in by_class if len(p)]
        regexes = [part for part in _parts(self.spec.get("pre_tokenizer"), "pretokenizers")
                   if part["type"] == "Split" and part["behavior"] == "Isolated"]  # fmt: skip
        sources = {source: table for table, (_, _, source) in zip(tables, self.plan.stages, strict=True)}
        for part in regexes:
            ((kind, pattern),) = part["pattern"].items()
            split = pre.Split(Regex(pattern) if kind == "Regex" else pattern, "isolated")
            common = [ord(c) for c in "'sStTrReEvVmMlLdD  \n\r\taA1" + re.sub(r"[\\\[\](){}]", "", pattern)[:64]]
            for _ in range(500):
                text = "".join(
                    chr(int(chance.choice(common if chance.random() < 0.5 else chance.choice(by_class))))
                    * (chance.randrange(2, 5) if chance.random() < 0.1 else 1)
                    for _ in range(chance.randrange(1, 24))
                )
                want = [span for _, span in split.pre_tokenize_str(text)]
                found = split_regex.pieces(sources[pattern], [int(alphabet.classes[ord(c)]) for c in text])
                if want != [(begin, end) for begin, end, _ in found]:
                    raise refuse(f"the split pattern {pattern!r} cuts {text!r} in a way that is not understood")

    def normalization(self) -> dict[str, int]:
        if "nfc" not in self.plan.flags:
            return {"nfc_blocks": 0, "nfc_records": 0, "nfc_points": 0, "nfc_pairs": 0}
        tables = unicode_probe.normalization()
        points: list[int] = []
        records: list[tuple[int, int, int, int]] = [(0, 1, 0, 0)]
        numbers: dict[tuple[int, int, int, int], int] = {records[0]: 0}
        of_point = np.zeros(unicode_probe.CODE_POINTS, "<u2")
        seconds = {second for _, second in tables.pairs} | {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}
        for point in sorted({*tables.decompositions, *tables.order, *seconds}):
            parts = tables.decompositions.get(point, ())
            first = parts[0] if parts else point
            stands = first not in tables.order and first not in seconds
            record = (tables.order.get(point, 0), stands + 2 * (point in tables.changed), len(parts), len(points))
            if not parts:
                record = (*record[:3], 0)
            points += parts
            if record not in numbers:
                numbers[record] = len(records)
                records.append(record)
            of_point[point] = numbers[record]
        blocks, index = np.unique(of_point.reshape(-1, 256), axis=0, return_inverse=True)
        self.put(index.astype(np.uint8))
        self.put(blocks)
        self.put(np.array(records, np.dtype([("order", "u1"), ("flags", "u1"), ("count", "<u2"), ("first", "<u4")])))
        self.put(np.array(points, "<u4"))
        self.put(np.array([(*pair, whole) for pair, whole in sorted(tables.pairs.items())], "<u4"))
        return {"nfc_blocks": len(blocks), "nfc_records": len(records), "nfc_points": len(points),
                "nfc_pairs": len(tables.pairs)}  # fmt: skip


def _tries(*tries: dict[bytes, dict[str, Any]]) -> tuple[list[tuple[int, int, int, int, int]], list[int]]:
    """The nodes of several tries, first all roots, a parent's together and sorted; and the numbers of roots."""
    nodes: list[tuple[int, int, int, int, int]] = []
    roots: list[int] = []
    level = [(-1, 0, trie) for trie in tries]
    while level:
        following = []
        for parent, depth, keys in level:
            children: dict[int, dict[bytes, dict[str, Any]]] = {}
            for key, token in keys.items():
                if len(key) > depth:
                    children.setdefault(key[depth], {})[key] = token
            if parent < 0:
                roots.append(len(children))
            else:
                nodes[parent] = (len(nodes), nodes[parent][1], len(children), *nodes[parent][3:])
            for byte, below in sorted(children.items()):
                ends = next((token for key, token in below.items() if len(key) == depth + 1), None)
                flags = 0
                if ends is not None:
                    flags = LSTRIP * ends["lstrip"] | RSTRIP * ends["rstrip"] | SINGLE_WORD * ends["single_word"]
                    flags |= CONTROL * ends["special"]
                following.append((len(nodes), depth + 1, below))
                nodes.append((0, NONE if ends is None else ends["id"], 0, byte, flags))
        level = following
    return nodes, roots


def _hash(key: bytes) -> int:
    """FNV-1a with a last mix, 32 bits."""
    h = 0x811C9DC5
    for byte in key:
        h = ((h ^ byte) * 0x01000193) & 0xFFFFFFFF
    h ^= h >> 16
    return (h * HASH & 0xFFFFFFFF) ^ (h * HASH & 0xFFFFFFFF) >> 13


def _place(hashes: np.ndarray[Any, np.dtype[np.uint64]]) -> tuple[np.ndarray[Any, Any], int, int]:
    """Places in a table with linear probing, its slots, and the most probes a search takes.

    In the order of their home slots, each goes to its home or behind the one before; the table has `probes` slots more,
    so that no search wraps around.
    """
    slots = max(16, len(hashes) * 5 // 3)
    while True:
        home = (hashes * np.uint64(slots) >> np.uint64(32)).astype(np.int64)
        order = np.argsort(home, kind="stable")
        steps = np.arange(len(home))
        sorted_places = np.maximum.accumulate(home[order] - steps) + steps
        probes = int((sorted_places - home[order]).max(initial=0)) + 1
        if probes <= MOST_PROBES:
            places = np.empty(len(home), np.int64)
            places[order] = sorted_places
            return places, slots, align(probes, 2)
        slots *= 2
