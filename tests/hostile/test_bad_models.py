"""A bad file cannot hurt: every damaged or hostile model is refused by name, or runs inside its own memory.

The engine runs under AddressSanitizer and UndefinedBehaviorSanitizer in a driver of its own (fuzz.c), which gets every
model in a buffer of exactly its size; a stray access, an overflow or a hang ends the driver and fails the test with the
names of the mutations that did it.
"""

from __future__ import annotations

import random
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri._engine import ffi, lib
from colibri.errors import ModelError
from colibri.format import spec
from colibri.runtime import engine
from tests.engine.conftest import GRAPHS, compile_c, compiler, example, find_clang
from tools import size

HERE = Path(__file__).parent
TEXT_BASES = ["text", "text_window", "text_int8", "text_delta", "exchange"]
BASES = [*GRAPHS, *TEXT_BASES]
BATCH = 3
E = {name: code for code, (name, _) in enumerate(spec.ERRORS)}
HEADER = spec.HEADER.bytes
NOT_RUN = -1
REPAIR = 1


def image(name: str) -> bytes:
    """A valid model, its experts close together so that it is small."""
    return example(name, 64, BATCH).image


# --- the driver -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One mutated model: what is changed in which base, and whether the checksums are made to fit again."""

    name: str
    base: str
    patches: tuple[tuple[int, bytes], ...] = ()
    size: int | None = None
    repair: bool = True

    def packed(self) -> bytes:
        size = len(image(self.base)) if self.size is None else self.size
        head = struct.pack("<4I", BASES.index(self.base), size, REPAIR if self.repair else 0, len(self.patches))
        return head + b"".join(struct.pack("<2I", at, len(data)) + data for at, data in self.patches)


@dataclass(frozen=True)
class Result:
    """The codes of one case, NOT_RUN where the engine was not asked."""

    check: int
    diagnose: int
    one: int  # status after forward with batch 1
    most: int  # after forward with max_batch
    selftest: int


@dataclass(frozen=True)
class Fuzz:
    """The engine under sanitizers, with the best kernels and with the plain ones, and its bases."""

    binaries: tuple[Path, Path]
    bases: tuple[Path, ...]

    def __call__(self, cases: Sequence[Case]) -> list[Result]:
        """The result of every case; fails where one crashes the engine, breaks a sanitizer's rule or hangs."""
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda binary: self._run(binary, cases), self.binaries))
        crashes = [c for _, crashed in parts for c in crashed]
        assert not crashes, f"{len(crashes)} cases broke the engine (up to 5 a process):\n" + "\n".join(crashes)
        (results, _), (others, _) = parts
        assert len(results) == len(cases)
        assert results == others, "the kernels disagree"
        for case, result in zip(cases, results, strict=True):
            assert sound(result), f"{case.name}: {result}"
        return results

    def _run(self, binary: Path, cases: Sequence[Case]) -> tuple[list[Result], list[str]]:
        results: list[Result] = []
        crashes: list[str] = []
        first = 0
        while first < len(cases) and len(crashes) < 5:
            done = subprocess.run(
                [binary, *self.bases],
                input=b"".join(c.packed() for c in cases[first:]),
                capture_output=True,
                timeout=600,
                check=False,
            )
            found = [Result(*map(int, line.split())) for line in done.stdout.decode().splitlines()]
            results += found
            first += len(found)
            if done.returncode == 0:
                break
            words = [
                w
                for w in done.stderr.decode("utf-8", "replace").splitlines()
                if "ERROR" in w or "error" in w or " in c" in w
            ]
            what = f"{cases[first].base}: {cases[first].name}" if first < len(cases) else "the driver's end"
            crashes.append(f"{what}: status {done.returncode}: {' | '.join(words[:6])}")
            first += 1
        return results, crashes


def sound(result: Result) -> bool:
    """Either refused with a code and not run, or accepted and run (where it is not too much work) without complaint."""
    if not 0 <= result.check < len(spec.ERRORS):
        return False
    ran = (result.diagnose, result.one, result.most)
    if result.check not in (E["OK"], E["CHECKSUM"]):
        return ran == (NOT_RUN,) * 3 and result.selftest == NOT_RUN
    codes = {E["OK"], NOT_RUN}
    if result.most == E["CONTEXT"]:  # of a language model whose context a whole batch does not fit
        codes.add(result.most)
    # CONTEXT: of a certificate with more rows than the context has places
    return set(ran) <= codes and result.selftest in (E["OK"], E["SELFTEST"], E["CONTEXT"], NOT_RUN)


@pytest.fixture(scope="session")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    folder = tmp_path_factory.mktemp("fuzz")
    cc = find_clang() or compiler("gcc")
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    binaries = []
    for kernels, more in (("best", ""), ("plain", "-UCLB_X86")):
        built = size.build(folder / kernels, cc, " ".join([*flags, more]), target="libcolibri.a")
        sources = [HERE / "fuzz.c", built / "libcolibri.a"]
        binaries.append(compile_c(cc, folder / f"fuzz_{kernels}", sources, "-std=gnu11", *flags))
    bases = []
    for name in BASES:
        bases.append(folder / f"{name}.bin")
        bases[-1].write_bytes(image(name))
    return Fuzz((binaries[0], binaries[1]), tuple(bases))


def test_the_driver_reports_what_breaks(fuzz: Fuzz, tmp_path: Path) -> None:
    # Everything below would pass with sanitizers that say nothing.
    source = tmp_path / "over.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "int main(int argc, char **argv) { volatile char *p = calloc(8, 1); (void)argv; return p[7 + argc]; }\n",
        encoding="utf-8",
    )
    flags = ["-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    over = compile_c(find_clang() or compiler("gcc"), tmp_path / "over", [source], *flags)
    with pytest.raises(AssertionError, match="4 cases broke the engine"):
        Fuzz((over, over), fuzz.bases)([Case("a", BASES[0]), Case("b", BASES[0])])


def test_valid_models_run(fuzz: Fuzz) -> None:
    assert fuzz([Case("unchanged", name) for name in BASES]) == [Result(0, 0, 0, 0, 0)] * len(BASES)
    assert fuzz([Case("unchanged", name, repair=False) for name in BASES]) == [Result(0, 0, 0, 0, 0)] * len(BASES)


# --- damage: what a broken disk or line does --------------------------------------------------------------------------


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
    meta = int(Editor("deep").header["meta_bytes"])
    bits = [at * 8 + at % 8 for at in range(HEADER, meta)]
    results = fuzz([Case(f"bit {bit}", "deep", (flip(data, bit),), repair=False) for bit in bits])
    assert {r.check for r in results} == {E["CHECKSUM"]}


def test_every_damaged_weight_byte_is_named(fuzz: Fuzz) -> None:
    edit = Editor("top2_shared")
    first, shared = int(edit.header["meta_bytes"]), int(edit.header["shared_bytes"])
    places = [*range(first, first + shared)]
    for e in edit.experts:
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


# --- hostile fields ---------------------------------------------------------------------------------------------------


class Editor:
    """A valid model with its records as writable arrays."""

    def __init__(self, base: str) -> None:
        self.base, self.original = base, image(base)
        self.image = bytearray(self.original)
        self.header = np.frombuffer(self.image, spec.HEADER.dtype, 1)[0]
        h = self.header
        self.ports = self._records("ports", spec.PORT, int(h["inputs"]) + int(h["outputs"]))
        self.ops = self._records("ops", spec.OP, int(h["ops"]))
        self.tensors = self._records("tensors", spec.TENSOR, int(h["tensors"]))
        self.layers = self._records("layers", spec.LAYER, int(h["layers"]))
        self.experts = self._records("experts", spec.EXPERT, int(h["experts"]))

    def _records(self, name: str, record: spec.Record, count: int) -> Any:
        return np.frombuffer(self.image, record.dtype, count, int(self.header[f"{name}_offset"]))

    def sections(self) -> Iterator[tuple[str, spec.Record, int, int]]:
        """Name, record, file offset and count of every section of records, the golden rows' heads included."""
        h = self.header
        yield "header", spec.HEADER, 0, 1
        for name, record, rows in (
            ("ports", spec.PORT, self.ports),
            ("ops", spec.OP, self.ops),
            ("layers", spec.LAYER, self.layers),
            ("tensors", spec.TENSOR, self.tensors),
            ("experts", spec.EXPERT, self.experts),
        ):
            yield name, record, int(h[f"{name}_offset"]), len(rows)
        yield "golden", spec.GOLDEN, int(h["golden_offset"]), 1

    def op(self, code: str, expert: bool = False) -> int:
        """The first operation `code` of the main program, or of the experts."""
        main = int(self.header["main_ops"])
        span = range(main, len(self.ops)) if expert else range(main)
        return next(n for n in span if self.ops[n]["code"] == spec.OPCODES.index(code))

    def set(self, op: int, operand: str, **values: int | str) -> None:
        """Set fields of an operand; a space by name."""
        for name, value in values.items():
            value = value(self) if callable(value) else value
            self.ops[operand][name][op] = spec.SPACES.index(value) if isinstance(value, str) else value

    def case(self, name: str) -> Case:
        """The changes so far, as a case whose checksums are repaired."""
        changed = np.frombuffer(self.original, np.uint8) != np.frombuffer(bytes(self.image), np.uint8)
        patches = tuple((int(at), bytes(self.image[at : at + 1])) for at in np.flatnonzero(changed))
        return Case(name, self.base, patches)


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
        0,
        1,
        2,
        3,
        7,
        8,
        9,
        63,
        64,
        128,
        top - 1,
        top - 2,
        top // 2,
        top // 2 - 1,
        top // 4,
        value + 1,
        value - 1,
        value + 4,
        value - 4,
        value + 64,
        value - 64,
        value * 2,
        value // 2,
        value ^ top // 2,
        -value,
        len(edit.original),
        int(edit.header["context_bytes"]),
        spec.LIMIT,
        spec.LIMIT + 1,
        1 << 16,
        1 << 31,
        1 << 61,
        1 << 62,
    }
    return [v.to_bytes(size, "little") for v in sorted({v % top for v in values} - {value})]


