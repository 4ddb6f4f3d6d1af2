"""The same certificates on every target: equal bits wherever the engine runs, or the named refusal."""

from __future__ import annotations

import functools
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.build import toolchain
from colibri.emit import c_program
from colibri.format import spec
from colibri.ir.graph import Graph, Router
from tests.cross.targets import MACHINES, Machine
from tests.engine.conftest import EXCHANGES, GRAPHS, TEXTS, example
from tests.graphs import FORMATS, every_byte, expert, linear
from tools import size

HERE = Path(__file__).parent
TEXT = 75  # tokens of a certificate: over a page of the cache, a window, a delay
FLAGS = ["-std=gnu11", "-O2", *toolchain.source_flags()]
E = {name: code for code, (name, _) in enumerate(spec.ERRORS)}


def _wide(fmt: str) -> exporter.Export:
    """More columns than a group of any kind, more rows than a panel, more tokens than a tile."""
    graph, rng = Graph("wide"), np.random.default_rng(8)
    x = graph.add_input("x", (11, 30))
    h = linear(graph, rng, x, 290, True, fmt, activation="silu")
    logits = linear(graph, rng, x, 3, True)
    body = [expert(90 + e, 30, 33, 30, 1, fmt) for e in range(3)]
    y = graph.add("moe", x, logits, router=Router(3, 2, "softmax", "sum"), experts=body)
    graph.outputs = [linear(graph, rng, h, 13, False, fmt), y]
    return exporter.build(graph, expert_align=64)


def _denormal() -> exporter.Export:
    """Products, sums and outputs below the smallest normal float, which a machine may not flush to zero."""
    graph, rng = Graph("denormal"), np.random.default_rng(9)
    x = graph.add_input("x", (3, 12))
    tiny = graph.add_constant("tiny", rng.standard_normal((12,)).astype(np.float32) * np.float32(1e-20))
    w = graph.add_constant("w", rng.standard_normal((9, 12)).astype(np.float32) * np.float32(1e-20))
    small = graph.add("binary", x, tiny, func="mul")
    graph.outputs = [graph.add("linear", small, w, activation="relu"), graph.add("binary", small, tiny, func="mul")]
    return exporter.build(graph, expert_align=64)


def _every_byte(fmt: str) -> exporter.Export:
    """C5: a weight of every number its format holds, -128 in int8 among them."""
    graph = Graph(f"every_byte_{fmt}")
    x = graph.add_input("x", (256,))
    graph.outputs = [graph.add("linear", x, graph.add_constant("w", every_byte(fmt)))]
    return exporter.build(graph, expert_align=64)


@functools.cache
def exports() -> dict[str, exporter.Export]:
    """Every small model, one wide one in each format, one of denormals, and texts longer than a page and a window."""
    wide = {f"wide_{fmt.replace(' ', '_').replace('-', '_')}": _wide(fmt) for fmt in FORMATS}
    texts = {name: example(name, 64, golden_rows=TEXT) for name in (*TEXTS, *EXCHANGES)}
    bytes_ = {f"every_byte_{fmt}": _every_byte(fmt) for fmt in ("fp16", "int8", "int4")}
    return {name: example(name, 64) for name in GRAPHS} | wide | bytes_ | {"denormal": _denormal()} | texts


def images() -> dict[str, bytes]:
    """The model files."""
    return {name: export.image for name, export in exports().items()}


def batches(machine: Machine) -> list[list[str]]:
    """All models, in parts of which each leaves half of the machine's memory for code."""
    parts: list[list[str]] = []
    left = 0
    for name, export in exports().items():
        bytes_ = len(export.image) * (2 if _twice(machine, export) else 1)
        if bytes_ > left:
            parts.append([])
            left = machine.code_bytes // 2
        parts[-1].append(name)
        left -= bytes_
    return parts


def _twice(machine: Machine, export: exporter.Export) -> bool:
    """Whether the library needs the model's file too, because the generated code carries no records."""
    return machine.bare and c_program.folds(export.program)


