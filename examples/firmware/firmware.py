"""Builds the smart-meter firmware for an emulated board, runs it there, and says what it takes.

    python examples/firmware/firmware.py [--dtype int8] [--board cortex-m7]

Needs the cross compiler that `colibri targets` names, and QEMU's system emulators.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from colibri import exporter
from colibri.build import elf, targets, toolchain
from colibri.runtime import engine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "smart_meter"))
import data  # noqa: E402
import trained  # noqa: E402

ROWS = 48  # a day of forecasts
LIBRARY_STACK = 64  # bytes that functions of the compiler's library may take below the engine's deepest frame


@dataclass(frozen=True)
class Board:
    """An emulated board: which target it is, the emulator's command, and its clock."""

    target: str
    emulator: tuple[str, ...]
    mhz: int = 25

    @property
    def command(self) -> tuple[str, ...]:
        """The emulator with semihosting; the program's path comes next."""
        return (*self.emulator, "-nographic", "-monitor", "none", "-serial", "none", "-semihosting-config",
                "enable=on,target=native", "-kernel")  # fmt: skip


BOARDS = {
    board.target: board
    for board in (
        Board("cortex-m3", ("qemu-system-arm", "-M", "mps2-an385")),
        Board("cortex-m4", ("qemu-system-arm", "-M", "mps2-an386")),
        Board("cortex-m7", ("qemu-system-arm", "-M", "mps2-an500")),
        Board("cortex-m33", ("qemu-system-arm", "-M", "mps2-an505"), 20),
        Board("cortex-m55", ("qemu-system-arm", "-M", "mps3-an547"), 32),
        Board("rv32imc", ("qemu-system-riscv32", "-M", "virt", "-bios", "none")),
    )
}


@dataclass(frozen=True)
class Figures:
    """Bytes of the linked image, and of the model and the self-test in it; of static data; of stack that
    colibri_forward takes at worst; and instructions of the costliest forecast of a day.
    """

    flash: int
    model: int
    selftest: int
    ram: int
    stack: int
    instructions: int


def export(dtype: str) -> tuple[exporter.Export, np.ndarray]:
    """The trained model in a format, calibrated on the validation week, and a day of rows to forecast."""
    return trained.export(dtype), data.split(data.load(), data.TEST).features[:ROWS]


def link(
    made: exporter.Export, rows: np.ndarray, board: Board, folder: Path, program: str = "main.c",
    kind: toolchain.Toolchain = toolchain.Toolchain.auto, fast: Sequence[int] = (), flags: Sequence[str] = (),
) -> tuple[Path, toolchain.Built]:  # fmt: skip
    """The firmware as an ELF file in `folder`, engine, model and rows included; `program` is one of this directory.

    The weights of the experts `fast` are copied to RAM on start-up. Debian's compiler gets `flags` besides.
    """
    target = targets.find(board.target)
    exporter.write(made, folder, exporter.Style(expert_sections=bool(fast)))
    text = ",\n".join("{" + ", ".join(f"{float(x).hex()}f" for x in row) + "}" for row in rows)
    (folder / "rows.h").write_text(
        f"#define ROWS {len(rows)}\nstatic const float rows[ROWS][{rows.shape[1]}] = {{\n{text}}};\n"
    )
    compiler = " ".join([target.compiler, *flags]) if flags else None
    built = toolchain.build(folder, folder / "build", compiler, board.target, kind)
    boards = toolchain.engine_directory() / "firmware"
    start = boards / ("board_riscv.c" if board.target.startswith("rv") else "board_cortex_m.c")
    parts = [f"-DBOARD_MHZ={board.mhz}", f"-I{boards}", f"-I{folder}", HERE / program, boards / "board.c", start,
             built.model_object, built.static_library]  # fmt: skip
    image = folder / "firmware.elf"
    script = toolchain.linker_script(target)
    for number in fast:  # as a user adds lines of experts.ld
        script = script.replace("*(.fast)", f"*(.fast) *(.rodata.model.expert_{number})")
    toolchain.link_bare(toolchain.choose(target, kind), script, parts, image)
    return image, built


def run(image: Path, board: Board) -> str:
    """What the firmware prints on its emulated board; raises SystemExit where it fails."""
    command = [*board.command, str(image), "-icount", "shift=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"the firmware ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr  # semihosting writes to stderr


def expected_digest(made: exporter.Export, rows: np.ndarray) -> int:
    """FNV-1a over the bytes of the outputs, as the engine computes them on this machine."""
    return trained.fnv1a(np.ascontiguousarray(engine.load(made.image)(rows), "<f4").tobytes())


def latency(dtype: str, board: Board, folder: Path) -> list[tuple[int, int]]:
    """Least and most instructions of a forecast over 1,000 pseudo-random inputs, for each expert."""
    made, rows = export(dtype)
    image, _ = link(made, rows[:1], board, folder, "latency.c", toolchain.Toolchain.debian)
    found = [int(number, 16) for number in re.findall(r"^\w+ 0x([0-9a-f]{8})$", run(image, board), re.M)]
    return list(zip(found[::2], found[1::2], strict=True))


def measure(
    dtype: str, board: Board, folder: Path, kind: toolchain.Toolchain = toolchain.Toolchain.debian,
    flags: Sequence[str] = (),
) -> Figures:  # fmt: skip
    """Build, run, compare with this machine; raises SystemExit where anything differs."""
    made, rows = export(dtype)
    image, built = link(made, rows, board, folder, kind=kind, flags=flags)
    printed = {n: int(v, 16) for n, v in re.findall(r"^(\w+) (0x[0-9a-f]{8})$", run(image, board), re.M)}
    if printed.get("selftest") != 0 or printed.get("digest") != expected_digest(made, rows):
        raise SystemExit(f"{board.target}, {dtype}: the firmware's answers are not this machine's: {printed}")
    stack = built.stack["colibri_forward"] if built.stack else 0
    if built.stack and not 0 < printed["stack"] <= stack + LIBRARY_STACK:
        raise SystemExit(f"{board.target}, {dtype}: a forecast took {printed['stack']} bytes of stack, not {stack}")
    found = elf.read(image)
    flash = found.bytes_of(".text", ".rodata", ".ARM.exidx", ".data")
    rows_bytes = rows.nbytes  # the example's own data, not the meter's
    return Figures(flash=flash - rows_bytes, model=built.model_bytes or 0, selftest=built.selftest_bytes or 0,
                   ram=found.bytes_of(".data", ".bss"), stack=stack, instructions=printed["instructions"])  # fmt: skip


def main() -> None:
    """Print a table of the chosen boards and formats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--board", nargs="+", default=["cortex-m7"], choices=BOARDS)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "int8"], choices=["fp32", "fp16", "int8", "int4"])
    options = parser.parse_args()
    table = Table("board", "weights", "flash", "of it the model", "of it the self-test", "RAM", "worst stack",
                  "instructions of a forecast", box=None)  # fmt: skip
    for name in options.board:
        for dtype in options.dtype:
            f = measure(dtype, BOARDS[name], Path("build/firmware") / f"{name}-{dtype}")
            table.add_row(name, dtype, *(f"{n:,}" for n in asdict(f).values()))
    Console().print(table)


if __name__ == "__main__":
    main()