FIELD_BASES = [
    "top2_shared",
    "many_ports",
    *(pytest.param(n, marks=pytest.mark.slow) for n in BASES if n not in ("top2_shared", "many_ports")),
]
POSITIONS = [spec.OPCODES.index(code) for code in ("embed", "rope", "cache", "attention", "delay", "delta")]


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


# --- attacks: what someone who knows the engine would try -------------------------------------------------------------

Attack = Callable[[Editor], None]
ATTACKS: dict[str, tuple[str, Attack, tuple[str, ...]]] = {}


def attack(base: str, *codes: str) -> Callable[[Attack], Attack]:
    """Register an attack on `base`, and the codes that may refuse it; OK among them: running it is harmless."""

    def register(change: Attack) -> Attack:
        ATTACKS[change.__name__.replace("_", " ")] = (base, change, codes)
        return change

    return register


def rewrite(base: str, name: str, codes: str | tuple[str, ...], change: Attack) -> None:
    """Register an attack too short for a name of its own."""
    ATTACKS[name] = (base, change, (codes,) if isinstance(codes, str) else codes)


def put(array: str, row: int, field: str, value: Any) -> Attack:
    """Set one field of one record."""

    def change(e: Editor) -> None:
        if array == "header":
            e.header[field] = value(e) if callable(value) else value
        else:
            getattr(e, array)[field][row] = value(e) if callable(value) else value

    return change


def grow(array: str, row: int, field: str, by: int) -> Attack:
    """Add to one field of one record."""

    def change(e: Editor) -> None:
        getattr(e, array)[field][row] += np.asarray(by).astype(getattr(e, array)[field].dtype)

    return change


def without_certificate(e: Editor) -> None:
    """Nobody else accounts for its bytes, so the information text does."""
    e.header["golden_rows"] = 0
    e.header["info_offset"], e.header["info_bytes"] = HEADER, int(e.header["meta_bytes"]) - HEADER


@attack("top2_shared", "PROGRAM")
def expert_scratch_over_the_index_lists(e: Editor) -> None:
    n, moe = e.op("linear", expert=True), e.op("moe")
    layer = e.layers[0]
    choices = BATCH * int(e.ops["rows"][moe]) * int(layer["k"])
    at = int(e.ops["work"]["offset"][moe]) + 4 * choices * (int(layer["d_out"]) + 1)  # where the expert numbers are
    e.set(n, "out", space="arena", offset=at, sample_stride=int(e.ops["dims"][n][1]))


@attack("top2_shared", "PROGRAM")
def expert_scratch_ends_inside_the_workspace(e: Editor) -> None:
    n, moe = e.op("linear", expert=True), e.op("moe")
    e.set(n, "out", space="arena", offset=int(e.ops["work"]["offset"][moe]) - 32)


@attack("top1", "ORDER")
def moe_output_over_its_own_workspace(e: Editor) -> None:
    moe = e.op("moe")
    e.set(moe, "out", space="arena", offset=int(e.ops["work"]["offset"][moe]))


@attack("top1", "PROGRAM")
def expert_writes_the_context_head(e: Editor) -> None:
    e.set(e.op("linear", expert=True), "out", space="arena", offset=64)


@attack("top1", "PROGRAM")
def operation_writes_the_context_head(e: Editor) -> None:
    e.set(e.op("linear"), "out", space="arena", offset=0)


@attack("top1", "PROGRAM")
def workspace_over_the_context_head(e: Editor) -> None:
    e.set(e.op("moe"), "work", offset=0)


@attack("top1", "PROGRAM")
def workspace_past_the_context(e: Editor) -> None:
    e.set(e.op("moe"), "work", offset=int(e.header["context_bytes"]) - 32)


@attack("top1", "PROGRAM")
def workspace_far_past_the_context(e: Editor) -> None:
    e.set(e.op("moe"), "work", offset=(1 << 64) - 32)


@attack("top1", "PROGRAM")
def workspace_unaligned(e: Editor) -> None:
    e.set(e.op("moe"), "work", offset=int(e.ops["work"]["offset"][e.op("moe")]) + 4)


@attack("top1", "PROGRAM")
def workspace_outside_the_arena(e: Editor) -> None:
    e.set(e.op("moe"), "work", space="output")


@attack("top1", "PROGRAM")
def moe_tokens_overflow(e: Editor) -> None:
    e.ops["rows"][e.op("moe")] = 1 << 30


@attack("top2_shared", "PROGRAM")
def moe_tokens_times_k_overflow(e: Editor) -> None:
    e.ops["rows"][e.op("moe")] = (1 << 31) // (BATCH * 2) + 1


@attack("top1", "PROGRAM")
def moe_inside_an_expert(e: Editor) -> None:
    e.ops[e.op("linear", expert=True)] = e.ops[e.op("moe")]


@attack("deep", "PROGRAM")
def layer_run_twice(e: Editor) -> None:
    second = [n for n in range(int(e.header["main_ops"])) if e.ops[n]["code"] == spec.OPCODES.index("moe")][1]
    e.ops["w0"][second] = 0


@attack("deep", "PROGRAM")
def layer_never_run(e: Editor) -> None:
    e.ops[e.op("moe")] = e.ops[e.op("linear")]


@attack("deep", "PROGRAM")
def layers_run_out_of_order(e: Editor) -> None:
    first, second, *_ = (n for n in range(int(e.header["main_ops"])) if e.ops[n]["code"] == spec.OPCODES.index("moe"))
    e.ops["w0"][first], e.ops["w0"][second] = 1, 0


@attack("deep", "PROGRAM")
def program_ends_before_its_layers(e: Editor) -> None:
    e.header["main_ops"] = e.op("moe")


@attack("top1", "PROGRAM")
def rows_written_over_each_other(e: Editor) -> None:
    e.set(e.op("linear"), "out", row_stride=0)


@attack("top1", "PROGRAM")
def samples_written_over_each_other(e: Editor) -> None:
    e.set(e.op("linear"), "out", sample_stride=0)


@attack("many_ports", "PROGRAM")
def elements_written_over_each_other(e: Editor) -> None:
    n = e.op("map1")
    e.ops["strides_out"][n] = 0


@attack("top1", "PROGRAM")
def rows_times_stride_overflow(e: Editor) -> None:
    n = e.op("linear")
    e.ops["rows"][n] = 1 << 30
    e.set(n, "out", row_stride=1 << 30)
    e.set(n, "a", row_stride=0)


@attack("top1", "PROGRAM")
def rows_times_the_largest_stride_wraps(e: Editor) -> None:
    n = e.op("linear")
    e.ops["rows"][n] = (1 << 30) - 1
    e.set(n, "out", row_stride=(1 << 32) - 1, sample_stride=(1 << 32) - 1)


@attack("many_ports", "PROGRAM")
def reach_of_four_axes_overflows(e: Editor) -> None:
    n = e.op("map1")
    e.ops["dims"][n], e.ops["strides_a"][n] = 1 << 30, (1 << 32) - 1


@attack("many_ports", "PROGRAM")
def read_of_one_element_far_away(e: Editor) -> None:
    e.ops["strides_a"][e.op("map2")] = 1 << 30


@attack("top1", "PROGRAM")
def offset_that_is_no_float(e: Editor) -> None:
    e.set(e.op("linear"), "a", offset=2)


@attack("top1", "PROGRAM")
def offset_that_wraps(e: Editor) -> None:
    e.set(e.op("linear"), "a", offset=(1 << 64) - 4)


@attack("top1", "PROGRAM")
def main_program_reads_an_experts_tensor(e: Editor) -> None:
    e.ops["w0"][e.op("linear")] = next(t for t in range(len(e.tensors)) if e.tensors[t]["scope"] == 1)


@attack("top1", "PROGRAM")
def expert_reads_a_shared_tensor(e: Editor) -> None:
    e.ops["w0"][e.op("linear", expert=True)] = int(e.ops["w0"][e.op("linear")])


@attack("top1", "PROGRAM")
def scope_of_an_expert_tensor_changed(e: Editor) -> None:
    # Moved to where a shared tensor may be, so that only its use gives it away.
    shared = next(t for t in range(len(e.tensors)) if e.tensors[t]["scope"] == 0)
    e.tensors[int(e.ops["w0"][e.op("linear", expert=True)])] = e.tensors[shared]


@attack("top1", "PROGRAM")
def expert_tensor_past_the_expert(e: Editor) -> None:
    e.tensors["offset"][int(e.ops["w0"][e.op("linear", expert=True)])] = int(e.experts["bytes"][0])


@attack("top1", "PROGRAM")
def expert_shrunk_below_its_tensors(e: Editor) -> None:
    e.experts["bytes"][2] = 64


@attack("many_ports", "PROGRAM")
def constant_read_without_a_tensor(e: Editor) -> None:
    n = e.op("map1")
    e.ops["w0"][n] = spec.NONE
    e.set(n, "a", space="const")


@attack("top1", "PROGRAM")
def interleaved_matrix_read_as_a_constant(e: Editor) -> None:
    n = e.op("linear")
    e.set(n, "a", space="const", offset=0, sample_stride=0)


@attack("many_ports", "PROGRAM")
def constant_written(e: Editor) -> None:
    e.set(e.op("map1"), "out", space="const", offset=0)


@attack("dense", "PROGRAM")
def input_written(e: Editor) -> None:
    e.set(e.op("softmax"), "out", space="input", offset=0, sample_stride=9)


