"""A damaged or hostile tokenizer.bin is refused by name, or used inside its own memory and in bounded time."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from colibri import spec, tokenizer_bin
from tests.engine.conftest import compile_c, compiler
from tests.lm import kinds
from tools import size

BASES = ("qwen2", "llama2", "deepseek_v2", "gpt2_prefix")
HEADER = tokenizer_bin.HEADER_BYTES
TEXT = (
    kinds.SCRIPTS[:700] + "".join(kinds.FRAGMENTS) + "a" * 200 + " " * 100 + "e\u0301" * 40
).encode() + b"\xff\xc0\x80"


@dataclass(frozen=True)
class Case:
    base: str
    size: int
    repair: bool = False
    patches: tuple[tuple[int, int], ...] = ()

    def packed(self) -> bytes:
        head = struct.pack("<4I", BASES.index(self.base), self.size, self.repair, len(self.patches))
        return head + b"".join(struct.pack("<2I", *p) for p in self.patches)


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


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    folder = tmp_path_factory.mktemp("hostile")
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    archive = size.build(folder / "lm", compiler("gcc"), " ".join(flags), target="libcolibri_lm.a") / "libcolibri_lm.a"
    sources = [Path(__file__).parent / "fuzz.c", archive]
    binary = compile_c(compiler("gcc"), folder / "fuzz", sources, "-std=gnu11", *flags)
    text = folder / "text"
    text.write_bytes(TEXT)
    bases = {}
    for kind in BASES:
        bases[kind] = folder / f"{kind}.bin"
        # Small vocabularies would do, but these have every section.
        bases[kind].write_bytes(tokenizer_bin.write_c(kinds.tokenizer(kind).to_str().encode(), bos=0, eos=[0]))
    return Fuzz(binary, text, bases)


def test_valid_files_are_used(fuzz: Fuzz) -> None:
    results = fuzz([Case(base, len(fuzz.image(base)), repair) for base in BASES for repair in (False, True)])
    for result in results:
        assert result == ["OK", "OK", "OUTPUT", "OK", "OUTPUT", "SCRATCH", "OK"] or result[3] == "SCRATCH"


def test_every_flipped_header_bit_is_named(fuzz: Fuzz) -> None:
    data = fuzz.image("qwen2")
    cases = [Case("qwen2", len(data), False, ((bit // 8, data[bit // 8] ^ 1 << bit % 8),)) for bit in range(HEADER * 8)]
    for bit, result in enumerate(fuzz(cases)):
        assert result == ["VERSION" if 64 <= bit < 96 else "TOKENIZER"], f"bit {bit}"


@pytest.mark.parametrize("base", BASES)
def test_truncations_are_named(fuzz: Fuzz, base: str) -> None:
    whole = len(fuzz.image(base))
    sizes = sorted({*range(HEADER + 64), *range(HEADER, whole, 997), whole - 1})
    assert {r[0] for r in fuzz([Case(base, n) for n in sizes])} == {"TRUNCATED"}
    # The header owns up to the truncation.
    owned = [Case(base, n, True, tuple(enumerate(struct.pack("<I", n), 12))) for n in sizes if n >= HEADER]
    assert {r[0] for r in fuzz(owned)} == {"TOKENIZER"}


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
    assert {"OK", "TOKENIZER"} <= seen <= {"OK", "TOKENIZER", "TRUNCATED", "VERSION"}


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_many_hostile_files_stay_inside_their_memory(fuzz: Fuzz, base: str) -> None:
    for seed in range(10, 30):
        fuzz(hostile(fuzz.image(base), base, 1000, seed))
