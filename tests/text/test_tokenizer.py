"""The C tokenizer gives the library's ids and bytes, for every kind of tokenizer that its writer accepts."""

from __future__ import annotations

import ctypes
import functools
import json
import random
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from colibri.errors import ExportError
from colibri.text import split_regex, tokenizer_bin, unicode_probe
from tests.text import kinds
from tests.text.c_tokenizer import CONTINUE, SKIP_SPECIAL, SPECIAL, TEMPLATE, CTokenizer, edited, load, name


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load(tmp_path_factory.mktemp("lm"))


@functools.cache
def image(kind: str) -> bytes:
    return tokenizer_bin.write_c(kinds.tokenizer(kind).to_str().encode(), bos=0, eos=[0, 2])


def opened(library: ctypes.CDLL, kind: str) -> CTokenizer:
    tokenizer = CTokenizer(library, image(kind))
    assert tokenizer.error == "OK"
    return tokenizer


def compare(library: ctypes.CDLL, kind: str, seed: int, size: int) -> None:
    """The same ids with and without special tokens and template, and the same text back."""
    c, want = opened(library, kind), kinds.tokenizer(kind)
    texts = list(kinds.texts(seed, size))
    for options in (0, TEMPLATE | SPECIAL):
        want.encode_special_tokens = not options & SPECIAL
        encoded = want.encode_batch_fast(texts, add_special_tokens=bool(options & TEMPLATE))
        for text, expected in zip(texts, encoded, strict=True):
            assert c.encode(text, options) == expected.ids, (text, options)
        ids = [e.ids for e in encoded]
        for skip in (False, True):
            for one, expected_text in zip(ids, want.decode_batch(ids, skip_special_tokens=skip), strict=True):
                data = c.decode(one, SKIP_SPECIAL if skip else 0)
                if kind in kinds.BYTE_LEVEL or "\ufffd" not in expected_text:
                    assert data.decode("utf-8", "replace") == expected_text, one


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_ids_and_text_are_the_librarys(library: ctypes.CDLL, kind: str) -> None:
    compare(library, kind, 1, 150_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_ids_and_text_are_the_librarys_on_ten_megabytes(library: ctypes.CDLL, kind: str) -> None:
    for seed in range(100, 110):
        compare(library, kind, seed, 1_000_000)


@pytest.mark.parametrize("kind", ["qwen2", "o200k", "deepseek_v3", "llama2"])
def test_every_character_is_encoded_as_by_the_library(library: ctypes.CDLL, kind: str) -> None:
    c, want = opened(library, kind), kinds.tokenizer(kind)
    points = [p for p in range(0x30000) if not 0xD800 <= p < 0xE000] + [*range(0xE0000, 0xE0200), 0x10FFFF]
    texts = [
        "".join(f"a{chr(p)}b {chr(p)}1{chr(p)}\n" for p in points[n : n + 2048]) for n in range(0, len(points), 2048)
    ]
    want.encode_special_tokens = True
    for text, expected in zip(texts, want.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        assert c.encode(text) == expected.ids


@given(text=st.text())
@settings(max_examples=150, deadline=None)
def test_byte_level_text_comes_back(library: ctypes.CDLL, text: str) -> None:
    for kind in ("gpt2", "o200k", "deepseek_v2", "cl100k"):
        c = opened_once(library, kind)
        assert c.decode(c.encode(text)).decode() == text


@given(text=st.text())
@settings(max_examples=150, deadline=None)
def test_normalised_text_comes_back(library: ctypes.CDLL, text: str) -> None:
    c = opened_once(library, "qwen3_5")
    back = c.decode(c.encode(text)).decode()
    assert back == kinds.tokenizer("qwen3_5").normalizer.normalize_str(text)
    assert back == unicodedata.normalize("NFC", text) or any(ord(ch) > 0x10000 for ch in text)  # newer than Python's


OPEN: dict[str, CTokenizer] = {}


def opened_once(library: ctypes.CDLL, kind: str) -> CTokenizer:
    if kind not in OPEN:
        OPEN[kind] = opened(library, kind)
    return OPEN[kind]


@pytest.mark.parametrize("kind", ["gpt2", "neox", "qwen2", "llama2", "metaspace_first"])
def test_invalid_utf8_is_read_as_python_replaces_it(library: ctypes.CDLL, kind: str) -> None:
    """D4: whether or not the vocabulary has the bytes that UTF-8 never has."""
    c, want = opened(library, kind), kinds.tokenizer(kind)
    want.encode_special_tokens = True
    chance = random.Random(3)
    parts = [b"\x80", b"\xc0\x80", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xf4\x90\x80\x80", b"\xf5", b"\xff",
             b"\xe0\x80\x80", b"\xf0\x80", b"ok", b" ", "é€😀".encode(), b"\xe2\x96", b"<|end|>"]  # fmt: skip
    for _ in range(2000):
        data = b"".join(chance.choices(parts, k=chance.randrange(8)))
        data = data if chance.random() < 0.7 else chance.randbytes(chance.randrange(24))
        text = data.decode("utf-8", "replace")
        assert c.encode(data) == c.encode(text) == want.encode(text, add_special_tokens=False).ids, data


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_a_vocabulary_without_bytes_that_text_can_have_is_refused(kind: str) -> None:
    """D4: of the 256 bytes exactly the 13 that UTF-8 never has may lack."""
    spec = json.loads(kinds.tokenizer(kind).to_str())
    letters = {byte: letter for letter, byte in tokenizer_bin.byte_alphabet().items()}
    for byte in (0x00, 0xBF, 0xC0, 0xC1, 0xC2, 0xF4, 0xF5, 0xFF) if kind == "gpt2" else (0x41, 0xC1, 0xF4, 0xFF):
        name = letters[byte] if kind == "gpt2" else f"<0x{byte:02X}>"
        vocab = {token: i for token, i in spec["model"]["vocab"].items() if token != name}
        merges = [m for m in spec["model"]["merges"] if name not in m and "".join(m) in vocab]
        lacking = edited(json.dumps(spec).encode(), model=spec["model"] | {"vocab": vocab, "merges": merges})
        if byte in tokenizer_bin.NEVER_BYTES:
            assert tokenizer_bin.write_c(lacking)
        else:
            with pytest.raises(ExportError, match=f"lacks 1 of the 256 bytes .*0x{byte:02X}"):
                tokenizer_bin.write_c(lacking)


def test_special_tokens_of_users_stay_text(library: ctypes.CDLL) -> None:
    c = opened(library, "gpt2")
    special = kinds.tokenizer("gpt2").token_to_id("<|end|>")
    assert special not in c.encode("a<|end|>b")
    assert special in c.encode("a<|end|>b", SPECIAL)
    assert c.decode(c.encode("a<|end|>b")) == b"a<|end|>b"


@pytest.mark.parametrize("atom", [r"\p{L}", r"\p{N}", r"\s", r"[^\r\n\p{L}\p{N}]", "(?i:s)", unicode_probe.DIGITS])
@pytest.mark.slow
def test_classes_hold_for_every_code_point(atom: str) -> None:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    classes, members = unicode_probe.partition((atom,))
    for first in range(0, 0x110000, 0x8000):
        points = [p for p in range(first, first + 0x8000) if not 0xD800 <= p < 0xE000]
        text = "".join(map(chr, points))
        inside = np.ones(len(points), bool)
        split = pre.Digits() if atom == unicode_probe.DIGITS else pre.Split(Regex(atom), "removed")
        if atom == unicode_probe.DIGITS:
            inside = np.array([len(split.pre_tokenize_str(f"a{ch}a")) == 3 for ch in text])
        else:
            for _, (begin, end) in split.pre_tokenize_str(text):
                inside[begin:end] = False
        assert np.array_equal(inside, np.array(members)[classes[points], 0])


@pytest.mark.slow
def test_nfc_holds_for_every_code_point(library: ctypes.CDLL) -> None:
    c, normalize = opened(library, "qwen3_5"), kinds.tokenizer("qwen3_5").normalizer.normalize_str
    for first in range(0, 0x110000, 0x1000):
        points = [p for p in range(first, first + 0x1000) if not 0xD800 <= p < 0xE000]
        text = "".join(f"{chr(p)}a{chr(p)}\u0323\u0301{chr(p)}\u11a8 " for p in points)
        assert c.decode(c.encode(text)).decode() == normalize(text)


# --- the interface ----------------------------------------------------------------------------------------------------


def test_a_small_output_is_counted_and_refused(library: ctypes.CDLL) -> None:
    c = opened(library, "gpt2")
    ids = c.encode("Hello, world")
    assert c.call(b"Hello, world", 0, 2) == ("OUTPUT", ids[:2], len(ids))
    assert c.call(b"Hello, world", 0, 0) == ("OUTPUT", [], len(ids))
    assert c.call_decode(ids, 0, 3) == ("OUTPUT", b"Hel", 12)


def test_little_scratch_is_refused_and_enough_suffices(library: ctypes.CDLL) -> None:
    for kind, text in (("qwen2", "e\u0301" * 50), ("llama2", "zq" * 30), ("gpt2", "\xff" * 9)):
        c = opened(library, kind)
        data = text.encode("latin-1") if kind == "gpt2" else text.encode()
        sizes = range(0, 4096, 16)
        answers = [c.call(data, 0, 500, scratch)[0] for scratch in sizes]
        assert answers[0] == "SCRATCH" and answers[-1] == "OK"
        assert answers == sorted(answers, reverse=True)


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "metaspace_first"])
def test_ids_without_a_token_have_no_text(library: ctypes.CDLL, kind: str) -> None:
    """D3: behind the vocabulary and in its gaps, first, last or between, as in the library."""
    spec = json.loads(kinds.tokenizer(kind).to_str())
    gap = max(i for i in spec["model"]["vocab"].values())
    vocab = {token: i + (i == gap) * 5 for token, i in spec["model"]["vocab"].items()}
    merges = [m for m in spec["model"]["merges"] if vocab["".join(m)] < gap]
    text = json.dumps(spec | {"model": spec["model"] | {"vocab": vocab, "merges": merges}})
    want = Library.from_str(text)
    c = CTokenizer(library, tokenizer_bin.write_c(text.encode()))
    assert c.error == "OK"
    size = library.colibri_tokenizer_vocabulary(c.handle)
    gaps = [i for i in range(size) if want.id_to_token(i) is None]
    absent = [*gaps, size, 1 << 20, (1 << 31) - 1]
    assert gaps or kind == "llama2"  # whose added tokens the library numbers into the gap
    chance = random.Random(2)
    for text in ("Hello there", " a", "é", "x  y"):
        for _ in range(40):
            ids = c.encode(text)
            for _ in range(chance.randrange(1, 4)):
                ids.insert(chance.randrange(len(ids) + 1), chance.choice(absent))
            for skip in (False, True):
                found = c.decode(ids, SKIP_SPECIAL if skip else 0).decode()
                assert found == want.decode(ids, skip_special_tokens=skip), ids
    assert all(library.colibri_tokenizer_special(c.handle, i) for i in absent)
    assert c.call_decode([-1], 0, 8)[0] == "TOKEN"