@attack("top1", "PROGRAM")
def token_written_over_the_input(e: Editor) -> None:
    e.set(e.op("linear", expert=True), "out", space="token_in", offset=0, sample_stride=0)


@attack("top1", "PROGRAM")
def main_program_reads_a_token(e: Editor) -> None:
    e.set(e.op("linear"), "a", space="token_in", sample_stride=0, row_stride=0)


@attack("top1", "PROGRAM")
def expert_reads_the_model_input(e: Editor) -> None:
    e.set(e.op("linear", expert=True), "a", space="input", offset=0)


@attack("top1", "PROGRAM")
def token_longer_than_the_layer_says(e: Editor) -> None:
    e.layers["d_in"][0] = 5


@attack("top2_shared", "PROGRAM")
def expert_output_longer_than_the_layer_says(e: Editor) -> None:
    e.layers["d_out"][0] = 7


@attack("top2_shared", "PROGRAM")
def more_experts_chosen_than_the_workspace_holds(e: Editor) -> None:
    e.layers["k"][0] = 5


@attack("top1", "PROGRAM")
def more_tokens_in_a_tile_than_the_scratch_holds(e: Editor) -> None:
    for field in ("context_bytes", "cleared_bytes"):
        e.header[field] = e.ops["out"]["offset"][e.op("linear", expert=True)] + 4


@attack("dense", "PROGRAM")
def bias_shorter_than_the_matrix(e: Editor) -> None:
    n = e.op("linear")
    bias = int(e.ops["w1"][n])
    e.tensors["cols"][bias] -= 1
    e.tensors["bytes"][bias] -= 4


@attack("dense", "PROGRAM")
def matrix_smaller_than_the_operation_says(e: Editor) -> None:
    e.ops["dims"][e.op("linear")] += 8


@attack("dense", "PROGRAM")
def batch_larger_than_the_context_was_planned_for(e: Editor) -> None:
    e.header["max_batch"] = 1 << 16


@attack("dense", "PROGRAM")
def input_of_a_row_that_a_smaller_batch_does_not_have(e: Editor) -> None:
    # Inside max_batch rows, outside the one row that colibri_forward is given with batch_size 1.
    e.set(e.op("linear"), "a", offset=2 * 9 * 4, sample_stride=0)


@attack("many_ports", "PROGRAM")
def output_of_a_row_that_a_smaller_batch_does_not_have(e: Editor) -> None:
    floats = int(e.header["output_floats"])
    copies = [
        n
        for n in range(int(e.header["main_ops"]))
        if e.ops["dims"][n].prod() == 4
        and e.ops["code"][n] == spec.OPCODES.index("map1")
        and e.ops["out"]["space"][n] == spec.SPACES.index("output")
    ]
    e.set(copies[0], "out", offset=floats * 4, sample_stride=4)


@attack("top1", "PROGRAM")
def tokens_of_a_row_that_a_smaller_batch_does_not_have(e: Editor) -> None:
    e.set(e.op("moe"), "a", space="input", offset=2 * int(e.header["input_floats"]) * 4, sample_stride=0)


@attack("many_ports", "ORDER")
def copy_shifted_onto_itself(e: Editor) -> None:
    n = next(
        n
        for n in range(int(e.header["main_ops"]))
        if e.ops["code"][n] == spec.OPCODES.index("map1")
        and e.ops["func"][n] == 0
        and e.ops["out"]["space"][n] == spec.SPACES.index("output")
        and e.ops["out"]["offset"][n] > 0
    )
    out = e.ops["out"][n]
    e.set(n, "a", space="output", offset=int(out["offset"]) - 4, sample_stride=int(out["sample_stride"]))


@attack("top1", "ORDER")
def matrix_product_onto_its_own_input(e: Editor) -> None:
    n = e.op("linear", expert=True)
    out = e.ops["out"][n]
    e.set(n, "a", space="arena", offset=int(out["offset"]), sample_stride=int(out["sample_stride"]))


@attack("top1", "EXPERT")
def expert_without_operations(e: Editor) -> None:
    e.experts["ops"] = 0


def prune(e: Editor, number: int) -> None:
    for field in ("ops", "bytes", "macs"):
        e.experts[field][number] = 0


@attack("top1", "OK")
def pruned_expert_between_two_that_share_a_program(e: Editor) -> None:
    prune(e, 1)


@attack("top2_shared", "OK")
def pruned_expert_whose_first_operation_is_another_program(e: Editor) -> None:
    prune(e, 0)
    e.experts["first_op"][0] = len(e.ops)


@attack("top1", "OK")
def every_expert_pruned(e: Editor) -> None:
    choices = int(e.ops["rows"][e.op("moe")]) * int(e.layers["k"][0])
    e.header["worst_macs"] -= choices * int(e.experts["macs"].max())
    e.header["worst_bytes"] = e.header["shared_bytes"]
    for n in range(len(e.experts)):
        prune(e, n)


@attack("top1", "PROGRAM")
def every_expert_pruned_but_the_cost_stated(e: Editor) -> None:
    for n in range(len(e.experts)):
        prune(e, n)


@attack("top1", "EXPERT")
def pruned_expert_with_weights(e: Editor) -> None:
    prune(e, 1)
    e.experts["bytes"][1] = 64


@attack("top1", "EXPERT")
def pruned_expert_with_work(e: Editor) -> None:
    prune(e, 1)
    e.experts["macs"][1] = 1


@attack("top2_shared", "OK")
def all_experts_share_one_weight_range(e: Editor) -> None:
    e.experts["offset"] = e.experts["offset"][0]


for _field, _value, _codes in (
    ("main_ops", lambda e: int(e.header["ops"]) + 1, "HEADER"),
    ("max_batch", 0, "HEADER"),
    ("max_batch", spec.MAX_BATCH + 1, "TOO_LARGE"),
    ("total_bytes", (1 << 64) - 1, "TOO_LARGE"),
    ("context_bytes", 1 << 63, "TOO_LARGE"),
    ("context_bytes", spec.HEAD_BYTES - 1, "HEADER"),
    ("context_bytes", spec.HEAD_BYTES, "HEADER"),
    ("cleared_bytes", spec.HEAD_BYTES - 1, "HEADER"),
    ("cleared_bytes", spec.HEAD_BYTES, "PROGRAM"),
    ("cleared_bytes", lambda e: int(e.header["context_bytes"]) + 1, "HEADER"),
    ("meta_bytes", spec.MAX_META + 64, ("HEADER", "TRUNCATED")),
    ("input_floats", 0, "HEADER"),
    ("output_floats", 0, "HEADER"),
    ("input_floats", (1 << 32) - 1, "HEADER"),
    ("inputs", 0, "HEADER"),
    ("outputs", 0, "HEADER"),
    ("inputs", (1 << 32) - 1, "HEADER"),
    ("ops", (1 << 32) - 1, "HEADER"),
    ("tensors", (1 << 32) - 1, "HEADER"),
    ("layers", (1 << 32) - 1, "HEADER"),
    ("experts", spec.LIMIT + 1, "HEADER"),
    ("experts", spec.LIMIT, "HEADER"),
    ("experts", 3, ("EXPERT", "ROUTING", "HEADER")),
    ("golden_rows", (1 << 32) - 1, "HEADER"),
    ("golden_bytes", (1 << 32) - 1, "HEADER"),
    ("golden_bytes", 0, "HEADER"),
    ("info_bytes", (1 << 32) - 1, "HEADER"),
    ("meta_bytes", 0, "HEADER"),
    ("meta_bytes", (1 << 64) - 1, "HEADER"),
    ("meta_bytes", lambda e: len(e.image), ("HEADER", "TENSOR", "EXPERT")),
    ("shared_bytes", (1 << 64) - 1, "HEADER"),
    ("shared_bytes", 0, "TENSOR"),
    ("ops_offset", 0, "HEADER"),
    ("ops_offset", lambda e: int(e.header["ops_offset"]) + 4, "HEADER"),
    ("experts_offset", lambda e: int(e.header["meta_bytes"]), "HEADER"),
    ("golden_offset", (1 << 32) - 8, "HEADER"),
    ("tensors_offset", lambda e: int(e.header["layers_offset"]), ("HEADER", "TENSOR")),
    ("ops_offset", lambda e: int(e.header["ports_offset"]), "PROGRAM"),
    ("layers_offset", lambda e: int(e.header["experts_offset"]), "ROUTING"),
    ("experts_offset", lambda e: int(e.header["layers_offset"]), ("HEADER", "EXPERT")),
    ("info_offset", lambda e: int(e.header["ops_offset"]), "OK"),
):
    _what = "another" if callable(_value) else str(_value)
    rewrite("top1", f"header {_field} {_what} {len(ATTACKS)}", _codes, put("header", 0, _field, _value))

