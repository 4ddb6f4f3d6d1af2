"""Compilation of the engine and an exported model, for this machine or another, and measurement of the result."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from colibri.build import callgraph, elf
from colibri.build.targets import Target, find
from colibri.emit.files import require_one_export
from colibri.errors import ColibriError
from colibri.format.package import open_package

STACK_OF = ("init", "forward", "selftest")  # with the prefix of the model's functions
_NO_STACK_FRAMES = ("pool.ci", "map.ci", "prefetch.ci")  # the host layer is no part of the engine
ZIG = (sys.executable, "-P", "-m", "ziglang")  # -P: no module of the directory it runs in
_PROBE = """\
/* The smallest program around the model, to see what the linker keeps. */
#include "colibri_inspect.h"
#include "model.h"

static _Alignas(64) uint8_t memory[COLIBRI_MODEL_CONTEXT_BYTES];
static float input[COLIBRI_MODEL_INPUT_SIZE], output[COLIBRI_MODEL_OUTPUT_SIZE];

int main(void)
{
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    colibri_forward(ctx, input, output, 1);
#if defined(SELFTEST)
    return colibri_selftest(ctx, output);
#elif defined(CHECK)
    static colibri_scan_t scan;
    return colibri_check_flash(&scan, 64);
#else
    return ctx->status;
#endif
}
"""


class Toolchain(Enum):
    """Where the compiler of a target comes from."""

    auto = "auto"
    debian = "debian"
    zig = "zig"


@dataclass(frozen=True)
class Compiler:
    """Commands that compile and archive for one machine, its flags included."""

    cc: tuple[str, ...]
    ar: tuple[str, ...]
    packages: str = "build-essential"
    make: tuple[str, ...] = ()  # variables of the engine's Makefile
    link: tuple[str, ...] = ("-lm",)  # at the end of a program's command

    @property
    def writes_call_graphs(self) -> bool:
        """Whether it is a gcc that knows callgraph.FLAGS."""
        command = [*self.cc, *callgraph.FLAGS, "-E", "-xc", os.devnull, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Built:
    """What a build left behind and what it takes.

    `shared_library` is None on a bare machine, and the module for WebAssembly, which has no `model_object`. Bytes of
    code and constants are those of the shared library; on a bare machine, of what a linker keeps for this model.
    `stack` has this model's worst case of STACK_OF and, on a bare machine, of the check, or is None where the compiler
    gives no call graph. `flash_bytes` is what a bare machine's flash holds, the `model_bytes` of the model in it, and
    `selftest_bytes` and `check_bytes` what colibri_selftest and colibri_check_flash add to it.
    """

    static_library: Path
    shared_library: Path | None
    model_object: Path | None
    text_bytes: int
    rodata_bytes: int
    flash_bytes: int | None = None
    model_bytes: int | None = None
    selftest_bytes: int | None = None
    check_bytes: int | None = None
    stack: dict[str, int] | None = None


def engine_directory() -> Path:
    """The engine's sources: next to the installed package, or in the repository."""
    installed = Path(__file__).parents[1] / "engine_source"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "engine"


def choose(target: Target | None, toolchain: Toolchain = Toolchain.auto, compiler: str | None = None) -> Compiler:
    """The compiler of a target, or of this machine; `compiler` is a command that takes its place.

    Raises ColibriError where it is not installed, with what to install.
    """
    if target is None:
        if toolchain is not Toolchain.auto:
            raise ColibriError(f"--toolchain {toolchain.value} chooses the compiler of a target: pass --target too")
        return _installed(Compiler(_split(compiler or os.environ.get("CC") or "cc"), ("ar",)))
    if compiler is None and toolchain is not Toolchain.debian:
        debian = shutil.which(target.compiler) is not None and shutil.which(target.archiver) is not None
        zig = importlib.util.find_spec("ziglang") is not None
        if zig and (toolchain is Toolchain.zig or not debian):
            return _installed(Compiler((*ZIG, "cc", *target.zig, "-g0", *_headers(target, zig=True)),
                                       (*ZIG, "ar"), make=target.zig_make, link=()))  # fmt: skip
        if toolchain is Toolchain.zig:
            raise ColibriError("ziglang is not installed: pip install ziglang")
        if not debian:
            raise ColibriError(f"there is no compiler for {target.name}: on Debian, apt-get install {target.packages}; "
                               "anywhere, pip install ziglang")  # fmt: skip
    cc = (*_split(compiler or target.compiler), *target.flags, *_headers(target))
    link = ("-lm",) if target.system != "wasm" else ()
    return _installed(Compiler(cc, (target.archiver,), target.packages, link=link))


