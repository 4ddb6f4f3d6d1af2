"""Programs nobody would export: work without a bound, memory nobody wrote, rows that meet, names that are none."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri._engine import ffi, lib
from colibri.errors import ModelError
from colibri.format import package, spec
from colibri.lowering.program import Program
from colibri.runtime import engine
from tests.engine.conftest import GRAPHS, example
from tests.hostile.programs import HEAD, arena, at, model, move, op, tensor

E = {name: code for code, (name, _) in enumerate(spec.ERRORS)}


def check(data: bytes) -> str:
    """The name of what the engine says of a file."""
    memory = engine.aligned(len(data), spec.ALIGN_MODEL)
    memory[:] = np.frombuffer(data, np.uint8)
    error = lib.colibri_check(ffi.from_buffer("uint8_t[]", memory), len(data), lib.COLIBRI_CHECK_STRUCTURE)
    return spec.ERRORS[error][0]


# --- C3: work ---------------------------------------------------------------------------------------------------------


def bomb(pairs: int, **header: int) -> bytes:
    """Loops of elementwise operations: little to read, hours to run."""
    steps, elements = 1 << 18, 1 << 12
    ops = [move(at("input", 0, 1), arena(0, elements), 1)]
    ops += [move(arena(0), arena(1), elements - 1)]
    for _ in range(pairs):
        ops += [op("loop", dims=(steps, 1)), move(arena(0), arena(0), elements, "gelu")]
    ops += [move(arena(0), at("output", 0, 1), 1)]
    return model(ops, 1, 1, steps, **header)


def test_loops_of_elementwise_operations_count_as_work() -> None:
    """C3: what a forward takes is bounded by what the header says, and the header by the program."""
    honest = 1 + ((1 << 12) - 1) + 3 * (1 << 18) * (1 << 12) + 1
    inside = [op("loop", dims=(4, 1)), move(arena(0), arena(0), 8)]
    assert check(model([move(at("input", 0, 8), arena(0), 8), *inside, move(arena(0), at("output", 0, 8), 8)], 8, 8, 64,
                       worst_work=8 + 32 + 8)) == "OK"  # fmt: skip
    assert check(bomb(3, worst_work=0)) == "PROGRAM"
    assert check(bomb(3, worst_work=honest - 1)) == "PROGRAM"


def counted(program: Program) -> int:
    """Elementary steps of the costliest route, counted operation by operation and step by step."""

    def of(ops: list[Any]) -> int:
        total = n = 0
        while n < len(ops):
            body = ops[n + 1 : n + 1 + ops[n]["body"]] if ops[n].code == "loop" else [ops[n]]
            for _ in range(ops[n]["steps"] if ops[n].code == "loop" else 1):
                total += sum(one(each) for each in body)
            n += len(body) + (ops[n].code == "loop")
        return total

    def one(o: Any) -> int:
        if o.code in ("linear", "linear_q"):
            outliers = 0
            if (tensor := o["outliers"]) is not None:
                cells = -(-tensor.rows // 64) * -(-tensor.cols // 1024)
                outliers = cells * min((tensor.bytes - 4 * (cells + 1)) // 4, 65536)
            return int(o.rows * (o["inputs"] * o["outputs"] + o["outputs"] + outliers))
        if o.code == "moe":
            layer = program.layers[o["layer"]]
            own = [e for e in program.experts if e.layer == o["layer"]]
            most = max(of(program.expert_ops[e.first_op : e.first_op + e.ops]) for e in own)
            experts = layer.router.experts
            return int(experts + o.rows * layer.router.k * (experts + layer.d_out + most))
        return int(o.rows * np.prod(o.sizes() if o.code in ("unary", "binary", "reduce") else o.sizes()[:1]))

    return of(program.ops)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_header_states_the_work_of_the_costliest_route(name: str) -> None:
    """C3: one step less than the program's own count is refused."""
    export = example(name, 64, 3)
    header = np.frombuffer(export.image, spec.HEADER.dtype, 1)[0]
    assert counted(export.program) == export.program.work == int(header["worst_work"])
    image = bytearray(export.image)
    changed = np.frombuffer(image, spec.HEADER.dtype, 1)[0]
    changed["worst_work"] -= np.uint64(1)
    changed["header_crc"] = package.zlib.crc32(image[: spec.HEADER.bytes - 4])
    assert check(bytes(image)) == "PROGRAM"


