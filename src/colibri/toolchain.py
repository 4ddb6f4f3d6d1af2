"""Compiles the engine and an exported model with the machine's C compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from colibri.errors import ColibriError


def engine_directory() -> Path:
    """The engine's sources: beside the package where it is installed, in the repository where it is not."""
    installed = Path(__file__).parent / "engine_source"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "engine"


@dataclass(frozen=True)
class Built:
    """What a build left behind, and the bytes of each kind in the linked code."""

    static_library: Path
    shared_library: Path
    model_object: Path
    text_bytes: int
    rodata_bytes: int


def build(export_directory: Path, output: Path | None = None, compiler: str | None = None) -> Built:
    """Compile libcolibri.a, libcolibri.so and model.o of an export into `output` (default: its build/).

    Raises ColibriError where a file or the compiler is missing, or the compiler refuses.
    """
    source = export_directory / "model.c"
    if not source.is_file():
        raise ColibriError(f"{export_directory} has no model.c: pass the directory of an export")
    output = (output or export_directory / "build").resolve()
    cc = shlex.split(compiler or os.environ.get("CC") or "cc")
    for tool in (cc[0], "make", "ar"):
        if shutil.which(tool) is None:
            raise ColibriError(f"{tool} is not installed: install a C compiler and make (on Debian: build-essential)")
    engine = engine_directory()
    _run(["make", "-C", str(engine), f"BUILD={output}", f"CC={shlex.join(cc)}"])
    model = output / "model.o"
    include = [f"-I{export_directory}", f"-Wa,-I{export_directory}"]
    _run([*cc, "-std=c11", "-O2", *include, "-c", str(source), "-o", str(model)])
    sections = _sections(output / "libcolibri.so")
    text = sections.get(".text", 0)
    rodata = sum(size for name, size in sections.items() if name.startswith((".rodata", ".data.rel.ro")))
    return Built(output / "libcolibri.a", output / "libcolibri.so", model, text, rodata)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ColibriError(f"{shlex.join(command)} failed:\n{(done.stderr or done.stdout).strip()}")


def _sections(path: Path) -> dict[str, int]:
    if shutil.which("size") is None:
        return {}
    lines = subprocess.run(["size", "-A", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith(".")]
    return {row[0]: int(row[1]) for row in rows}
