"""Export of a module: all in memory, where formats are measured and the engine is proven before there is a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from colibri.common import options
from colibri.common.compare import finite_rows
from colibri.emit import c_source, model_bin
from colibri.emit.c_source import PLAIN, Style
from colibri.emit.files import write_files
from colibri.errors import ExportError
from colibri.format import spec
from colibri.ir import weights
from colibri.ir.graph import Array, Graph, expert_numbers, logit_masks
from colibri.ir.weights import StoredWeight
from colibri.lowering.program import Program
from colibri.passes.prune import PROVEN, Pruning, Selection, prune
from colibri.passes.read import read_weights
from colibri.passes.stream import stream, time_steps, verify
from colibri.pipeline import stages
from colibri.pipeline.stages import Stage
from colibri.quantize.choose import DTYPES, Choice, quantize
from colibri.quantize.report import Quality, Scorer, measure
from colibri.quantize.watch import large_error
from colibri.reference import arithmetic
from colibri.reference.certificate import Certificate, certify
from colibri.reference.interpreter import run
from colibri.runtime.engine import Model, load

_COMPARED_ROWS = 64  # rows run through reference and engine before anything is written


@dataclass(frozen=True)
class Quantization:
    """How weights are stored: see `colibri.quantize.choose.quantize`."""

    dtype: str = "fp32"
    activations: str = "int8"
    outlier_share: float | None = None  # of a matrix's bytes, for its sparse outliers E; None: 1 % where it pays
    budget: int | None = None  # bytes of all weights
    max_error: float | None = None  # ‖Δ‖ / ‖y‖ of the worst output
    scorer: Scorer | None = None  # task metric of a run's outputs, for the report

    def __post_init__(self) -> None:
        options.choice("dtype", self.dtype, DTYPES)
        options.choice("activations", self.activations, ("int8", "float"))
        if self.outlier_share is not None:
            options.number("outlier_share", self.outlier_share, 0, 1)
        if self.budget is not None:
            options.whole("budget", self.budget, 1, 1 << 62)
        if self.max_error is not None:
            options.number("max_error", self.max_error, 0)
        if self.scorer is not None and not callable(self.scorer):
            raise ExportError(f"scorer is {self.scorer!r}; it must be a function of the outputs")


FP32 = Quantization()


@dataclass(frozen=True)
class Export:
    """What an export produced: the final graph, its program, the certificate, the bytes of model.bin, what quantising
    chose and cost (empty and None for fp32), the experts taken out, and what the user should know."""

    graph: Graph
    program: Program
    certificate: Certificate
    image: bytes
    choices: list[Choice]
    quality: Quality | None
    pruning: Pruning
    warnings: list[str]

    def files(self, style: Style = PLAIN) -> dict[str, bytes]:
        """The files of the export directory, by name."""
        texts = c_source.files(self.program, self.image, style)
        return {"model.bin": self.image, **{name: text.encode() for name, text in texts.items()}}

    def summary(self) -> dict[str, Any]:
        """The figures of the export."""
        return {
            **load(self.image).package.summary(),
            "planner_lower_bound": self.program.lower_bound,
            "calibration_rows": self.certificate.rows,
            "pruned_experts": len(self.pruning.experts),
            "pruned_bytes": self.pruning.bytes,
        }


def alignment(expert_align: int | None, firmware: bool) -> int:
    """Bytes each expert is aligned to in model.bin: what was asked for, or what flash or a system's pages need."""
    return expert_align or (spec.ALIGN_MODEL if firmware else spec.ALIGN_EXPERT)


