"""The bytes of tokenizer.bin: the same as ever, by its one description, refused where they are out of its ranges."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.errors import ExportError
from colibri.format import tokenizer_spec
from colibri.format.tokenizer_spec import HEADER, RECORDS, SECTIONS
from colibri.text import tokenizer_bin, unicode_probe
from tests.text.c_tokenizer import CTokenizer, load

STORYTELLER = Path(__file__).resolve().parents[2] / "examples/storyteller/checkpoint/tokenizer.json"


def added(content: str, place: int, **options: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": place, "content": content, **flags, **options}


def byte_level() -> bytes:
    """Bytes, NFC, two stages of which one drops its matches, and added tokens of every option."""
    names = sorted(tokenizer_bin.byte_alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġa", "b")]
    vocab = {name: n for n, name in enumerate([*names, *(left + right for left, right in merges)])}
    splits = [{"type": "Split", "pattern": {"String": "|"}, "behavior": "Removed", "invert": False},
              {"type": "Split", "pattern": {"Regex": " ?[a-z]+|[0-9]{1,3}|[^a-z0-9]"}, "behavior": "Isolated",
               "invert": False}]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokens = [added("<s>", 260, special=True), added("<l>", 261, lstrip=True, normalized=True),
              added("<lé>", 262, rstrip=True), added("word", 263, single_word=True, normalized=True)]  # fmt: skip
    return json.dumps({
        "version": "1.0", "added_tokens": tokens, "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]}, "decoder": level,
        "post_processor": None, "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }).encode()  # fmt: skip


def metaspace() -> bytes:
    """Characters with bytes to fall back to, U+2581 for spaces, and a template."""
    pieces = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    template = {"type": "TemplateProcessing", "pair": [], "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}  # fmt: skip
    scheme = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, scheme]}
    return json.dumps({
        "version": "1.0", "added_tokens": [added("<s>", 0, special=True), added("</s>", 1, special=True)],
        "normalizer": None, "pre_tokenizer": scheme, "decoder": decoder, "post_processor": template,
        "model": {"type": "BPE", "vocab": vocab, "merges": [("a", "b"), ("▁", "a"), ("▁a", "b")],
                  "byte_fallback": True, "unk_token": None},
    }).encode()  # fmt: skip


KINDS = {"byte_level": byte_level, "metaspace": metaspace, "storyteller": STORYTELLER.read_bytes}
# Of files as this format's first writer wrote them, for the characters of one version of Unicode.
UNICODE = "af44c57414931a50048649b3f6138ed6a0b371986cdd15eaf1b11cd815e582ec"
DIGESTS = {
    "byte_level": "57e46d8e57337d14d38a9dcf6ea61f0d13cdc543303a3bb62de51abf5a200617",
    "metaspace": "4902f22839b64687c72b185d2b786b4a203eb252d3f84bc8bcfb60754b68b9e6",
    "storyteller": "d5ba8bafdd433e972f90ed07e5bcc5d02679796c6a52deece293553dcc374133",
}


@functools.cache
def image(kind: str) -> bytes:
    return tokenizer_bin.write_c(KINDS[kind](), bos=0, eos=[1, 2])


def unicode_digest() -> str:
    """What the tokenizers library holds for letters, digits, words and normal forms."""
    classes, members = unicode_probe.partition((r"\p{L}", r"\p{N}", r"\s", unicode_probe.WORD))
    tables = unicode_probe.normalization()
    told = (members, sorted(tables.decompositions.items()), sorted(tables.pairs.items()), sorted(tables.order.items()))
    return hashlib.sha256(classes.tobytes() + repr(told).encode()).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_tokenizer_stay(kind: str) -> None:
    if unicode_digest() != UNICODE:
        pytest.skip("the tokenizers library follows another version of Unicode")
    assert hashlib.sha256(image(kind)).hexdigest() == DIGESTS[kind]


# --- the description --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda r: r.name)
def test_records_have_their_size_and_aligned_fields(record: tokenizer_spec.Record) -> None:
    assert record.dtype.itemsize == record.bytes
    assert record.bytes % 4 == 0  # sections begin at multiples of 8, and hold nothing wider than 4 bytes
    for name, (field, offset, *_) in (record.dtype.fields or {}).items():
        assert offset % field.base.alignment == 0, name


def test_every_count_of_the_header_has_a_meaning() -> None:
    """Each field is a range's, a section's or one of the few that are proven by themselves."""
    names = {f.name for f in HEADER.fields}
    counted = {name for section in SECTIONS for name in section.counts}
    own = {"magic", "version", "total_bytes", "longest", "bos", "body_crc", "reserved", "header_crc"}
    assert counted | tokenizer_spec.RANGES.keys() | own == names
    assert not own & (counted | tokenizer_spec.RANGES.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_sections_fill_the_file(kind: str) -> None:
    data = image(kind)
    header = np.frombuffer(data, HEADER.dtype, 1)[0]
    at = HEADER.bytes
    for section in SECTIONS:
        at += section.count({name: int(header[name]) for name in (*section.counts, "flags")}) * section.dtype.itemsize
        assert not any(data[at : -(-at // 8) * 8])
        at = -(-at // 8) * 8
    assert at == len(data) == header["total_bytes"]


# --- ranges -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load(tmp_path_factory.mktemp("lm"))


def changed(data: bytes, **fields: int) -> bytes:
    """The file with other numbers in its header, under a checksum that fits."""
    header = np.frombuffer(data, HEADER.dtype, 1).copy()
    for name, value in fields.items():
        header[name] = value
    header["header_crc"] = zlib.crc32(header.tobytes()[:-4])
    return header.tobytes() + data[HEADER.bytes :]


@pytest.mark.parametrize("field", ["flags", "added_bytes", "hash_probes", "merge_probes"])
def test_the_reader_knows_the_ranges(library: ctypes.CDLL, field: str) -> None:
    """Fields that change no section's size, or by pairs do not, so that nothing but the range refuses them."""
    data = image("storyteller")
    header = np.frombuffer(data, HEADER.dtype, 1)[0]
    _, most = tokenizer_spec.RANGES[field]
    slots = field.replace("probes", "slots")
    errors = []
    for value in (most, most + 1):
        same = {slots: int(header[slots]) + int(header[field]) - value} if slots != field else {}
        if field == "flags":
            value -= tokenizer_spec.FLAG["nfc"] * (value == most)  # whose sections this file has not
        errors.append(CTokenizer(library, changed(data, **{field: value}, **same)).error)
    assert errors == ["OK", "TOKENIZER"]


def test_the_writer_refuses_what_no_reader_takes() -> None:
    _, most = tokenizer_spec.RANGES["eos"]
    assert tokenizer_bin.write_c(metaspace(), eos=[1] * most)
    with pytest.raises(ExportError, match=f"eos {most + 1:,}, not 0 to {most:,}"):
        tokenizer_bin.write_c(metaspace(), eos=[1] * (most + 1))
