"""The same certificates on every target: equal bits wherever the engine runs, or the named refusal."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from colibri import exporter, spec, toolchain
from colibri.graph import Graph, Router
from tests.cross.targets import MACHINES, Machine
from tests.engine.conftest import GRAPHS, example
from tests.graphs import FORMATS, expert, linear
from tools import size

HERE = Path(__file__).parent
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


@functools.cache
def images() -> dict[str, bytes]:
    """Every small model and one wide one in each format."""
    wide = {f"wide_{fmt.replace(' ', '_').replace('-', '_')}": _wide(fmt).image for fmt in FORMATS}
    return {name: example(name, 64).image for name in GRAPHS} | wide


def program(machine: Machine, folder: Path) -> Path:
    """The certificate runner with all models, for a machine."""
    for tool in (machine.compile[0], machine.run[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    lines = ['#include "selftest_models.h"']
    for name, image in images().items():
        (folder / f"{name}.bin").write_bytes(image)
        lines.append(f'__asm__(".section .rodata\\n.balign 64\\n.globl {name}\\n{name}:\\n.incbin \\"{name}.bin\\"\\n'
                     f'.previous"); extern const uint8_t {name}[];')  # fmt: skip
    table = ", ".join(f'{{"{name}", {name}}}' for name in images())
    lines.append(f"const model models[] = {{{table}}}; const int model_count = {len(images())};")
    (folder / "models.c").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "selftest_models.h").write_text(
        "#include <stdint.h>\ntypedef struct { const char *name; const uint8_t *bytes; } model;\n", encoding="utf-8"
    )
    headers = [np.frombuffer(image[: spec.HEADER.bytes], spec.HEADER.dtype)[0] for image in images().values()]
    sizes = [f"-DMEMORY_BYTES={max(int(h['context_bytes']) for h in headers)}",
             f"-DOUTPUT_FLOATS={max(int(h['output_floats']) for h in headers)}"]  # fmt: skip
    sources = [str(p) for p in sorted((size.ENGINE / "src").rglob("*.c"))]
    common = [*machine.compile, *FLAGS, "-Wl,--gc-sections", f"-I{folder}"]
    extra = []
    if "neon" in machine.kernels:  # as engine/Makefile does it
        common.append("-DCLB_NEON_DOT")
        extra = ["v128_dot.o"]
        _run([*common, "-O3", "-march=armv8.2-a+dotprod", "-c", str(size.ENGINE / "src/simd/v128.c"), "-o", *extra],
             folder)  # fmt: skip
    output = folder / "selftest"
    _run([*common, *sizes, f"-Wa,-I{folder}", str(HERE / "selftest.c"), str(folder / "models.c"), *sources, *extra,
          "-lm", "-o", str(output)], folder)  # fmt: skip
    return output


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr  # an emulated board's semihosting writes to stderr


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_certificate_holds_on(machine: Machine, tmp_path: Path) -> None:
    lines = _run([*machine.run, str(program(machine, tmp_path))], tmp_path).split("\n")
    assert "DONE" in lines
    results = [tuple(line.split()) for line in lines if len(line.split()) == 3]
    if machine.big_endian:
        assert results == [(name, "-", str(E["BIG_ENDIAN"])) for name in images()]
    else:
        assert results == [(name, kernels, str(E["OK"])) for name in images() for kernels in machine.kernels]


@pytest.mark.parametrize("simd", [True, False])
def test_every_certificate_holds_in_webassembly(simd: bool, tmp_path: Path) -> None:
    wasmtime = pytest.importorskip("wasmtime")
    for tool in ("clang-19", "wasm-ld-19"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    sources = [str(p) for p in sorted((size.ENGINE / "src").rglob("*.c"))]
    vectors = ["-msimd128"] if simd else []
    _run(["clang-19", "--target=wasm32", "-nostdlib", "-mbulk-memory", *vectors, *FLAGS[:-1], "-Wl,--no-entry",
          "-Wl,--export=run", "-Wl,--export=__heap_base", f"-I{size.ENGINE / 'include'}", f"-I{size.ENGINE / 'src'}",
          f"-I{size.ENGINE / 'freestanding'}", str(size.ENGINE / "freestanding/memory.c"), str(HERE / "wasm/run.c"),
          *sources, "-o", "engine.wasm"], tmp_path)  # fmt: skip
    store = wasmtime.Store()
    exports = wasmtime.Instance(
        store, wasmtime.Module.from_file(store.engine, str(tmp_path / "engine.wasm")), []
    ).exports(store)
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