def test_a_caller_can_limit_the_work() -> None:
    """C3: a file from elsewhere may be refused for what it says it takes."""
    image = example("top1", 64, 3).image
    work = int(np.frombuffer(image, spec.HEADER.dtype, 1)[0]["worst_work"])
    loaded = engine.load(image, most_work=work)
    assert lib.colibri_worst_work(ffi.from_buffer("uint8_t[]", loaded.package.data)) == work
    assert lib.colibri_worst_work(ffi.NULL) == 0
    with pytest.raises(ModelError, match=f"up to {work:,} steps"):
        engine.load(image, most_work=work - 1)


# --- C4, C13: what is read has been written, for the same row ---------------------------------------------------------

IN, OUT = at("input", 0, 8), at("output", 0, 8)
LOAD, STORE = move(IN, arena(0, 8), 8), move(arena(0, 8), OUT, 8)
_WEIGHT = tensor(0, 8 * 4 + 8 * 32, "rows8_i8", 8, 32)


def int8(*before: Any, a: Any, **values: Any) -> list[Any]:
    return [*before, op("linear_q", a=a, out=OUT, w0=0, dims=(32, 8), **values)]


def quantized(**values: Any) -> Any:
    return op("quantize", **{"a": arena(64), "out": arena(0), "dims": (32,), **values})


FILL = move(arena(0, 8), arena(64), 8)
WIDE = op(
    "unary", a=at("input", 0, 8), out=arena(64), dims=(1, 1, 4, 8), strides_a=(0, 0, 0, 1), strides_out=(32, 32, 8, 1)
)

PROGRAMS: dict[str, tuple[str, list[Any]]] = {
    "loaded and stored": ("OK", [LOAD, STORE]),
    "memory nobody wrote": ("ORDER", [STORE]),
    "one float more than was written": ("ORDER", [move(IN, arena(0, 8), 7), STORE]),
    "one float before what was written": ("ORDER", [move(IN, arena(1, 8), 7), STORE]),
    "written in two pieces": ("OK", [move(IN, arena(0, 8), 3), move(IN, arena(3, 8), 5), STORE]),
    "a middle piece is missing": ("ORDER", [move(IN, arena(0, 8), 3), move(IN, arena(4, 8), 4), STORE]),
    "written afterwards": ("ORDER", [STORE, LOAD]),
    "output read before it is written": ("ORDER", [move(OUT, OUT, 8)]),
    "output read after it is written": ("OK", [move(IN, OUT, 8), move(OUT, OUT, 8, "relu")]),
    "output not all written": ("ORDER", [move(IN, OUT, 7)]),
    "another row's": ("ORDER", [LOAD, move(arena(0, 0), OUT, 8)]),
    "the row before": ("ORDER", [move(IN, arena(8, 8), 8), move(arena(0, 8), OUT, 8)]),
    "rows of another width": ("ORDER", [LOAD, move(arena(0, 4), OUT, 8)]),
    "in place": ("OK", [LOAD, move(arena(0, 8), arena(0, 8), 8, "tanh"), STORE]),
    "one float further": ("ORDER", [LOAD, move(arena(0, 8), arena(1, 8), 7, "tanh"), STORE]),
    "the sum of neighbours": ("ORDER", [
        LOAD, op("binary", "add", a=arena(0, 8), b=arena(1, 8), out=arena(2, 8), dims=(1, 1, 1, 6),
                 strides_a=(0, 0, 0, 1),
                 strides_b=(0, 0, 0, 1), strides_out=(6, 6, 6, 1)), STORE]),
    "a row over the next": ("ORDER", [
        LOAD, op("softmax", rows=2, a=arena(0, 8, 4), out=arena(2, 8, 4), dims=(4,)), STORE]),
    "rows in place": ("OK", [LOAD, op("softmax", rows=2, a=arena(0, 8, 4), out=arena(0, 8, 4), dims=(4,)), STORE]),
    "columns side by side": ("OK", [
        LOAD, op("softmax", rows=2, a=arena(0, 8, 4), out=arena(2, 8, 4), dims=(2,)), STORE]),
    "columns that overlap": ("ORDER", [
        LOAD, op("softmax", rows=2, a=arena(0, 8, 4), out=arena(1, 8, 4), dims=(2,)), STORE]),
    "a function before the other operand is read": ("ORDER", [
        LOAD, op("binary", "mul", a=arena(0, 8), b=arena(0, 8), out=arena(0, 8), dims=(1, 1, 1, 8),
                 strides_a=(0, 0, 0, 1),
                 strides_b=(0, 0, 0, 1), strides_out=(8, 8, 8, 1), before=3), STORE]),
    "a square in place": ("OK", [
        LOAD, op("binary", "mul", a=arena(0, 8), b=arena(0, 8), out=arena(0, 8), dims=(1, 1, 1, 8),
                 strides_a=(0, 0, 0, 1),
                 strides_b=(0, 0, 0, 1), strides_out=(8, 8, 8, 1)), STORE]),
    "a reduction onto its input": ("ORDER", [
        LOAD, op("reduce", "sum", a=arena(0, 8), out=arena(0, 8), dims=(1, 8, 1),
                 strides_a=(8, 1, 1), strides_out=(1, 0, 1)), STORE]),
    "a state from step to step": ("OK", [
        move(IN, arena(0, 32), 8), op("loop", dims=(3, 1)), move(arena(0, 32, 0, 8), arena(8, 32, 0, 8), 8, "tanh"),
        move(arena(24, 32), OUT, 8)]),
    "a state that begins nowhere": ("ORDER", [
        op("loop", dims=(3, 1)), move(arena(0, 32, 0, 8), arena(8, 32, 0, 8), 8, "tanh"), move(arena(24, 32), OUT, 8)]),
    "a state from the last step back": ("OK", [
        move(IN, arena(24, 32), 8), op("loop", dims=(3, 1, 1)), move(arena(8, 32, 0, 8), arena(0, 32, 0, 8), 8, "tanh"),
        move(arena(0, 32), OUT, 8)]),
    "a state the wrong way round": ("ORDER", [
        move(IN, arena(0, 32), 8), op("loop", dims=(3, 1, 1)), move(arena(0, 32, 0, 8), arena(8, 32, 0, 8), 8, "tanh"),
        move(arena(24, 32), OUT, 8)]),
    "steps to come": ("ORDER", [
        move(IN, arena(24, 32), 8), op("loop", dims=(3, 2)), move(IN, arena(0, 32, 0, 8), 8),
        move(arena(8, 32, 0, 8), arena(32, 8), 8), move(arena(32, 8), OUT, 8)]),
    "an exponential with a parameter": ("PROGRAM", [LOAD, move(arena(0, 8), arena(0, 8), 8, "exp", alpha=1.0), STORE]),
    "an exponential": ("OK", [LOAD, move(arena(0, 8), arena(0, 8), 8, "exp"), STORE]),
}  # fmt: skip

