"""Pruning of experts: those no input can choose, and on request those that data never chose or that the user names.

There are two ways, for there are two promises:

- An expert that is *proven* never to be chosen loses its weights and its program; the router keeps its row. All logits,
  choices and weights stay what they were, so every bit of the outputs does: a softmax over all experts counts its
  probability as before.
- An expert taken out on request leaves the router as well: its tokens go to the next best, and a softmax over all
  experts is one over those left. That changes outputs; the report says by how much on the calibration rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from colibri.common import options
from colibri.errors import ExportError
from colibri.ir.graph import Array, Graph, Node, Router, absent_expert, expert_numbers, is_absent
from colibri.ir.weights import Fp16Weight
from colibri.passes.rewrite import rebuild
from colibri.reference.interpreter import Trace, run

MODES = ("proven", "unused", "none")

_ROWS = 1024  # calibration rows run at once
# What the proofs and the removal below were made for: the k largest logits are chosen, and what follows from them are
# weights. Anything else a router or an MoE node says stops both.
_ROUTER = {"experts", "k", "score", "normalize", "scale", "epsilon"}
_ATTRIBUTES = {"router", "experts", "numbers"}
_SCORES = {"softmax", "sigmoid", "logit", "sqrt_softplus"}
_NORMALIZE = {"none", "sum", "softmax", "one", "clamped"}

Expert = tuple[int, int]  # layer, number in the original model


@dataclass(frozen=True)
class Selection:
    """What to take out: `mode` is one of MODES; `experts` are taken out besides, as (layer, expert)."""

    mode: str = "proven"
    experts: tuple[Expert, ...] = ()

    def __post_init__(self) -> None:
        options.choice("prune", self.mode, MODES)


PROVEN = Selection()


@dataclass(frozen=True)
class Pruned:
    """One expert that was taken out, by its number in the original model.

    `why` is "proven", "unused" or "requested"; `reason` says it for people; `bytes` of weights it would have taken.
    """

    layer: int
    name: str
    expert: int
    why: str
    reason: str
    bytes: int


@dataclass(frozen=True)
class Change:
    """How far one output moved: largest and mean |difference|, and the output's largest |value| before."""

    name: str
    largest: float
    mean: float
    scale: float


@dataclass(frozen=True)
class Rerouted:
    """Tokens of one layer whose set of experts changed."""

    layer: int
    tokens: int
    rerouted: int


@dataclass(frozen=True)
class Effect:
    """What pruning on request changed on `rows` rows, calibration's where `given`, random ones otherwise."""

    rows: int
    given: bool
    outputs: list[Change]
    layers: list[Rerouted]


@dataclass(frozen=True)
class Pruning:
    """What was taken out and, where that can change outputs, what it changed."""

    experts: list[Pruned]
    effect: Effect | None = None

    @property
    def bytes(self) -> int:
        """Bytes of weights that were saved."""
        return sum(p.bytes for p in self.experts)

    def by_layer(self) -> dict[int, list[int]]:
        """The original numbers of the experts taken out, ascending, by layer."""
        ordered = sorted(self.experts, key=lambda p: (p.layer, p.expert))
        return {layer: [p.expert for p in group] for layer, group in groupby(ordered, lambda p: p.layer)}

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {**asdict(self), "bytes": self.bytes}

    def __str__(self) -> str:
        lines = [
            f"pruned layer {p.layer} ({p.name}), expert {p.expert}, {p.bytes:,} bytes, {p.why}: {p.reason}"
            for p in self.experts
        ]
        if self.effect is not None:
            kind = "calibration" if self.effect.given else "random"
            for change in self.effect.outputs:
                moved = f"by {change.largest:.3g} at most, {change.mean:.3g} on average"
                lines.append(f"pruning moved output {change.name} {moved} (largest value {change.scale:.3g}) on "
                             f"{self.effect.rows:,} {kind} rows")  # fmt: skip
            for r in self.effect.layers:
                lines.append(f"pruning rerouted {r.rerouted:,} of {r.tokens:,} tokens in layer {r.layer}")
        return "\n".join(lines)