def _split(command: str) -> tuple[str, ...]:
    """A compiler's command as words; the first names the same program in every directory."""
    try:
        program, *flags = shlex.split(command)
    except ValueError as error:
        raise ColibriError(f"the compiler {command!r} is no command: {error}") from None
    return (str(Path(program).absolute()) if os.sep in program else program, *flags)


def _headers(target: Target, zig: bool = False) -> tuple[str, ...]:
    """The flag for bundled headers if the compiler has no C library."""
    bare = target.system == "wasm" or (zig and target.system == "bare")
    return (f"-I{engine_directory() / 'freestanding'}",) if bare else ()


def is_zig(compiler: Compiler) -> bool:
    """Whether it is zig's, whose command begins with that of this Python."""
    return compiler.cc[0] == sys.executable


def flags_of(compiler: Compiler) -> tuple[str, ...]:
    """Its flags for the machine, without the command."""
    return compiler.cc[len(ZIG) + 1 :] if is_zig(compiler) else compiler.cc[1:]


def _installed(compiler: Compiler) -> Compiler:
    for tool in (compiler.cc[0], compiler.ar[0], "make"):
        if shutil.which(tool) is None:
            packages = "build-essential" if tool == "make" else compiler.packages
            raise ColibriError(f"{tool} is not installed: on Debian, apt-get install {packages}")
    return compiler


def build(
    export_directory: Path,
    output: Path | None = None,
    compiler: str | None = None,
    target: str | None = None,
    toolchain: Toolchain = Toolchain.auto,
) -> Built:
    """Compile libcolibri.a, libcolibri.so and model.o of an export into `output`: by default build/, or build-TARGET/.

    `target` names one of `colibri.build.targets`; without it the machine's own compiler is used. Raises ColibriError
    where a file or the compiler is missing, or the compiler refuses.
    """
    for name in ("model.c", "model.h"):
        if not (export_directory / name).is_file():
            raise ColibriError(f"{export_directory} has no {name}: pass the directory of an export, and export again "
                               "where the last one was interrupted")  # fmt: skip
    require_one_export(export_directory)
    known = None if target is None else find(target)
    system = known.system if known else "linux"
    output = (output or export_directory / ("build" if target is None else f"build-{target}")).resolve()
    tools = choose(known, toolchain, compiler)
    stacks = tools.writes_call_graphs
    cc = [*tools.cc, *(callgraph.FLAGS if stacks else ())]
    _forget_other_compilers(output, cc)

    archive, shared, model = (output / name for name in ("libcolibri.a", "libcolibri.so", "model.o"))
    with plain_name(output) as build:
        static = f"{build}/{archive.name}"
        # The compiler's flags are part of its name here: they say what machine it compiles for.
        command = ["make", f"-j{os.cpu_count() or 1}", "-C", str(engine_directory()), f"BUILD={build}",
                   f"CC={for_make(cc)}", f"AR={for_make(tools.ar)}", *tools.make, static]  # fmt: skip
        _run([*command, *([f"{build}/{shared.name}"] if system == "linux" else ["PIC="])])
    shutil.copytree(engine_directory() / "include", output / "include", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("colibri_host.h", "colibri_ring.h"))  # fmt: skip
    if system == "wasm":
        module = _link_module(tools, archive, output)
        found = elf.read(module)
        return Built(archive, module, None, found.bytes_of(".text"), found.bytes_of(".data"))
    command = [*cc, "-std=c11", "-O2", "-I.", "-Wa,-I."]
    if system == "bare":  # firmware carries only what its model uses
        command += ["-DCOLIBRI_GENERATED", *source_flags()]
    _run([*command, "-c", "model.c", "-o", str(model)], export_directory)
    if system == "bare":
        assert known is not None
        return _measured(export_directory.resolve(), known, tools, archive, model, stacks)
    found = elf.read(shared) if _is_elf(shared) else elf.Elf()
    stack = None
    if stacks:
        graphs = (path for path in output.glob("*.ci") if path.name not in (*_NO_STACK_FRAMES, "model.ci"))
        texts = open_package(export_directory).header["context_tokens"] > 0
        stack = _stack(graphs, "colibri", never=() if texts else ("clb_attention",))
    rodata = found.bytes_of(".rodata", ".data.rel.ro")
    return Built(archive, shared, model, found.bytes_of(".text"), rodata, stack=stack)