def test_null_pointers_are_refused(library: ctypes.CDLL) -> None:
    closed = (ctypes.c_uint64 * 48)()
    count = ctypes.c_size_t()
    assert name(library.colibri_tokenizer_open(None, None, 0)) == "NULL"
    assert name(library.colibri_tokenizer_encode(closed, b"a", 1, 0, None, 0, ctypes.byref(count), None, 0)) == "NULL"
    assert name(library.colibri_tokenizer_decode(closed, None, 0, 0, None, 0, ctypes.byref(count))) == "NULL"
    assert library.colibri_tokenizer_vocabulary(closed) == 0
    assert library.colibri_tokenizer_bos(closed) == -1
    assert library.colibri_tokenizer_ends(closed, 0) == library.colibri_tokenizer_special(closed, 0) == 0


def test_what_else_a_generator_asks(library: ctypes.CDLL) -> None:
    c = opened(library, "gpt2")
    assert library.colibri_tokenizer_vocabulary(c.handle) == kinds.tokenizer("gpt2").get_vocab_size()
    assert library.colibri_tokenizer_bos(c.handle) == 0
    assert [i for i in range(-1, 9) if library.colibri_tokenizer_ends(c.handle, i)] == [0, 2]
    assert [i for i in range(-1, 9) if library.colibri_tokenizer_special(c.handle, i)] == [0]