for _array, _field, _value, _codes in (
    ("layers", "tile", spec.EXPERT_TILE + 1, "ROUTING"),
    ("layers", "tile", 0, "ROUTING"),
    ("layers", "tile", 1 << 31, "ROUTING"),
    ("layers", "k", 0, "ROUTING"),
    ("layers", "k", 6, "ROUTING"),
    ("layers", "k", (1 << 32) - 1, "ROUTING"),
    ("layers", "experts", 0, "ROUTING"),
    ("layers", "experts", 6, "ROUTING"),
    ("layers", "experts", 4, "EXPERT"),
    ("layers", "score", len(spec.SCORES), "ROUTING"),
    ("layers", "score", (1 << 32) - 1, "ROUTING"),
    ("layers", "normalize", len(spec.NORMALIZE), "ROUTING"),
    ("layers", "normalize", spec.NORMALIZE.index("softmax"), "ROUTING"),
    ("layers", "score", spec.SCORES.index("logit"), "ROUTING"),
    ("layers", "groups", 0, "ROUTING"),
    ("layers", "groups", 2, "ROUTING"),  # of 5 experts
    ("layers", "groups", (1 << 32) - 1, "ROUTING"),
    ("layers", "kept_groups", 0, "ROUTING"),
    ("layers", "kept_groups", 2, "ROUTING"),
    ("layers", "group_rule", len(spec.ENUMS["group_rule"]), "ROUTING"),
    ("layers", "capacity", spec.LIMIT + 1, "ROUTING"),
    ("layers", "apply", len(spec.ENUMS["apply"]), "ROUTING"),
    ("layers", "epsilon", np.nan, "ROUTING"),
    ("layers", "epsilon", -1.0, "ROUTING"),
    ("layers", "epsilon", np.inf, "ROUTING"),
    ("layers", "scale", np.nan, "ROUTING"),
    ("layers", "scale", np.inf, "ROUTING"),
    ("layers", "scale", -np.inf, "ROUTING"),
    ("layers", "first_expert", 1, "ROUTING"),
    ("layers", "d_in", 0, "ROUTING"),
    ("layers", "d_out", 0, "ROUTING"),
    ("layers", "d_in", spec.LIMIT + 1, "ROUTING"),
    ("layers", "d_out", spec.LIMIT, "PROGRAM"),
    ("experts", "layer", 1, "EXPERT"),
    ("experts", "offset", 0, "EXPERT"),
    ("experts", "offset", (1 << 64) - 64, "EXPERT"),
    ("experts", "bytes", (1 << 64) - 1, "EXPERT"),
    ("experts", "first_op", 0, "EXPERT"),
    ("experts", "first_op", (1 << 32) - 1, "EXPERT"),
    ("experts", "ops", (1 << 32) - 1, "EXPERT"),
    ("tensors", "scope", len(spec.SCOPES), "TENSOR"),
    ("tensors", "scope", (1 << 32) - 1, "TENSOR"),
    ("tensors", "layout", len(spec.LAYOUTS), "TENSOR"),
    ("tensors", "layout", 0, "TENSOR"),
    ("tensors", "rows", 0, "TENSOR"),
    ("tensors", "cols", 0, "TENSOR"),
    ("tensors", "rows", spec.LIMIT + 1, "TENSOR"),
    ("tensors", "cols", spec.LIMIT, "TENSOR"),
    ("tensors", "rows", spec.LIMIT, "TENSOR"),
    ("tensors", "bytes", (1 << 64) - 1, "TENSOR"),
    ("tensors", "offset", 0, "TENSOR"),
    ("tensors", "offset", (1 << 64) - 64, "TENSOR"),
    ("ports", "rank", 7, "HEADER"),
    ("ports", "rank", (1 << 32) - 1, "HEADER"),
    ("ports", "dims", 0, "HEADER"),
    ("ports", "dims", 1 << 16, "HEADER"),
    ("ports", "dims", 1 << 31, "HEADER"),
    ("ports", "floats", 0, "HEADER"),
    ("ports", "floats", (1 << 32) - 1, "HEADER"),
    ("ports", "rank", 0, "HEADER"),
):
    rewrite("top2_shared", f"{_array} {_field} {_value} {len(ATTACKS)}", _codes, put(_array, 0, _field, _value))

rewrite("top2_shared", "expert off its alignment", "EXPERT", grow("experts", 1, "offset", 32))
rewrite("top2_shared", "tensor off its alignment", "TENSOR", grow("tensors", 0, "offset", 32))
rewrite("top2_shared", "two ports of one model too long", "HEADER", grow("ports", 1, "floats", 1))


# Loops, and products of two computed matrices.


def floats_of(e: Editor) -> int:
    return int(e.header["output_floats"])


def loop_macs(e: Editor) -> int:
    """Multiply-accumulates of the main program outside MoE layers, loops as often as they say."""
    total, steps, left = 0, 1, 0
    for op in e.ops[: int(e.header["main_ops"])]:
        if op["code"] == spec.OPCODES.index("loop"):
            steps, left = int(op["dims"][0]), int(op["dims"][1])
            continue
        if spec.OPCODES[op["code"]].startswith("linear"):
            total += (steps if left else 1) * int(op["rows"]) * int(op["dims"][0]) * int(op["dims"][1])
        left -= left > 0
    return total


def loop_attack(name: str, codes: str | tuple[str, ...], change: Attack) -> None:
    """An attack on a model with loops whose cost the header owns up to."""

    def costed(e: Editor) -> None:
        before = loop_macs(e)
        change(e)
        e.header["worst_macs"] = (int(e.header["worst_macs"]) + loop_macs(e) - before) % (1 << 64)

    rewrite("steps", name, codes, costed)


def loop(at: int, value: Any) -> Attack:
    """Set a size of the first loop: 0 its steps, 1 its operations, 2 its direction."""
    return lambda e: e.ops["dims"].__setitem__((e.op("loop"), at), value(e) if callable(value) else value)


def inside(operand: str, **values: Any) -> Attack:
    """Set fields of an operand of the last operation in the first loop, which writes the next state."""
    return lambda e: e.set(e.op("loop") + int(e.ops["dims"][e.op("loop")][1]), operand, **values)


def product(operand: str, **values: Any) -> Attack:
    """Set fields of an operand of the first product of two computed matrices."""

    def change(e: Editor) -> None:
        n = next(n for n, op in enumerate(e.ops) if op["code"] == 0 and op["w0"] == spec.NONE)
        e.set(n, operand, **{k: v(e, n) if callable(v) else v for k, v in values.items()})

    return change


for _value in (0, 1 << 20, spec.LIMIT, spec.LIMIT + 1, (1 << 32) - 1):
    loop_attack(f"loop of {_value} steps", "PROGRAM", loop(0, _value))
    loop_attack(f"loop of {_value} operations", "PROGRAM", loop(1, _value))
loop_attack("loop of one step", "ORDER", loop(0, 1))
loop_attack("loop of one step more", "ORDER", loop(0, 7))
loop_attack("loop the other way", "ORDER", loop(2, 1))
loop_attack("loop of no direction", "PROGRAM", loop(2, 2))
loop_attack("loop of fewer operations", "ORDER", loop(1, 3))
loop_attack("loop over another loop", "PROGRAM", loop(1, 12))
loop_attack("loop over a layer of experts", "PROGRAM", lambda e: (
    e.ops["dims"].__setitem__((e.op("moe") - 2, 1), 2), e.ops["dims"].__setitem__((e.op("moe") - 2, 0), 1),
    e.ops["code"].__setitem__(e.op("moe") - 2, spec.OPCODES.index("loop"))))  # fmt: skip
loop_attack("loop to the end of the program", "PROGRAM", loop(1, lambda e: int(e.header["main_ops"]) - e.op("loop")))
loop_attack("loop in a text", "OK", lambda e: e.header.__setitem__("context_tokens", 64))
loop_attack("loop across the tail", "PROGRAM", put("header", 0, "tail_op", lambda e: e.op("loop") + 2))
for _stride in (11, 1 << 12, spec.LIMIT, spec.LIMIT + 1, (1 << 32) - 1):
    for _operand in ("a", "out"):
        loop_attack(
            f"{_operand} {_stride} apart in steps",
            "ORDER" if _stride == 11 else "PROGRAM",
            inside(_operand, step_stride=_stride),
        )
loop_attack("every step writes the same state", "ORDER", inside("out", step_stride=0))
loop_attack("a step outside loops", "OK", lambda e: e.set(e.op("quantize"), "a", step_stride=1 << 20))
loop_attack("states into the output beyond its row", "PROGRAM",
            inside("out", space="output", offset=0, sample_stride=floats_of, step_stride=1 << 10))  # fmt: skip
loop_attack("states into the input", "PROGRAM", inside("out", space="input", offset=0))
loop_attack("a loop in an expert over its neighbour's operations", "PROGRAM", lambda e: e.ops["dims"].__setitem__(
    (e.op("loop", expert=True), 1), 40))  # fmt: skip