@arithmetic.standard()
def build(
    graph: Graph,
    *,
    quantization: Quantization = FP32,
    selection: Selection = PROVEN,
    max_batch: int = 1,
    calibration: Sequence[Array] | None = None,
    expert_align: int = spec.ALIGN_EXPERT,
    on_stage: Stage | None = None,
    stream_axis: int | None = None,
) -> Export:
    """Run every stage in memory and prove the engine equal to the reference on the calibration rows.

    `calibration` holds one array (rows, *shape) float32 for each input; without it, seeded normal rows stand in for the
    certificate, and weights are quantised without looking at activations. `selection` says which experts are taken out.
    `stream_axis`: of the inputs, batch included, the axis of time; the model then takes one time step a call.
    Raises ExportError for anything that cannot be exported faithfully.
    """
    options.whole("max_batch", max_batch, 1, spec.MAX_BATCH)
    options.whole("expert_align", expert_align, spec.ALIGN_MODEL, 1 << 30)
    stage = on_stage or stages.silent
    given, dtype = calibration is not None, quantization.dtype
    graph = stages.optimized(graph, stage, _in_memory)
    warnings: list[str] = []
    rows = stages.random_rows(graph) if calibration is None else _usable_rows(graph, calibration, warnings)
    more: dict[str, Any] = {}
    if stream_axis is not None:
        graph, rows, more["latency"] = _streamed(graph, rows, stream_axis)
        stage("stream", graph)
    whole = graph
    graph, pruning = prune(graph, selection, rows, given)
    graph.validate()
    stage("prune", graph)
    if pruning.experts:
        more["pruned"] = {str(layer): experts for layer, experts in pruning.by_layer().items()}
    left = graph
    graph, choices, quality = _quantize(graph, quantization, rows, given)
    if quality is not None:
        warnings += large_error(left, graph, quality, dtype, quantization.activations, rows)
    graph, program = stages.planned(graph, max_batch, stage)
    certificate = certify(graph, rows)
    info = stages.info(graph, dtype, given, **more)
    image = model_bin.write(program, certificate.golden, certificate.frequencies, info, expert_align)
    pruning = _sized(pruning, whole, program)
    export = Export(graph, program, certificate, image, choices, quality, pruning, warnings)
    _prove_equal(export, rows)
    stage("export", export)
    return export


def _in_memory(graph: Graph) -> Graph:
    """The graph with every weight in it, and sound."""
    graph = read_weights(graph)
    _require_sound_constants(graph)
    return graph


def _streamed(graph: Graph, rows: list[Array], axis: int) -> tuple[Graph, list[Array], dict[str, int]]:
    """The graph that takes one time step a call, its rows, and how many steps each output comes late."""
    rank = min(len(graph.shapes[name]) for name in graph.inputs)
    if rank == 0 or axis not in range(1, rank + 1):
        raise ExportError(f"stream is {axis!r}; it must be the axis of time, from 1 to the last of every input's")
    moving, flows = stream(graph, axis - 1)
    verify(graph, moving, flows, axis - 1, rows)
    late = {name: flow.latency * (flow.axis is not None) for name, flow in zip(graph.outputs, flows, strict=True)}
    return moving, time_steps([x[:_COMPARED_ROWS] for x in rows], axis - 1), late


def _quantize(
    graph: Graph, how: Quantization, rows: Sequence[Array], given: bool
) -> tuple[Graph, list[Choice], Quality | None]:
    new, choices = quantize(graph, how.dtype, rows if given else None, activations=how.activations,
                            share=how.outlier_share, budget=how.budget, max_error=how.max_error)  # fmt: skip
    _require_sound_constants(new)
    if how.dtype == "fp32":
        return new, [], None
    quality = measure(graph, new, rows, how.scorer)
    if how.max_error is not None and quality.error > how.max_error:
        raise ExportError(f"{how.dtype} has an output error of {quality.error:.3%}, more than the {how.max_error:.3%} "
                          "allowed: raise the limit, or use a wider format")  # fmt: skip
    return new, choices, quality


def _sized(pruning: Pruning, whole: Graph, program: Program) -> Pruning:
    """With the bytes an expert would have taken in the file: those of one of its layer and shape that is left."""
    shapes = {
        (layer, number): body.signature()
        for layer, node in enumerate(whole.moe_nodes())
        for number, body in zip(expert_numbers(node), node.attrs["experts"], strict=True)
    }
    sizes = {(e.layer, shapes[e.layer, e.index]): e.section.size for e in program.experts if e.ops}
    experts = [replace(p, bytes=sizes.get((p.layer, shapes[p.layer, p.expert]), p.bytes)) for p in pruning.experts]
    return replace(pruning, experts=experts)


