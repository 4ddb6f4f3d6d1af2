"""Effects of quantisation: errors against the float32 reference, router flips with their margins, the task metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from colibri.errors import ExportError
from colibri.ir.graph import Array, Graph
from colibri.ir.weights import Int4Weight, Int8Weight, Weight, dense
from colibri.reference.interpreter import Trace, run

Scorer = Callable[[list[Array]], float]
Numbers = np.ndarray[Any, np.dtype[Any]]
Route = np.ndarray[Any, np.dtype[np.int32]]

_SHOWN = 3  # most frequent flips of a layer, for people


@dataclass(frozen=True)
class Difference:
    """Error of one value relative to the reference's: ‖Δ‖ / ‖y‖, max |Δ| / max |y|, and ‖Δ‖ / ‖y‖ without any E."""

    name: str
    error: float
    largest: float
    without_outliers: float


@dataclass(frozen=True)
class Flips:
    """Tokens of one MoE layer whose set of experts changed.

    A token's `margin` is its least chosen minus its best other logit in the reference; 0 where nothing flipped. `pairs`
    are (expert left, expert taken, times), most frequent first; `usage` is each expert's share of the reference's
    choices, `usage_now` of the quantised model's.
    """

    layer: str
    tokens: int
    flipped: int
    median_margin: float
    largest_margin: float
    pairs: list[tuple[int, int, int]]
    usage: list[float]
    usage_now: list[float]

    @property
    def share(self) -> float:
        """Flipped tokens of all tokens, 0 … 1."""
        return self.flipped / self.tokens


@dataclass(frozen=True)
class Metric:
    """The task metric of the reference, of the quantised model, and of the quantised model without any E."""

    reference: float
    quantised: float
    without_outliers: float


