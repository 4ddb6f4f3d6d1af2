"""Prints what the engine weighs: code lines, bytes per section, symbols, stack, and example models' context memory.

    python tools/size.py [--json] [model.bin …]

Needs nothing but the standard library, a gcc (`CC`), make and binutils; models are shown where `colibri` is installed.
tests/engine/sources/test_objects.py holds the engine to limits with the same functions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "src/colibri/build"))  # for one module, by itself: the package needs NumPy

import callgraph  # noqa: E402
from callgraph import CallGraph, StackError  # noqa: E402

__all__ = ["CallGraph", "StackError"]

ENGINE = ROOT / "engine"
# Limits of promise P7: code lines of what a PyTorch module needs with plain kernels, and of everything linked into
# libcolibri; and how dense a file may be, for lines are not to be saved by writing wider.
CORE_LIMIT, LIBRARY_LIMIT, TOKENS_A_LINE = 3000, 5000, 10.0
# Operations that any PyTorch module may need, as the Makefile has them; the others are for texts.
CORE_OPS = [f"{op}.c" for line in (ENGINE / "Makefile").read_text(encoding="utf-8").splitlines()
            if line.startswith("CORE_OPS := ") for op in line.split()[2:]]  # fmt: skip
# Linked into libcolibri and not core either: language models, and instruction sets beside plain C.
BEYOND_CORE = ("include/colibri_lm.h", "lm/lm.c", "src/simd/avx2.c", "src/simd/avx512.c", "src/simd/cpu.c",
               "src/simd/tile.h", "src/simd/v128.c")  # fmt: skip
# Nor is core what P7 does not list: tables written by tools/generate.py, optional inspection and self-test.
APART = ("include/colibri_inspect.h", "src/check/inspect.c", "src/check/selftest.c", "src/format/error_text.h",
         "src/format/format.h", "src/format/operations.h")  # fmt: skip
# What makes one unit of the engine's files for an exported model.c; libcolibri has nothing of it.
UNIT = "src/generated.h"
# The optional host layer: its own library, counted apart.
HOST = ("colibri_host.h", "colibri_ring.h", "pool.o", "map.o", "prefetch.o")
# The optional tokenizer, its own library too.
TOKENIZER = ("colibri_tokenizer.h", "tokenizer_decode.o", "tokenizer_encode.o", "tokenizer_merge.o",
             "tokenizer_open.o", "tokenizer_split.o", "tokenizer_text.o")  # fmt: skip
OPTIONAL = (*HOST, *TOKENIZER)
STACK_FLAGS = " ".join(callgraph.FLAGS)

COMMENT_OR_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
_FAMILIES = {".text": "text", ".rodata": "rodata", ".data.rel.ro": "rodata", ".data": "data", ".tdata": "data",
             ".bss": "bss", ".tbss": "bss"}  # fmt: skip


# --- lines ------------------------------------------------------------------------------------------------------------


def without_comments(text: str) -> str:
    """C with a blank for each comment, whose line breaks stay."""

    def blanked(match: re.Match[str]) -> str:
        # A literal may hold what looks like a comment.
        return match[0] if match[0][0] in "\"'" else " " + "\n" * match[0].count("\n")

    return COMMENT_OR_TEXT.sub(blanked, text)


def code_lines(text: str) -> int:
    """Lines of C that hold something besides blanks and comments."""
    return sum(1 for line in without_comments(text).splitlines() if line.strip())


_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\.?\d(?:[eEpP][+-]|[\w.])*|\w+'
    r"|->|\+\+|--|<<=|>>=|\.\.\.|&&|\|\||##|[-+*/%&|^!=<>]=|<<|>>|[^\s\\]"
)


def tokens(text: str) -> int:
    """Preprocessing tokens of C, without comments."""
    return len(_TOKEN.findall(without_comments(text)))


def c_files(engine: Path = ENGINE) -> list[Path]:
    """Every C file of the engine, linked or not."""
    return sorted(p for p in engine.rglob("*.[ch]") if "build" not in p.relative_to(engine).parts)


def density(engine: Path = ENGINE) -> dict[str, float]:
    """Tokens a code line of every file of the engine, by path relative to it, the densest first."""
    texts = {str(p.relative_to(engine)): p.read_text(encoding="utf-8") for p in c_files(engine)}
    found = {path: round(tokens(text) / code_lines(text), 1) for path, text in texts.items() if code_lines(text)}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def library_lines(engine: Path = ENGINE) -> dict[str, int]:
    """Code lines of every source and header that is linked into libcolibri, by path relative to the engine."""
    files = [p for folder in ("include", "src") for p in (engine / folder).rglob("*") if p.suffix in (".c", ".h")]
    files = [*(p for p in files if p.name not in OPTIONAL and p != engine / UNIT), engine / "lm/lm.c"]
    return {str(p.relative_to(engine)): code_lines(p.read_text(encoding="utf-8")) for p in sorted(files)}


def core_lines(engine: Path = ENGINE) -> dict[str, int]:
    """Those of the core, which any model needs."""
    return {path: lines for path, lines in library_lines(engine).items() if _is_core(path)}


def _is_core(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return name in CORE_OPS if folder == "src/ops" else path not in (*BEYOND_CORE, *APART)


def host_lines(engine: Path = ENGINE) -> dict[str, int]:
    """Code lines of the optional host layer, by path relative to the engine."""
    files = [*(engine / "host").iterdir(), *(engine / "include" / name for name in HOST if name.endswith(".h"))]
    return {str(p.relative_to(engine)): code_lines(p.read_text(encoding="utf-8")) for p in sorted(files)}


def tokenizer_lines(engine: Path = ENGINE) -> dict[str, int]:
    """Code lines of the optional tokenizer, by path relative to the engine."""
    headers = [engine / "include" / name for name in TOKENIZER if name.endswith(".h")]
    files = [*(engine / "lm").glob("tokenizer*"), *headers]
    return {str(p.relative_to(engine)): code_lines(p.read_text(encoding="utf-8")) for p in sorted(files)}


# --- objects ----------------------------------------------------------------------------------------------------------


def build(
    directory: Path, cc: str = "gcc", cflags: str = "", optimize: str | None = None, target: str | None = None
) -> Path:
    """Build the engine with its own Makefile into `directory`; raises CalledProcessError with the compiler's words."""
    command = ["make", "-s", "-j2", "-C", str(ENGINE), f"BUILD={directory}", f"CC={cc}", f"CFLAGS={cflags}"]
    if optimize is not None:
        command.append(f"OPTIMIZE={optimize}")
    if target is not None:
        command.append(str(directory / target))
    # A make that started us hands down its flags and job server, which are not meant for this one.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return directory