loop_attack("a product without a matrix", "PROGRAM", product("b", space="none"))
loop_attack("a product with a matrix in the input", ("PROGRAM", "OK"), product("b", space="input", offset=0))
loop_attack("a product with a constant matrix", "PROGRAM", product("b", space="const", offset=0))
loop_attack("a matrix that ends behind the context", "PROGRAM",
            product("b", offset=lambda e, n: int(e.header["context_bytes"]) // 64 * 64 - 64))  # fmt: skip
loop_attack("matrices far apart", "PROGRAM", product("b", sample_stride=1 << 20))
loop_attack("a matrix in the context's head", "PROGRAM", product("b", offset=0))


def matrix_sized(at: int, value: int) -> Attack:
    """Set the columns (0) or rows (1) of the first computed matrix."""

    def change(e: Editor) -> None:
        n = next(n for n, op in enumerate(e.ops) if op["code"] == 0 and op["w0"] == spec.NONE)
        e.ops["dims"][n][at] = value

    return change


for _size in (0, 1 << 16, spec.LIMIT, spec.LIMIT + 1, (1 << 32) - 1):
    for _at, _name in enumerate(("columns", "rows")):
        loop_attack(f"a computed matrix of {_size} {_name}", "PROGRAM", matrix_sized(_at, _size))


# Language models.


def text_macs(e: Editor) -> int:
    """Multiply-accumulates of attention on the last token of a full context, and of the delta rule."""
    tokens, total = int(e.header["context_tokens"]), 0
    for op in e.ops:
        rows, key, value, window = (int(n) for n in (op["rows"], *op["dims"][:2], op["strides_a"][0]))
        if op["code"] == spec.OPCODES.index("attention"):
            total += rows * (key + value) * min(tokens, window or tokens)
        if op["code"] == spec.OPCODES.index("delta"):
            total += 3 * rows * key * value
    return total


def text_attack(name: str, codes: str | tuple[str, ...], change: Attack, base: str = "text") -> None:
    """An attack whose cost the header owns up to, so that something else must refuse it."""

    def costed(e: Editor) -> None:
        before = text_macs(e)
        change(e)
        e.header["worst_macs"] = (int(e.header["worst_macs"]) + text_macs(e) - before) % (1 << 64)

    rewrite(base, name, codes, costed)


def of(code: str, operand: str, **values: Any) -> Attack:
    """Set fields of an operand of the first operation `code`; a value may be a function of the editor."""
    return lambda e: e.set(e.op(code), operand, **values)


def sized(code: str, at: int, value: Any, field: str = "dims") -> Attack:
    """Set one size (or stride) of the first operation `code`."""

    def change(e: Editor) -> None:
        e.ops[field][e.op(code)][at] = value(e) if callable(value) else value

    return change


def several_rows(apart: int) -> Attack:
    """The first delay recalls two time steps."""

    def change(e: Editor) -> None:
        n = e.op("delay")
        width = int(e.ops["dims"][n][0])
        e.ops["rows"][n], e.ops["strides_a"][n][0] = 2, apart
        e.set(n, "out", row_stride=width, sample_stride=2 * width, offset=spec.HEAD_BYTES)

    return change


for _code in ("linear", "rmsnorm", "embed", "moe", "attention"):
    for _operand in ("a", "out"):
        text_attack(
            f"{_code} before the tail has its {_operand} in the output", "PROGRAM",
            of(_code, _operand, space="output", offset=0, sample_stride=floats_of, row_stride=0),
        )  # fmt: skip
for _code in ("embed", "moe", "rope", "cache", "attention", "delay", "delta"):
    _base = "text_delta" if _code == "delta" else "text"
    text_attack(f"{_code} in the tail", "PROGRAM", put("header", 0, "tail_op", lambda e, c=_code: e.op(c)), _base)
    if _code != "moe":
        text_attack(
            f"{_code} in an expert", "PROGRAM",
            lambda e, c=_code: e.ops.__setitem__(e.op("linear", expert=True), e.ops[e.op(c)]), _base,
        )  # fmt: skip
text_attack("tail behind the program", "PROGRAM", put("header", 0, "tail_op", lambda e: int(e.header["main_ops"]) + 1))
text_attack("no tail", "OK", put("header", 0, "tail_op", lambda e: int(e.header["main_ops"])))
text_attack("no context", "PROGRAM", put("header", 0, "context_tokens", 0))
text_attack("context beyond the limit", "HEADER", put("header", 0, "context_tokens", spec.LIMIT + 1))
text_attack("context beyond the table and the pages", "PROGRAM", put("header", 0, "context_tokens", spec.LIMIT))
text_attack("context beyond the table by one", "PROGRAM", put("header", 0, "context_tokens", 81))
for _value in (1, 2, 3, 63, 64, 65):
    text_attack(f"context of {_value}", "OK", put("header", 0, "context_tokens", _value))
text_attack("batch beyond the pages of a window", "PROGRAM", put("header", 0, "max_batch", 1 << 10), "text_window")
for _code in ("cache", "attention"):
    for _at, _name in enumerate(("key", "value", "heads", "positions")):
        for _value in (0, 1 << 20, 1 << 27, spec.LIMIT, spec.LIMIT + 1, 1 << 31, (1 << 32) - 1, (1 << 32) - 64):
            text_attack(f"{_code} with {_name} {_value}", "PROGRAM", sized(_code, _at, _value))
    text_attack(f"{_code} of one page for two", "PROGRAM", sized(_code, 3, 64))
    text_attack(f"{_code} of one page for a window", "PROGRAM", sized(_code, 3, 64), "text_window")
    text_attack(f"{_code} of no whole pages", "PROGRAM", sized(_code, 3, 127))
    text_attack(f"{_code} with an endless window", "PROGRAM", sized(_code, 0, spec.LIMIT + 1, "strides_a"))
    text_attack(f"{_code} with a wider window", ("OK", "PROGRAM"), sized(_code, 0, 79, "strides_a"), "text_window")
    text_attack(f"{_code} in an unknown format", "PROGRAM", lambda e, c=_code: put("ops", e.op(c), "func", 3)(e))
    text_attack(f"{_code} in a larger format", ("OK", "PROGRAM"),
                lambda e, c=_code: put("ops", e.op(c), "func", 0)(e), "text_int8")  # fmt: skip
for _code in ("cache", "attention", "delay", "delta"):
    _base = "text_delta" if _code == "delta" else "text"
    for _name, _value in (
        ("head", 0),
        ("end", lambda e: int(e.header["context_bytes"]) // 32 * 32),
        ("nowhere", (1 << 64) - 32),
        ("an odd place", lambda e, c=_code: int(e.ops["work"]["offset"][e.op(c)]) + 4),
    ):
        text_attack(f"{_code} keeps at {_name}", "PROGRAM", of(_code, "work", offset=_value), _base)
    text_attack(f"{_code} keeps in the output", "PROGRAM", of(_code, "work", space="output"), _base)
text_attack(
    "attention of more heads than share keys", "PROGRAM", lambda e: grow("ops", e.op("attention"), "rows", 1)(e)
)
text_attack("cache of more rows than heads", "PROGRAM", lambda e: grow("ops", e.op("cache"), "rows", 1)(e))
text_attack("fewer sinks than heads", "PROGRAM", lambda e: grow("ops", e.op("attention"), "rows", 2)(e), "text_window")
text_attack("queries times samples overflow", "PROGRAM", lambda e: put("ops", e.op("attention"), "rows", spec.LIMIT)(e))
text_attack("rope turns an odd number", "PROGRAM", sized("rope", 1, 3))
text_attack("rope turns more than there is", "PROGRAM", sized("rope", 1, 10))
text_attack("rope turns nothing", "OK", sized("rope", 1, 0))
text_attack("rope without a table", "PROGRAM", lambda e: put("ops", e.op("rope"), "w0", spec.NONE)(e))
text_attack(
    "rope with a matrix", "PROGRAM", lambda e: put("ops", e.op("rope"), "w0", int(e.ops["w0"][e.op("embed")]))(e)
)
text_attack("embed without a table", "PROGRAM", lambda e: put("ops", e.op("embed"), "w0", spec.NONE)(e))
text_attack(
    "embed from a vector", "PROGRAM", lambda e: put("ops", e.op("embed"), "w0", int(e.ops["w0"][e.op("rope")]))(e)
)
text_attack("embed of another width", "PROGRAM", sized("embed", 0, 8))
text_attack("embed of several rows", "PROGRAM", lambda e: put("ops", e.op("embed"), "rows", 2)(e))
for _layout in range(len(spec.LAYOUTS) + 1):
    if _layout != spec.LAYOUTS.index("rows8_i8"):
        text_attack(
            f"embed table in layout {_layout}",
            ("TENSOR", "PROGRAM"),
            lambda e, n=_layout: put("tensors", int(e.ops["w0"][e.op("embed")]), "layout", n)(e),
            "text_int8",
        )
text_attack("delay of fewer slots than it looks back", "PROGRAM", sized("delay", 2, 4))
text_attack("delay of nothing", "PROGRAM", sized("delay", 1, 0))
for _value in (1 << 20, spec.LIMIT, (1 << 32) - 1):
    text_attack(f"delay of {_value} steps", "PROGRAM", sized("delay", 1, _value))
    text_attack(f"delay of {_value} slots", "PROGRAM", sized("delay", 2, _value))
text_attack("delay of more rows than fit apart", "PROGRAM", lambda e: put("ops", e.op("delay"), "rows", 2)(e))
for _value in (3, 1 << 20, (1 << 32) - 1):
    text_attack(f"delay of rows {_value} apart, from the future", "PROGRAM", several_rows(_value))
text_attack("delay of two rows onto another value", "ORDER", several_rows(2))
_kept = {"offset": lambda e: int(e.ops["work"]["offset"][e.op("delay")]) + 4, "space": "arena", "sample_stride": 0}
text_attack("delay that only stores", "ORDER", of("delay", "out", space="none"))
text_attack("delay that only recalls", "OK", of("delay", "a", space="none"))
text_attack("delay that stores from a constant", "PROGRAM", of("delay", "a", space="const"))
text_attack("delay that recalls into the input", "PROGRAM", of("delay", "out", space="input"))
text_attack("delay of what it keeps", "ORDER", of("delay", "a", **_kept))
_state = {"offset": lambda e: int(e.ops["work"]["offset"][e.op("delta")])}
for _name, _codes, _change in (
    *((f"{name} {value}", "PROGRAM", sized("delta", at, value))
      for at, name in enumerate(("key", "value", "key heads"))
      for value in (0, 1 << 20, 1 << 27, spec.LIMIT, spec.LIMIT + 1, 1 << 31, (1 << 32) - 1)),
    ("a longer key", "PROGRAM", sized("delta", 0, 7)),
    ("a shorter key", "OK", sized("delta", 0, 5)),
    ("a longer value", "PROGRAM", sized("delta", 1, 6)),
    ("a shorter value", ("OK", "ORDER"), sized("delta", 1, 4)),
    ("key heads that do not serve all values", "PROGRAM", sized("delta", 2, 3)),
    ("more key heads than there are", "ORDER", sized("delta", 2, 4)),
    ("fewer key heads", "OK", sized("delta", 2, 1)),
    ("more heads than it keeps", "PROGRAM", lambda e: put("ops", e.op("delta"), "rows", 6)(e)),
    ("fewer heads", ("OK", "ORDER"), lambda e: put("ops", e.op("delta"), "rows", 2)(e)),
    ("no values", "PROGRAM", of("delta", "b", space="none")),
    ("values from a constant", "PROGRAM", of("delta", "b", space="const")),
    ("values out of its state", "ORDER", of("delta", "b", **_state)),
    ("keys out of its state", "ORDER", of("delta", "a", **_state)),
    ("results onto its state", "ORDER", of("delta", "out", **_state)),
    ("results onto its keys", "ORDER", of("delta", "out", offset=lambda e: int(e.ops["a"]["offset"][e.op("delta")]))),
    ("a state where others write", "ORDER", of("delta", "work", offset=spec.HEAD_BYTES)),
):  # fmt: skip
    text_attack(f"delta with {_name}", _codes, _change, "text_delta")
text_attack(
    "queries out of the cache",
    "PROGRAM",
    of("attention", "a", offset=lambda e: int(e.ops["work"]["offset"][e.op("attention")])),
)


# Encoder-decoders: the first attention is the encoder's, the second the decoder's to its own text, the third the other.


def nth_attention(e: Editor, n: int) -> int:
    return int(np.flatnonzero(e.ops["code"] == spec.OPCODES.index("attention"))[n])


def biased_by(n: int, tensor: Callable[[Editor], int]) -> Attack:
    return lambda e: put("ops", nth_attention(e, n), "w1", tensor(e))(e)


def seeing(n: int, sight: int, window: int = 0) -> Attack:
    return lambda e: e.ops["strides_a"][nth_attention(e, n)].__setitem__(slice(2), (window, sight))


_past, _all, _source = range(3)
for _name, _codes, _change in (
    ("an unknown sight", "PROGRAM", seeing(1, 3)),
    ("an encoder that looks at a source text", "PROGRAM", seeing(0, _source)),
    ("all, through a window", "PROGRAM", seeing(0, _all, 5)),
    ("a source text through a window", "PROGRAM", seeing(2, _source, 5)),
    ("biases for both ways, used for one", "ORDER", seeing(0, _past)),
    ("biases for one way, used for both", "PROGRAM", seeing(1, _all)),
    ("biases beside a source text", "PROGRAM", biased_by(2, lambda e: int(e.ops["w1"][nth_attention(e, 1)]))),
    ("biases in a matrix", "PROGRAM", biased_by(1, lambda e: int(e.ops["w0"][e.op("linear")]))),
    ("biases from another section", "PROGRAM", biased_by(1, lambda e: len(e.tensors) - 1)),
    ("no biases", "OK", biased_by(1, lambda e: spec.NONE)),
    ("an encoder of no operations", "PROGRAM", put("header", 0, "encoder_ops", 0)),
    ("an encoder of one operation", "ORDER", put("header", 0, "encoder_ops", 1)),
    ("an encoder that reaches into the tail", "PROGRAM",
     put("header", 0, "encoder_ops", lambda e: e.header["tail_op"] + 1)),
    ("an encoder longer than the program", "PROGRAM", put("header", 0, "encoder_ops", (1 << 32) - 1)),
    ("a context longer than the biases", "PROGRAM", put("header", 0, "context_tokens", 81)),
    ("a shorter context", "OK", put("header", 0, "context_tokens", 5)),
    ("an encoder that writes the output", "PROGRAM",
     of("rmsnorm", "out", space="output", offset=0, sample_stride=floats_of, row_stride=0)),
):  # fmt: skip
    text_attack(f"encoder-decoder: {_name}", _codes, _change, "exchange")
text_attack("a source text without an encoder", "PROGRAM", seeing(0, _source))


@attack("text", "OK", "PROGRAM")
def attention_over_its_own_cache(e: Editor) -> None:
    n = e.op("attention")
    e.set(n, "out", offset=int(e.ops["work"]["offset"][n]))


@attack("text", "PROGRAM")
def attention_that_costs_less_than_it_says(e: Editor) -> None:
    e.header["worst_macs"] -= np.uint64(1)


@attack("text", "OK")
def tokens_of_two_numbers(e: Editor) -> None:
    # colibri_lm_evaluate, which hands over one number a token, must not be fooled.
    e.header["input_floats"] = 2
    without_certificate(e)
    e.ports["floats"][0] = e.ports["dims"][0][0] = 2
    e.set(e.op("embed"), "a", sample_stride=2)


def _each_operation() -> Iterator[tuple[str, int]]:
    seen = set()
    for base in BASES:
        edit = Editor(base)
        for n in range(len(edit.ops)):
            code = int(edit.ops["code"][n])
            if code not in seen:
                seen.add(code)
                yield base, n


for _base, _n in _each_operation():
    _code = spec.OPCODES[int(Editor(_base).ops["code"][_n])]
    for _space in (*range(len(spec.SPACES), len(spec.SPACES) + 2), spec.SPACES.index("none"), (1 << 32) - 1):
        for _operand in ("a", "b" if _code == "cache" else "out"):
            if _code in ("delay", "loop") and _space == 0:
                continue  # a delay may only store, or only recall; a loop has no operands
            rewrite(
                _base,
                f"{_code} {_operand} in space {_space}",
                "PROGRAM",
                lambda e, n=_n, o=_operand, s=_space: e.set(n, o, space=s),
            )
    for _value in (0, spec.LIMIT + 1, (1 << 32) - 1):
        rewrite(_base, f"{_code} with {_value} rows", "PROGRAM", put("ops", _n, "rows", _value))
    if _code in ("linear", "map1", "map2", "reduce"):
        _count = len({"map2": spec.BINARY, "reduce": spec.REDUCE}.get(_code, spec.UNARY))
        for _value in (_count, (1 << 16) - 1):
            rewrite(_base, f"{_code} with function {_value}", "PROGRAM", put("ops", _n, "func", _value))
    if _code != "moe":
        for _value in (0, spec.LIMIT + 1, (1 << 32) - 1):
            rewrite(_base, f"{_code} of sizes {_value}", "PROGRAM", put("ops", _n, "dims", _value))
        for _field in ("w0", "w1"):
            rewrite(_base, f"{_code} {_field} beyond the tensors", "PROGRAM", put("ops", _n, _field, 1 << 20))
    rewrite(
        _base,
        f"{_code} turned into operation {len(spec.OPCODES)}",
        "PROGRAM",
        put("ops", _n, "code", len(spec.OPCODES)),
    )
    rewrite(_base, f"{_code} turned into operation 65535", "PROGRAM", put("ops", _n, "code", (1 << 16) - 1))


def macs(ops: np.ndarray) -> np.uint64:
    """Multiply-accumulates of operations on one sample."""
    products = ops[ops["code"] == spec.OPCODES.index("linear")]
    return np.sum(products["rows"].astype(np.uint64) * products["dims"][:, 0] * products["dims"][:, 1], dtype=np.uint64)


def many_experts(count: int) -> Case:
    """A sound layer of `count` experts, each with the same `count` operations: 256 bytes apiece in the file."""
    edit = Editor("top1")
    h, main, moe = edit.header, int(edit.header["main_ops"]), edit.op("moe")
    logits = spec.align(8 * count + 100_000, 32)  # one of the three, again and again
    again = edit.ops[moe].copy()
    again["code"], again["rows"], again["w0"], again["w1"] = spec.OPCODES.index("map1"), 1, spec.NONE, spec.NONE
    again["a"], again["out"] = edit.ops["b"][moe], edit.ops["b"][moe]
    again["out"]["offset"], again["out"]["sample_stride"] = logits, count
    again["a"]["row_stride"] = again["out"]["row_stride"] = 0
    again["b"] = again["work"] = np.zeros((), spec.OPERAND.dtype)
    again["dims"], again["strides_a"], again["strides_out"] = (1, 1, 1, count), 0, (count, count, count, 1)
    body = np.concatenate([np.repeat(edit.ops[main : main + 1], count - 1), edit.ops[main + 1 : main + 2]])
    words = 3 * BATCH * int(edit.ops["rows"][moe]) * int(edit.layers["k"][0]) + 2 * count + 1
    scratch = int(edit.ops["work"]["offset"][moe]) + 4 * spec.align(words, 8)  # behind the workspace, which grows
    body["out"]["offset"][:-1] = body["a"]["offset"][-1] = scratch
    ops = np.concatenate([edit.ops[:moe], [again], edit.ops[moe:main], body])
    experts = np.repeat(edit.experts[:1], count)
    layers = edit.layers.copy()
    experts["first_op"], experts["ops"], layers["experts"] = main + 1, count, count
    old_macs, experts["macs"] = experts["macs"][0], macs(ops[main + 1 :])
    h["worst_macs"] += ops["rows"][moe + 1] * layers["k"][0] * (experts["macs"][0] - old_macs)
    touched = min(count, int(ops["rows"][moe + 1]) * int(layers["k"][0]))
    h["worst_bytes"] = int(h["shared_bytes"]) + touched * int(experts["bytes"][0])
    ops["b"]["offset"][moe + 1], ops["b"]["sample_stride"][moe + 1], ops["b"]["row_stride"][moe + 1] = logits, count, 0
    h["main_ops"] += 1
    h["tail_op"] += 1
    old = int(h["meta_bytes"])
    room = spec.align(ops.nbytes + experts.nbytes + layers.nbytes, 64)
    experts["offset"] += np.uint64(room)
    edit.tensors["offset"][edit.tensors["scope"] == 0] += np.uint64(room)
    h["ops_offset"], h["ops"] = old, len(ops)
    h["experts_offset"], h["experts"] = old + ops.nbytes, count
    h["layers_offset"] = old + ops.nbytes + experts.nbytes
    h["meta_bytes"] += np.uint64(room)
    h["total_bytes"] += np.uint64(room)
    h["context_bytes"] = h["cleared_bytes"] = logits + 4 * BATCH * count
    without_certificate(edit)
    added = (ops.tobytes() + experts.tobytes() + layers.tobytes()).ljust(room, b"\0")
    data = bytes(edit.image[:old]) + added + bytes(edit.image[old:])
    return Case(f"{count} experts of {count} operations", "top1", ((0, data),), len(data))


def test_a_layer_of_many_experts_is_sound(fuzz: Fuzz) -> None:
    assert fuzz([many_experts(50)])[0].check == E["OK"]


@pytest.mark.slow
def test_checking_takes_time_in_proportion_to_the_file(fuzz: Fuzz) -> None:
    # 10 MB; the driver's alarm ends a check that takes experts times operations.
    assert fuzz([many_experts(40_000)])[0].check in range(len(spec.ERRORS))


@pytest.mark.parametrize("field", ["worst_macs", "macs"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_statement_of_the_work_is_refused(fuzz: Fuzz, field: str, change: int) -> None:
    edit = Editor("top1")
    record = edit.header if field == "worst_macs" else edit.experts[0]
    record[field] = int(record[field]) + change
    assert fuzz([edit.case(field)])[0].check == E["PROGRAM"]


def test_a_reduction_may_not_read_its_input_again_for_every_row(fuzz: Fuzz) -> None:
    # Every row of the output would be a sum over half the context: work in the square of the memory.
    edit = Editor("many_ports")
    n, half = edit.op("reduce"), 1 << 16
    edit.header["context_bytes"] = 8 * half + spec.HEAD_BYTES
    edit.ops["rows"][n] = half // BATCH
    edit.ops["dims"][n], edit.ops["strides_a"][n], edit.ops["strides_out"][n] = (1, half, 1, 0), (0, 1, 0, 0), 0
    edit.set(n, "a", space="arena", offset=spec.HEAD_BYTES, sample_stride=0, row_stride=0)
    edit.set(n, "out", space="arena", offset=spec.HEAD_BYTES + 4 * half, sample_stride=half // BATCH, row_stride=1)
    assert fuzz([edit.case("sums")])[0].check == E["PROGRAM"]


def test_a_model_without_a_certificate_does_not_pass_the_selftest(fuzz: Fuzz) -> None:
    edit = Editor("top1")
    without_certificate(edit)
    (result,) = fuzz([edit.case("no certificate")])
    assert (result.check, result.selftest) == (E["OK"], E["SELFTEST"])


RESERVED = {"header": "HEADER", "experts": "EXPERT"}


@pytest.mark.parametrize("place", RESERVED)
def test_reserved_fields_must_be_zero(fuzz: Fuzz, place: str) -> None:
    edit = Editor("top1")
    if place == "header":
        edit.header["reserved"][3] = 1
    else:
        getattr(edit, place)["reserved"][0] = 1
    assert fuzz([edit.case(place)])[0].check == E[RESERVED[place]]


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("value", [1, spec.UNARY.index("silu"), len(spec.UNARY), 0xFFFF])
def test_only_map2_has_a_function_around_it_and_a_known_one(fuzz: Fuzz, value: int, place: str) -> None:
    for base in BASES:
        for n, code in enumerate(Editor(base).ops["code"]):
            edit = Editor(base)
            edit.ops[place][n] = value
            good = spec.OPCODES[code] == "map2" and value < len(spec.UNARY)
            assert (fuzz([edit.case(f"{base} {n}")])[0].check == E["PROGRAM"]) != good


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused_or_harmless(fuzz: Fuzz, name: str) -> None:
    base, change, codes = ATTACKS[name]
    edit = Editor(base)
    change(edit)
    case = edit.case(name)
    assert case.patches, "the attack changes nothing"
    (result,) = fuzz([case])
    assert spec.ERRORS[result.check][0] in codes


def golden(e: Editor, row: int = 0) -> tuple[int, int]:
    """File offsets of a golden row's head and of its choices."""
    at = int(e.header["golden_offset"]) + row * int(e.header["golden_bytes"])
    return at, at + spec.GOLDEN.bytes + 4 * int(e.header["input_floats"])


@pytest.mark.parametrize("row", [0, 1, -1])
@pytest.mark.parametrize("what", ["choice", "digest", "input"])
def test_certificate_that_lies_fails_the_selftest(fuzz: Fuzz, what: str, row: int) -> None:
    edit = Editor("top2_shared")
    head, choices = golden(edit, row % int(edit.header["golden_rows"]))
    at = {"choice": choices, "digest": head, "input": head + spec.GOLDEN.bytes + 3}[what]
    edit.image[at] ^= 1
    assert fuzz([edit.case(what)]) == [Result(0, 0, 0, 0, E["SELFTEST"])]


@pytest.mark.parametrize("count", [0, 1, -1, 1 << 31, (1 << 32) - 1])
def test_certificate_with_a_wrong_number_of_choices_is_refused(fuzz: Fuzz, count: int) -> None:
    edit = Editor("top2_shared")
    head, _ = golden(edit)
    old = int.from_bytes(edit.image[head + 4 : head + 8], "little")
    edit.image[head + 4 : head + 8] = ((old + count if abs(count) == 1 else count) % (1 << 32)).to_bytes(4, "little")
    assert fuzz([edit.case(f"{count} choices")])[0].check == E["HEADER"]


# --- misuse of the functions ------------------------------------------------------------------------------------------


def aligned(data: bytes) -> Any:
    memory = engine.aligned(max(1, len(data)), 64)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return memory


def pointer(memory: Any) -> Any:
    return ffi.from_buffer("uint8_t[]", memory)


@dataclass
class Session:
    """A context with its memory, driven straight through the C functions."""

    model: Any
    memory: Any
    ctx: Any

    @staticmethod
    def of(base: str) -> Session:
        model = aligned(image(base))
        memory = engine.aligned(int(lib.colibri_model_size(pointer(model))), 64)
        ctx = lib.colibri_init(pointer(memory), len(memory), pointer(model))
        assert ctx != ffi.NULL
        return Session(model, memory, ctx)


@pytest.mark.parametrize(
    ("batch", "code"),
    [(0, "BATCH"), (-1, "BATCH"), (-(1 << 31), "BATCH"), (BATCH + 1, "BATCH"), ((1 << 31) - 1, "BATCH"), (BATCH, "OK")],
)
def test_forward_refuses_a_batch_it_cannot_run(batch: int, code: str) -> None:
    s = Session.of("dense")
    x, y = np.ones((BATCH, 9), np.float32), np.full((BATCH, 3), -7.0, np.float32)
    before = bytes(s.memory[128:])
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), batch)
    assert s.ctx.status == E[code]
    assert (y == -7.0).all() == (code != "OK")
    assert (bytes(s.memory[128:]) == before) == (code != "OK")
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), 1)
    assert s.ctx.status == E["OK"], "a context goes on after misuse"


@pytest.mark.parametrize(("has_input", "has_output"), [(False, True), (True, False), (False, False)])
def test_forward_refuses_null_and_leaves_the_output(has_input: bool, has_output: bool) -> None:
    s = Session.of("dense")
    x, y = np.ones((BATCH, 9), np.float32), np.full((BATCH, 3), -7.0, np.float32)
    lib.colibri_forward(
        s.ctx,
        ffi.from_buffer("float[]", x) if has_input else ffi.NULL,
        ffi.from_buffer("float[]", y) if has_output else ffi.NULL,
        1,
    )
    assert s.ctx.status == E["NULL"]
    assert (y == -7.0).all()


def test_null_and_freed_contexts_do_nothing() -> None:
    s = Session.of("dense")
    x, y = np.ones((BATCH, 9), np.float32), np.full((BATCH, 3), -7.0, np.float32)
    scratch = ffi.from_buffer("float[]", y)
    lib.colibri_free(ffi.NULL)
    lib.colibri_forward(ffi.NULL, ffi.from_buffer("float[]", x), scratch, 1)
    assert lib.colibri_selftest(ffi.NULL, scratch) == E["NULL"]
    assert lib.colibri_selftest(s.ctx, ffi.NULL) == E["NULL"]
    lib.colibri_free(s.ctx)
    before = bytes(s.memory)
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), scratch, 1)
    lib.colibri_forward(s.ctx, ffi.NULL, ffi.NULL, 99)
    lib.colibri_free(s.ctx)
    assert lib.colibri_selftest(s.ctx, scratch) == E["NULL"]
    assert bytes(s.memory) == before
    assert (y == -7.0).all()