def program(machine: Machine, names: list[str], folder: Path) -> Path:
    """The certificate runner with some models, for a machine; on a bare one with their generated code too."""
    for tool in (machine.compile[0], machine.run[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    lines = [f'#include "{HERE / "selftest.h"}"']
    objects, table = [], []
    for name in names:
        export = exports()[name]
        exporter.write(export, folder / name, exporter.Style(prefix=name))
        flags = ["-DCOLIBRI_GENERATED", "-Wno-unused-function"] if machine.bare else []
        objects.append(f"{name}.o")
        _run([*machine.compile, *FLAGS, *flags, "-c", str(folder / name / "model.c"), "-o", objects[-1]], folder)
        lines.append(f'#include "{name}/model.h"')
        code = f"{name}_init, {name}_selftest" if machine.bare else "NULL, NULL"
        whole = f"{name}_model"
        if _twice(machine, export):
            whole = f"{name}_file"
            lines.append(
                f'extern const uint8_t {whole}[]; __asm__(".section .rodata\\n.balign 64\\n{whole}:\\n.incbin '
                f'\\"{folder / name / "model.bin"}\\"\\n.text");'
            )
        table.append(f'{{"{name}", {whole}, {name}_model, {code}}}')
    lines.append(f"const model models[] = {{{', '.join(table)}}}; const int model_count = {len(table)};")
    (folder / "models.c").write_text("\n".join(lines) + "\n", encoding="utf-8")
    headers = [np.frombuffer(images()[n][: spec.HEADER.bytes], spec.HEADER.dtype)[0] for n in names]
    sizes = [f"-DMEMORY_BYTES={max(int(h['context_bytes']) for h in headers)}",
             f"-DOUTPUT_FLOATS={max(int(h['output_floats']) for h in headers)}"]  # fmt: skip
    sources = [str(p) for p in sorted((size.ENGINE / "src").rglob("*.c"))]
    common = [*machine.compile, *FLAGS, *machine.defines, "-Wl,--gc-sections", f"-I{folder}"]
    for file, flags in machine.vectors:  # as engine/Makefile does it
        objects.append(f"vectors{len(objects)}.o")
        _run([*common, "-O3", *flags, "-c", str(size.ENGINE / "src/simd" / file), "-o", objects[-1]], folder)
    output = folder / "selftest"
    _run([*common, *sizes, str(HERE / "selftest.c"), str(folder / "models.c"), *sources, *objects, "-lm", "-o",
          str(output)], folder)  # fmt: skip
    return output


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr  # an emulated board's semihosting writes to stderr


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_certificate_holds_on(machine: Machine, tmp_path: Path) -> None:
    results: list[tuple[str, ...]] = []
    for names in batches(machine):
        lines = _run([*machine.run, str(program(machine, names, tmp_path))], tmp_path).split("\n")
        assert "DONE" in lines
        results += [tuple(line.split()) for line in lines if len(line.split()) == 3]
    if machine.big_endian:
        assert results == [(name, "-", str(E["BIG_ENDIAN"])) for name in images()]
    else:
        kernels = [*machine.kernels, *(["generated"] if machine.bare else [])]
        assert results == [(name, kind, str(E["OK"])) for name in images() for kind in kernels]


def _module(folder: Path, simd: bool) -> Any:
    """The engine as a WebAssembly module with the certificate runner: its store and its exports."""
    wasmtime = pytest.importorskip("wasmtime")
    for tool in ("clang-19", "wasm-ld-19"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    sources = [str(p) for p in sorted((size.ENGINE / "src").rglob("*.c"))]
    vectors = ["-msimd128"] if simd else []
    _run(["clang-19", "--target=wasm32", "-nostdlib", "-mbulk-memory", *vectors, *FLAGS[:-1], "-Wl,--no-entry",
          "-Wl,--export=run", "-Wl,--export=__heap_base", f"-I{size.ENGINE / 'include'}", f"-I{size.ENGINE / 'src'}",
          f"-I{size.ENGINE / 'freestanding'}", str(size.ENGINE / "freestanding/memory.c"), str(HERE / "wasm/run.c"),
          *sources, "-o", "engine.wasm"], folder)  # fmt: skip
    store = wasmtime.Store()
    module = wasmtime.Module.from_file(store.engine, str(folder / "engine.wasm"))
    return store, wasmtime.Instance(store, module, []).exports(store)


def _key_of_2_27(header: Any, ops: Any, tensors: Any) -> None:
    """A block of 8 keys takes 2^32 bytes."""
    for op in ops[np.isin(ops["code"], [spec.OPCODES.index(c) for c in ("cache", "attention")])]:
        index = np.flatnonzero(ops["work"]["offset"] == op["work"]["offset"])
        ops["dims"][index, 0] = 1 << 27
        ops["a"]["offset"][index], ops["a"]["sample_stride"][index], ops["a"]["row_stride"][index] = 128, 0, 0


def _matrix_of_2_27_and_one_columns(header: Any, ops: Any, tensors: Any) -> None:
    """A block of 8 rows takes 2^32 + 32 bytes, of which 32 would be left."""
    n = np.flatnonzero(ops["code"] == spec.OPCODES.index("linear"))[0]
    ops["dims"][n, 0] = (1 << 27) + 1
    ops["a"]["offset"][n], ops["a"]["sample_stride"][n], ops["a"]["row_stride"][n] = 128, 0, 0
    w = ops["w0"][n]
    tensors["cols"][w], tensors["bytes"][w] = (1 << 27) + 1, -(-int(tensors["rows"][w]) // 8) * 32


@pytest.mark.parametrize("change", [_key_of_2_27, _matrix_of_2_27_and_one_columns])
def test_sizes_that_wrap_in_32_bits_are_refused(change: Any, tmp_path: Path) -> None:
    store, exports = _module(tmp_path, True)
    image = bytearray(images()["text"])
    header = np.frombuffer(image, spec.HEADER.dtype, 1)[0]
    ops = np.frombuffer(image, spec.OP.dtype, int(header["ops"]), int(header["ops_offset"]))
    tensors = np.frombuffer(image, spec.TENSOR.dtype, int(header["tensors"]), int(header["tensors_offset"]))

    def macs() -> int:
        product = ops["dims"].astype(object)
        linear, attention = (ops["code"] == spec.OPCODES.index(c) for c in ("linear", "attention"))
        linear[int(header["main_ops"]) :] = False
        rows = ops["rows"].astype(object)
        return int(np.sum((rows * product[:, 0] * product[:, 1])[linear])) + int(header["context_tokens"]) * int(
            np.sum((rows * (product[:, 0] + product[:, 1]))[attention]))  # fmt: skip

    before = macs()
    change(header, ops, tensors)
    header["context_bytes"] = (1 << 29) + (1 << 20)  # where an operand of such a size is read from
    header["worst_macs"] = int(header["worst_macs"]) + macs() - before
    meta = int(header["meta_bytes"])
    header["meta_crc"] = zlib.crc32(image[spec.HEADER.bytes : meta])
    header["header_crc"] = zlib.crc32(image[: spec.HEADER.bytes - 4])
    memory, at = exports["memory"], -(-exports["__heap_base"].value(store) // 64) * 64
    memory.grow(store, -(-(at + len(image) + 4096) // 65536))
    memory.write(store, bytes(image), at)
    context = -(-(at + len(image)) // 64) * 64
    assert exports["run"](store, at, context, int(header["context_bytes"]), context + 1024, 0) == -2


@pytest.mark.parametrize("simd", [True, False])
def test_every_certificate_holds_in_webassembly(simd: bool, tmp_path: Path) -> None:
    store, exports = _module(tmp_path, simd)
    memory, base = exports["memory"], exports["__heap_base"].value(store)
    for name, image in images().items():
        header = np.frombuffer(image[: spec.HEADER.bytes], spec.HEADER.dtype)[0]
        places = [-(-base // 64) * 64]
        for used in (len(image), int(header["context_bytes"]), 4 * int(header["output_floats"])):
            places.append(-(-(places[-1] + used) // 64) * 64)
        missing = places[-1] - memory.data_len(store)
        if missing > 0:
            memory.grow(store, -(-missing // 65536))
        memory.write(store, image, places[0])
        codes = [
            exports["run"](store, places[0], places[1], int(header["context_bytes"]), places[2], n) for n in range(3)
        ]
        assert codes == [E["OK"]] * (1 + simd) + [-1] * (2 - simd), name