def test_decoding_may_go_on_where_it_stopped(library: ctypes.CDLL) -> None:
    for kind in ("llama2", "metaspace_first", "gpt2"):
        c = opened(library, kind)
        ids = c.encode("Hello there, you")
        rest = b"".join(c.decode([i], CONTINUE) for i in ids[1:])
        assert c.decode(ids[:1]) + rest == c.decode(ids) == b"Hello there, you"


def test_a_special_token_that_is_left_out_is_not_gone_on_from(library: ctypes.CDLL) -> None:
    """D7."""
    c = opened(library, "llama2")
    ids = c.encode("Hello there", TEMPLATE)
    assert c.decode(ids[:1], SKIP_SPECIAL) == b"" and len(ids) > 2
    rest = c.decode(ids[1:2], SKIP_SPECIAL) + c.decode(ids[2:], SKIP_SPECIAL | CONTINUE)
    assert rest == c.decode(ids, SKIP_SPECIAL) == b"Hello there"


def test_incomplete_characters_are_held_back(library: ctypes.CDLL) -> None:
    c = opened(library, "gpt2")
    for text in ("a", "é", "€", "😀", "a😀"):
        data = text.encode()
        for n in range(len(data) + 1):
            whole = len(data[:n].decode("utf-8", "ignore").encode())
            assert c.complete(data[:n]) == whole
    assert c.complete(b"\xff") == 1 and c.complete(b"a\x80") == 2 and c.complete(b"\xed\xa0") == 2