@pytest.mark.parametrize(
    ("shift", "size", "code"),
    [
        (0, 0, "OK"),
        (0, -1, "MEMORY"),
        (0, None, "MEMORY"),
        (1, 0, "MISALIGNED"),
        (4, 0, "MISALIGNED"),
        (32, 0, "MISALIGNED"),
        (None, 0, "NULL"),
    ],
)
def test_init_names_what_is_wrong_with_the_memory(shift: int | None, size: int | None, code: str) -> None:
    model = aligned(image("top1"))
    need = int(lib.colibri_model_size(pointer(model)))
    block = engine.aligned(need + 64, 64)
    block[:] = 0x5A
    at = ffi.NULL if shift is None else pointer(block) + shift
    given = 0 if size is None else need + size
    assert lib.colibri_diagnose(at, given, pointer(model)) == E[code]
    ctx = lib.colibri_init(at, given, pointer(model))
    assert (ctx == ffi.NULL) == (code != "OK")
    assert (block == 0x5A).all() == (code != "OK"), "a refused block is left untouched"


@pytest.mark.parametrize(
    ("shift", "code"), [(1, "MISALIGNED"), (8, "MISALIGNED"), (32, "MISALIGNED"), (None, "NULL"), (0, "OK")]
)
def test_every_function_names_what_is_wrong_with_the_model_pointer(shift: int | None, code: str) -> None:
    data = image("top1")
    room = aligned(data + bytes(64))
    if shift:
        room[shift : shift + len(data)] = np.frombuffer(data, np.uint8)
    at = ffi.NULL if shift is None else pointer(room) + shift
    memory = engine.aligned(1 << 16, 64)
    assert lib.colibri_check(at, len(data), lib.COLIBRI_CHECK_WEIGHTS) == E[code]
    assert lib.colibri_check(at, len(data), lib.COLIBRI_CHECK_STRUCTURE) == E[code]
    assert lib.colibri_diagnose(pointer(memory), len(memory), at) == E[code]
    assert (lib.colibri_init(pointer(memory), len(memory), at) == ffi.NULL) == (code != "OK")
    assert (lib.colibri_model_size(at) == 0) == (code != "OK")
    assert lib.colibri_get_num_experts(at) == (4 if code == "OK" else -E[code])


