"""Stages that every export goes through, in the order data moves.

Between `optimized` and `planned` the weights take their formats: a module's by what a run makes of them, a language
model's by role. Behind `planned` a module is certified and put together in memory, a language model piece by piece on
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from colibri.common.names import printable
from colibri.format import spec
from colibri.ir.graph import Array, Graph
from colibri.lowering.lower import lower
from colibri.lowering.plan import plan
from colibri.lowering.program import Program
from colibri.passes import PASSES, optimize
from colibri.passes.merge import merge_gates
from colibri.reference.certificate import random_text

NAMES = ("graph", *PASSES, "prune", "quantize", "merge", "program", "plan")  # of a module's stages
ROWS = 64  # that stand in for given ones

Stage = Callable[[str, Any], None]  # sees a stage's name and what it gives


def silent(name: str, value: Any) -> None:
    """The `Stage` that shows nothing."""


def optimized(graph: Graph, stage: Stage, read: Callable[[Graph], Graph] = lambda graph: graph) -> Graph:
    """The graph after every pass; `read` may fetch its weights before."""
    stage("graph", graph)
    return optimize(read(graph), stage)


def random_rows(graph: Graph) -> list[Array]:
    """Seeded rows (ROWS, *shape) for each input, of a language model the tokens of one text."""
    if graph.context:
        return random_text(graph, ROWS)
    rng = np.random.default_rng(0)
    return [rng.standard_normal((ROWS, *graph.shapes[i]), np.float32) for i in graph.inputs]


def planned(graph: Graph, max_batch: int, stage: Stage) -> tuple[Graph, Program]:
    """A graph whose weights have their formats, with its gates merged, and its program with every buffer placed."""
    stage("quantize", graph)
    graph = merge_gates(graph)
    stage("merge", graph)
    program = lower(graph, max_batch)
    stage("program", program)
    plan(program)
    stage("plan", program)
    return graph, program


def info(graph: Graph, dtype: str, given: bool, **more: Any) -> dict[str, Any]:
    """What model.bin tells of its origin; `given` rows are the user's."""
    return {"name": printable(graph.name), "dtype": dtype, "producer": f"colibri {spec.VERSION}",
            "calibration": "given" if given else "random", **more}  # fmt: skip
