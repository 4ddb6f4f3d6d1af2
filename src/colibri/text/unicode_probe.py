"""Character classes and normalisation tables, asked from the `tokenizers` library character by character.

Python's `unicodedata`, the library's regular expressions, its digits and its normaliser follow different versions of
Unicode; a table taken from any other place than the code it has to agree with would be wrong for some characters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CODE_POINTS = 0x110000
DIGITS = "<digits>"  # the pre-tokenizer of this name, as an atom beside regular expressions
WORD = "<word>"  # what `single_word` of an added token calls a part of a word

Classes = np.ndarray[Any, np.dtype[np.uint8]]


# Planes 4 to 16 hold nothing but tags and selectors at the start of plane 14, characters for private use, and the same
# noncharacters at their ends: the middle of a plane is what its 4,096th character is.
_FULL, _HEAD, _TAIL = 0x40000, 0x1000, 0x100


@functools.cache
def _characters() -> tuple[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """The characters that are asked about, and their code points."""
    parts = [np.arange(0xD800), np.arange(0xE000, _FULL)]
    for plane in range(_FULL, CODE_POINTS, 0x10000):
        parts += [np.arange(plane, plane + _HEAD), np.arange(plane + 0x10000 - _TAIL, plane + 0x10000)]
    points = np.concatenate(parts)
    return "".join(map(chr, points)), points


@functools.cache
def partition(atoms: tuple[str, ...]) -> tuple[Classes, tuple[tuple[bool, ...], ...]]:
    """The class of every code point, and for each class which atoms its characters belong to.

    An atom is a regular expression that matches one character, in the library's syntax, or `DIGITS` or `WORD`.
    Characters with equal membership have one class; surrogates, which no text holds, have class 0.
    """
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    text, points = _characters()
    plain = [a for a in atoms if a not in (DIGITS, WORD)]
    stages: list[Any] = [pre.Split(Regex(f"(?:{a})+"), "isolated") for a in plain]
    if DIGITS in atoms:
        stages.append(pre.Digits(individual_digits=False))
    # One pass cuts all characters into runs that no atom tells apart; then one character of each run speaks for it.
    runs = [span for _, span in pre.Sequence(stages).pre_tokenize_str(text)] if stages else [(0, len(text))]
    starts = np.array([begin for begin, _ in runs])
    word = _word_characters(text) if WORD in atoms else None
    if word is not None:
        starts = np.union1d(starts, np.flatnonzero(np.diff(word.astype(np.int8))) + 1)
    sample = "".join(text[n] for n in starts)
    member = np.zeros((len(starts), len(atoms)), bool)
    for column, atom in enumerate(atoms):
        if atom == WORD:
            assert word is not None
            member[:, column] = word[starts]
        elif atom == DIGITS:
            member[:, column] = _digits(sample)
        else:
            member[:, column] = True
            for _, (begin, end) in pre.Split(Regex(atom), "removed").pre_tokenize_str(sample):
                member[begin:end, column] = False
    kinds, of_run = np.unique(member, axis=0, return_inverse=True)
    if len(kinds) > 255:
        raise OverflowError(f"{len(kinds)} character classes")
    classes = np.zeros(CODE_POINTS, np.uint8)
    lengths = np.diff(np.append(starts, len(text)))
    classes[points] = np.repeat(of_run.reshape(-1).astype(np.uint8), lengths)
    for plane in range(_FULL, CODE_POINTS, 0x10000):
        classes[plane + _HEAD : plane + 0x10000 - _TAIL] = classes[plane + _HEAD - 1]
    return classes, tuple(tuple(bool(x) for x in row) for row in kinds)


def _digits(sample: str) -> list[bool]:
    from tokenizers import pre_tokenizers as pre

    text = "a" + "a".join(sample) + "a"
    cuts = {begin for _, (begin, _) in pre.Digits(individual_digits=False).pre_tokenize_str(text)}
    return [2 * n + 1 in cuts for n in range(len(sample))]


def _word_characters(text: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    from tokenizers import AddedToken, Tokenizer, models

    finder = Tokenizer(models.BPE())
    finder.add_tokens([AddedToken("@", single_word=True, normalized=False)])
    word = np.ones(len(text), bool)
    step = 1 << 16
    for first in range(0, len(text), step):
        part = text[first : first + step]
        for begin, _ in finder.encode("@\n".join(part) + "@\n").offsets:
            if begin % 3 == 1:
                word[first + begin // 3] = False
    return word


@dataclass(frozen=True)
class Normalization:
    """What NFC needs, Hangul syllables aside, which are arithmetic.

    decompositions: full canonical decomposition of every character that has one
    order:          canonical order of every mark (the combining classes, numbered without gaps from 1)
    pairs:          what two characters compose to
    changed:        characters that are not their own NFC
    """

    decompositions: dict[int, tuple[int, ...]]
    order: dict[int, int]
    pairs: dict[tuple[int, int], int]
    changed: frozenset[int]


@functools.cache
def normalization() -> Normalization:
    """The tables behind the library's NFC."""
    from tokenizers import normalizers

    nfc, nfd = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str
    text, _ = _characters()
    text = text.replace("\n", "")
    hangul = range(0xAC00, 0xAC00 + 11172)

    def each(normalize: Any, before: str, after: str) -> Sequence[str]:
        whole: str = normalize("\n".join(before + c + after for c in text))
        return whole.split("\n")

    apart = each(nfd, "", "")
    decompositions = {
        ord(c): tuple(map(ord, d)) for c, d in zip(text, apart, strict=True) if c != d and ord(c) not in hangul
    }
    changed = frozenset(ord(c) for c, d in zip(text, each(nfc, "", ""), strict=True) if c != d)
    # A mark moves before one of a higher class and behind one of a lower: U+0334 has the lowest, U+0345 the highest.
    high = each(nfd, "\u0345", "")
    low = each(nfd, "", "\u0334")
    whole = [(c, h, w) for c, h, w, d in zip(text, high, low, apart, strict=True) if c == d]
    marks = [c for c, h, w in whole if h == c + "\u0345" or w == "\u0334" + c or c in "\u0334\u0345"]

    def compare(a: str, b: str) -> int:
        return -1 if nfd(b + a) == a + b != b + a else 1 if nfd(a + b) == b + a != a + b else 0

    marks.sort(key=functools.cmp_to_key(compare))
    order: dict[int, int] = {}
    number = 0
    for n, mark in enumerate(marks):
        number += n == 0 or compare(marks[n - 1], mark) != 0
        order[ord(mark)] = number
    pairs = {}
    for point, parts in decompositions.items():
        first = nfc("".join(map(chr, parts[:-1])))
        if point not in changed and len(parts) > 1 and len(first) == 1:
            pairs[ord(first), parts[-1]] = point
    return Normalization(decompositions, order, pairs, changed)