@pytest.mark.parametrize("code", [*range(len(spec.ERRORS)), -1, len(spec.ERRORS), 1 << 30, -(1 << 31), (1 << 31) - 1])
def test_error_texts_are_the_tables_and_never_missing(code: int) -> None:
    name, text = (ffi.string(f(code)).decode() for f in (lib.colibri_error_name, lib.colibri_error_text))
    if 0 <= code < len(spec.ERRORS):
        assert f"{name}: {text}" == spec.error_text(code)
    else:
        assert name == "COLIBRI_ERR_UNKNOWN" and text


# --- files, from Python -----------------------------------------------------------------------------------------------


def flipped_weight(data: bytes) -> bytes:
    at = int(np.frombuffer(data, spec.HEADER.dtype, 1)[0]["meta_bytes"])
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "TRUNCATED"),
    "short text": (lambda data: b"hello\n", "TRUNCATED"),
    "text": (lambda data: b"This is no model.\n" * 100, "MAGIC"),
    "header alone": (lambda data: data[:HEADER], "TRUNCATED"),
    "last byte missing": (lambda data: data[:-1], "TRUNCATED"),
    "other version": (lambda data: data[:8] + bytes([spec.FORMAT_VERSION + 1]) + data[9:], "VERSION"),
    "flipped header bit": (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "HEADER"),
    "flipped metadata bit": (lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:], "CHECKSUM"),
    "flipped weight bit": (flipped_weight, "CHECKSUM"),
    "flipped expert bit": (lambda data: data[:-64] + bytes([data[-64] ^ 1]) + data[-63:], "CHECKSUM"),
}


