"""The worst-case stack from call graphs: pointer calls, what a linker kept, and what has no bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.build import callgraph
from tools.size import ENGINE

NODE = 'node: {{ title: "{title}" label: "{name}\\n/src/{file}:1:1\\n{size} bytes (static)" }}'
EDGE = 'edge: {{ sourcename: "{source}" targetname: "{target}" label: "/src/{file}:2:2" }}'


def graph(folder: Path, functions: str, calls: str) -> list[Path]:
    """A .ci file of functions `name@file=bytes` and calls `caller>callee@file`; `*` is a call through a pointer."""
    lines = []
    for text in functions.split():
        name, file, size = text.replace("@", "=").split("=")
        lines.append(NODE.format(title=f"{file}:{name}", name=name, file=file, size=size))
    homes = dict(text.split("=")[0].split("@") for text in functions.split())
    for text in calls.split():
        source, target, file = text.replace("@", ">").split(">")
        goal = "__indirect_call" if target == "*" else f"{homes[target]}:{target}" if target in homes else target
        lines.append(EDGE.format(source=f"{homes[source]}:{source}", target=goal, file=file))
    (folder / "model.ci").write_text("\n".join(lines), encoding="utf-8")
    return [folder / "model.ci"]


FUNCTIONS = (
    "walk@context.c=16 program@model.c=32 run_moe@moe.c=100 run_expert_0@model.c=8 run_expert_1@model.c=40 "
    "mix@vector.h=24"
)
CALLS = "walk>program@context.c program>run_moe@model.c run_moe>*@moe.c run_expert_1>memcpy@model.c"
LINKED = {"walk", "program", "run_moe", "run_expert_0", "run_expert_1", "mix"}


def test_pointer_calls_reach_what_generated_code_has(tmp_path: Path) -> None:
    found = callgraph.read(graph(tmp_path, FUNCTIONS, CALLS), ENGINE, LINKED)
    assert found.calls["walk"] == {"program"}
    assert found.calls["run_moe"] == {"run_expert_0", "run_expert_1", "mix"}
    assert found.worst("walk") == (16 + 32 + 100 + 40 + 0, ["walk", "program", "run_moe", "run_expert_1", "memcpy"])
    assert found.outside == {"memcpy"}


def test_functions_that_were_not_linked_do_not_count(tmp_path: Path) -> None:
    found = callgraph.read(graph(tmp_path, FUNCTIONS, CALLS), ENGINE, LINKED - {"run_expert_1"})
    assert found.worst("walk")[0] == 16 + 32 + 100 + 24


@pytest.mark.parametrize(
    ("functions", "calls", "message"),
    [
        ("a@new.c=8", "a>*@new.c", "new: a calls through a pointer"),
        ("a@routing.c=8", "a>*@routing.c", "none of its targets"),
        ("a@x.c=8 b@x.c=8", "a>b@x.c b>a@x.c", "recursion: a -> b -> a"),
    ],
)
def test_a_stack_without_a_bound_is_refused(tmp_path: Path, functions: str, calls: str, message: str) -> None:
    with pytest.raises(callgraph.StackError, match=message):
        callgraph.read(graph(tmp_path, functions, calls), ENGINE, {"a", "b"}).worst("a")


def test_a_pointer_call_of_generated_code_may_be_a_callers_hook(tmp_path: Path) -> None:
    found = callgraph.read(graph(tmp_path, "a@moe.c=8", "a>*@moe.c"), ENGINE, {"a"})
    assert found.worst("a") == (8, ["a"])


def test_the_whole_engine_must_have_every_function_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(callgraph.StackError, match="not in the build: attend, attention_fits, "):
        callgraph.read(graph(tmp_path, "a@x.c=8", ""), ENGINE)
