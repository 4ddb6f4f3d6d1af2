"""The worst-case stack, from the call graphs that gcc writes; imports nothing but the standard library.

Every function's own frame and callees are in the .ci file next to its object, written under FLAGS. Calls through a
pointer have no target there: `indirect` names them by the file in which the call is written. What operations call, or
is called of them, is read from the engine's tables and sources; the rest is in INDIRECT and PROVEN, which
tests/build/test_pointer_calls.py checks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

FLAGS = ("-fstack-usage", "-fcallgraph-info=su")

INDIRECT: dict[str, tuple[str, ...]] = {"moe": ("compare_routes", "run_expert", "clb_route")}
"""The functions that a call through a pointer can reach, by the file that makes it, beside those of an instruction set
and the tasks of threads. The caller's own hooks come on top of what is measured; compare_routes is the engine's own."""

TABLES = {"rowwise": "CLB_ROW_KERNELS", "forward": "CLB_BATCH_KERNELS"}
"""Files whose calls go through a table of operations, and the macro of operations.h that fills it."""

PROVEN: dict[str, tuple[str, ...]] = {
    "clb_uses": ("uses",),
    "clb_cost_of": ("macs", "work"),
    "clb_work_floats": ("kept",),
    "clb_op_fits": ("fits", "kept"),
    "kept_fits": ("kept",),
}
"""Functions of operations.c, and the parts of an operation's proof that each calls, or what is inlined into it."""

GENERATED = {"moe": ("run_expert_*", "route_*")}
"""What it can reach besides where an exported model.c holds the program as code, if the pointer call is left at all."""

HOOKS = ("moe", "parallel", "sums")
"""Files that call the caller's hooks through pointers, or what these are handed, as do those that share out tasks:
generated code may have no other calls through pointers left in them."""


class StackError(ValueError):
    """The stack has no bound that can be computed: recursion, a dynamic frame, or an unknown pointer call."""


@dataclass
class CallGraph:
    """Every function's own frame and callees."""

    frames: dict[str, int] = field(default_factory=dict)
    dynamic: set[str] = field(default_factory=set)
    calls: dict[str, set[str]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)  # called, but not the engine's: the C library's functions

    def worst(self, function: str) -> tuple[int, list[str]]:
        """Bytes of stack from the entry of `function` to the deepest point, and the way there.

        Counts the engine's own frames; a callee in `outside` counts as nothing. Raises StackError on recursion.
        """
        return self._worst(function, (), {})

    def _worst(
        self, name: str, path: tuple[str, ...], known: dict[str, tuple[int, list[str]]]
    ) -> tuple[int, list[str]]:
        if name in path:
            raise StackError(f"recursion: {' -> '.join([*path, name])}")
        if name not in known:
            below = [self._worst(callee, (*path, name), known) for callee in sorted(self.calls.get(name, ()))]
            deepest, way = max(below, key=lambda b: b[0], default=(0, []))
            known[name] = self.frames.get(name, 0) + deepest, [name, *way]
        return known[name]


def kernels(sources: Path, table: str) -> set[str]:
    """The kernels in a table of operations, from the engine's operations.h."""
    text = (sources / "src/format/operations.h").read_text(encoding="utf-8")
    rows = re.search(rf"#define {table}\(X\)((?:[^\n]*\\\n)+[^\n]*)", text)
    if rows is None:
        raise StackError(f"operations.h has no table {table}: name in {__name__}.TABLES what it has")
    return {f"clb_{name}" for name in re.findall(r"X\(\w+, (\w+)\)", rows[1])}


def proofs(sources: Path) -> dict[str, dict[str, str]]:
    """The functions of every proof in the engine's operations, by the proof's name and the part that each is."""
    header = (sources / "src/check/proof.h").read_text(encoding="utf-8")
    struct = re.search(r"typedef struct \{([^{}]*)\} clb_proof;", header)
    parts = re.findall(r"\(\*(\w+)\)\(", struct[1]) if struct else []
    found = {}
    for file in sorted((sources / "src/ops").glob("*.c")):
        for name, values in re.findall(
            r"^const clb_proof clb_(\w+)_proof\s*=\s*\{([^}]*)\};", file.read_text(encoding="utf-8"), re.M
        ):
            functions = dict(re.findall(r"\.(\w+) = (\w+)", values))
            if len(functions) != values.count(",") + 1 or not functions.keys() <= set(parts):
                raise StackError(f"{file.name}: the proof of {name} has not just the parts of a proof, by name")
            found[name] = functions
    return found


def _sources(sources: Path) -> dict[str, str]:
    """The engine's C files, by name, without comments."""
    return {file.stem: re.sub(r"/\*.*?\*/", " ", file.read_text(encoding="utf-8"), flags=re.S)
            for file in sorted((sources / "src").rglob("*.c"))}  # fmt: skip