def run(*command: str | Path) -> str:
    """The standard output of a tool."""
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def sections(obj: Path) -> dict[str, int]:
    """Bytes of an object's text, rodata (relocated constants included), writable data and bss."""
    sizes = dict.fromkeys(("text", "rodata", "data", "bss"), 0)
    for name, size in re.findall(r"^(\.\S+)\s+(\d+)\s+\d+$", run("size", "-A", obj), re.M):
        family = next((f for prefix, f in _FAMILIES.items() if name == prefix or name.startswith(prefix + ".")), None)
        if family is not None:
            sizes[family] += int(size)
    return sizes


def objects(directory: Path) -> list[Path]:
    """The objects of a build, by name."""
    return sorted(p for p in directory.glob("*.o") if p.name not in OPTIONAL)


def exported(library: Path) -> set[str]:
    """The symbols a shared library defines for others."""
    return {line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines() if line.strip()}


def declared(engine: Path = ENGINE) -> set[str]:
    """The functions the public headers declare for the shared library."""
    text = "".join(
        p.read_text(encoding="utf-8") for p in sorted((engine / "include").glob("*.h")) if p.name not in OPTIONAL
    )
    return set(re.findall(r"^COLIBRI_API\b[^;(]*?\b(colibri_\w+)\s*\(", text, re.M))