@contextmanager
def plain_name(directory: Path) -> Iterator[Path]:
    """Another name of a directory, of letters that mean nothing to make or a shell."""
    places = [place for place in (tempfile.gettempdir(), "/tmp") if re.fullmatch(r"[\w./+-]+", place, re.A)]
    with tempfile.TemporaryDirectory(prefix="colibri-", dir=places[0]) as folder:
        link = Path(folder) / "build"
        link.symlink_to(directory, target_is_directory=True)
        yield link


def for_make(command: Sequence[str]) -> str:
    """A command as the value of a variable of make, which hands it to a shell."""
    text = shlex.join(command)
    if any(not character.isprintable() for character in text):
        raise ColibriError(f"make cannot take a compiler whose command has a line break in it: {text!r}")
    return text.replace("$", "$$")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _forget_other_compilers(output: Path, cc: Sequence[str]) -> None:
    """Remove what another compiler, or one with other flags, left in `output`: make would take it for up to date."""
    mark = output / "compiler.txt"
    if not mark.is_file() or mark.read_text(encoding="utf-8") != shlex.join(cc):
        for pattern in ("*.o", "*.a", "*.so", "*.ci", "*.su"):
            for path in output.glob(pattern):
                path.unlink()
        output.mkdir(parents=True, exist_ok=True)
        mark.write_text(shlex.join(cc), encoding="utf-8")


def _link_module(tools: Compiler, archive: Path, output: Path) -> Path:
    """colibri.wasm: the engine's functions and memory, for a host that writes the model into it."""
    module = output / "colibri.wasm"
    names = ("colibri_init", "colibri_forward", "colibri_free", "colibri_model_size", "colibri_get_num_experts",
             "colibri_check", "colibri_diagnose", "colibri_selftest", "__heap_base")  # fmt: skip
    _run([*tools.cc, "-std=gnu11", "-O2", *source_flags(), "-nostdlib", "-s",
          str(engine_directory() / "freestanding/memory.c"), str(archive), "-Wl,--no-entry",
          *(f"-Wl,--export={name}" for name in names), "-o", str(module)])  # fmt: skip
    return module


def linker_script(target: Target, flash_bytes: int = 512 << 10, ram_bytes: int = 256 << 10) -> str:
    """The engine's linker script for a bare machine with these memories."""
    return (
        f"/* The memories of this board. Change them to those of yours. */\nMEMORY\n{{\n"
        f"    FLASH (rx) : ORIGIN = {target.flash:#x}, LENGTH = {flash_bytes}\n"
        f"    RAM (rwx) : ORIGIN = {target.ram:#x}, LENGTH = {ram_bytes}\n}}\n\n"
        + (engine_directory() / "firmware/board.ld").read_text(encoding="utf-8")
    )


def link_bare(tools: Compiler, script: str, parts: Sequence[Path | str], image: Path) -> Path:
    """Link a bare machine's program of sources, objects and further flags, with the text of a linker script."""
    place = image.with_suffix(".ld")
    place.write_text(script, encoding="utf-8")
    _run([*tools.cc, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-ffunction-sections", "-nostartfiles", "-Wl,-e,reset",
          f"-I{engine_directory() / 'include'}", *map(str, parts), "-T", str(place), *tools.link, "-Wl,--gc-sections",
          "-o", str(image)])  # fmt: skip
    return image