def prune(graph: Graph, selection: Selection, rows: Sequence[Array], given: bool) -> tuple[Graph, Pruning]:
    """The graph without the selected experts, and what was taken out.

    `rows` (n, *shape) for each input are what "unused" and the effect are measured on; `given` says that they are the
    user's. Raises ExportError for an expert that does not exist or cannot be spared.
    """
    if selection.mode == "unused" and not given:
        raise ExportError("pruning unused experts needs real rows to know them by: pass --calibration rows.npy")
    numbers = [expert_numbers(node) for node in graph.moe_nodes()]
    gone: dict[Expert, Pruned] = {}

    def note(experts: Collection[Expert], why: str, reason: str) -> None:
        for layer, expert in sorted(experts):
            node = list(graph.moe_nodes())[layer]
            body = node.attrs["experts"][numbers[layer].index(expert)]
            size = sum(value.nbytes for value in body.constants.values())
            gone[layer, expert] = Pruned(layer, node.output, expert, why, reason, size)

    _check_requested(selection.experts, numbers)
    note(selection.experts, "requested", "taken out as asked")
    new = _removed(graph, selection.experts)
    proofs = _proofs(new, selection.mode)
    unused = _unused(new, rows) if selection.mode == "unused" else set()
    while spare := {e for e in unused if e not in proofs and e not in gone}:
        note(spare, "unused", f"none of the {len(rows[0]):,} calibration rows chose it")
        new = _removed(new, spare)
        proofs = _proofs(new, selection.mode)  # some may have rested on an expert that has just gone
    for expert, reason in proofs.items():
        note([expert], "proven", reason)
    effect = None
    if any(p.why != "proven" for p in gone.values()):
        effect = _effect(graph, new, rows, given)
    return _emptied(new, proofs), Pruning([gone[e] for e in sorted(gone)], effect)


# --- proofs -----------------------------------------------------------------------------------------------------------


def _proofs(graph: Graph, mode: str) -> dict[Expert, str]:
    """The experts that can never be chosen, each with its proof."""
    found: dict[Expert, str] = {}
    for layer, node in enumerate(graph.moe_nodes() if mode != "none" else ()):
        numbers = expert_numbers(node)
        for e, reason in never_chosen(graph, node).items():
            if not is_absent(node.attrs["experts"][e]):
                found[layer, numbers[e]] = reason
    return found


def never_chosen(graph: Graph, node: Node) -> dict[int, str]:
    """The experts of a `moe` node, by position, that its router can never choose, each with the proof for people.

    A logit is one chain of float32 additions that starts from the bias: b, then fl(b + c), … with terms c that depend
    on the router's row and the input alone. fl(· + c) never decreases, so of two experts with the same row bit for bit
    the one with the larger bias has, at every step and so in the end, a logit at least as large. They may well round to
    the same; then the lower number wins. So expert j stays ahead of e for every input if j < e, their rows are the same
    and b_j >= b_e. That covers what is not finite: a term that is NaN makes both logits NaN, and NaN counts as -inf;
    where an infinite term makes NaN of the larger sum alone, inf - inf, the smaller one is at -inf already or joins it
    with that term, and from there it gets no further than -inf or NaN.

    A bias of -inf makes a logit of -inf or NaN for every input; every expert with a lower number is then ahead.
    One with a higher number is ahead only where its own logit is above -inf: the proof says so.

    k experts ahead of e leave it no place. Nothing is proven of a router that says more than these proofs know.
    """
    linear = _router_of(graph, node)
    if _unknown(node) or linear is None:
        return {}
    k = node.attrs["router"].k
    matrix = graph.array(linear.inputs[1])
    bias = graph.array(linear.inputs[2]) if len(linear.inputs) == 3 else np.zeros(len(matrix), np.float32)
    numbers = expert_numbers(node)
    rows = [row.tobytes() for row in matrix]
    proofs: dict[int, str] = {}
    for e in range(len(rows)):
        never = bool(np.isneginf(bias[e]))
        ahead = [j for j in range(e) if never or (rows[j] == rows[e] and bias[j] >= bias[e])]
        lower = _experts([numbers[j] for j in ahead])
        if len(ahead) >= k and not never:
            proofs[e] = (
                f"ahead of it for every input: {lower}, with the same router row, a bias at least as large, and lower "
                f"numbers, which win ties (k = {k})"
            )
        elif len(ahead) >= k:
            proofs[e] = (
                "its router bias is -inf, so its logit is -inf or NaN for every input; ahead of that: "
                f"{lower} at least by lower numbers, which win ties (k = {k})"
            )
        higher = [j for j in range(e + 1, len(rows)) if bias[j] > -np.inf]
        if never and len(ahead) < k <= len(ahead) + len(higher):
            lower = f"{lower} at least by lower numbers, and " if ahead else ""
            proofs[e] = (
                f"its router bias is -inf, so its logit is -inf or NaN for every input; ahead of that: {lower}"
                f"{_experts([numbers[j] for j in higher])} where their logits are above -inf (k = {k}). That is so for "
                "every input but those that are NaN or infinite or make the router overflow; should one of these "
                "choose it, its result counts as zeros"
            )
    return proofs