# --- stack ------------------------------------------------------------------------------------------------------------


def call_graph(directory: Path, engine: Path = ENGINE) -> CallGraph:
    """The call graph of a build made with STACK_FLAGS by gcc; raises StackError where a pointer call is unknown."""
    return callgraph.read(sorted(p for p in directory.glob("*.ci") if p.with_suffix(".o").name not in OPTIONAL), engine)


# --- the report -------------------------------------------------------------------------------------------------------


def context_bytes(models: Iterable[str]) -> dict[str, int]:
    """Context memory of model files, read from their headers; empty where the package is not installed."""
    try:
        from colibri.format.package import open_package
    except ImportError:
        return {}
    return {path: int(open_package(path).header["context_bytes"]) for path in models}


def measure(models: Sequence[str] = ()) -> dict[str, Any]:
    """Everything the report shows."""
    cc = os.environ.get("CC", "gcc")
    with tempfile.TemporaryDirectory() as folder:
        fast = build(Path(folder) / "default", cc)
        small = build(Path(folder) / "small", cc, optimize="-Os")
        stack = build(Path(folder) / "stack", "gcc", STACK_FLAGS)
        graph = call_graph(stack)
        public = exported(fast / "libcolibri.so")
        core, library = core_lines(), library_lines()
        return {
            "core_lines": {**core, "total": sum(core.values()), "limit": CORE_LIMIT},
            "library_lines": {
                **{path: lines for path, lines in library.items() if path not in core},
                "total with the core": sum(library.values()),
                "limit": LIBRARY_LIMIT,
            },
            "unit_lines": {UNIT: code_lines((ENGINE / UNIT).read_text(encoding="utf-8"))},
            "host_lines": {**host_lines(), "total": sum(host_lines().values())},
            "tokenizer_lines": {**tokenizer_lines(), "total": sum(tokenizer_lines().values())},
            "tokens_a_line": {**density(), "limit": TOKENS_A_LINE},
            "sections": {
                name: {o.stem: sections(o) for o in objects(directory)}
                for name, directory in (("-Os", small), ("default", fast))
            },
            "exported_symbols": len(public),
            "worst_stack": {name: graph.worst(name)[0] for name in sorted(public)},
            "context_bytes": context_bytes(models),
        }


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [[str(c) for c in row] for row in [(title, *columns), *rows]]
    widths = [max(len(row[n]) for row in cells) for n in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    )


def report(figures: dict[str, Any]) -> str:
    """The figures as aligned plain text."""
    parts = []
    for title, name in (("core", "core"), ("rest of libcolibri", "library"), ("unit of a model.c", "unit"),
                        ("host layer", "host"), ("tokenizer", "tokenizer")):  # fmt: skip
        lines = figures[f"{name}_lines"]
        rows = [(path, count, figures["tokens_a_line"].get(path, "")) for path, count in lines.items()]
        parts.append(_table(f"code lines, {title}", ["lines", "tokens a line"], rows))
    for flags, by_object in figures["sections"].items():
        names = ("text", "rodata", "data", "bss")
        total = [sum(sizes[n] for sizes in by_object.values()) for n in names]
        rows = [[name, *(sizes[n] for n in names)] for name, sizes in by_object.items()]
        parts.append(_table(f"bytes, {flags}", names, [*rows, ["total", *total]]))
    parts.append(_table("worst-case stack", ["bytes"], figures["worst_stack"].items()))
    parts.append(_table("exported symbols", ["count"], [("libcolibri.so", figures["exported_symbols"])]))
    if figures["context_bytes"]:
        parts.append(_table("context memory", ["bytes"], figures["context_bytes"].items()))
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Print the report, as text or with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("models", nargs="*", help="model.bin files whose context memory to show")
    args = parser.parse_args(argv)
    try:
        figures = measure(args.models)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} failed:\n{error.stderr}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2) if args.json else report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