def _measured(export: Path, target: Target, tools: Compiler, archive: Path, model: Path, stacks: bool) -> Built:
    """What a bare machine's program takes, from three that were linked: the least, with self-test, with check."""
    output = archive.parent
    probe = output / "probe.c"
    prefix = model_prefix(export)
    probe.write_text(with_prefix(_PROBE, prefix), encoding="utf-8")
    model_bytes = elf.read(model).bytes_of(".rodata.model")
    context_bytes = int(open_package(export).header["context_bytes"])
    script = linker_script(target, model_bytes + (1 << 20), 2 * context_bytes + (1 << 20))
    sizes: list[tuple[int, int]] = []
    linked: set[str] = set()
    for name, define in (("probe", ()), ("probe_selftest", ("-DSELFTEST",)), ("probe_check", ("-DCHECK",))):
        parts = [f"-I{export}", *define, probe, model, archive, "-Wl,-e,main"]
        image = elf.read(link_bare(tools, script, parts, output / f"{name}.elf"))
        linked |= image.functions.keys()
        code = image.bytes_of(".text") - image.functions["main"]
        sizes.append((code, image.bytes_of(".rodata", ".ARM.exidx", ".data") - model_bytes))
    stack = None
    if stacks:
        objects = linked_objects(model, output.glob("*.o"), prefix)
        graphs = [path.with_suffix(".ci") for path in objects]
        stack = _stack(graphs, prefix, (*STACK_OF, "check_flash"), frozenset(linked))
    least, selftest, check = map(sum, sizes)
    return Built(archive, None, model, *sizes[0], least + model_bytes, model_bytes, selftest - least, check - least,
                 stack)  # fmt: skip


def model_prefix(export_directory: Path) -> str:
    """What the names of an export's functions begin with."""
    text = (export_directory / "model.h").read_text(encoding="utf-8")
    found = re.search(r"^extern const uint8_t (\w+)_model\[", text, re.M)
    if found is None:
        raise ColibriError(f"{export_directory / 'model.h'} declares no model: export it again")
    return found[1]


def with_prefix(source: str, prefix: str) -> str:
    """C that calls a model's functions, by the names that they have under another prefix."""
    functions = re.sub(r"\bcolibri_(?=(init|forward|free|selftest|check_flash|model)\b)", f"{prefix}_", source)
    return functions.replace("COLIBRI_MODEL_", f"{prefix.upper()}_MODEL_")


def linked_objects(model: Path, objects: Iterable[Path], prefix: str) -> list[Path]:
    """The model's object and those of the engine that a linker takes with it, for a program with the self-test."""
    known = {path: elf.read(path) for path in objects if path != model}
    own = elf.read(model)
    chosen, wanted = [model], (own.undefined | {f"{prefix}_selftest"}) - own.defined
    while found := next((path for path, obj in known.items() if obj.defined & wanted), None):
        obj = known.pop(found)
        chosen.append(found)
        wanted = (wanted | obj.undefined) - set().union(*(elf.read(path).defined for path in chosen))
    return chosen


def _stack(
    graphs: Iterable[Path], prefix: str, names: Iterable[str] = STACK_OF, linked: frozenset[str] | None = None,
    never: Collection[str] = (),
) -> dict[str, int]:  # fmt: skip
    """`never`: functions that this model does not call, in an engine that serves all."""
    try:
        graph = callgraph.read(sorted(graphs), engine_directory(), linked)
        for called in graph.calls.values():
            called.difference_update(never)
        return {f"{prefix}_{name}": graph.worst(f"{prefix}_{name}")[0] for name in names}
    except callgraph.StackError as error:
        raise ColibriError(f"the worst-case stack is not known: {error}") from None


def source_flags() -> list[str]:
    """What compiling the engine's sources without its Makefile takes: where they are, and their arithmetic."""
    engine = engine_directory()
    return [f"-I{engine / 'include'}", f"-I{engine / 'src'}", "-ffp-contract=off", "-fno-math-errno",
            "-fno-trapping-math", "-fno-strict-aliasing", "-ffunction-sections", "-fdata-sections"]  # fmt: skip


def _run(command: Sequence[str], directory: Path | None = None) -> None:
    # A make that started this program hands down its flags and job server, which are not meant for another.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory, env=env)
    if done.returncode:
        raise ColibriError(f"{shlex.join(command)} failed:\n{(done.stderr or done.stdout).strip()}")
