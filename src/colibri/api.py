"""The Python door: export a PyTorch module."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colibri.common import options
from colibri.emit.c_source import PLAIN, Style
from colibri.errors import ExportError, ExportWarning
from colibri.format import spec
from colibri.passes.prune import Selection
from colibri.pipeline.module import Quantization, alignment, build, write
from colibri.reference import arithmetic

try:
    import torch  # noqa: F401
except ModuleNotFoundError:
    raise ExportError("exporting a PyTorch module needs PyTorch: pip install 'colibri-moe[torch]'") from None

from colibri.frontends.recognise.report import Report
from colibri.frontends.torch.export import from_pt2, from_torch, register_moe
from colibri.quantize.report import Scorer

__all__ = ["export", "register_moe"]


@arithmetic.standard()
def export(
    module: Any,
    example_inputs: Any,
    path: str | Path,
    *,
    calibration: Any = None,
    dtype: str = "fp32",
    activations: str = "int8",
    outlier_share: float | None = None,
    residual_share: float | None = None,
    budget: int | None = None,
    max_error: float | None = None,
    scorer: Scorer | None = None,
    prune: str = "proven",
    prune_experts: Sequence[tuple[int, int]] = (),
    max_batch: int | None = None,
    name: str | None = None,
    expert_align: int | None = None,
    prefix: str = PLAIN.prefix,
    expert_sections: bool = False,
    firmware: bool = False,
    stream: int | None = None,
    trust: bool = False,
) -> Report:
    """Export a `torch.nn.Module` to the directory `path` (model.bin, model.h, model.c), or to one `….bin` file.

    module: also a `torch.export.ExportedProgram`, or the path of one saved as .pt2, which has inputs of its own:
    example_inputs is None then. Loading a .pt2 that holds more than tensors and a program of tensor operations runs
    code; it is refused unless `trust` is set.

    example_inputs: a tensor or tuple of tensors, first axis the batch; gives the shapes, and `max_batch` (rows the
    context memory is planned for) where that is not given. calibration: a tensor, tuple or iterable of such with real
    rows; MoE blocks are identified on them, golden rows are taken from them, and quantising looks at them.

    dtype: fp32, fp16, int8, int4, or mixed, which chooses a format for each weight to meet `budget` (bytes of weights)
    or `max_error` (‖Δ‖ / ‖y‖ of the worst output; checked for every dtype). activations: how int8 weights read their
    input, "int8" or "float". outlier_share: of a matrix's bytes, what its sparse float16 outliers take;
    None: 1 % where that takes a third off the error, otherwise nothing; `residual_share` is its older name. scorer:
    a task metric of the outputs, for the report.

    prune: "proven" takes out experts that no input can choose, which keeps every bit; "unused" also those that
    `calibration` never chooses; "none" takes out none. prune_experts: more (layer, expert) pairs to remove. The
    report says what went, why, and what that changed.

    expert_align: bytes each expert is aligned to in model.bin; by default a page, or with `firmware` the 64 that flash
    needs. (model.c compiled as firmware has no gaps in any case.) prefix: what names in model.h and model.c begin with.
    expert_sections: each expert's weights in a section of their own, for a linker to place.

    stream: the axis of time (1 for inputs (batch, time, …), 2 for (batch, channels, time)). The exported model then
    takes one time step a call and keeps what it needs of the past in its context, until that is initialised again: GRUs
    and causal convolutions step by step. What needs the future or the whole sequence is refused.

    Returns the report: what each block was taken for, its warnings (also issued as `ExportWarning`), and what
    quantising cost.

    Raises ExportError, before anything is written, for whatever cannot be exported faithfully.
    """
    path = options.path("path", path)
    max_batch = None if max_batch is None else options.whole("max_batch", max_batch, 1, spec.MAX_BATCH)
    stream = None if stream is None else options.whole("stream", stream, 1, 1 << 16)
    name = None if name is None else options.text("name", name)
    outlier_share = residual_share if outlier_share is None else outlier_share
    quantization = Quantization(dtype, activations, outlier_share, budget, max_error, scorer)
    selection = Selection(prune, options.pairs("prune_experts", prune_experts))
    if expert_align is not None:
        expert_align = options.whole("expert_align", expert_align, spec.ALIGN_MODEL, 1 << 30)
    if not isinstance(trust, bool):
        raise ExportError(f"trust is {trust!r}; it must be True or False")
    if prune == "unused" and calibration is None:
        raise ExportError("pruning unused experts needs real rows to know them by: pass calibration=rows")
    style = Style(prefix, expert_sections)
    if isinstance(module, str | Path):
        source = options.path("module", module)
        if source.suffix != ".pt2" or example_inputs is not None:
            raise ExportError(f"module is the path {str(source)!r}: only a .pt2 is read from a file, with the example "
                              "inputs it was saved with; pass None for them")  # fmt: skip
        imported = from_pt2(source, calibration, name or source.stem, trust)
    else:
        imported = from_torch(module, example_inputs, calibration, name or type(module).__name__)
    built = build(
        imported.graph,
        quantization=quantization,
        selection=selection,
        max_batch=(imported.batch if stream is None else 1) if max_batch is None else max_batch,
        calibration=imported.rows,
        expert_align=alignment(expert_align, firmware),
        stream_axis=stream,
    )
    write(built, path, style)
    imported.report.quality, imported.report.pruning = built.quality, built.pruning
    imported.report.warnings += built.warnings
    for warning in imported.report.warnings:
        warnings.warn(warning, ExportWarning, stacklevel=2)
    return imported.report
