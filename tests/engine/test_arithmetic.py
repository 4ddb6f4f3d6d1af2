"""One arithmetic: whatever compiler, options, control word, hook or byte of a weight, the same bits or a named refusal.

docs/arithmetic.md has what is measured here as a table; `python -m tests.engine.test_arithmetic` writes it anew.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from colibri import exporter
from colibri._engine import ffi, lib
from colibri.format import spec
from colibri.ir.graph import Graph, Router
from colibri.reference import interpreter
from colibri.runtime import engine
from colibri.runtime.language import LanguageModel
from tests.cross.targets import MACHINES, Machine, firmware
from tests.engine.conftest import GRAPHS, HERE, Build, compile_c, compiler, example, packed, random_rows
from tests.graphs import FORMATS, every_byte, expert, linear
from tests.lm_graphs import language_model
from tools import size

E = {name: code for code, (name, _) in enumerate(spec.ERRORS)}
DOC = Path(__file__).parents[2] / "docs/arithmetic.md"


def delicate() -> Graph:
    """Denormals, quantised rows and a softmax, wide enough that its operations are spread over threads."""
    graph, rng = Graph("delicate"), np.random.default_rng(2)
    x = graph.add_input("x", (300,))
    scores = [linear(graph, rng, x, 500, True, fmt) for fmt in ("fp32", "int8", "int4")]
    gates = graph.add("softmax", linear(graph, rng, graph.add("concat", *scores, axis=0), 260, False))
    body = [expert(e, 260, 300, 260, 1, "int8") for e in range(3)]
    y = graph.add("moe", gates, linear(graph, rng, gates, 3, True), router=Router(3, 2, "softmax", "sum"), experts=body)
    tiny = graph.add_constant("tiny", np.full(260, 1e-37, np.float32))
    small = graph.add("binary", graph.add("softmax", y), tiny, func="mul")  # about 1e-39
    graph.outputs = [graph.add("softmax", scores[0]), y, small]
    return graph


# --- the control word -------------------------------------------------------------------------------------------------


def test_a_forward_has_its_own_control_word_and_gives_the_callers_back(engine_build: Build, tmp_path: Path) -> None:
    """A3, A4, C11: whatever the caller, its threads and its hooks do to it; a hook cannot call its context."""
    export = exporter.build(delicate(), max_batch=9, expert_align=64)
    (tmp_path / "model.bin").write_bytes(export.image)
    (tmp_path / "rows").write_bytes(packed(random_rows(export, 9)))
    sources = [HERE / "control.c", size.ENGINE / "host/pool.c", engine_build.archive]
    flags = ("-std=gnu11", "-O1", "-DCLB_X86", "-pthread", "-lm", "-Wno-float-conversion")
    program = compile_c(engine_build.cc, tmp_path / "control", sources, *flags)
    done = subprocess.run([program, tmp_path / "model.bin", tmp_path / "rows", "9"], capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


# --- compilers --------------------------------------------------------------------------------------------------------

LEVELS = ("-O0", "-Og", "-O1", "-Os", "-O2", "-O3", "-O2 -flto")
OPTIONS: dict[str, tuple[str, ...]] = {
    "gcc": ("-ffp-contract=fast", "-frounding-math", "-fno-trapping-math", "-freciprocal-math", "-fassociative-math",
            "-fassociative-math -fno-signed-zeros -fno-trapping-math", "-fno-signed-zeros", "-ffinite-math-only",
            "-funsafe-math-optimizations", "-ffast-math", "-Ofast", "-mfpmath=both"),
    "clang": ("-ffp-contract=fast", "-frounding-math", "-fno-trapping-math", "-freciprocal-math", "-fassociative-math",
              "-fassociative-math -fno-signed-zeros -fno-trapping-math", "-fno-signed-zeros", "-ffinite-math-only",
              "-fno-honor-nans", "-fno-honor-infinities", "-funsafe-math-optimizations", "-ffast-math", "-Ofast",
              "-mdaz-ftz"),
}  # fmt: skip
SOURCES = ("-DCOLIBRI_GENERATED", f"-I{size.ENGINE / 'include'}", f"-I{size.ENGINE / 'src'}", HERE / "arithmetic.c")
SAME, REFUSED, NAMED = "the same bits", "refused when compiled", "`COLIBRI_ERR_ARITHMETIC`"


@functools.cache
def meter() -> tuple[exporter.Export, np.ndarray]:
    """The smart meter in int8, whose code is folded, and a day of rows."""
    return firmware.export("int8")


@functools.cache
def alone(name: str) -> tuple[exporter.Export, np.ndarray]:
    """A small model of one row at a time, and some rows."""
    export = example(name, 64, 1)
    return export, np.frombuffer(packed(random_rows(export, 6)), np.float32).reshape(6, -1)


def fused() -> list[str]:
    """What lets a compiler join products and sums, where this machine can run that."""
    about = Path("/proc/cpuinfo")
    flags = about.read_text(encoding="utf-8") if about.exists() else ""
    return ["-mfma"] if " fma " in flags else []


def outcome(cc: str, options: str, made: tuple[exporter.Export, np.ndarray], folder: Path) -> str:
    """What becomes of generated code compiled with these options and none of ours."""
    export, rows = made
    exporter.write(export, folder)
    command = [compiler(cc), *options.split(), *fused(), *SOURCES, f"-I{folder}", folder / "model.c", "-lm",
               "-o", folder / "program"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        assert "#error" in done.stderr or 'error: "' in done.stderr or "error: Colibri" in done.stderr, done.stderr
        return REFUSED
    run = subprocess.run([folder / "program"], input=rows.astype("<f4").tobytes(), capture_output=True, check=False)
    head, _, outputs = run.stdout.partition(b"\n")
    if head == b"%d %d" % (E["ARITHMETIC"], E["ARITHMETIC"]):
        return NAMED
    model = engine.load(export.image)
    shapes = [port.shape for port in model.inputs]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    parts = np.split(rows, ends, axis=1)
    found = model(*(part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)))
    assert head == b"0 0"
    assert outputs == packed(list(found) if isinstance(found, tuple) else [found]), f"{cc} {options}"
    return SAME


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_generated_code_needs_no_options_at_any_level(cc: str, level: str, tmp_path: Path) -> None:
    """A1, B1: folded code compiles and gives the engine's bits with the compiler's own defaults."""
    assert outcome(cc, level, meter(), tmp_path) == SAME


@pytest.mark.slow
@pytest.mark.parametrize("level", [*LEVELS, "-O2 -mavx2 -mf16c"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_generated_code_of_every_model_needs_no_options(cc: str, name: str, level: str, tmp_path: Path) -> None:
    """A1, B1"""
    if "avx2" in level and "avx2" not in engine.KERNELS:
        pytest.skip("this machine has no avx2")
    assert outcome(cc, level, alone(name), tmp_path) == SAME


BOARDS = [machine for machine in MACHINES if machine.name in ("cortex-m7", "rv32imc")]


@pytest.mark.parametrize("level", ["-O0", "-Og"])
@pytest.mark.parametrize("machine", BOARDS, ids=lambda machine: machine.name)
def test_firmware_needs_no_options_at_a_debuggers_level(machine: Machine, level: str, tmp_path: Path) -> None:
    """B1"""
    for tool in (machine.compile[0], machine.run[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    exporter.write(meter()[0], tmp_path)
    command = [*machine.compile, level, "-DALONE", *SOURCES, f"-I{tmp_path}", tmp_path / "model.c", "-lm",
               "-o", tmp_path / "program"]  # fmt: skip
    subprocess.run(command, capture_output=True, check=True)
    done = subprocess.run([*machine.run, tmp_path / "program"], capture_output=True, text=True, timeout=120,
                          check=False, stdin=subprocess.DEVNULL)  # fmt: skip
    assert "0 0" in (done.stdout + done.stderr).splitlines()


def measured() -> str:
    """The table of docs/arithmetic.md."""
    lines = ["| compiler | options beside -O2 | what becomes of it |", "|---|---|---|"]
    for cc, options in OPTIONS.items():
        for option in options:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(f"| {cc} | `{option}` | {outcome(cc, f'-O2 {option}', meter(), Path(folder))} |")
    return "\n".join(lines)


@pytest.mark.slow
def test_the_documented_table_is_the_measured_one() -> None:
    """A2: options that change arithmetic give the same bits, are refused, or are named by status and self-test."""
    assert measured() in DOC.read_text(encoding="utf-8")


@pytest.mark.parametrize(("cc", "option"), [("clang", "-ffp-contract=fast"), ("clang", "-freciprocal-math"),
                                            ("clang", "-fno-honor-nans"), ("gcc", "-ffp-contract=fast"),
                                            ("gcc", "-freciprocal-math")])  # fmt: skip
def test_what_becomes_of_an_option_is_as_documented(cc: str, option: str, tmp_path: Path) -> None:
    """A2: the quick part of the table."""
    found = outcome(cc, f"-O2 {option}", meter(), tmp_path)
    assert f"| {cc} | `{option}` | {found} |" in DOC.read_text(encoding="utf-8")


# --- Python -----------------------------------------------------------------------------------------------------------

MXCSR = {"flush": 0x8000, "denormals are zero": 0x40, "both": 0x8040, "down": 0x2000, "up": 0x4000, "to zero": 0x6000}


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library that does to a process what one linked with -ffast-math does, and worse."""
    folder = tmp_path_factory.mktemp("control")
    source = (
        "unsigned get(void) { return __builtin_ia32_stmxcsr(); } void set(unsigned w) { __builtin_ia32_ldmxcsr(w); }"
    )
    (folder / "control.c").write_text(source, encoding="utf-8")
    subprocess.run([compiler("gcc"), "-shared", "-fPIC", "control.c", "-o", "control.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "control.so"))


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="sets the control word of x86")
@pytest.mark.parametrize("how", MXCSR)
def test_an_export_does_not_depend_on_what_libraries_did_to_the_process(how: str, control: ctypes.CDLL) -> None:
    """A3: certificate, verification and calls are right, and the process keeps its word."""
    graph = delicate()
    want = exporter.build(graph).image
    x = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    outputs = [y.tobytes() for y in engine.load(want)(x)]
    before = control.get() & 0xFFC0
    control.set(before | MXCSR[how])
    try:
        image = exporter.build(graph).image
        model = engine.load(image)
        model.selftest()
        found = [y.tobytes() for y in model(x)]
        after = control.get() & 0xFFC0
    finally:
        control.set(before)
    assert (image, found, after) == (want, outputs, before | MXCSR[how])


# --- bytes of weights -------------------------------------------------------------------------------------------------


def products(weight: object, activations: str) -> exporter.Export:
    """One product of 3 rows with a weight of 256 columns."""
    graph = Graph("products")
    x = graph.add_input("x", (3, 256))
    graph.outputs = [graph.add("linear", x, graph.add_constant("w", weight), activations=activations)]
    return exporter.build(graph, expert_align=64)


@pytest.mark.parametrize("kernels", engine.KERNELS)
@pytest.mark.parametrize("fmt", ["fp16", "int8", "int8 weight-only", "int4"])
def test_every_number_of_a_format_gives_the_references_bits(fmt: str, kernels: str) -> None:
    """C5: int8 weights of -128, which no export writes, like all others."""
    export = products(every_byte(fmt), "float" if "only" in fmt else "int8")
    model = engine.load(export.image, kernels=kernels)
    model.selftest()
    for seed in range(8):  # signs of both kinds meet every number
        x = np.random.default_rng(seed).standard_normal((5, 3, 256)).astype(np.float32)
        assert model(x).tobytes() == interpreter.run(export.graph, [x])[0].tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_bytes_of_weights_give_one_answer_on_all_kernels(fmt: str) -> None:
    """C5: also NaN and infinity, as weights, scales and outliers, and places beyond the matrix."""
    graph, rng = Graph("bytes"), np.random.default_rng(4)
    x = graph.add_input("x", (150,))
    graph.outputs = [linear(graph, rng, x, 70, False, fmt)]
    image = exporter.build(graph, max_batch=9, expert_align=64).image
    first, size = (int(np.frombuffer(image, spec.HEADER.dtype, 1)[name][0]) for name in ("meta_bytes", "shared_bytes"))
    rows = rng.standard_normal((9, 150)).astype(np.float32)
    for _ in range(12):
        changed = bytearray(image)
        changed[first : first + size] = rng.bytes(size)
        answers = {
            name: engine.load(bytes(changed), verify=False, kernels=name)(rows).tobytes() for name in engine.KERNELS
        }
        assert len(set(answers.values())) == 1, answers.keys()


# --- a context that is not free ---------------------------------------------------------------------------------------


def test_a_selftest_does_not_end_a_text() -> None:
    """B4: amid a text or a stream it is refused by name, and the next rows are what they were."""
    graph = language_model(context=40, layers=1)
    model = LanguageModel(engine.opened(exporter.build(graph, max_batch=4).image))
    ids = np.arange(12) % 20
    want = model.logits(ids)
    model.reset()
    output = ffi.from_buffer("float[]", np.empty(model._output_size, np.float32))
    context = model._text[1]
    assert lib.colibri_selftest(context, output) == E["OK"]
    first = model.logits(ids[:5])
    assert lib.colibri_selftest(context, output) == E["UNFINISHED"]
    rest = model.logits(ids[5:])
    assert np.concatenate([first, rest]).tobytes() == want.tobytes()
    context.position = 0
    assert lib.colibri_selftest(context, output) == E["OK"]


if __name__ == "__main__":
    text = DOC.read_text(encoding="utf-8")
    DOC.write_text(re.sub(r"\| compiler .*?(?=\n\n|\Z)", lambda _: measured(), text, flags=re.S), encoding="utf-8")