def members(sources: Path) -> set[str]:
    """The functions that each instruction set has its own of."""
    header = (sources / "src/core/internal.h").read_text(encoding="utf-8")
    struct = re.search(r"typedef struct clb_kernels \{([^{}]*)\} clb_kernels;", header)
    return set(re.findall(r"\(\*(\w+)\)\(", struct[1])) if struct else set()


def tasks(sources: Path) -> dict[str, set[str]]:
    """The functions that are spread over the caller's threads, by the file that does it."""
    spread = re.compile(r"\bCLB_SPREAD\([^;]*?, (\w+),\s*&")
    return {file: set(spread.findall(text)) for file, text in _sources(sources).items() if spread.search(text)}


def _kernel_calls(sources: Path) -> dict[str, set[str]]:
    """The functions of an instruction set that each file calls; a panel is called by name where there is but one."""
    known, found = members(sources), {}
    for file, text in _sources(sources).items():
        called = {name for name in known if re.search(rf"(?:->|\.){name}\(", text)}
        found[file] = called | ({"panel"} if "CLB_PANEL_OF(" in text else set())
    return {file: called for file, called in found.items() if called}


def indirect(sources: Path) -> dict[str, set[str]]:
    """What a call through a pointer can reach, by the file that makes it, or by file and function."""
    known = [*proofs(sources).values()]
    found = {file: set(functions) for file, functions in INDIRECT.items()}
    for file, called in _kernel_calls(sources).items():
        found.setdefault(file, set()).update(called)
    return {
        **found,
        "parallel": set().union(*tasks(sources).values()),
        **{file: kernels(sources, table) for file, table in TABLES.items()},
        **{f"operations.{caller}": {proof[part] for proof in known for part in parts if part in proof}
           for caller, parts in PROVEN.items()},
    }  # fmt: skip


def read(files: Iterable[Path], sources: Path, linked: Collection[str] | None = None) -> CallGraph:
    """The graph of these .ci files of the engine in `sources`; raises StackError where a pointer call is unknown.

    `linked` are the functions that a linker kept of generated code and what it uses: others do not count. Without it,
    the graph is that of the whole engine, and every function that `indirect` names must be in it.
    """
    graph = CallGraph()
    calls: list[tuple[str, str]] = []  # the file a pointer call is written in, and the function that makes it
    for info in files:
        text = info.read_text(encoding="utf-8")
        at: dict[str, str] = {}
        for title, file, size, kind in re.findall(
            r'^node: .*?title: "([^"]+)" label: "[^"]*?\\n([^"]*?):\d+:\d+\\n(\d+) bytes \(([\w,]+)\)', text, re.M
        ):
            name, at[title] = _plain(title), Path(file).stem
            if linked is not None and name not in linked:
                continue
            graph.frames[name] = max(int(size), graph.frames.get(name, 0))
            if kind != "static":
                graph.dynamic.add(name)
        for source, target, line in re.findall(
            r'^edge: .*?sourcename: "([^"]+)" targetname: "([^"]+)"(?: label: "([^"]+)")?', text, re.M
        ):
            if linked is not None and _plain(source) not in linked:
                continue
            if target == "__indirect_call":
                place = Path(line.rsplit(":", 2)[0]).stem if line else at[source]
                calls.append((place, _plain(source)))
            else:
                graph.calls.setdefault(_plain(source), set()).add(_plain(target))
    known = indirect(sources)
    hooks = {*HOOKS, *tasks(sources)} if linked is not None else None
    for file, caller in calls:
        graph.calls.setdefault(caller, set()).update(_targets(file, caller, graph, known, hooks))
    for targets in graph.calls.values():
        graph.outside |= targets - graph.frames.keys()
    if linked is None and (missing := set().union(*known.values()) - graph.frames.keys()):
        raise StackError(f"not in the build: {', '.join(sorted(missing))}")
    return graph


def _targets(
    file: str, caller: str, graph: CallGraph, known: Mapping[str, set[str]], hooks: Collection[str] | None
) -> set[str]:
    """What a pointer call written in `file` reaches in this build; generated code has `hooks`."""
    file = f"{file}.{caller}" if f"{file}.{caller}" in known else file
    if file not in known:
        raise StackError(f"{file}: {caller} calls through a pointer: name its targets in {__name__}.INDIRECT")
    named = known[file].union(GENERATED.get(file, ()) if hooks is not None else ())
    reached = {name for name in graph.frames if any(fnmatchcase(name.split(".")[0], pattern) for pattern in named)}
    if not reached and file not in (hooks or ()):
        raise StackError(f"{file}: {caller} calls through a pointer, and none of its targets is in the build")
    return reached


def _plain(title: str) -> str:
    """A function's name without its file (static functions carry it)."""
    return title.rsplit(":", 1)[-1]