def test_a_long_run_of_one_letter_takes_no_longer_per_letter(library: ctypes.CDLL) -> None:
    import time

    for kind in ("gpt2", "llama2", "deepseek_v2", "metaspace_always"):
        c = opened(library, kind)
        for letter in (b"a", b" ", b"\n", "\u0301".encode(), "中".encode()):
            seconds = []
            for size in (20_000, 320_000):
                start = time.process_time()
                c.encode(letter * size)
                seconds.append(time.process_time() - start)
            assert seconds[1] < 16 * 6 * max(seconds[0], 0.002), (kind, letter, seconds)


# --- what the writer refuses ------------------------------------------------------------------------------------------

REFUSED = {
    "NFKC": {"normalizer": {"type": "NFKC"}},
    "Lowercase": {"normalizer": {"type": "Lowercase"}},
    "Whitespace": {"pre_tokenizer": {"type": "Whitespace"}},
    "UnicodeScripts": {"pre_tokenizer": {"type": "UnicodeScripts"}},
    "look-ahead of more": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a(?!bc)"}, "behavior": "Isolated", "invert": False}
    },
    "an escape": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\bword"}, "behavior": "Isolated", "invert": False}
    },
    "unknown kind": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?<!a)b"}, "behavior": "Isolated", "invert": False}
    },
    "far ahead": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "a+b|a"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    },
    "decoder": {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    "model": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_c_does_not_do_is_refused_by_name(word: str) -> None:
    with pytest.raises(ExportError) as caught:
        tokenizer_bin.write_c(edited(kinds.tokenizer("gpt2").to_str().encode(), **REFUSED[word]))
    assert word in str(caught.value) and "use the Python tokenizer" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"{\xff", b'{"model": 3}'])
def test_a_malformed_file_is_refused(content: bytes) -> None:
    with pytest.raises(ExportError):
        tokenizer_bin.write_c(content)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "a)",
        "[a",
        "*a",
        "a**",
        "a|b*",
        r"(a*)*",
        "a{65}",
        r"\b",
        "^a",
        "(?<=a)b",
        "(?i)a",
        "[]a]",
        r"(?:a++b)+",
        "a++ab",
        "a+b|a",
        r"\s+(?=\S)|\s",
    ],
)
def test_patterns_that_are_not_understood_are_refused(pattern: str) -> None:
    with pytest.raises(ExportError):
        node = split_regex.parse(pattern)
        split_regex.compile_pattern(node, split_regex.Alphabet.of([*split_regex.atoms(node)]), pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"a|ab|abc", r"abc|ab|a", r"a??b|a", r"(?:ab)+|a", r"a+?", r"[ab]{2,3}c?|[abc]", r"\s(?=\S)|\S+|\s", r"(a|b)c|.",
     r"a?+b|a|b", r"\d{2}|\D", r"x(?!\s)|[^x]+|x", r"\s+$|\S+", r"[[:alpha:]]+|\W", *kinds.PATTERNS.values(),
     *kinds.DEEPSEEK_V2, *kinds.DEEPSEEK_V3],
)  # fmt: skip
def test_patterns_cut_where_the_library_cuts(pattern: str) -> None:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    node = split_regex.parse(pattern)
    alphabet = split_regex.Alphabet.of([*split_regex.atoms(node)])
    table = split_regex.compile_pattern(node, alphabet, pattern)
    split = pre.Split(Regex(pattern), "isolated")
    chance = random.Random(7)
    for n in range(1500):
        text = "".join(chance.choices("aabbcx  \n1", k=chance.randrange(12)))
        if n % 2:
            text = kinds.random_text(chance, 8) + "".join(chance.choices(kinds.FRAGMENTS, k=4))
        cut = split_regex.pieces(table, [int(alphabet.classes[ord(ch)]) for ch in text])
        assert [(b, e) for b, e, _ in cut] == [span for _, span in split.pre_tokenize_str(text)], text
