"""Compares Colibri's firmware with what others make of the smart-meter model, on an emulated Cortex-M7.

    python -m benchmarks.firmware.compare [--publish] [--peers-python build/firmware-peers/bin/python]

Builds every variant with the same compiler, -O2, start-up code and harness; runs the test weeks; checks the answers;
prints a table, and with --publish writes docs/measured/firmware.md. Needs what `colibri targets` names for cortex-m7,
and qemu-system-arm. The peers that write C are asked with --peers-python's interpreter, which requirements.txt is
for; where it is missing, their rows are left out and named.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
METER = ROOT / "examples/smart_meter"
sys.path[:0] = [str(ROOT / "examples/firmware"), str(METER)]

import data  # noqa: E402
import firmware  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from benchmarks.firmware import hand_count, onnx_style, page, profile_image, weights  # noqa: E402
from colibri import exporter  # noqa: E402
from colibri.build import elf, targets, toolchain  # noqa: E402
from colibri.emit import c_source  # noqa: E402
from colibri.runtime import engine  # noqa: E402

BOARD = firmware.BOARDS["cortex-m7"]
BOARDS = toolchain.engine_directory() / "firmware"
FLASH = (".text", ".rodata", ".ARM.exidx", ".data")
RAM = (".data", ".bss")
# The largest error allowed, in the model's unit of 950 MW. Float: rounding of sums, and of emlearn's constants, which
# have six decimals. Int8 and fixed point: the mean absolute percentage error must stay near float's.
FLOAT_TOLERANCE = 2e-5
MAPE_TOLERANCE = 0.02  # percentage points
PROFILED = 3  # forecasts


class LeftOut(Exception):
    """Why a variant is not in the table."""


@dataclass(frozen=True)
class Variant:
    """`source` is a file of peers/, `prepare` writes what it includes into the folder of its build."""

    name: str
    source: str
    dtype: str
    flags: tuple[str, ...] = ()
    prepare: Callable[[Path, Path], None] | None = None
    dense: bool = False


@dataclass(frozen=True)
class Row:
    """What the table shows; bytes beyond those of the empty image, the error in the model's unit."""

    variant: Variant
    code: int
    weights: int
    ram: int
    stack: int
    instructions: int
    error: float
    mape: float


@dataclass
class Work:
    """What all variants share."""

    rows: NDArray[np.float32]
    exact: NDArray[np.float64]
    split: data.Split
    folder: Path
    peers_python: Path
    headers: Path = field(init=False)

    def __post_init__(self) -> None:
        self.headers = self.folder / "headers"
        self.headers.mkdir(parents=True, exist_ok=True)