QUANTIZED: dict[str, tuple[str, list[Any]]] = {
    "quantised": ("OK", int8(WIDE, quantized(), a=arena(0))),
    "floats as a quantised row": ("ORDER", int8(WIDE, move(arena(64), arena(0), 10), a=arena(0))),
    "the input as a quantised row": ("ORDER", int8(a=at("input", 0, 8))),
    "a quantised row of another length": ("ORDER", int8(WIDE, quantized(dims=(31,)), a=arena(0))),
    "a quantised row and one float": ("ORDER", int8(WIDE, quantized(), move(IN, arena(9), 1), a=arena(0))),
    "a quantised row, shifted": ("ORDER", int8(WIDE, quantized(out=arena(1)), a=arena(0))),
    "quantised onto its floats": ("ORDER", int8(WIDE, quantized(out=arena(64)), a=arena(64))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_element_read_was_written_for_the_same_row(name: str) -> None:
    """C4, C13: unwritten memory, other rows, overlapping operands, orders of a loop."""
    code, ops = PROGRAMS[name]
    assert check(model(ops, 8, 8, 128, max_batch=3)) == code


@pytest.mark.parametrize("name", QUANTIZED)
def test_only_what_was_quantised_is_read_as_a_quantised_row(name: str) -> None:
    """C13: kernels agree on records, not on any other bytes."""
    code, ops = QUANTIZED[name]
    floats = 32 if "input" in name else 8
    ops = [o.copy() for o in ops]
    for o in ops:
        for operand in ("a", "b"):
            if o[operand]["space"] == spec.SPACES.index("input"):
                o[operand]["sample_stride"] = floats
    shared = b"\0" * int(_WEIGHT["bytes"])
    assert check(model(ops, floats, 8, 128, [_WEIGHT], shared, worst_macs=256)) == code


def test_initialising_clears_what_lay_in_the_block() -> None:
    """C4: gaps between the elements of a stretch are zeros, whatever the caller's memory held."""
    apart = op(
        "unary", a=at("input", 0, 4), out=arena(0), dims=(1, 1, 1, 4), strides_a=(0, 0, 0, 1), strides_out=(9, 9, 9, 3)
    )
    loaded = engine.load(model([apart, move(arena(0), at("output", 0, 10), 10)], 4, 10, 16))
    pointer = ffi.from_buffer("uint8_t[]", loaded.package.data)
    memory = engine.aligned(loaded.context_bytes, 64)
    memory[:] = 0x5A
    context = lib.colibri_init(ffi.from_buffer("uint8_t[]", memory), len(memory), pointer)
    x, y = np.arange(1, 5, dtype=np.float32), np.empty(10, np.float32)
    lib.colibri_forward(context, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), 1)
    assert y.tolist() == [1, 0, 0, 2, 0, 0, 3, 0, 0, 4]


def test_looking_back_ends() -> None:
    """C13: the proof of a program that looks back from every operation to its beginning is given up."""
    early = move(IN, arena(0, 8), 8)
    far = [move(arena(0, 8), arena(8 + 8 * (n % 2), 8), 8) for n in range(20_000)]
    assert check(model([early, *far, STORE], 8, 8, 128)) == "ORDER"
    assert check(model([early, *far[:5000], STORE], 8, 8, 128)) == "OK"


# --- C10, C12: what a header and its names may say --------------------------------------------------------------------

NAMES: dict[bytes, str] = {
    b"x": "OK", "größe".encode(): "OK", "入力".encode(): "OK", "🐦".encode(): "OK", b"a" * 31: "OK",
    b"": "HEADER", b"a" * 32: "HEADER", b"a\0b": "HEADER", b"\x1b[31m": "HEADER", b"a\nb": "HEADER", b"\x7f": "HEADER",
    b"\xc2\x9b31m": "HEADER", b"\xff": "HEADER", b"\xc3": "HEADER", b"\xc0\x80": "HEADER", b"\xe0\x80\x9b": "HEADER",
    b"\xed\xa0\x80": "HEADER", b"\xf4\x90\x80\x80": "HEADER", b"\xf0\x80\x80\x80": "HEADER", b"\x80": "HEADER",
    b"a" * 30 + b"\xc3": "HEADER", b"\xf8\x88\x80\x80\x80": "HEADER",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text_without_control_characters(name: bytes) -> None:
    """C13: a port's name is UTF-8 that no terminal takes for a command."""
    assert check(model([LOAD, STORE], 8, 8, 64, names=(name, b"y"))) == NAMES[name]


def test_metadata_holds_nothing_but_its_records(tmp_path: Path) -> None:
    """C10: a sparse file that claims gigabytes of metadata is refused by its header, before they are read."""
    sound = model([LOAD, STORE], 8, 8, 64)
    path = tmp_path / "model.bin"
    for size, count in ((3 << 30, 0), (3 << 30, (3 << 30) - 4096), (1 << 27, 0)):
        values = {"meta_bytes": size, "total_bytes": size} | ({"info_bytes": count} if count else {})
        path.write_bytes(model([LOAD, STORE], 8, 8, 64, **values)[: len(sound)])
        os.truncate(path, size)
        with pytest.raises(ModelError) as caught:
            package.open_package(path)
        assert caught.value.code in {E["HEADER"], E["HEADER" if size > spec.MAX_META else "CHECKSUM"]}


@pytest.mark.parametrize("cleared", [False, True])
def test_a_context_no_machine_has_is_refused_by_name(cleared: bool) -> None:
    """C10: context_bytes of 2^45."""
    size = {"context_bytes": 1 << 45} | ({"cleared_bytes": 1 << 45} if cleared else {})
    if not cleared:
        size["context_bytes"] = 1 << 60
    with pytest.raises(ModelError, match="more than this machine has") as caught:
        engine.load(model([LOAD, STORE], 8, 8, 64, **size))(np.zeros((1, 8), np.float32))
    assert caught.value.code == E["MEMORY"]


def test_bytes_read_along_the_costliest_route_are_checked() -> None:
    """C13: worst_bytes covers the experts, and at most all shared weights beside them."""
    assert check(model([LOAD, STORE], 8, 8, 64, shared=b"1" * 64)) == "OK"
    assert check(model([LOAD, STORE], 8, 8, 64, shared=b"1" * 64, worst_bytes=65)) == "PROGRAM"
    export = example("top1", 64, 3)
    image = bytearray(export.image)
    header = np.frombuffer(image, spec.HEADER.dtype, 1)[0]
    header["worst_bytes"] = max(e.section.size for e in export.program.experts) - 1
    header["header_crc"] = package.zlib.crc32(image[: spec.HEADER.bytes - 4])
    assert check(bytes(image)) == "PROGRAM"


# --- C2: a file that changes while it is loaded -----------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, 100),
    "emptied": lambda path: os.truncate(path, 0),
    "overwritten": lambda path: path.write_bytes(b"\xa5" * path.stat().st_size),
    "copied over": lambda path: path.write_bytes(example("deep", 64, 3).image),
    "renamed over": lambda path: Path(shutil.copy(path, f"{path}.new")).replace(path),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_loaded_model_survives_its_file(
    damage: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: the same outputs, or of a mapped file an error by name; never a signal."""
    monkeypatch.setattr(package, "_COPIED", 0 if mapped else 1 << 26)
    path = tmp_path / "model.bin"
    path.write_bytes(example("top1", 4096, 3).image)
    loaded = engine.load(path)
    x = np.linspace(-1, 1, 3 * 18, dtype=np.float32).reshape(3, *loaded.inputs[0].shape)
    expected = loaded(x)
    DAMAGE[damage](path)
    if mapped and damage != "renamed over":
        for _ in range(2):
            with pytest.raises(ModelError) as caught:
                loaded(x)
            assert caught.value.code in (E["TRUNCATED"], E["CHANGED"])
        with pytest.raises(ModelError):
            loaded.selftest()
    else:
        assert loaded(x).tobytes() == expected.tobytes()
        loaded.selftest()


def test_program_bytes_changed_on_disk_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: offsets, sizes and counts written into the file of a mapped model reach no operation."""
    monkeypatch.setattr(package, "_COPIED", 0)
    monkeypatch.setattr(package.Package, "check_unchanged", lambda self: None)
    path = tmp_path / "model.bin"
    image = example("top1", 4096, 3).image
    path.write_bytes(image)
    loaded = engine.load(path)
    x = np.ones((3, *loaded.inputs[0].shape), np.float32)
    expected = loaded(x).tobytes()
    meta = int(loaded.package.header["meta_bytes"])
    with path.open("r+b") as file:
        for place in range(0, meta, 8):
            file.seek(place)
            file.write(struct.pack("<Q", 0xDEAD_BEEF_0000_0040 * (place + 1) % (1 << 64)))
            file.flush()
            if place % 128 == 0:
                assert loaded(x).tobytes() == expected
    assert loaded(x).tobytes() == expected


def test_records_outlive_the_package_they_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: a map is closed with the last look at it."""
    monkeypatch.setattr(package, "_COPIED", 0)
    path = tmp_path / "model.bin"
    path.write_bytes(example("top1", 4096, 3).image)
    data = package.open_package(path).data
    assert bytes(data) == path.read_bytes()


# --- C13: the context's head ------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_the_heads_fixed_fields_is_noticed() -> None:
    """C13: model, kernels and sizes are sealed; a forward with others is refused, and writes nothing."""
    loaded = engine.load(example("top1", 64, 3).image)
    x = np.ones((3, *loaded.inputs[0].shape), np.float32)
    expected = loaded(x)
    _, context, memory = loaded._contexts[0]
    head = np.frombuffer(ffi.buffer(memory, HEAD), np.uint8)
    noticed = 0
    y = np.full_like(expected, 7)
    # max_batch and sizes, model, kernels, context_tokens, the seal itself; what lies between is the caller's to set
    for place in [*range(4, 16), *range(32, 40), *range(56, 64), *range(68, 72), *range(80, 84)]:
        for bit in range(8):
            head[place] ^= 1 << bit
            lib.colibri_forward(context, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), 3)
            noticed += context.status == E["DAMAGED"]
            assert lib.colibri_selftest(context, ffi.from_buffer("float[]", y)) in (E["DAMAGED"], E["NULL"])
            head[place] ^= 1 << bit
    assert (y == 7).all()
    assert noticed == 8 * (12 + 8 + 8 + 4 + 4)
    assert loaded(x).tobytes() == expected.tobytes()