@dataclass(frozen=True)
class Quality:
    """How far a quantised graph is from its reference on `rows` calibration rows."""

    rows: int
    layers: list[Difference]
    outputs: list[Difference]
    flips: list[Flips]
    metric: Metric | None

    @property
    def error(self) -> float:
        """‖Δ‖ / ‖y‖ of the worst output: what an error limit is compared with."""
        return max(output.error for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        flips = [{**asdict(flip), "share": flip.share} for flip in self.flips]
        return {**asdict(self), "flips": flips, "error": self.error}

    def __str__(self) -> str:
        lines = [f"against float32 on {self.rows} rows"]
        for kind, values in (("layer", self.layers), ("output", self.outputs)):
            lines += [
                f"{kind} {v.name}: error {v.error:.3%}, largest {v.largest:.3%}, without E {v.without_outliers:.3%}"
                for v in values
            ]
        for flip in self.flips:
            line = f"router {flip.layer}: {flip.flipped} of {flip.tokens} tokens flipped ({flip.share:.2%})"
            if flip.flipped:
                pairs = ", ".join(f"{a}→{b} {n}×" for a, b, n in flip.pairs[:_SHOWN])
                line += f", {pairs}, margin {flip.median_margin:.3g} (median), {flip.largest_margin:.3g} (largest)"
            lines.append(line)
        if self.metric is not None:
            m = self.metric
            lines.append(f"metric {m.quantised:.6g}, float32 {m.reference:.6g}, without E {m.without_outliers:.6g}")
        return "\n".join(lines)


def measure(reference: Graph, quantised: Graph, rows: Sequence[Array], scorer: Scorer | None = None) -> Quality:
    """Compare two graphs of one model on `rows`, one array (n, *shape) an input.

    `scorer(outputs)` is a task metric of a run's outputs (n, *shape). Raises ExportError where the graphs differ in
    layers or outputs.
    """
    layers = [node.output for node in reference.moe_nodes()]
    if [node.output for node in quantised.moe_nodes()] != layers or quantised.outputs != reference.outputs:
        raise ExportError("the two graphs are not of one model: their MoE layers or outputs differ")
    traces, outputs = [], []
    for graph in (reference, quantised, without_outliers(quantised)):
        traces.append(Trace())
        outputs.append(run(graph, rows, traces[-1]))
    want, have, bare = (trace.values for trace in traces)
    for name in reference.outputs:
        if not np.isfinite(want[name]).any():
            raise ExportError(
                f"output {name} is NaN or infinite on every row, so what a format costs cannot be measured"
            )

    def difference(name: str) -> Difference:
        delta = _delta(want[name], have[name])
        largest = float(_ratio(np.abs(delta).max(), np.abs(want[name]).max()))
        return Difference(name, relative_error(want[name], have[name]), largest, relative_error(want[name], bare[name]))

    flips = [
        compare_routes(node.output, before, after, logits)
        for node, before, after, logits in zip(
            reference.moe_nodes(), traces[0].routes, traces[1].routes, traces[0].logits, strict=True
        )
    ]
    metric = None if scorer is None else Metric(*(_scored(scorer, y) for y in outputs))
    return Quality(len(outputs[0][0]), list(map(difference, layers)), list(map(difference, reference.outputs)), flips,
                   metric)  # fmt: skip


def _scored(scorer: Scorer, outputs: list[Array]) -> float:
    try:
        return float(scorer(outputs))
    except Exception as error:
        raise ExportError(
            f"scorer, given the list of outputs, gives no number: {type(error).__name__}: {error}"
        ) from None


def without_outliers(graph: Graph) -> Graph:
    """A copy of `graph` whose weights have lost their E, experts included."""
    nodes = [
        replace(node, attrs={**node.attrs, "experts": list(map(without_outliers, node.attrs["experts"]))})
        if node.op == "moe"
        else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=nodes, constants={name: _bare(value) for name, value in graph.constants.items()})


def relative_error(want: Numbers, have: Numbers) -> float:
    """‖have - want‖ / ‖want‖: 0 where both agree, NaNs included; infinite where only one is finite."""
    return float(_ratio(np.linalg.norm(_delta(want, have)), np.linalg.norm(want.astype(np.float64))))


def weight_error(matrix: Array, stored: Weight, energy: Array | None = None) -> float:
    """Relative Frobenius error of a stored weight, its columns weighted by `energy` (cols,): that of its output."""
    root = np.ones(1) if energy is None else np.sqrt(energy.astype(np.float64))
    return relative_error(matrix * root, dense(stored) * root)


def _bare(weight: Weight) -> Weight:
    return replace(weight, outliers=None) if isinstance(weight, Int8Weight | Int4Weight) else weight


def _delta(want: Numbers, have: Numbers) -> np.ndarray[Any, np.dtype[np.float64]]:
    """have - want, where they are not the same number (or both NaN); infinite where only one is finite."""
    with np.errstate(invalid="ignore"):
        delta = have.astype(np.float64) - want
    delta[(have == want) | (np.isnan(have) & np.isnan(want))] = 0
    return np.where(np.isnan(delta), np.inf, delta)


def _ratio(error: Any, size: Any) -> Any:
    if error == 0:
        return 0.0
    return error / size if size > 0 and np.isfinite(error) else np.inf


def compare_routes(layer: str, before: Route, after: Route, logits: Array) -> Flips:
    """Compare the choices (…, k) of every token, given the reference's logits (…, experts); -1 is no expert."""
    k, experts = before.shape[-1], logits.shape[-1]
    old, new = np.zeros((2, before.size // k, experts + 1), bool)  # the last for what has no expert
    np.put_along_axis(old, before.reshape(-1, k), True, 1)
    np.put_along_axis(new, after.reshape(-1, after.shape[-1]), True, 1)
    old, new = old[:, :experts], new[:, :experts]
    flipped = np.flatnonzero((old != new).any(axis=1))
    pairs = Counter(
        (int(a), int(b))
        for token in flipped
        for a, b in zip(*map(np.flatnonzero, (old[token] & ~new[token], new[token] & ~old[token])), strict=True)
    )
    ranked = -np.sort(-np.where(np.isnan(logits), -np.inf, logits).reshape(-1, experts)[flipped], axis=1)
    margins = [a - b if a > b else 0.0 for a, b in ranked[:, k - 1 : k + 1].tolist()] or [0.0]
    usage = [(chosen.sum(axis=0) / chosen.sum()).tolist() for chosen in (old, new)]
    ordered = [(a, b, n) for (a, b), n in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))]
    return Flips(layer, len(old), len(flipped), float(np.median(margins)), max(margins), ordered, *usage)
