"""Parity certificate: golden rows, the experts they choose and the digest of their outputs.

Computed here with the reference interpreter, written into model.bin, recomputed by `colibri verify` and by the
engine's self-test on the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.ir.graph import Array, Graph, is_absent
from colibri.reference.interpreter import Trace, run

Routes = np.ndarray[Any, Any]  # of a layer: (rows, …, k) experts, -1 for none

GOLDEN_ROWS = 8
TEXT_ROWS = 16  # of a language model: the first tokens of one text, run one after another
_MEASURED_ROWS = 1024  # calibration rows run to measure how often each expert is chosen
_SEARCHED_ROWS = 1 << 14  # of them run, a part of that size at a time, while there are experts that none has chosen


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

    There are GOLDEN_ROWS of them, and more where it takes more to visit every expert that the rows choose. In a
    language model the rows are the tokens of one text, and the golden rows its first TEXT_ROWS. `golden_rows` asks for
    another number.
    """
    if graph.context:
        inputs, outputs, routes = _run(graph, [x[: min(_MEASURED_ROWS, graph.context)] for x in rows])
    else:
        inputs, outputs, routes = _searched(graph, rows)
    count = len(inputs)
    least = GOLDEN_ROWS if golden_rows is None else golden_rows
    if graph.context:
        kept = list(range(min(TEXT_ROWS if golden_rows is None else golden_rows, count)))
    else:
        kept = _varied(routes, count, min(least, count), count if golden_rows is None else least)
    experts = [node.attrs["router"].experts for node in graph.moe_nodes()]
    return assemble(inputs, outputs, routes, experts, kept, count)


def assemble(
    inputs: Array, outputs: Array, routes: Sequence[Routes], experts: Sequence[int], kept: Sequence[int], rows: int
) -> Certificate:
    """The certificate of `rows` rows whose layers of so many `experts` took these routes, with `kept` as golden rows.

    inputs, outputs: (n, floats) float32, of the rows that are kept at least.
    """
    frequencies: list[float] = []
    for count, chosen in zip(experts, routes, strict=True):
        taken = np.bincount(chosen[chosen >= 0], minlength=count)
        frequencies += (taken * (chosen.shape[-1] / chosen.size)).tolist()

    def golden(n: int) -> Golden:
        choices = np.concatenate([layer[n].reshape(-1) for layer in routes] or [np.zeros(0, int)])
        return Golden(inputs[n], choices.astype(np.uint16), zlib.crc32(outputs[n].tobytes()))

    return Certificate(list(map(golden, kept)), frequencies, rows)


def flat(arrays: Sequence[Array]) -> Array:
    """Arrays (rows, …) as one (rows, floats) float32, as model.bin and its checksums have them."""
    rows = len(arrays[0])
    return np.concatenate([x.reshape(rows, -1) for x in arrays], axis=1).astype("<f4")


def _run(graph: Graph, rows: Sequence[Array]) -> tuple[Array, Array, list[Routes]]:
    """Input rows, output rows and each layer's routes, all flat but for the rows."""
    trace = Trace()
    arrays = [np.ascontiguousarray(x, np.float32) for x in rows]
    outputs = run(graph, arrays, trace)
    return flat(arrays), flat(outputs), list(trace.routes)


def _searched(graph: Graph, rows: Sequence[Array]) -> tuple[Array, Array, list[Routes]]:
    """The first rows, and further ones while there are experts that none has chosen."""
    wanted = {(layer, e) for layer, node in enumerate(graph.moe_nodes())
              for e, body in enumerate(node.attrs["experts"]) if not is_absent(body)}  # fmt: skip
    parts = []
    for first in range(0, min(len(rows[0]), _SEARCHED_ROWS), _MEASURED_ROWS):
        parts.append(_run(graph, [x[first : first + _MEASURED_ROWS] for x in rows]))
        wanted -= {(layer, int(e)) for layer, r in enumerate(parts[-1][2]) for e in np.unique(r)}
        if not wanted:
            break
    routes = [np.concatenate(layers) for layers in zip(*(part[2] for part in parts), strict=True)]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), routes


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


def _varied(routes: Sequence[Routes], count: int, least: int, most: int) -> list[int]:
    """Row numbers, each adding as many experts not seen before as it can, spread evenly where none are new."""
    visits = [
        {(layer, int(e)) for layer, r in enumerate(routes) for e in r[n].reshape(-1) if e >= 0} for n in range(count)
    ]
    left = set().union(*visits)
    chosen: set[int] = set()
    spread = {n * count // least for n in range(least)}
    while len(chosen) < least or (left and len(chosen) < most):
        best = max((n for n in range(count) if n not in chosen), key=lambda n: (len(visits[n] & left), n in spread))
        chosen.add(best)
        left -= visits[best]
    return sorted(chosen)
