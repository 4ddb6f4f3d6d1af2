"""Damage, as a broken disk or line does it: every flipped bit and every missing byte is named."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from colibri.format import spec
from tests.engine.conftest import compile_c, compiler, find_clang
from tests.hostile.driver import SANITIZERS, Case, E, Fuzz, Result
from tests.hostile.editor import BASES, HEADER, Editor, image


def test_the_driver_reports_what_breaks(fuzz: Fuzz, tmp_path: Path) -> None:
    # Everything below would pass with sanitizers that say nothing.
    source = tmp_path / "over.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "int main(int argc, char **argv) { volatile char *p = calloc(8, 1); (void)argv; return p[7 + argc]; }\n",
        encoding="utf-8",
    )
    over = compile_c(find_clang() or compiler("gcc"), tmp_path / "over", [source], "-std=gnu11", *SANITIZERS)
    with pytest.raises(AssertionError, match="4 cases broke the engine"):
        Fuzz((over, over), fuzz.bases)([Case("a", BASES[0]), Case("b", BASES[0])])


def test_valid_models_run(fuzz: Fuzz) -> None:
    assert fuzz([Case("unchanged", name) for name in BASES]) == [Result(0, 0, 0, 0, 0)] * len(BASES)
    assert fuzz([Case("unchanged", name, repair=False) for name in BASES]) == [Result(0, 0, 0, 0, 0)] * len(BASES)


def flip(data: bytes, bit: int) -> tuple[int, bytes]:
    return bit // 8, bytes([data[bit // 8] ^ 1 << bit % 8])


def test_every_flipped_header_bit_is_named(fuzz: Fuzz) -> None:
    data = image("deep")
    results = fuzz([Case(f"bit {bit}", "deep", (flip(data, bit),), repair=False) for bit in range(HEADER * 8)])
    for bit, result in enumerate(results):
        want = E["MAGIC"] if bit < 64 else E["VERSION"] if bit < 96 else E["HEADER"]
        assert result.check == want, f"bit {bit}"


def test_every_damaged_metadata_byte_is_named(fuzz: Fuzz) -> None:
    data = image("deep")
    meta = Editor("deep")["header.meta_bytes"]
    bits = [at * 8 + at % 8 for at in range(HEADER, meta)]
    results = fuzz([Case(f"bit {bit}", "deep", (flip(data, bit),), repair=False) for bit in bits])
    assert {r.check for r in results} == {E["CHECKSUM"]}


def test_every_damaged_weight_byte_is_named(fuzz: Fuzz) -> None:
    edit = Editor("top2_shared")
    first, shared = edit["header.meta_bytes"], edit["header.shared_bytes"]
    places = [*range(first, first + shared)]
    for e in edit.records["experts"]:
        places += range(int(e["offset"]), int(e["offset"]) + int(e["bytes"]))
    assert len(places) > 5000
    cases = [
        Case(f"byte {at}", "top2_shared", (flip(edit.original, at * 8 + at % 8),), repair=False)
        for at in [*places[::7], places[-1]]
    ]
    assert {r.check for r in fuzz(cases)} == {E["CHECKSUM"]}


def test_every_truncation_is_named(fuzz: Fuzz) -> None:
    results = fuzz([Case(f"{size} bytes", "top1", size=size, repair=False) for size in range(len(image("top1")))])
    assert {r.check for r in results} == {E["TRUNCATED"]}


def test_truncation_the_header_owns_up_to_is_refused(fuzz: Fuzz) -> None:
    at = spec.HEADER.dtype.fields["total_bytes"][1]  # type: ignore[index]
    sizes = range(HEADER, len(image("top1")))
    results = fuzz([Case(f"{size} bytes", "top1", ((at, struct.pack("<Q", size)),), size) for size in sizes])
    assert {r.check for r in results} <= {E["HEADER"], E["TENSOR"], E["EXPERT"]}


def test_bytes_after_the_model_are_not_looked_at(fuzz: Fuzz) -> None:
    data = image("top1")
    assert fuzz([Case("longer", "top1", ((len(data), b"\xff" * 77),), len(data) + 77)]) == [Result(0, 0, 0, 0, 0)]
