"""A damaged or hostile tokenizer.bin is refused by name, or used inside its own memory and in bounded time."""

from __future__ import annotations

import random
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken

from colibri.format import spec, tokenizer_spec
from colibri.text import tokenizer_bin
from tests.engine.conftest import compile_c, compiler
from tests.text import kinds
from tools import size

BASES = ("qwen2", "llama2", "deepseek_v2", "gpt2_prefix")
ALL_BASES = (*BASES, "gpt2_cut", "metaspace_cut")
HEADER = tokenizer_spec.HEADER.bytes
HEADER_FIELDS = dict(tokenizer_spec.HEADER.dtype.fields or {})
VERSION, TOTAL = HEADER_FIELDS["version"][1], HEADER_FIELDS["total_bytes"][1]
TEXT = (
    kinds.SCRIPTS[:700] + "".join(kinds.FRAGMENTS) + "a" * 200 + " " * 100 + "e\u0301" * 40
).encode() + b"\xff\xc0\x80"


@dataclass(frozen=True)
class Case:
    base: str
    size: int
    repair: bool = False
    patches: tuple[tuple[int, int], ...] = ()
    text: bytes = b""  # empty: TEXT
    scratch: int = 1000

    def packed(self) -> bytes:
        sizes = (self.size, self.repair, self.scratch, len(self.text), len(self.patches))
        head = struct.pack("<6I", ALL_BASES.index(self.base), *sizes)
        return head + b"".join(struct.pack("<2I", *p) for p in self.patches) + self.text


@dataclass(frozen=True)
class Fuzz:
    binary: Path
    text: Path
    bases: dict[str, Path]

    def __call__(self, cases: Sequence[Case]) -> list[list[str]]:
        """The error names of every case; fails, with the case, where a sanitizer or the clock stops the driver."""
        done = subprocess.run(
            [self.binary, self.text, *self.bases.values()],
            input=b"".join(c.packed() for c in cases),
            capture_output=True,
            check=False,
        )
        results = [[spec.ERRORS[int(w)][0] for w in line.split()] for line in done.stdout.decode().splitlines()]
        if done.returncode != 0:
            broken = cases[min(len(results), len(cases) - 1)]
            pytest.fail(f"{broken}: status {done.returncode}\n{done.stderr.decode('utf-8', 'replace')[:3000]}")
        assert len(results) == len(cases)
        return results

    def image(self, base: str) -> bytes:
        return self.bases[base].read_bytes()