def variants(peers_python: Path) -> list[Variant]:
    """In the order of the table."""

    def ask(peer: str) -> Callable[[Path, Path], None]:
        def prepare(headers: Path, folder: Path) -> None:
            if not peers_python.is_file():
                raise LeftOut(f"{peers_python} is not there; benchmarks/firmware/README.md says how to make it")
            command = [peers_python, HERE / "generate.py", peer, headers / "weights.npz", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
            if done.returncode:
                raise LeftOut(f"{peer} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")

        return prepare

    def style(headers: Path, folder: Path) -> None:
        (folder / "style.c").write_text(onnx_style.generate(np.load(headers / "weights.npz")), encoding="utf-8")

    emlearn = subprocess.run([peers_python, "-c", "import emlearn; print(emlearn.includedir)"], capture_output=True,
                             text=True, check=False) if peers_python.is_file() else None  # fmt: skip
    include = f"-I{emlearn.stdout.strip()}" if emlearn and not emlearn.returncode else "-I."
    return [
        Variant("Plain C, loops", "hand_fp32.c", "fp32"),
        Variant("Plain C, four rows a pass", "hand_fp32.c", "fp32", ("-DPACKED",)),
        Variant("C++ templates, in the style of TinyMind", "templates.cpp", "fp32"),
        Variant("emlearn, a net an expert, routed by hand", "emlearn.c", "fp32", (include,), ask("emlearn")),
        Variant("ONNX by emx-onnx-cgen, experts gathered", "onnx.c", "fp32", (), ask("onnx-gather")),
        Variant("ONNX by emx-onnx-cgen", "onnx.c", "fp32", (), ask("onnx-dense"), dense=True),
        Variant("ONNX in the style of onnx2c", "onnx_style.c", "fp32", (), style, dense=True),
        Variant("C++ templates, in the style of TinyMind", "templates.cpp", "Q16.16", ("-DFIXED",)),
        Variant("Plain C, loops", "hand_int8.c", "int8", ("-DVARIANT=0",)),
        Variant("C with SMLAD, a row a pass", "hand_int8.c", "int8", ("-DVARIANT=1",)),
        Variant("C with SMLAD, four rows a pass", "hand_int8.c", "int8", ("-DVARIANT=2",)),
        Variant("The same, the gate int8 too", "hand_int8.c", "int8", ("-DVARIANT=2", "-DINT8_GATE")),
        Variant("C++ templates with SMLAD, fixed ranges", "affine.cpp", "int8"),
    ]


def measure(variant: Variant, work: Work, empty: dict[str, int]) -> Row:
    """Builds it, runs it, compares its answers; raises LeftOut where it cannot be made or is wrong."""
    folder = fresh(work.folder / re.sub(r"\W+", "-", f"{variant.name} {variant.dtype}".lower()))
    if variant.prepare is not None:
        variant.prepare(work.headers, folder)
    image, peer = link(variant, work.headers, folder)
    return _row(variant, image, constants(image, peer), work, empty)


def fresh(folder: Path) -> Path:
    """Empty: no file of an earlier run, from which a tool that failed could seem to have succeeded."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def link(variant: Variant, headers: Path, folder: Path) -> tuple[Path, Path]:
    """The image and the object of the variant in it, with the flags of the example's own program."""
    target = targets.find(BOARD.target)
    flags = [*target.flags, "-O2", "-ffunction-sections", "-fdata-sections", f"-DBOARD_MHZ={BOARD.mhz}",
             f"-I{folder}", f"-I{HERE}", f"-I{BOARDS}", f"-I{headers}"]  # fmt: skip
    peer = folder / "peer.o"
    plus = variant.source.endswith(".cpp")
    compiler = target.compiler.replace("gcc", "g++") if plus else target.compiler
    language = ["-std=gnu++17", "-fno-exceptions", "-fno-rtti"] if plus else ["-std=gnu11"]
    _run([compiler, *flags, *language, *variant.flags, "-c", str(HERE / "peers" / variant.source), "-o", str(peer)])
    image = folder / "firmware.elf"
    board = [str(BOARDS / name) for name in ("board.c", "board_cortex_m.c")]
    script = folder / "board.ld"
    script.write_text(toolchain.linker_script(target), encoding="utf-8")
    _run([target.compiler, *flags, "-std=gnu11", "-nostartfiles", str(HERE / "harness.c"), str(peer), *board, "-T",
          str(script), "-lm", "-Wl,--gc-sections", "-o", str(image)])  # fmt: skip
    return image, peer


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LeftOut(done.stderr.strip())
    return done.stdout


def constants(image: Path, peer: Path) -> int:
    """Bytes of the variant's own constants that are in the image."""
    tool = targets.find(BOARD.target).compiler.replace("gcc", "nm")
    own, linked = (
        re.findall(r"^\w+ (\w+) ([rR]) (\S+)$", _run([tool, "--print-size", str(path)]), re.M) for path in (peer, image)
    )
    names = {name for _, _, name in own}
    return sum(int(size, 16) for size, _, name in linked if name in names)


def image_bytes(image: Path) -> dict[str, int]:
    sections = elf.read(image).sections
    return {"flash": sum(sections.get(s, 0) for s in FLASH), "ram": sum(sections.get(s, 0) for s in RAM)}


def run(image: Path) -> tuple[dict[str, int], NDArray[np.float32]]:
    """What the harness says of a variant, stack and instructions, and its answers."""
    printed = firmware.run(image, BOARD)
    values = {name: int(value, 16) for name, value in re.findall(r"^(stack|instructions) (0x\w{8})$", printed, re.M)}
    bits = [int(word, 16) for word in re.findall(r"^output (0x\w{8})$", printed, re.M)]
    return values, np.array(bits, np.uint32).view(np.float32)


def _row(variant: Variant, image: Path, weight_bytes: int, work: Work, empty: dict[str, int]) -> Row:
    values, answers = run(image)
    if answers.shape != work.exact.shape:
        raise LeftOut(f"gave {len(answers)} of {len(work.exact)} answers")
    error = float(np.abs(answers - work.exact).max())
    mape, float_mape = (
        data.mape(data.to_megawatts(y, work.split.now), work.split.demand) for y in (answers, work.exact)
    )
    if variant.dtype == "fp32" and not error <= FLOAT_TOLERANCE:
        raise LeftOut(f"wrong: an answer is {error:.2g} off")
    if not abs(mape - float_mape) <= MAPE_TOLERANCE:
        raise LeftOut(f"wrong: MAPE {mape:.3f} % instead of {float_mape:.3f} %")
    size = image_bytes(image)
    return Row(
        variant, size["flash"] - empty["flash"] - weight_bytes, weight_bytes, size["ram"] - empty["ram"],
        values["stack"], values["instructions"], error, mape,
    )  # fmt: skip


def colibri(dtype: str, work: Work, empty: dict[str, int], program: str = "colibri.c") -> Row:
    """As the example links it; its answers must also be this machine's, to the last bit."""
    image, made = _link_colibri(dtype, work, program)
    row = _row(Variant("**Colibri**", program, dtype), image, flash_of(made), work, empty)
    here = np.ascontiguousarray(engine.load(made.image)(work.rows), np.float32).ravel()
    if run(image)[1].tobytes() != here.tobytes():
        raise LeftOut(f"Colibri's {dtype} answers are not this machine's")
    return row


def flash_of(made: exporter.Export) -> int:
    """Bytes of the model in flash."""
    header = c_source.files(made.program, made.image, c_source.PLAIN)["model.h"]
    found = re.search(r"MODEL_FLASH_BYTES (\d+)u", header)
    if found is None:
        raise LeftOut("model.h does not say what the model takes")
    return int(found[1])


def _link_colibri(dtype: str, work: Work, program: str) -> tuple[Path, exporter.Export]:
    made, _ = firmware.export(dtype)
    return link_colibri(made, work.rows, fresh(work.folder / f"{Path(program).stem}-{dtype}"), program), made


def link_colibri(made: exporter.Export, rows: NDArray[np.float32], folder: Path, program: str = "colibri.c") -> Path:
    """An export with the harness, as the example links its own."""
    for file in (HERE / "harness.c", HERE / "harness.h", BOARDS / "board.h"):
        shutil.copy(file, folder)  # where the example's command looks for files
    return firmware.link(made, rows, BOARD, folder, str(HERE / "peers" / program))[0]


def write_rows(rows: NDArray[np.float32], folder: Path) -> None:
    """rows.h, as the harness includes it."""
    text = ",\n".join("{" + ", ".join(f"{float(x).hex()}f" for x in row) + "}" for row in rows)
    (folder / "rows.h").write_text(
        f"#define ROWS {len(rows)}\nstatic const float rows[ROWS][{rows.shape[1]}] = {{\n{text}}};\n"
    )


def profile(dtype: str, folder: Path) -> dict[str, int]:
    """Colibri's instructions by function, of a few forecasts."""
    image, _ = _link_colibri(dtype, prepare(folder, Path("none"), PROFILED), "colibri.c")
    return by_function(image)


def by_function(image: Path) -> dict[str, int]:
    """A harness image's instructions by function."""
    nm = targets.find(BOARD.target).compiler.replace("gcc", "nm")
    return profile_image.by_function(image, BOARD.command, nm)


def prepare(folder: Path, peers_python: Path, rows: int | None = None) -> Work:
    """The test weeks' forecasts, or their first ones, and the headers that variants include."""
    demand = data.load()
    hours = data.TEST if rows is None else data.TEST[:rows]
    split = data.split(demand, hours)
    checkpoint = load_file(METER / "checkpoint.safetensors")
    exact = weights.activations(checkpoint, split.features)["answers"]
    work = Work(split.features, exact, split, folder, peers_python)
    weights.write(checkpoint, data.split(demand, data.VALIDATION).features, work.headers)
    write_rows(split.features, work.headers)
    return work


def hand_counts() -> dict[str, hand_count.Count]:
    """What the costliest route asks for at the least, by precision."""
    checkpoint = load_file(METER / "checkpoint.safetensors")
    architecture = json.loads((METER / "architecture.json").read_text(encoding="utf-8"))
    layers, experts = hand_count.costliest_route(architecture, {k: v.shape for k, v in checkpoint.items()})
    return {"int8": hand_count.int8(layers, experts), "fp32": hand_count.fp32(layers, experts)}


def main() -> None:
    """Measures everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", type=Path, default=ROOT / "build/firmware-peers/bin/python")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/firmware-compare", help="where all is built")
    parser.add_argument("--publish", action="store_true", help="write docs/measured/firmware.md")
    options = parser.parse_args()

    # Absolute, for the tools run elsewhere; not resolved, since a virtual environment's interpreter is a link.
    work = prepare(options.folder.absolute(), options.peers_python.absolute())
    image, _ = link(Variant("empty", "empty.c", "fp32"), work.headers, fresh(work.folder / "empty"))
    empty = image_bytes(image)
    table: list[Row] = []
    left_out: list[tuple[Variant, str]] = []
    for dtype in ("fp32", "int8"):
        table.append(colibri(dtype, work, empty))
    with_selftest = colibri("int8", work, empty, "colibri_selftest.c")
    for variant in variants(work.peers_python):
        try:
            table.append(measure(variant, work, empty))
        except LeftOut as reason:
            left_out.append((variant, str(reason)))
    counts = hand_counts()

    profiles = {dtype: profile(dtype, options.folder.absolute() / "profile") for dtype in counts}
    facts = page.Facts(
        compiler=_run([targets.find(BOARD.target).compiler, "--version"]).splitlines()[0],
        emulator=_run([BOARD.emulator[0], "--version"]).splitlines()[0],
        rows=len(work.exact),
        empty_flash=empty["flash"] - work.rows.nbytes,
        selftest_code=with_selftest.code - next(r.code for r in table if r.variant.dtype == "int8"),
        float_mape=data.mape(data.to_megawatts(work.exact, work.split.now), work.split.demand),
        float_tolerance=FLOAT_TOLERANCE,
        mape_tolerance=MAPE_TOLERANCE,
    )
    print(page.table(table, counts))
    print()
    print(page.counts(counts, table))
    print()
    print(page.profiles(profiles))
    for variant, why in left_out:
        print(f"\nLeft out: {variant.name}, {variant.dtype}: {why}")
    if options.publish:
        if left_out:
            raise SystemExit("not published: a row is missing")
        from benchmarks.firmware import stream  # which uses this module

        text = page.page(table, counts, profiles, facts, stream.section(stream.measured()))
        (ROOT / "docs/measured/firmware.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