def write(export: Export, path: str | Path, style: Style = PLAIN) -> Path:
    """Write the export to the directory `path`, or model.bin alone where `path` ends in .bin; returns its model.bin.

    Each file is replaced by rename, so a process that has the old one mapped keeps it whole; `write_files` says what an
    export that is stopped leaves.
    """
    path = Path(path)
    files = (
        {path: export.image} if path.suffix == ".bin" else {path / n: data for n, data in export.files(style).items()}
    )
    write_files(files, path)
    return path if path.suffix == ".bin" else path / "model.bin"


def _require_sound_constants(graph: Graph) -> None:
    lowest, any_bound, masks = _may_be_infinite(graph)
    for name, value in graph.constants.items():
        if isinstance(value, StoredWeight):
            weights.check(value)
        elif isinstance(value, np.ndarray):
            allowed = np.isinf(value) if name in any_bound else np.isneginf(value) & (name in lowest)
            if name in masks or (np.isfinite(value) | allowed).all():
                continue
            raise ExportError(f"constant {name!r} holds NaN or infinity: train or load the model again")
    for node in graph.moe_nodes():
        for expert in node.attrs["experts"]:
            _require_sound_constants(expert)


def _may_be_infinite(graph: Graph) -> tuple[set[str], set[str], set[str]]:
    """Constants that may hold -inf, as masks of what they are added to; those that are bounds or fill a border; and
    those that replace what they cover, and are NaN elsewhere."""
    readers = graph.consumers()

    def only(name: str, *funcs: str) -> bool:
        return all((n.attrs.get("func") if n.op == "binary" else n.op) in funcs for n in readers[name])

    masks = {name for name in graph.constants if only(name, "add")}
    bounds = {name for name in graph.constants if only(name, "minimum", "maximum", "concat")}
    covers = {name for name in graph.constants if only(name, "fill") and readers[name]}
    covers -= {node.inputs[0] for node in graph.nodes if node.attrs.get("func") == "fill"}
    return masks | logit_masks(graph), bounds, covers


def _usable_rows(graph: Graph, calibration: Sequence[Array], warnings: list[str]) -> list[Array]:
    """The calibration rows that hold numbers throughout; raises ExportError where they do not fit the graph."""
    shapes = [graph.shapes[name] for name in graph.inputs]
    given = [tuple(x.shape) for x in calibration]
    if [shape[1:] for shape in given] != shapes or len({shape[:1] for shape in given}) != 1 or not given[0][0]:
        wanted = ", ".join(str(("rows", *shape)).replace("'", "") for shape in shapes)
        raise ExportError(
            f"calibration has the shapes {given}; the inputs take {wanted}, of one number of rows, at least 1"
        )
    finite = finite_rows(*calibration)
    left_out = len(finite) - int(finite.sum())
    if left_out == 0:
        return list(calibration)
    warnings.append(f"{left_out} of {len(finite)} calibration rows hold NaN or infinity and were left out")
    return [x[finite] for x in calibration] if finite.any() else stages.random_rows(graph)


def _prove_equal(export: Export, rows: Sequence[Array]) -> None:
    """The engine gives the reference's bits on these bytes; a difference is a bug of Colibri and never shipped."""
    model: Model = load(export.image)
    model.selftest()
    some = [x[:_COMPARED_ROWS] for x in rows]
    result = model(*some)
    got = result if isinstance(result, tuple) else (result,)
    for name, want, have in zip(export.graph.outputs, run(export.graph, some), got, strict=True):
        if want.tobytes() != have.tobytes():
            raise ExportError(f"output {name!r} of the engine differs from the reference: please report this model")
    if model.context_bytes != export.program.context_bytes:
        raise ExportError("the engine's context size differs from the plan: please report this model")
