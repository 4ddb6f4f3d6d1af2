"""Calls through pointers: every operation has its kernel and its proof, and the bound on the stack has every target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colibri.build import callgraph
from colibri.format import spec
from tools.size import ENGINE

FILES = [*sorted((ENGINE / "src").rglob("*.[ch]")), ENGINE / "lm/lm.c"]
NO_TARGETS = {
    "parallel.h: clb_run_task",  # handed to the caller's hook, which comes on top of what is measured
    "tile.h: int8_tile", "tile.h: int4_tile",  # handed to a macro, which calls them by name
    "order.c: before",  # a parameter elsewhere in the file
}  # fmt: skip
_DEFINITION = re.compile(r"^[A-Za-z_][\w \t*]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)


def code(file: Path) -> str:
    """A source without comments and texts."""
    return re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", file.read_text(encoding="utf-8"), flags=re.S)


SOURCES = {file: code(file) for file in FILES}


def functions(text: str) -> dict[str, str]:
    """The functions that a source defines, each with its body."""
    found = list(_DEFINITION.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(found, ends, strict=False)}


@pytest.mark.parametrize("operation", spec.OPERATIONS, ids=lambda o: o.name)
def test_every_operation_has_its_kernel_and_its_proof(operation: spec.Operation) -> None:
    """Before the linker says so of one of them."""
    assert operation.proof in callgraph.proofs(ENGINE), (
        f"{operation.name}: no file in engine/src/ops defines `const clb_proof clb_{operation.proof}_proof`"
    )
    in_ops = {name for file, text in SOURCES.items() if file.parent.name == "ops" for name in functions(text)}
    assert operation.walk == "loop" or f"clb_{operation.kernel}" in in_ops, (
        f"{operation.name}: no file in engine/src/ops defines clb_{operation.kernel}"
    )


def test_every_proof_is_an_operations() -> None:
    assert callgraph.proofs(ENGINE).keys() == {operation.proof for operation in spec.OPERATIONS}


def test_a_proof_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for name in ("src/check", "src/ops"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "src/check/proof.h").write_text((ENGINE / "src/check/proof.h").read_text())
    (tmp_path / "src/ops/new.c").write_text("const clb_proof clb_new_proof = {new_fits, NULL};\n")
    with pytest.raises(callgraph.StackError, match="the proof of new has not just the parts of a proof, by name"):
        callgraph.proofs(tmp_path)


def test_calls_of_an_instruction_sets_functions_are_found() -> None:
    """Exactly: one too many makes the bound on the stack larger than it is, one too few smaller."""
    known, found = callgraph.members(ENGINE), callgraph.indirect(ENGINE)
    assert known == {"unary", "binary", "panel", "outliers", "quantize", "mix", "sound"}
    assert found["linear"] == {"panel", "outliers", "unary"}
    assert found["moe"] & known == {"mix"}
    assert "norms" not in found
    elsewhere = [text for file, text in SOURCES.items() if file.suffix == ".h" or file.parent.name == "lm"]
    assert not [name for name in known for text in elsewhere if re.search(rf"(?:->|\.){name}\(", text)]


def test_tasks_of_threads_are_found() -> None:
    """Every one: each file that shares out work names as many as it does so often."""
    found = callgraph.tasks(ENGINE)
    sharing = {f.stem: text.count("CLB_SPREAD(") for f, text in SOURCES.items() if f.suffix == ".c"}
    assert {file: len(tasks) for file, tasks in found.items()} == {file: n for file, n in sharing.items() if n}
    assert found["rowwise"] == {"run_rows"}


def test_calls_of_proofs_are_named() -> None:
    """A static function's calls are its callers' too, into which it may be inlined."""
    bodies = functions(SOURCES[ENGINE / "src/check/operations.c"])
    inside = {name: {other for other in bodies if re.search(rf"\b{other}\(", body)} for name, body in bodies.items()}
    called = {name: set(re.findall(r"\bproof->(\w+)\(", body)) for name, body in bodies.items()}
    for _ in bodies:  # as deep as calls may go
        called = {name: own.union(*(called[other] for other in inside[name])) for name, own in called.items()}
    assert {name: set(parts) for name, parts in callgraph.PROVEN.items()} == {n: c for n, c in called.items() if c}


def test_every_function_that_a_pointer_may_hold_is_a_target() -> None:
    """A function whose name stands without a call's parentheses is handed to someone, who may call it."""
    targets = set().union(*callgraph.indirect(ENGINE).values())
    ours = {file: functions(text).keys() for file, text in SOURCES.items()}
    shared = {name for names in ours.values() for name in names if name.startswith("clb_")}
    taken = {
        f"{file.name}: {name}"
        for file, text in SOURCES.items()
        for name in ours[file] | shared
        if name not in targets and re.search(rf"(?<![\w.>]){name}\b(?!\s*\()", text)
    }
    assert taken <= NO_TARGETS
    assert {"run_chunk", "compare_routes", "panel"} <= set().union(*ours.values())
