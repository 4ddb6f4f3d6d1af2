"""The parity certificate: golden rows, the experts they choose and the digest of what they give.

Computed here with the reference interpreter, written into model.bin, recomputed by `colibri verify` and by the
engine's self-test on the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.graph import Array, Graph
from colibri.reference.interpreter import Trace, run

GOLDEN_ROWS = 8
TEXT_ROWS = 16  # of a language model: the first tokens of one text, run one after another
_MEASURED_ROWS = 1024  # calibration rows run to measure how often each expert is chosen


@dataclass(frozen=True)
class Golden:
    """One golden row: an input row, the experts chosen in the order they are, and the digest of the output row."""

    input: np.ndarray[Any, np.dtype[np.float32]]
    choices: np.ndarray[Any, np.dtype[np.uint16]]
    output_crc: int


@dataclass(frozen=True)
class Certificate:
    """Golden rows, and every expert's share of the tokens of the rows that were run, in program order."""

    golden: list[Golden]
    frequencies: list[float]
    rows: int


def certify(graph: Graph, rows: Sequence[Array], golden_rows: int | None = None) -> Certificate:
    """Run `rows` (one array (n, *shape) an input) through the reference; keep golden rows that visit many experts.

    In a language model the rows are the tokens of one text, and the golden rows its first. `golden_rows` is by default
    GOLDEN_ROWS, of a text TEXT_ROWS.
    """
    most = min(_MEASURED_ROWS, graph.context or _MEASURED_ROWS)
    inputs = [np.ascontiguousarray(x[:most], np.float32) for x in rows]
    trace = Trace()
    outputs = run(graph, inputs, trace)
    count = len(inputs[0])
    flat_in = np.concatenate([x.reshape(count, -1) for x in inputs], axis=1)
    flat_out = np.concatenate([y.reshape(count, -1) for y in outputs], axis=1).astype("<f4")
    choices = [np.concatenate([r[n].reshape(-1) for r in trace.routes] or [np.zeros(0, int)]) for n in range(count)]
    frequencies: list[float] = []
    for node, routes in zip(graph.moe_nodes(), trace.routes, strict=True):
        experts = node.attrs["router"].experts
        taken = np.bincount(routes[routes >= 0], minlength=experts)
        frequencies += (taken * (routes.shape[-1] / routes.size)).tolist()
    wanted = TEXT_ROWS if graph.context else GOLDEN_ROWS
    kept = min(wanted if golden_rows is None else golden_rows, count)
    golden = [
        Golden(flat_in[n], choices[n].astype(np.uint16), zlib.crc32(flat_out[n].tobytes()))
        for n in (range(kept) if graph.context else _varied(trace.routes, count, kept))
    ]
    return Certificate(golden, frequencies, count)


def random_text(graph: Graph, tokens: int) -> list[Array]:
    """Seeded rows (tokens, *shape) for each input of a language model, ids where it looks them up in a table."""
    rng = np.random.default_rng(0)
    tables = {node.inputs[0]: graph.shapes[node.inputs[1]][0] for node in graph.nodes if node.op == "embed"}
    count = min(tokens, graph.context)

    def rows(name: str) -> Array:
        if name in tables:
            return rng.integers(0, tables[name], (count, *graph.shapes[name])).astype(np.float32)
        return rng.standard_normal((count, *graph.shapes[name]), np.float32)

    return list(map(rows, graph.inputs))


def _varied(routes: Sequence[np.ndarray[Any, Any]], count: int, wanted: int) -> list[int]:
    """Row numbers, each adding as many experts not seen before as it can, spread evenly where none are new."""
    visits = [{(layer, int(e)) for layer, r in enumerate(routes) for e in r[n].reshape(-1)} for n in range(count)]
    chosen: list[int] = []
    seen: set[tuple[int, int]] = set()
    spread = [n * count // wanted for n in range(wanted)]
    while len(chosen) < wanted:
        best = max((n for n in range(count) if n not in chosen), key=lambda n: (len(visits[n] - seen), n in spread))
        chosen.append(best)
        seen |= visits[best]
    return sorted(chosen)