SANITIZED = ("-std=gnu11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    folder = tmp_path_factory.mktemp("hostile")
    sources = [Path(__file__).parent / "fuzz.c", *(size.ENGINE / "lm").glob("tokenizer*.c")]
    binary = compile_c(compiler("gcc"), folder / "fuzz", sources, *SANITIZED)
    text = folder / "text"
    text.write_bytes(TEXT)
    bases = {}
    for kind in BASES:
        bases[kind] = folder / f"{kind}.bin"
        # Small vocabularies would do, but these have every section.
        bases[kind].write_bytes(tokenizer_bin.write_c(kinds.tokenizer(kind).to_str().encode(), bos=0, eos=[0]))
    for name, kind in zip(CUT, ("gpt2", "metaspace_never"), strict=True):
        bases[name] = folder / f"{name}.bin"
        bases[name].write_bytes(tokenizer_bin.write_c(with_cuts(kind), bos=0, eos=[0]))
    return Fuzz(binary, text, bases)


def test_valid_files_are_used(fuzz: Fuzz) -> None:
    results = fuzz([Case(base, len(fuzz.image(base)), repair) for base in BASES for repair in (False, True)])
    for result in results:
        assert result == ["OK", "OK", "OUTPUT", "OK", "OUTPUT", "SCRATCH", "OK"] or result[3] == "SCRATCH"


def test_every_flipped_header_bit_is_named(fuzz: Fuzz) -> None:
    data = fuzz.image("qwen2")
    cases = [Case("qwen2", len(data), False, ((bit // 8, data[bit // 8] ^ 1 << bit % 8),)) for bit in range(HEADER * 8)]
    for bit, result in enumerate(fuzz(cases)):
        assert result == ["VERSION" if VERSION <= bit // 8 < TOTAL else "TOKENIZER"], f"bit {bit}"


@pytest.mark.parametrize("base", BASES)
def test_truncations_are_named(fuzz: Fuzz, base: str) -> None:
    whole = len(fuzz.image(base))
    sizes = sorted({*range(HEADER + 64), *range(HEADER, whole, 997), whole - 1})
    assert {r[0] for r in fuzz([Case(base, n) for n in sizes])} == {"TRUNCATED"}
    # The header owns up to the truncation.
    owned = [Case(base, n, True, tuple(enumerate(struct.pack("<I", n), TOTAL))) for n in sizes if n >= HEADER]
    assert {r[0] for r in fuzz(owned)} == {"TOKENIZER"}


@pytest.fixture(scope="module")
def unproven(fuzz: Fuzz, tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    """The same without the proof that added tokens are whole characters: what is left are the bounds in the code."""
    folder = tmp_path_factory.mktemp("unproven")
    opener = size.ENGINE / "lm/tokenizer_open.c"
    proof = r"&& ends_whole\(t, way\);|within_character\(node->byte\)"
    text, changed = re.subn(proof, lambda found: ";" if found[0][0] == "&" else "0", opener.read_text())
    assert changed == 2
    (folder / opener.name).write_text(text)
    others = [p for p in (size.ENGINE / "lm").glob("tokenizer*.c") if p.name != opener.name]
    sources = [Path(__file__).parent / "fuzz.c", folder / opener.name, *others]
    includes = [f"-I{size.ENGINE / 'lm'}", "-Wno-unused-function"]
    binary = compile_c(compiler("gcc"), folder / "fuzz", sources, *SANITIZED, *includes)
    return Fuzz(binary, fuzz.text, fuzz.bases)


@pytest.mark.parametrize("base", BASES)
def test_damage_is_found_by_the_checksum(fuzz: Fuzz, base: str) -> None:
    data = fuzz.image(base)
    chance = random.Random(1)
    places = [chance.randrange(HEADER, len(data)) for _ in range(60)]
    cases = [Case(base, len(data), False, ((at, data[at] ^ 1 << chance.randrange(8)),)) for at in places]
    assert {r[0] for r in fuzz(cases)} == {"CHECKSUM"}


def hostile(data: bytes, base: str, count: int, seed: int) -> list[Case]:
    """Fields with extreme values, and random bytes, under checksums that fit."""
    chance = random.Random(seed)
    cases = []
    for _ in range(count):
        patches: list[tuple[int, int]] = []
        for _ in range(chance.choice((1, 1, 1, 2, 8, 64))):
            if chance.random() < 0.2:
                at = chance.randrange(16, HEADER - 16)
            else:  # small sections are hit as often as large ones
                at = chance.choice(
                    (chance.randrange(HEADER, len(data)), len(data) - 1 - int(len(data) ** chance.random()))
                )
            if chance.random() < 0.5:
                patches.append((at, chance.choice((0, 1, 0x7F, 0x80, 0xFF, data[at] ^ 1 << chance.randrange(8)))))
            else:
                at = at // 4 * 4
                value = chance.choice((0, 1, 2, 255, 256, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF))
                patches += enumerate(struct.pack("<I", value), at)
        cases.append(Case(base, len(data), True, tuple(p for p in patches if p[0] < len(data))))
    return cases


@pytest.mark.parametrize("base", BASES)
def test_hostile_files_stay_inside_their_memory(fuzz: Fuzz, base: str) -> None:
    results = fuzz(hostile(fuzz.image(base), base, 300, 2))
    seen = {r[0] for r in results}
    assert {"OK", "TOKENIZER", "VOCABULARY"} <= seen <= {*REFUSALS, "OK", "TOKENIZER", "TRUNCATED", "VERSION"}


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_many_hostile_files_stay_inside_their_memory(fuzz: Fuzz, base: str) -> None:
    for seed in range(10, 30):
        fuzz(hostile(fuzz.image(base), base, 1000, seed))


# --- by structure -----------------------------------------------------------------------------------------------------

REFUSALS = ("VOCABULARY", "ADDED_TOKEN", "PATTERN", "NORMAL_FORM")
LETTERS = {"u8": "B", "u16": "H", "u32": "I"}
COUNTS = range(HEADER_FIELDS["flags"][1], HEADER_FIELDS["body_crc"][1], 4)  # where the header's other fields are


def header(data: bytes) -> dict[str, int]:
    return {
        name: struct.unpack_from("<I", data, HEADER_FIELDS[name][1])[0] for name in HEADER_FIELDS if name != "magic"
    }


def fields_of(section: tokenizer_spec.Section) -> str:
    """The fields of an element, as struct knows them."""
    record = tokenizer_spec.RECORDS.get(section.type)
    return "".join(LETTERS[f.type] for f in record.fields) if record else LETTERS[section.type]


def sections(data: bytes) -> dict[str, tuple[int, int, str]]:
    """Where each section begins, how many elements it has, and the fields of one."""
    head = header(data)
    places, at = {}, HEADER
    for section in tokenizer_spec.SECTIONS:
        count, fields = section.count(head), fields_of(section)
        places[section.name] = (at, count, fields)
        at += -(-count * struct.calcsize("<" + fields) // 8) * 8
    assert at == len(data)
    return {name: place for name, place in places.items() if place[1] > 0}


def element(data: bytes, place: tuple[int, int, str], n: int) -> tuple[int, list[int]]:
    at, _, fields = place
    at += n * struct.calcsize("<" + fields)
    return at, list(struct.unpack_from("<" + fields, data, at))


def near(chance: random.Random, value: int, bits: int) -> int:
    """Another value for a field: its neighbours, ends of ranges, bytes that begin and continue characters, or any."""
    choices = (value + 1, value - 1, value ^ 1 << chance.randrange(bits), 0, 1, chance.randrange(256), (1 << bits) - 1,
               0x80, 0xA0, 0xC3, 0xE2, 0xF0, 1 << bits - 1, chance.randrange(1 << bits))  # fmt: skip
    return chance.choice(choices) % (1 << bits)


def mutated(data: bytes, base: str, chance: random.Random) -> Case:
    """A few fields of records changed, under checksums that fit, with a text of what the file looks for."""
    places = sections(data)
    interesting = [name for name in ("nodes", "merges", "stages", "records", "points", "pairs") if name in places]
    patches: list[tuple[int, int]] = []
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        if chance.random() < 0.1:  # a field of the header
            at = COUNTS[chance.randrange(len(COUNTS))]
            patches += enumerate(struct.pack("<I", near(chance, struct.unpack_from("<I", data, at)[0], 32)), at)
            continue
        name = chance.choice(interesting if chance.random() < 0.5 else [*places])
        place = places[name]
        at, values = element(data, place, chance.randrange(place[1]))
        field = chance.randrange(len(values))
        bits = 8 * struct.calcsize("<" + place[2][field])
        _, other = element(data, place, chance.randrange(place[1]))  # a value that is right elsewhere
        values[field] = other[field] if chance.random() < 0.3 else near(chance, values[field], bits)
        if name == "nodes" and chance.random() < 0.5:  # another token ends here
            values[1], values[4] = chance.randrange(header(data)["vocab"]), chance.randrange(16)
        patches += enumerate(struct.pack("<" + place[2], *values), at)
    return Case(base, len(data), True, tuple(patches), searched(chance), chance.choice((20, 60, 1000, 5000)))


def searched(chance: random.Random) -> bytes:
    """A text of added tokens, spaces, marks and letters of every length, cut anywhere."""
    pieces = [*kinds.FRAGMENTS, "\u00a0", "\u3000", "\u2003", "é", "É", "😀", "\u2581", "a", " ", "\u0301"]
    text = "".join(chance.choices(pieces, k=chance.randrange(1, 10))).encode()
    begin, end = chance.randrange(4), chance.randrange(4)
    text = text[begin : len(text) - end]
    return text if text else b"\xc3"


@pytest.mark.parametrize("base", BASES)
def test_files_changed_by_structure_stay_inside_their_memory(fuzz: Fuzz, base: str) -> None:
    """C1: every record of tokenizer.bin, with texts that reach it."""
    chance = random.Random(5)
    results = fuzz([mutated(fuzz.image(base), base, chance) for _ in range(250)])
    seen = Counter(r[0] for r in results)
    assert {*seen} <= {*REFUSALS, "OK", "TOKENIZER"} and min(seen["OK"], seen["PATTERN"], seen["VOCABULARY"]) > 10
    codes = {code for r in results for code in r[1::2]}
    assert codes <= {"OK", "SCRATCH", "OUTPUT", "TOO_SLOW"}


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_many_files_changed_by_structure_stay_inside_their_memory(fuzz: Fuzz, base: str) -> None:
    chance = random.Random(6)
    for _ in range(20):
        fuzz([mutated(fuzz.image(base), base, chance) for _ in range(1000)])


CUT = ALL_BASES[len(BASES) :]  # tokenizers with these added tokens, so that nodes lie within characters
ADDED_RAW = ("é", "\u00a0b", "😀", "▁c", "z")
ADDED_NORMAL = ("X", "Éa", "\u00a0", "😀!", "d")


def with_cuts(kind: str) -> bytes:
    library = type(kinds.tokenizer(kind)).from_str(kinds.tokenizer(kind).to_str())
    for normalised, tokens in ((False, ADDED_RAW), (True, ADDED_NORMAL)):
        library.add_tokens([AddedToken(t, normalized=normalised) for t in tokens])
    return library.to_str().encode()


def cut_characters(data: bytes, base: str, chance: random.Random) -> Case:
    """One to three nodes where an added token ends now, with any options, some of which begin within a character."""
    place, patches = sections(data)["nodes"], []
    for _ in range(chance.randrange(1, 4)):
        at, values = element(data, place, chance.randrange(place[1]))
        begins = values[3] in (0xC2, 0xC3) and chance.random() < 0.5
        byte = chance.choice((0xA0, 0xA9, 0x96, 0x9F)) if begins else values[3]
        patches += enumerate(struct.pack("<" + place[2], values[0], 1, values[2], byte, chance.randrange(16)), at)
    text = "".join(chance.choices([*ADDED_RAW, *ADDED_NORMAL, "▁", "aaaa", " "], k=chance.randrange(1, 4))).encode()
    return Case(base, len(data), True, tuple(patches), text, chance.choice((20, 40, 60, 20 * len(text))))


def node_at(data: bytes, normalised: bool, path: bytes) -> int:
    """The number of the node that a path through one of the tries ends at."""
    nodes = sections(data)["nodes"]
    raw, normal = header(data)["raw_nodes"], header(data)["normal_nodes"]
    first, count = (raw, normal) if normalised else (0, raw)
    found = -1
    for byte in path:
        found = next(n for n in range(first, first + count) if element(data, nodes, n)[1][3] == byte)
        first, _, count, _, _ = element(data, nodes, found)[1]
    return found


LSTRIP, SINGLE_WORD = tokenizer_spec.ADDED["lstrip"], tokenizer_spec.ADDED["single_word"]
CRAFTED = {  # what happened without bounds: the tokenizer, nodes (normalised, path, byte there, flags), text, scratch
    "a read before the text": ("gpt2_cut", [(False, b"\xc2", 0xC2, 0), (True, b"X", 0x58, LSTRIP)], "\u00a0X", 1000),
    "a read behind the text": ("gpt2_cut", [(False, b"\xc2", 0xC2, SINGLE_WORD)], "\u00a0", 1000),
    "a write behind scratch memory": ("metaspace_cut", [(False, b"\xc2", 0x9F, 0)], "aaaa🙀", 20),
    "a read behind a copy": ("metaspace_cut", [(False, b"\xc2", 0x96, 0)], "▁", 1),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_added_tokens(fuzz: Fuzz, unproven: Fuzz, case: str) -> None:
    """C1: refused by name, and without the proof bounded by the text all the same."""
    base, changed, text, scratch = CRAFTED[case]
    data = fuzz.image(base)
    patches: list[tuple[int, int]] = []
    nodes = sections(data)["nodes"]
    for normalised, path, byte, flags in changed:
        at, (first, _, count, _, _) = element(data, nodes, node_at(data, normalised, path))
        patches += enumerate(struct.pack("<" + nodes[2], first, 1, count, byte, flags), at)
    crafted = Case(base, len(data), True, tuple(patches), text.encode(), scratch)
    assert fuzz([crafted]) == [["ADDED_TOKEN"]]
    assert unproven([crafted])[0][0] == "OK"


@pytest.mark.parametrize("base", CUT)
def test_added_tokens_that_cut_characters(fuzz: Fuzz, unproven: Fuzz, base: str) -> None:
    """C1: reads before and behind the text and writes behind scratch memory: refused, and bounded without the proof."""
    chance = random.Random(1)
    cases = [cut_characters(fuzz.image(base), base, chance) for _ in range(300)]
    refused = [r[0] for r in fuzz(cases)]
    assert {*refused} == {"OK", "ADDED_TOKEN"} and refused.count("ADDED_TOKEN") > 50
    assert [r[0] for r in unproven(cases)].count("OK") > 50
