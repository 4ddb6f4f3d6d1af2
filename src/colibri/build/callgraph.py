"""The worst-case stack, from the call graphs that gcc writes; imports nothing but the standard library.

Every function's own frame and callees are in the .ci file beside its object, written under FLAGS. Calls through a
pointer have no target there: INDIRECT names them by the file in which the call is written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

FLAGS = ("-fstack-usage", "-fcallgraph-info=su")

_VECTOR = ("unary", "binary", "mix", "quantize")
_PROOFS = {
    "fits": "linear map reduce norm moe loop embed rope cache attention delay delta",
    "uses": "linear quantize map reduce moe loop embed cache attention delay delta",
    "macs": "linear attention delta",
    "work": "linear map reduce clb_cache attention delay delta",
    "kept": "moe clb_cache delay delta",
}
_CALLED = {"clb_uses": ("uses",), "clb_cost_of": ("macs", "work"), "clb_work_floats": ("kept",),
           "clb_op_fits": ("fits", "kept"), "kept_fits": ("kept",)}  # fmt: skip
INDIRECT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "context": ((), ("sound",)),
    "elementwise": ((), _VECTOR),
    "attention": ((), ("panel", "unary")),
    "delta": ((), ("mix",)),
    "parallel": ((), ("run_rows", "run_chunk", "attend", "learn")),
    "linear": ((), ("panel", "residual", "unary")),
    "sums": ((), ("unary",)),
    "rowwise": (
        (),
        tuple(f"clb_{op}" for op in ("quantize", "map", "softmax", "norm", "reduce")),
    ),
    **{
        f"operations.{caller}": ((), tuple(f"{name}_{part}" for part in parts for name in _PROOFS[part].split()))
        for caller, parts in _CALLED.items()
    },
    "routing": ((), ("unary",)),
    "forward": ((), tuple(f"clb_{op}" for op in ("embed", "rope", "cache", "attention", "delay", "delta"))),
    "moe": ((), ("mix", "compare_routes", "run_expert", "clb_route")),
}
"""What a call through a pointer can reach, by the file that makes it, or by file and function: tables in that file, and
functions by name. The caller's own hooks come on top of what is measured; compare_routes is the engine's own."""

GENERATED = {"moe": ("run_expert_*", "route_*")}
"""What it can reach besides where an exported model.c holds the program as code, if the pointer call is left at all."""

HOOKS = ("attention", "delta", "linear", "moe", "parallel", "rowwise", "sums")
"""Files that call the caller's hooks through pointers, or what these are handed: generated code may have no other calls
through pointers left in them."""


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


def read(files: Iterable[Path], sources: Path, linked: Collection[str] | None = None) -> CallGraph:
    """The graph of these .ci files of the engine in `sources`; raises StackError where a pointer call is unknown.

    `linked` are the functions that a linker kept of generated code and what it uses: others do not count. Without it,
    the graph is that of the whole engine, and every function INDIRECT names must be in it.
    """
    graph = CallGraph()
    indirect: list[tuple[str, str]] = []  # the file a pointer call is written in, and the function that makes it
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
                indirect.append((place, _plain(source)))
            else:
                graph.calls.setdefault(_plain(source), set()).add(_plain(target))
    for file, caller in indirect:
        graph.calls.setdefault(caller, set()).update(_targets(file, caller, graph, sources, linked is not None))
    for targets in graph.calls.values():
        graph.outside |= targets - graph.frames.keys()
    if linked is None and (missing := {name for _, names in INDIRECT.values() for name in names} - graph.frames.keys()):
        raise StackError(f"not in the build: {', '.join(sorted(missing))}")
    return graph


def _targets(file: str, caller: str, graph: CallGraph, sources: Path, generated: bool) -> set[str]:
    """What a pointer call written in `file` reaches in this build."""
    file = f"{file}.{caller}" if f"{file}.{caller}" in INDIRECT else file
    if file not in INDIRECT:
        raise StackError(f"{file}: {caller} calls through a pointer: name its targets in {__name__}.INDIRECT")
    tables, functions = INDIRECT[file]
    if generated:
        functions += GENERATED.get(file, ())
    source = (sources / "src" / f"{file}.c").read_text(encoding="utf-8") if tables else ""
    named = set(functions).union(*(table_entries(source, table) for table in tables))
    reached = {name for name in graph.frames if any(fnmatchcase(name.split(".")[0], pattern) for pattern in named)}
    if not reached and not (generated and file in HOOKS):
        raise StackError(f"{file}: {caller} calls through a pointer, and none of its targets is in the build")
    return reached


def table_entries(source: str, table: str) -> set[str]:
    """The functions in the initialiser of a constant table of function pointers, written `[INDEX] = function`."""
    match = re.search(rf"\*const {table}\[[^\]]*\] = \{{(.*?)\}};", source, re.S)
    if match is None:
        raise StackError(f"no function table {table}: name the table in {__name__}.INDIRECT as the source does")
    return set(re.findall(r"\]\s*=\s*(\w+)", match[1]))


def _plain(title: str) -> str:
    """A function's name without its file (static functions carry it)."""
    return title.rsplit(":", 1)[-1]