@pytest.mark.parametrize("what", FILES)
def test_load_names_the_file_and_what_is_wrong_with_it(tmp_path: Path, what: str) -> None:
    damage, code = FILES[what]
    path = tmp_path / "strange name.bin"
    path.write_bytes(damage(image("top1")))
    with pytest.raises(ModelError, match=r"strange name\.bin") as caught:
        engine.load(path)
    assert caught.value.code == E[code]
    assert spec.error_text(E[code]) in str(caught.value)
    with pytest.raises(ModelError) as caught:
        engine.load(path.read_bytes())
    assert caught.value.code == E[code]


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.bin does not exist"):
        engine.load(tmp_path / "absent.bin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match=r"folder is a directory without a model\.bin"):
        engine.load(tmp_path / "folder")
    (tmp_path / "folder" / "model.bin").mkdir()
    with pytest.raises(ModelError, match="folder"):
        engine.load(tmp_path / "folder")


def sealed(data: bytearray) -> bytes:
    """`data` with the checksums of its header and metadata repaired."""
    header = np.frombuffer(data, spec.HEADER.dtype, 1)[0]
    header["meta_crc"] = zlib.crc32(data[HEADER : int(header["meta_bytes"])])
    header["header_crc"] = zlib.crc32(data[: HEADER - 4])
    return bytes(data)


@pytest.mark.parametrize("name", [n for n, (_, _, codes) in ATTACKS.items() if "OK" not in codes][::3])
def test_load_refuses_what_the_engine_refuses(name: str) -> None:
    base, change, _ = ATTACKS[name]
    edit = Editor(base)
    change(edit)
    meta = int(edit.header["meta_bytes"])
    if not HEADER <= meta <= len(edit.image):
        edit.header["meta_crc"] = 0
        edit.header["header_crc"] = zlib.crc32(edit.image[: HEADER - 4])
    else:
        sealed(edit.image)
    with pytest.raises(ModelError, match="model") as caught:
        engine.load(bytes(edit.image))
    assert caught.value.code not in (None, E["OK"])


INFO_TEXTS = {
    "not JSON": b"{",
    "not UTF-8": b'{"\xff": 1}',
    "not an object": b"[1, 2]",
    "deeply nested": b"[" * 100_000,
    "long number": b"1" * 100_000,
    "name of a surprising type": b'{"name": {"a": [1]}}',
}


@pytest.mark.parametrize("what", INFO_TEXTS)
def test_information_text_cannot_break_the_reader(what: str) -> None:
    edit = Editor("dense")
    text = INFO_TEXTS[what].ljust(int(edit.header["info_bytes"]))
    # The text goes to the end of the metadata, which grows by whole alignments; the weights move behind it.
    old, room = int(edit.header["meta_bytes"]), spec.align(len(text), 64)
    for name in ("meta_bytes", "total_bytes"):
        edit.header[name] += np.uint64(room)
    edit.tensors["offset"] += np.uint64(room)
    edit.header["info_offset"], edit.header["info_bytes"] = old, len(text)
    data = sealed(bytearray(bytes(edit.image[:old]) + text.ljust(room) + bytes(edit.image[old:])))
    with pytest.raises(ModelError, match="information text") as caught:
        engine.load(data)
    assert caught.value.code == E["HEADER"]


# --- every error has been seen ----------------------------------------------------------------------------------------


def check_of(data: bytes) -> int:
    memory = aligned(data)
    return int(lib.colibri_check(pointer(memory), len(data), lib.COLIBRI_CHECK_WEIGHTS))


def attacked(name: str) -> int:
    base, change, _ = ATTACKS[name]
    edit = Editor(base)
    change(edit)
    return check_of(sealed(edit.image))


def selftest_of_a_lie() -> int:
    edit = Editor("top1")
    edit.image[golden(edit)[0]] ^= 1
    data = sealed(edit.image)
    try:
        engine.load(data).selftest()
    except ModelError as error:
        return int(error.code or 0)
    return 0


def status_of_forward(s: Session, batch: int = 1) -> int:
    x, y = np.ones((BATCH, 10), np.float32), np.ones((BATCH, 3), np.float32)
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), batch)
    return int(s.ctx.status)


def status_of_batch(batch: int) -> int:
    return status_of_forward(Session.of("dense"), batch)


def status_of_another_size() -> int:
    s = Session.of("dense")
    s.ctx.input_size += 1
    return status_of_forward(s)


def status_of_a_running_context() -> int:
    s = Session.of("dense")
    s.ctx.busy = 1
    return status_of_forward(s)


def selftest_amid_a_text() -> int:
    s = Session.of("text")
    s.ctx.position = 1
    return int(lib.colibri_selftest(s.ctx, ffi.new("float[]", int(s.ctx.output_size))))


def diagnosis(shift: int, size: int) -> int:
    model, memory = aligned(image("top1")), engine.aligned(1 << 16, 64)
    return int(lib.colibri_diagnose(pointer(memory) + shift, size, pointer(model)))


def header_attack(field: str) -> str:
    return next(n for n in ATTACKS if n.startswith(f"header {field} "))


OPTIONAL_TESTS = [Path(__file__).resolve().parents[1] / layer for layer in ("host", "lm", "text")]
PROVOKED: dict[str, Callable[[], int]] = {
    "OK": lambda: check_of(image("top1")),
    "NULL": lambda: int(lib.colibri_check(ffi.NULL, 0, lib.COLIBRI_CHECK_STRUCTURE)),
    "MISALIGNED": lambda: diagnosis(32, 1 << 15),
    "MAGIC": lambda: check_of(b"X" * 512),
    "VERSION": lambda: check_of(image("top1")[:8] + b"\xff" + image("top1")[9:]),
    "TRUNCATED": lambda: check_of(image("top1")[:-1]),
    "HEADER": lambda: attacked(header_attack("inputs")),
    "CHECKSUM": lambda: check_of(flipped_weight(image("top1"))),
    "PROGRAM": lambda: attacked("workspace unaligned"),
    "TENSOR": lambda: attacked(header_attack("shared_bytes 0")),
    "ROUTING": lambda: attacked(header_attack("layers_offset")),
    "EXPERT": lambda: attacked("expert off its alignment"),
    "MEMORY": lambda: diagnosis(0, 128),
    "TOO_LARGE": lambda: attacked(header_attack("total_bytes")),
    "BATCH": lambda: status_of_batch(0),
    "SELFTEST": selftest_of_a_lie,
    "ORDER": lambda: attacked("copy shifted onto itself"),
    "DAMAGED": status_of_another_size,
    "BUSY": status_of_a_running_context,
    "UNFINISHED": selftest_amid_a_text,
}
# One needs a big-endian machine, the other a build that computes otherwise: tests/engine/test_arithmetic.py.
NOT_HERE = {"BIG_ENDIAN", "ARITHMETIC"}


@pytest.mark.parametrize("name", [name for name, _ in spec.ERRORS if name not in NOT_HERE])
def test_every_error_can_be_provoked(name: str) -> None:
    if name in PROVOKED:
        assert spec.ERRORS[PROVOKED[name]()][0] == name
    else:  # of the host layer or the tokenizer, which have libraries and tests of their own
        tests = [path for folder in OPTIONAL_TESTS for path in folder.glob("test_*.py")]
        provoked = "".join(path.read_text(encoding="utf-8") for path in tests)
        assert re.search(rf'== \(*"{name}"|, "{name}"|"OK", "{name}"|!= COLIBRI_ERR_{name}\b', provoked), (
            f"no test provokes COLIBRI_ERR_{name}: add the way to PROVOKED, or a test to tests/host, lm or text"
        )
