"""Compiles the engine and an exported model, for this machine or for another."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from colibri.errors import ColibriError
from colibri.targets import find


def engine_directory() -> Path:
    """The engine's sources: beside the package where it is installed, in the repository where it is not."""
    installed = Path(__file__).parent / "engine_source"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "engine"


@dataclass(frozen=True)
class Built:
    """What a build left behind, and the bytes of each kind in its code; `shared_library` is None without a system."""

    static_library: Path
    shared_library: Path | None
    model_object: Path
    text_bytes: int
    rodata_bytes: int


def build(
    export_directory: Path, output: Path | None = None, compiler: str | None = None, target: str | None = None
) -> Built:
    """Compile libcolibri.a, libcolibri.so and model.o of an export into `output`: by default build/, or build-TARGET/.

    `target` names one of `colibri.targets`; without it the machine's own compiler is used. Raises ColibriError where a
    file or the compiler is missing, or the compiler refuses.
    """
    source = export_directory / "model.c"
    if not source.is_file():
        raise ColibriError(f"{export_directory} has no model.c: pass the directory of an export")
    known = None if target is None else find(target)
    output = (output or export_directory / ("build" if target is None else f"build-{target}")).resolve()
    cc = shlex.split(compiler or (known.compiler if known else os.environ.get("CC") or "cc"))
    cc += known.flags if known else ()
    archiver = known.archiver if known else "ar"
    for tool in (cc[0], "make", archiver):
        if shutil.which(tool) is None:
            wanted = known.packages if known and tool != "make" else "build-essential"
            raise ColibriError(f"{tool} is not installed: on Debian, apt-get install {wanted}")
    libraries = [output / "libcolibri.a", *([output / "libcolibri.so"] if known is None or known.hosted else [])]
    # The compiler's flags are part of its name here: they say what machine it compiles for.
    command = ["make", "-C", str(engine_directory()), f"BUILD={output}", f"CC={shlex.join(cc)}", f"AR={archiver}"]
    _run([*command, *(["PIC="] if len(libraries) == 1 else []), *(str(path) for path in libraries)])
    model = output / "model.o"
    command = [*cc, "-std=c11", "-O2", f"-I{export_directory}", f"-Wa,-I{export_directory}"]
    if known is not None and not known.hosted:  # firmware carries only what its model uses
        command += ["-DCOLIBRI_GENERATED", *source_flags()]
    _run([*command, "-c", str(source), "-o", str(model)])
    found = sections(libraries[-1])
    text = sum(size for name, size in found if name.startswith(".text"))
    rodata = sum(size for name, size in found if name.startswith((".rodata", ".data.rel.ro")))
    return Built(libraries[0], libraries[1] if len(libraries) > 1 else None, model, text, rodata)


def source_flags() -> list[str]:
    """What compiling the engine's sources without its Makefile takes: where they are, and their arithmetic."""
    engine = engine_directory()
    return [f"-I{engine / 'include'}", f"-I{engine / 'src'}", "-ffp-contract=off", "-fno-math-errno",
            "-fno-trapping-math", "-fno-strict-aliasing", "-ffunction-sections", "-fdata-sections"]  # fmt: skip


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ColibriError(f"{shlex.join(command)} failed:\n{(done.stderr or done.stdout).strip()}")


def sections(path: Path) -> list[tuple[str, int]]:
    """Names and bytes of the sections of a library, of all objects where it is an archive."""
    if shutil.which("size") is None:
        return []
    lines = subprocess.run(["size", "-A", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith(".")]
    return [(row[0], int(row[1])) for row in rows]
