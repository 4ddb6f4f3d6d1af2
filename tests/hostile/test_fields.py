"""Every field of every record with values that break careless arithmetic, and random changes of several."""

from __future__ import annotations

import random
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from colibri.format import spec
from tests.hostile.driver import Case, E, Fuzz
from tests.hostile.editor import BASES, HEADER, TEXT_BASES, Editor


@dataclass(frozen=True)
class Spot:
    """One scalar field in a file."""

    name: str
    at: int
    dtype: np.dtype[Any]


def spots(edit: Editor) -> list[Spot]:
    """Every scalar of every record, text left out."""
    found = []

    def walk(name: str, dtype: np.dtype[Any], at: int) -> None:
        if dtype.fields is not None:
            for field, (kind, offset, *_) in dtype.fields.items():
                walk(f"{name}.{field}", kind, at + offset)
        elif dtype.subdtype is not None:
            kind, (count,) = dtype.subdtype
            for n in range(count if kind.itemsize > 1 else 1):
                walk(f"{name}[{n}]", kind, at + n * kind.itemsize)
        else:
            found.append(Spot(name, at, dtype))

    for section, record, first, count in edit.sections():
        for n in range(count):
            walk(f"{section}[{n}]", record.dtype, first + n * record.bytes)
    return found


def nasty(spot: Spot, edit: Editor) -> list[bytes]:
    """Values that break careless arithmetic, as the field stores them; never the value it has."""
    size = spot.dtype.itemsize
    old = edit.original[spot.at : spot.at + size]
    if spot.dtype.kind == "f":
        floats = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 3e38, 1e-45]
        return [b for b in (struct.pack("<f", v) for v in floats) if b != old]
    top, value = 1 << 8 * size, int.from_bytes(old, "little")
    values = {
        *(0, 1, 2, 3, 7, 8, 9, 63, 64, 128, 1 << 16, 1 << 31, 1 << 61, 1 << 62, spec.LIMIT, spec.LIMIT + 1),
        *(top - 1, top - 2, top // 2, top // 2 - 1, top // 4),
        *(value + 1, value - 1, value + 4, value - 4, value + 64, value - 64),
        *(value * 2, value // 2, value ^ top // 2, -value),
        *(len(edit.original), edit["header.context_bytes"]),
    }
    return [v.to_bytes(size, "little") for v in sorted({v % top for v in values} - {value})]


FIELD_BASES = [
    "top2_shared",
    "many_ports",
    *(pytest.param(n, marks=pytest.mark.slow) for n in BASES if n not in ("top2_shared", "many_ports")),
]
POSITIONS = [spec.OPCODES.index(known.name) for known in spec.operations(walk="batch")]


@pytest.mark.parametrize("base", FIELD_BASES)
def test_every_field_with_every_nasty_value_is_refused_or_harmless(fuzz: Fuzz, base: str) -> None:
    edit = Editor(base)
    cases = [Case(f"{s.name} = 0x{v[::-1].hex()}", base, ((s.at, v),)) for s in spots(edit) for v in nasty(s, edit)]
    results = fuzz(cases)
    assert len({r.check for r in results}) >= 8  # many different refusals, and
    assert sum(r.check == E["OK"] for r in results) > 100  # many accepted: names, shares, strides of single rows
    assert sum(r.one == E["OK"] for r in results) > 100


@pytest.mark.parametrize("base", TEXT_BASES)
def test_every_field_of_operations_that_know_positions_is_refused_or_harmless(fuzz: Fuzz, base: str) -> None:
    edit = Editor(base)
    known = {f"ops[{n}]" for n, code in enumerate(edit.ops["code"]) if code in POSITIONS}
    fields = [
        s
        for s in spots(edit)
        if s.name.split(".")[0] in known or re.search(r"context_tokens|tail_op|max_batch", s.name)
    ]
    assert len({s.name.split(".")[-1] for s in fields}) > 20
    results = fuzz([Case(f"{s.name} = 0x{v[::-1].hex()}", base, ((s.at, v),)) for s in fields for v in nasty(s, edit)])
    assert {r.check for r in results} >= {E["OK"], E["HEADER"], E["PROGRAM"]}
    assert sum(r.one == E["OK"] for r in results) > 100


def mutation(rng: random.Random, edits: dict[str, tuple[Editor, list[Spot]]]) -> Case:
    """One to four changes of records: nasty values, values of the same field elsewhere, noise."""
    base = rng.choice(BASES)
    edit, fields = edits[base]
    patches, names = [], []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
        spot = rng.choice(fields)
        roll = rng.random()
        if roll < 0.45:
            value = rng.choice(nasty(spot, edit))
        elif roll < 0.75:  # what another record says there
            alike = [s for s in fields if s.name.split("]", 1)[-1] == spot.name.split("]", 1)[-1]]
            other = rng.choice(alike)
            value = edit.original[other.at : other.at + spot.dtype.itemsize]
        elif roll < 0.9:  # a small step
            size = spot.dtype.itemsize
            old = int.from_bytes(edit.original[spot.at : spot.at + size], "little")
            value = ((old + rng.choice([-64, -32, -16, -8, -4, -1, 1, 4, 8, 16, 32, 64])) % (1 << 8 * size)).to_bytes(
                size, "little"
            )
        else:
            at = rng.randrange(HEADER, len(edit.original) - 8)
            spot, value = Spot(f"bytes {at}", at, np.dtype("<u8")), rng.randbytes(rng.randint(1, 8))
        patches.append((spot.at, value))
        names.append(f"{spot.name} = 0x{value[::-1].hex()}")
    return Case(", ".join(names), base, tuple(patches))


def mutations(seed: int, count: int) -> list[Case]:
    edits = {base: (edit := Editor(base), spots(edit)) for base in BASES}
    rng = random.Random(seed)
    return [mutation(rng, edits) for _ in range(count)]


def test_random_mutations_are_refused_or_harmless(fuzz: Fuzz) -> None:
    results = fuzz(mutations(1, 40_000))
    assert sum(r.one == E["OK"] for r in results) > 1000


def test_results_do_not_depend_on_the_run(fuzz: Fuzz) -> None:
    cases = mutations(2, 300)
    assert fuzz(cases) == list(reversed(fuzz(list(reversed(cases)))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_mutations_are_refused_or_harmless(fuzz: Fuzz, seed: int) -> None:
    assert len(fuzz(mutations(seed, 25_000))) == 25_000
