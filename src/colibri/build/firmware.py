"""Writer of firmware projects: an exported model, the engine's sources that it uses, a board's start-up, a Makefile."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from colibri.build import targets, toolchain
from colibri.build.targets import Target
from colibri.build.toolchain import Built, Compiler, Toolchain
from colibri.errors import ColibriError
from colibri.format import spec

_MAKEFILE = """\
# firmware.elf for {target}: make. Written by colibri {version}; it needs nothing of it.
CC := {cc}
MACHINE := {machine}
# -ffp-contract=off keeps a multiply and an add apart: the bits that the model's certificate names.
FLAGS := -std=gnu11 -O2 -Wall -Wextra -DCOLIBRI_GENERATED -I. -Iengine/include -Iengine/src -Wa,-I. \\
         {arithmetic}
LINK := -nostartfiles -T board.ld -Wl,-e,reset -Wl,--gc-sections
LIBRARIES := {libraries}
SOURCES := {sources}
OBJECTS := $(addprefix build/,$(SOURCES:.c=.o))

firmware.elf: $(OBJECTS) board.ld
	$(CC) $(MACHINE) $(LINK) $(OBJECTS) $(LIBRARIES) -o $@

build/%.o: %.c $(wildcard *.h engine/*/*.* engine/*/*/*.*)
	@mkdir -p $(@D)
	$(CC) $(MACHINE) $(FLAGS) -c $< -o $@

clean:
	rm -rf build firmware.elf

.PHONY: clean
"""
_README = """\
# Firmware for {target}

`make` builds `firmware.elf`; the compiler is `{cc}`.

| file | what | to change |
|---|---|---|
| `main.c` | self-test on power-up, then a forecast | your inputs and outputs |
| `board.ld` | where flash and RAM are | the addresses and sizes of your part |
| `{start}` | reset, interrupt vectors, memory before main | what your part's manual asks for |
| `board.c`, `board.h` | output, which goes to a debugger (semihosting) | a serial port |
| `model.c`, `model.h` | the model and its program as code | nothing: export and build again |
| `engine/` | the sources that this model uses | nothing |

Without a debugger or an emulator semihosting stops the processor: change `board_semihost` first.
"""


def write(
    export_directory: Path, target: str, output: Path | None = None, kind: Toolchain = Toolchain.auto
) -> tuple[Path, Built]:
    """Write the project into `output`, by default firmware-TARGET/ in the export; returns it and what the engine takes.

    Raises ColibriError where the target has an operating system, or as `toolchain.build` does.
    """
    known = targets.find(target)
    if known.system != "bare":
        bare = ", ".join(t.name for t in targets.TARGETS.values() if t.system == "bare")
        raise ColibriError(f"{target} is no machine for firmware; those are {bare}")
    project = output or export_directory / f"firmware-{target}"
    tools = toolchain.choose(known, kind)
    engine = toolchain.engine_directory()
    with tempfile.TemporaryDirectory() as folder:
        built = toolchain.build(export_directory, Path(folder), target=target, toolchain=kind)
        assert built.model_object is not None
        prefix = toolchain.model_prefix(export_directory)
        objects = toolchain.linked_objects(built.model_object, Path(folder).glob("*.o"), prefix)
    used = [path for obj in objects[1:] for path in (engine / "src").rglob(f"{obj.stem}.c")]
    board = ["main.c", "board.c", "board_riscv.c" if target.startswith("rv") else "board_cortex_m.c"]
    try:
        project.mkdir(parents=True, exist_ok=True)
        optional = (["model.bin"] if ".incbin" in _head(export_directory) else []) + [
            path.name for path in export_directory.glob("experts.ld")
        ]
        for name in ("model.c", "model.h", *optional):
            shutil.copy(export_directory / name, project / name)
        for name in (*board, "board.h"):
            text = (engine / "firmware" / name).read_text(encoding="utf-8")
            (project / name).write_text(toolchain.with_prefix(text, prefix), encoding="utf-8")
        for source in _with_headers(export_directory, used, tools, engine):
            place = project / "engine" / source.relative_to(engine)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
        (project / "board.ld").write_text(toolchain.linker_script(known), encoding="utf-8")
        (project / "Makefile").write_text(_makefile(known, tools, engine, board, used), encoding="utf-8")
        (project / "README.md").write_text(
            _README.format(target=target, cc=_compiler(tools), start=board[-1]), encoding="utf-8"
        )
    except OSError as error:
        raise ColibriError(f"{project} cannot be written: {error.strerror}") from None
    return project, built


def _head(export_directory: Path) -> str:
    """The beginning of model.c, where it names the file of a model too large for a C array."""
    with (export_directory / "model.c").open(encoding="utf-8") as file:
        return file.read(4096)


def _with_headers(directory: Path, sources: Iterable[Path], tools: Compiler, engine: Path) -> list[Path]:
    """The engine's files among model.c of a directory, the sources, and what they include, as the compiler sees it."""
    files: set[Path] = set()
    for source in (Path("model.c"), *sources):
        command = [*tools.cc, *toolchain.source_flags(), "-DCOLIBRI_GENERATED", "-MM", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        if done.returncode:
            raise ColibriError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
        _, *names = re.findall(r"(?:\\.|[^\s\\])+", done.stdout.replace("\\\n", " "))
        files |= {(directory / re.sub(r"\\(.)", r"\1", name.replace("$$", "$"))).resolve() for name in names}
    return sorted(path for path in files if path.is_relative_to(engine.resolve()))


def _compiler(tools: Compiler) -> str:
    """The compiler's command without its flags and this machine's paths."""
    return "python3 -m ziglang cc" if toolchain.is_zig(tools) else tools.cc[0]


def _makefile(target: Target, tools: Compiler, engine: Path, board: list[str], used: list[Path]) -> str:
    machine = [flag.replace(f"-I{engine}", "-Iengine") for flag in toolchain.flags_of(tools)]
    sources = ["model.c", *board, *sorted(f"engine/{path.relative_to(engine)}" for path in used)]
    return _MAKEFILE.format(
        target=target.name, version=spec.VERSION, cc=_compiler(tools), machine=" ".join(machine),
        arithmetic=" ".join(flag for flag in toolchain.source_flags() if not flag.startswith("-I")),
        libraries=" ".join(tools.link), sources=" ".join(sources),
    )  # fmt: skip