def _experts(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"expert{'s' if len(numbers) > 1 else ''} {shown}"


def _router_of(graph: Graph, node: Node) -> Node | None:
    """The float product that gives the logits as they are; None where they come from something else."""
    producers = graph.producers()
    source = producers.get(node.inputs[1])
    while source is not None and source.op == "reshape" and _same_rows(graph, source):
        source = producers.get(source.inputs[0])
    if source is None or source.op != "linear" or source.attrs.get("activation"):
        return None
    weights = [graph.constants.get(name) for name in source.inputs[1:]]
    return source if all(isinstance(w, np.ndarray | Fp16Weight) for w in weights) else None


def _same_rows(graph: Graph, node: Node) -> bool:
    return graph.shapes[node.output][-1:] == graph.shapes[node.inputs[0]][-1:]


def _unknown(node: Node) -> str:
    """What a `moe` node says that this file does not know, as text; empty where it knows all of it."""
    router: Router = node.attrs["router"]
    plain = type(router)(router.experts, router.k)
    odd = [f.name for f in fields(router)
           if f.name not in _ROUTER and repr(getattr(router, f.name)) != repr(getattr(plain, f.name))]  # fmt: skip
    odd += [name for name, value in node.attrs.items() if name not in _ATTRIBUTES and value is not None]
    odd += [f"score {router.score}"] if router.score not in _SCORES else []
    odd += [f"normalize {router.normalize}"] if router.normalize not in _NORMALIZE else []
    odd += ["a third input"] if len(node.inputs) > 2 else []
    return ", ".join(odd)


# --- taking out -------------------------------------------------------------------------------------------------------


def _check_requested(experts: Sequence[Expert], numbers: Sequence[Sequence[int]]) -> None:
    for layer, expert in experts:
        if not 0 <= layer < len(numbers):
            known = f"has layers 0 to {len(numbers) - 1}" if numbers else "has no MoE layer"
            raise ExportError(f"there is no layer {layer} to prune expert {expert} from: the model {known}")
        if expert not in numbers[layer]:
            raise ExportError(
                f"layer {layer} has no expert {expert}: it has {numbers[layer][0]} to {numbers[layer][-1]}"
            )


def _removed(graph: Graph, experts: Collection[Expert]) -> Graph:
    """The graph without these experts, their router rows included."""
    keep: dict[str, list[int]] = {}
    for layer, node in enumerate(graph.moe_nodes()):
        mine = {expert for at, expert in experts if at == layer}
        if not mine:
            continue
        if unknown := _unknown(node):
            raise ExportError(f"layer {layer}: its router has {unknown}, with which no expert can be taken out; prune "
                              "other layers only")  # fmt: skip
        numbers = expert_numbers(node)
        keep[node.output] = [n for n, number in enumerate(numbers) if number not in mine]
        left, k = len(keep[node.output]), node.attrs["router"].k
        if left < k:
            raise ExportError(f"layer {layer}: without {_experts(sorted(mine))} it has {left} left, but its router "
                              f"chooses k = {k}: prune fewer")  # fmt: skip
    cut = dict(_router_rows(graph, keep))

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        if node.output in cut:
            parts = [new.add_constant(f"{i}.kept", graph.array(i)[cut[node.output]]) for i in node.inputs[1:]]
            return new.add(node.op, names[node.inputs[0]], *parts, output=node.output, **node.attrs)
        if node.output not in keep:
            return None
        kept = keep[node.output]
        logits = names[node.inputs[1]]
        if node.inputs[1] not in cut:
            logits = _columns(new, logits, kept)
        attrs = {**node.attrs, "router": replace(node.attrs["router"], experts=len(kept)),
                 "experts": [node.attrs["experts"][n] for n in kept],
                 "numbers": [expert_numbers(node)[n] for n in kept]}  # fmt: skip
        return new.add(node.op, names[node.inputs[0]], logits, output=node.output, **attrs)

    return rebuild(graph, lambda expert: expert, rewrite) if keep else graph


def _router_rows(graph: Graph, keep: Mapping[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """The products that give nothing but the logits of a layer in `keep`: they compute the kept rows only."""
    producers, readers = graph.producers(), graph.consumers()
    for node in graph.moe_nodes():
        name = node.inputs[1]
        source = producers.get(name)
        if node.output not in keep or source is None or source.op != "linear" or name in graph.outputs:
            continue
        if len(readers[name]) == 1 and all(isinstance(graph.constants.get(i), np.ndarray) for i in source.inputs[1:]):
            yield name, keep[node.output]


def _columns(graph: Graph, logits: str, kept: Sequence[int]) -> str:
    """Some columns of the logits, as slices of neighbours beside each other."""
    axis = len(graph.shapes[logits]) - 1
    runs = [[n for _, n in group] for _, group in groupby(enumerate(kept), lambda pair: pair[1] - pair[0])]
    parts = [graph.add("slice", logits, axis=axis, start=r[0], stop=r[-1] + 1, step=1) for r in runs]
    return parts[0] if len(parts) == 1 else graph.add("concat", *parts, axis=axis)


def _emptied(graph: Graph, experts: Collection[Expert]) -> Graph:
    """The graph with nothing in the place of these experts; the router keeps them."""
    place = {node.output: layer for layer, node in enumerate(graph.moe_nodes())}

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        if node.op != "moe":
            return None
        pairs = zip(expert_numbers(node), node.attrs["experts"], strict=True)
        bodies = [absent_expert(body) if (place[node.output], n) in experts else body for n, body in pairs]
        inputs = (names[i] for i in node.inputs)
        return new.add(node.op, *inputs, output=node.output, **{**node.attrs, "experts": bodies})

    return rebuild(graph, lambda expert: expert, rewrite) if experts else graph


# --- measuring --------------------------------------------------------------------------------------------------------


def _chunks(rows: Sequence[Array]) -> Iterator[list[Array]]:
    for first in range(0, len(rows[0]), _ROWS):
        yield [x[first : first + _ROWS] for x in rows]


def _routes(graph: Graph, trace: Trace) -> list[np.ndarray[Any, Any]]:
    """A run's choices (tokens, k) by original number, ascending, for every layer; no expert stays -1."""
    chosen = []
    for node, routes in zip(graph.moe_nodes(), trace.routes, strict=True):
        flat = routes.reshape(-1, routes.shape[-1])
        chosen.append(np.sort(np.where(flat < 0, flat, np.array(expert_numbers(node))[flat]), axis=1))
    return chosen


def _unused(graph: Graph, rows: Sequence[Array]) -> set[Expert]:
    """The experts that none of the rows choose."""
    unused = {(layer, n) for layer, node in enumerate(graph.moe_nodes()) for n in expert_numbers(node)}
    for chunk in _chunks(rows):
        trace = Trace()
        run(graph, chunk, trace)
        unused -= {(layer, int(n)) for layer, chosen in enumerate(_routes(graph, trace)) for n in np.unique(chosen)}
    return unused


def _effect(before: Graph, after: Graph, rows: Sequence[Array], given: bool) -> Effect:
    """What the same rows give before and after."""
    largest, total, scale, count = (np.zeros(len(before.outputs)) for _ in range(4))
    tokens, moved = (np.zeros(len(list(before.moe_nodes())), int) for _ in range(2))
    for chunk in _chunks(rows):
        traces = Trace(), Trace()
        want, have = (run(graph, chunk, trace) for graph, trace in zip((before, after), traces, strict=True))
        for n, (a, b) in enumerate(zip(want, have, strict=True)):
            with np.errstate(invalid="ignore"):
                delta = np.abs(b.astype(np.float64) - a)
            delta[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
            delta[np.isnan(delta)] = np.inf  # only one of the two is finite
            largest[n] = max(largest[n], delta.max())
            scale[n] = max(scale[n], np.abs(a[np.isfinite(a)]).max(initial=0))
            total[n] += delta.sum()
            count[n] += delta.size
        for layer, (old, new) in enumerate(zip(_routes(before, traces[0]), _routes(after, traces[1]), strict=True)):
            tokens[layer] += len(old)
            moved[layer] += int((old != new).any(axis=1).sum())
    changes = [Change(name, float(largest[n]), float(total[n] / count[n]), float(scale[n]))
               for n, name in enumerate(before.outputs)]  # fmt: skip
    layers = [Rerouted(n, int(t), int(m)) for n, (t, m) in enumerate(zip(tokens, moved, strict=True))]
    return Effect(len(rows[0]), given, changes, layers)
