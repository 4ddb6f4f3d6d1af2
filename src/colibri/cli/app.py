"""The command line: colibri export | inspect | verify | diff | run | routes | trace | advise | build | targets, and the
commands for language models of `cli_language`."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from typer import rich_utils

from colibri.build import firmware, toolchain
from colibri.build.targets import TARGETS
from colibri.cli import language as cli_language
from colibri.cli.sources import require_source
from colibri.cli.terminal import Debug, Json, ModelPath, err, errors, guarded, out, plain, show
from colibri.common import npz
from colibri.emit.c_source import PLAIN, Style
from colibri.emit.files import require_one_export
from colibri.errors import ColibriError, ExportError, ModelError
from colibri.format import spec
from colibri.format.package import open_package
from colibri.frontends.checkpoints.language_models import load_checkpoint
from colibri.ir.graph import CACHES, Array, Graph
from colibri.passes.prune import PROVEN, Selection
from colibri.pipeline import module as pipeline
from colibri.pipeline import stages
from colibri.pipeline.language import export_lm
from colibri.quantize.choose import DTYPES
from colibri.report import routes as route_report
from colibri.report import tables, traces
from colibri.report.advise import advise as judge
from colibri.report.diff import compare
from colibri.runtime.engine import load

if os.environ.get("NO_COLOR"):
    rich_utils.COLOR_SYSTEM = None  # as in `terminal`: dim and bold too

app = typer.Typer(
    help="Turns a Mixture-of-Experts model into a tiny C inference engine.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        print(f"colibri {spec.VERSION}")
        raise typer.Exit


@app.callback()
def _colibri(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


Stage = Enum("Stage", {name: name for name in stages.NAMES})  # type: ignore[misc]

Architecture = Annotated[Path | None, typer.Option(help="Architecture file of a .safetensors; default: next to it.")]
MaxBatch = Annotated[int | None, typer.Option(help="Largest batch, in rows; default: the batch of the example, or 1.")]

Trust = Annotated[
    bool,
    typer.Option("--trust", help="Load a .pt2 program that can execute code: only if you trust its author."),
]


def _source(model: Path, architecture: Path | None, trust: bool = False) -> tuple[Graph, list[Array] | None, int, Any]:
    """The graph, example rows, their batch and the recognition report of a source; None where it has none."""
    require_source(model)
    if model.is_dir():
        raise ExportError(
            f"{model} is the directory of a language model: this needs a .pt2 program or a .safetensors file"
        )
    if model.suffix == ".safetensors":
        from colibri.frontends.architecture import from_architecture

        return from_architecture(model, architecture), None, 1, None
    if model.suffix == ".pt2":
        try:
            from colibri.frontends.torch.export import from_pt2
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ExportError("a .pt2 program needs PyTorch: pip install 'colibri-moe[torch]'") from None
        imported = from_pt2(model, name=model.stem, trust=trust)
        return imported.graph, imported.rows, imported.batch, imported.report
    raise ExportError(f"{model}: unknown kind {model.suffix!r}: pass a .pt2 program or a .safetensors file")


def _bytes(text: str | None) -> int | None:
    """A size like 380KB or 2 MB in bytes; 1 KB is 1,024 bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)i?B?\s*", text, re.I)
    if match is None:
        raise ExportError(f"budget {text!r} is not a size: write it like 380KB")
    return int(float(match[1]) * 1024 ** " KMG".index(match[2].upper() or " "))


def _pairs(text: str | None) -> tuple[tuple[int, int], ...]:
    """Experts written as 0:3,0:5, layer and number, from 0."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    pairs = [re.fullmatch(r"(\d+):(\d+)", part) for part in parts]
    if None in pairs:
        raise ExportError(f"experts {text!r} are not written layer:expert: write them like 0:3,0:5")
    return tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair is not None)


def _arrays(path: Path, names: list[str]) -> list[Array]:
    """Arrays of a .npy file (one input) or a .npz file (by input name)."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            loaded = {name: loaded[name] for name in loaded.files}
    except traces.UNREADABLE as error:
        raise ColibriError(f"{path} cannot be read: {error}: pass a .npy or .npz file of numbers") from None
    if isinstance(loaded, np.ndarray):
        if len(names) != 1:
            raise ColibriError(f"{path} holds one array, but the model has inputs {', '.join(names)}: pass a .npz file")
        return [loaded]
    missing = [name for name in names if name not in loaded]
    if missing:
        raise ColibriError(f"{path} has no array {missing[0]!r}: it must hold {', '.join(names)}")
    return [loaded[name] for name in names]


@app.command()
def export(
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            "-m",
            help="A .pt2 program (torch.export.save), a .safetensors file, or the Hugging Face directory of a language "
            "model.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for model.bin, model.h and model.c.")],
    dtype: Annotated[
        str, typer.Option(help=f"Format of the weights: {', '.join(DTYPES)} (mixed: not for language models).")
    ] = "fp32",
    budget: Annotated[
        str | None, typer.Option(help="Largest size of the weights, like 380KB; with mixed, formats are chosen to fit.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Largest relative output error; above it, nothing is written.")
    ] = None,
    activations: Annotated[str, typer.Option(help="Format of the inputs of int8 weights: int8 or float.")] = "int8",
    outlier_share: Annotated[
        float | None,
        typer.Option(
            "--outlier-share",
            "--residual-share",
            help="Share of a matrix's bytes for its float16 sparse outliers; default: 1 % where that pays.",
        ),
    ] = None,
    architecture: Architecture = None,
    calibration: Annotated[Path | None, typer.Option(help=".npy or .npz with real input rows.")] = None,
    prune: Annotated[
        str, typer.Option(help="Experts to remove: proven (no input can choose them), unused (on the data), none.")
    ] = PROVEN.mode,
    prune_experts: Annotated[
        str | None, typer.Option(help="More experts to remove, as layer:expert, like 0:3,0:5.")
    ] = None,
    max_batch: MaxBatch = None,
    expert_align: Annotated[
        int | None, typer.Option(help="Alignment of experts in model.bin, bytes; default: a page, for firmware 64.")
    ] = None,
    for_firmware: Annotated[
        bool, typer.Option("--firmware", help="For a microcontroller: do not align experts in model.bin to pages.")
    ] = False,
    prefix: Annotated[
        str, typer.Option(help="Prefix of names in model.h and model.c, for several models in one firmware.")
    ] = PLAIN.prefix,
    expert_sections: Annotated[
        bool, typer.Option("--expert-sections", help="Put each expert in its own section, for the linker to place.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="Language models: context length in tokens; default: the model's, up to 4096.")
    ] = None,
    cache: Annotated[
        str, typer.Option(help=f"Language models: format of the key-value cache: {', '.join(CACHES)}.")
    ] = CACHES[0],
    workers: Annotated[
        int | None, typer.Option(help="Language models: worker processes; default: the number of CPUs, up to 4.")
    ] = None,
    stream: Annotated[
        int | None,
        typer.Option(
            help="Export a stream, one time step per call: the time axis of the inputs, counting the batch axis."
        ),
    ] = None,
    trust: Trust = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Programs: say how each block was recognised, or why not, also on failure."),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a trained model: read, verify, optimise, plan, certify, write."""
    if (model / "config.json").is_file():
        with errors(as_json, debug):
            if dtype == "mixed":
                raise ExportError("dtype mixed is not for language models: pass fp32, fp16, int8 or int4")
            unused = {"--budget": budget, "--max-error": max_error, "--architecture": architecture,
                      "--calibration": calibration, "--prune-experts": prune_experts, "--stream": stream}  # fmt: skip
            for option, value in unused.items():
                if value is not None:
                    raise ExportError(f"{option} is not for language models: leave it out")
            style = Style(prefix, expert_sections)
            summary = _export_language(model, output, dtype, activations, outlier_share, context, cache, max_batch,
                                       pipeline.alignment(expert_align, for_firmware), style, workers,
                                       as_json)  # fmt: skip
        show(summary, as_json)
        return
    with errors(as_json, debug), _progress(as_json) as advance:
        style = Style(prefix, expert_sections)
        selection = Selection(prune, _pairs(prune_experts))
        if prune == "unused" and calibration is None:
            raise ExportError("pruning unused experts needs real input rows: pass --calibration rows.npy")
        advance("read", None)
        with _explained(explain, as_json):
            graph, rows, batch, report = _source(model, architecture, trust)
        if calibration is not None:
            rows = [np.asarray(x, np.float32) for x in _arrays(calibration, graph.inputs)]
        how = pipeline.Quantization(dtype, activations, outlier_share, _bytes(budget), max_error)
        batch = (batch if stream is None else 1) if max_batch is None else max_batch
        built = pipeline.build(graph, quantization=how, selection=selection, max_batch=batch, calibration=rows,
                               expert_align=pipeline.alignment(expert_align, for_firmware), on_stage=advance,
                               stream_axis=stream)  # fmt: skip
        target = pipeline.write(built, output, style)
    summary = {**built.summary(), "path": str(target)}
    if as_json:
        summary["warnings"] = built.warnings
    if report is not None:
        summary["recognition"] = report.to_dict() if as_json else report.text(explain)
    if built.quality is not None and as_json:
        summary |= {"weights": [asdict(c) for c in built.choices], "quality": built.quality.to_dict()}
    if built.pruning.experts and as_json:
        summary["pruning"] = built.pruning.to_dict()
    show(summary, as_json)
    for warning in () if as_json else built.warnings:
        err.print(f"warning: {plain(warning)}", highlight=False, soft_wrap=True)
    if built.pruning.experts and not as_json:
        print(built.pruning)
    if built.quality is not None and not as_json:
        table = Table("weight", "format", "bytes", "sensitivity", "", box=None, pad_edge=False)
        for c in built.choices:
            shown = "" if c.sensitivity is None else f"{c.sensitivity:.3%}"
            table.add_row(c.name, c.format, f"{c.bytes:,}", shown, c.kept)
        out.print(table)
        print(built.quality)


@contextmanager
def _explained(explain: bool, as_json: bool) -> Iterator[None]:
    """With --explain, prints the recognition report of a program that is then refused."""
    try:
        yield
    except ExportError as error:
        if not explain or error.report is None:
            raise
        if not as_json:
            print(error.report.recognition())
            raise
        found = {"error": str(error), "kind": type(error).__name__, "code": None}
        print(json.dumps({**found, "recognition": error.report.to_dict()}))
        raise typer.Exit(1) from None


def _export_language(
    model: Path, output: Path, dtype: str, activations: str, share: float | None, context: int | None, cache: str,
    max_batch: int | None, expert_align: int, style: Style, workers: int | None, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    """Export the language model in a directory; a bar shows progress, speed and remaining time."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task("write", total=None)
        return export_lm(
            load_checkpoint(model, context, cache), output, dtype=dtype, activations=activations, share=share or 0.0,
            max_batch=max_batch, expert_align=expert_align, workers=workers, style=style,
            sources=sorted([*model.glob("*.safetensors"), model / "config.json"]), tokenizer=model,
            on_progress=lambda done, total, name: bar.update(task, completed=done, total=total),
            say=lambda sentence: err.print(plain(sentence), highlight=False, soft_wrap=True),
        )  # fmt: skip


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A progress bar over the stages of an export; yields the callback that advances it."""
    columns = (TextColumn("{task.description:10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task("read", total=len(stages.NAMES) + 2)
        yield lambda name, value: bar.update(task, description=name, advance=1)


@app.command()
def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An export, or a source (.pt2, .safetensors) with --stage.")
    ],
    stage: Annotated[Stage | None, typer.Option(help="Show a source's program after this stage.")] = None,
    architecture: Architecture = None,
    max_batch: MaxBatch = None,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show an export's figures and program, or a source's program after a stage."""
    with errors(as_json, debug):
        if stage is not None:
            if model.is_dir() or model.suffix == ".bin":
                raise ColibriError(f"--stage shows how a source becomes a program; {model} is an export already: pass "
                                   "the .pt2 or .safetensors file it came from")  # fmt: skip
            graph, rows, batch, _ = _source(model, architecture, trust)
            shown: dict[str, str] = {}

            def keep(name: str, value: Any) -> None:
                shown[name] = str(value)

            pipeline.build(graph, max_batch=batch if max_batch is None else max_batch, calibration=rows,
                           on_stage=keep)  # fmt: skip
            print(json.dumps({"stage": stage.value, "text": shown[stage.value]}) if as_json else shown[stage.value])
            return
        package = open_package(model)
        load(model)
        summary = package.summary()
        if as_json:
            show({**summary, "program": [_operation(op) for op in package.ops]}, True)
            return
        show(summary, False)
        table = Table("operation", "rows", "sizes", "a", "b", "out", box=None, pad_edge=False, title="program")
        for n, op in enumerate(package.ops):
            row = _operation(op)
            section = " (expert)" if n >= package.header["main_ops"] else ""
            table.add_row(f"{n} {row['op']}{section}", *(str(row[k]) for k in ("rows", "dims", "a", "b", "out")))
        out.print(table)


def _operation(op: Any) -> dict[str, Any]:
    known = spec.OPERATIONS[op["code"]]
    func = spec.ENUMS[known.functions][op["func"]] if known.functions else "identity"
    place = {k: f"{spec.SPACES[op[k]['space']]}+{op[k]['offset']}" for k in ("a", "b", "out") if op[k]["space"]}
    return {"op": known.name if func == "identity" else f"{known.name}.{func}", "rows": int(op["rows"]),
            "dims": [int(n) for n in op["dims"] if n], "a": "", "b": "", "out": "", **place}  # fmt: skip


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="model.bin or the directory of an export.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same of another export.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what changed between two exports: experts, router, program, shared weights, pages."""
    with errors(as_json, debug):
        difference = compare(*(load(model, verify=False).package for model in (old, new)))
        print(json.dumps(difference.to_dict(), indent=1) if as_json else str(difference))


@app.command()
def verify(model: ModelPath, as_json: Json = False, debug: Debug = False) -> None:
    """Check every checksum and recompute the parity certificate on this machine."""
    with errors(as_json, debug):
        start = time.perf_counter()
        loaded = load(model)
        if Path(loaded.package.path).name == "model.bin":
            require_one_export(Path(loaded.package.path).parent)
        loaded.selftest()
        rows = int(loaded.package.header["golden_rows"])
        if rows == 0:
            raise ModelError(f"{model} carries no certificate: export it again with calibration data")
        seconds = time.perf_counter() - start
        show(
            {"verified": True, "path": loaded.package.path, "golden_rows": rows, "seconds": round(seconds, 4)}, as_json
        )


@app.command()
def run(
    model: ModelPath,
    data: Annotated[
        Path, typer.Option("--input", "-i", help=".npy (one input) or .npz (by name); axis 0 is the batch.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the outputs here, .npz; default: print.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run an export on the rows of a file."""
    with errors(as_json, debug):
        loaded = load(model)
        inputs = _arrays(data, [p.name for p in loaded.inputs])
        start = time.perf_counter()
        results = loaded(*inputs)
        seconds = time.perf_counter() - start
        named = dict(
            zip((p.name for p in loaded.outputs), results if isinstance(results, tuple) else (results,), strict=True)
        )
        figures = {"rows": len(inputs[0]), "seconds": round(seconds, 6)}
        if output is not None:
            show({**figures, "output": str(npz.save(output, named))}, as_json)
        elif as_json:
            show({**figures, "outputs": {k: v.tolist() for k, v in named.items()}}, True)
        else:
            for name, value in named.items():
                print(f"{name}: shape {list(value.shape)}\n{value}")
            show(figures, False)


@app.command()
def build(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of an export.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Build directory; default: DIR/build, or DIR/build-TARGET.")
    ] = None,
    compiler: Annotated[str | None, typer.Option("--cc", help="C compiler; default: $CC, or cc.")] = None,
    target: Annotated[str | None, typer.Option(help="Cross-compile for one of `colibri targets`.")] = None,
    tools: Annotated[
        toolchain.Toolchain,
        typer.Option("--toolchain", help="Cross compiler: Debian's, or zig's from PyPI; auto: the one installed."),
    ] = toolchain.Toolchain.auto,
    project: Annotated[
        bool, typer.Option("--firmware", help="Write a firmware project with a Makefile; default: DIR/firmware-TARGET.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile the engine and an export's model.c, for this machine or a target, and print their sizes."""
    with errors(as_json, debug):
        if project:
            if target is None or compiler is not None:
                raise ColibriError("--firmware writes a project for a target's own compiler: pass --target, not --cc")
            path, built = firmware.write(directory, target, output, tools)
            show({"firmware": str(path), **_size_report(directory, built, as_json)}, as_json)
            return
        built = toolchain.build(directory, output, compiler, target, tools)
        paths = {"static_library": built.static_library, "shared_library": built.shared_library,
                 "model_object": built.model_object}  # fmt: skip
        found = {name: str(path) for name, path in paths.items() if path is not None}
        show({**found, **_size_report(directory, built, as_json)}, as_json)


def _size_report(directory: Path, built: toolchain.Built, as_json: bool) -> dict[str, Any]:
    summary = open_package(directory).summary()
    report: dict[str, Any] = {
        "code_bytes": built.text_bytes, "constant_bytes": built.rodata_bytes, "model_bytes": summary["file_bytes"],
        "weight_bytes": summary["weight_bytes"], "context_bytes": summary["context_bytes"],
    }  # fmt: skip
    if built.flash_bytes is not None:
        report |= {"model_bytes": built.model_bytes, "flash_bytes": built.flash_bytes,
                   "selftest_bytes": built.selftest_bytes, "check_bytes": built.check_bytes}  # fmt: skip
    if as_json:
        report["stack_bytes"] = built.stack
    elif built.stack is None:
        report["stack_bytes"] = "not known with this compiler"
    else:
        report |= {f"stack_bytes of {name}": used for name, used in built.stack.items()}
    return report


@app.command()
def routes(
    model: ModelPath,
    data: Annotated[
        Path | None, typer.Option("--input", "-i", help="Rows, .npy or .npz; default: what the export measured.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another export of the same model; show where MODEL chooses other experts.")
    ] = None,
    stack: Annotated[bool, typer.Option("--stack", help="Compile the engine and report its worst-case stack.")] = False,
    target: Annotated[str | None, typer.Option(help="Report the stack for one of `colibri targets`.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how often experts are used, the cost of the worst route, and where two exports route differently."""
    with errors(as_json, debug):
        loaded = load(model, verify=data is not None)
        package = loaded.package
        if against is not None and data is None:
            raise ColibriError("--against compares two exports on rows: pass --input too")
        changed = None
        if data is None:
            uses = route_report.calibrated_use(package)
            given = package.info.get("calibration") == "given"
            measured = f"measured by the export on {'its calibration' if given else 'random'} rows"
        else:
            inputs = _arrays(data, [p.name for p in loaded.inputs])
            uses = route_report.measured_use(package, traces.record(loaded, inputs))
            measured = f"{len(inputs[0]):,} rows of {data}"
            changed = None if against is None else route_report.flips(loaded, load(against), inputs)
        cost = route_report.budget(package)
        stacks = _stack_bytes(model, target) if stack or target is not None else None
        if as_json:
            report = {"path": package.path, "measured": measured, "layers": [asdict(u) for u in uses],
                      "budget": {**cost.to_dict(), "stack_bytes": stacks}}  # fmt: skip
            if changed is not None:
                report |= {"against": str(against), "flips": [layer.to_dict() for layer in changed]}
            show(report, True)
            return
        _print_all(tables.use_tables(uses, package, plain(measured)))
        _print_all(tables.budget_tables(cost, stacks))
        if changed is not None:
            _print_all(tables.flip_tables(changed, plain(str(against))))


def _stack_bytes(model: Path, target: str | None) -> dict[str, int]:
    directory = model if model.is_dir() else model.parent
    with tempfile.TemporaryDirectory() as folder, err.status("compiling the engine"):
        built = toolchain.build(directory, Path(folder), target=target)
    if built.stack is None:
        raise ColibriError("the worst-case stack is not known with this compiler: use a gcc")
    return built.stack


def _print_all(parts: Iterable[Table | str]) -> None:
    for part in parts:
        out.print(part, highlight=False)
        if not isinstance(part, str):
            out.print()


@app.command()
def trace(
    model: ModelPath,
    data: Annotated[
        Path, typer.Option("--input", "-i", help=".npy (one input) or .npz (by name), rows in time order.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the routes here, .npz.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run an export on the rows of a file and record which experts each row chooses."""
    with errors(as_json, debug):
        loaded = load(model)
        recorded = traces.record(loaded, _arrays(data, [p.name for p in loaded.inputs]))
        traces.save(recorded, output)
        show({"trace": str(output), "rows": recorded.rows, "layers": len(recorded.layers)}, as_json)


@app.command()
def advise(
    model: ModelPath,
    recorded: Annotated[Path, typer.Option("--trace", "-t", help="The output of `colibri trace`.")],
    budgets: Annotated[
        list[str] | None,
        typer.Option("--budget", help="Memory for experts, like 64MB; repeatable; default: shares of all experts."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which experts to lock in memory, from a trace of real use, or that locking does not pay."""
    with errors(as_json, debug):
        package = load(model, verify=False).package
        sizes = [size for text in budgets or [] if (size := _bytes(text)) is not None]
        with err.status("replaying the trace"):
            advice = judge(package, traces.load(recorded), sizes)
        if as_json:
            show(advice.to_dict(), True)
            return
        _print_all(tables.advice_tables(advice))


@app.command("targets")
def list_targets(as_json: Json = False, debug: Debug = False) -> None:
    """List the machines that `colibri build --target NAME` compiles for."""
    with errors(as_json, debug):
        show({target.name: target.about for target in TARGETS.values()}, as_json)


cli_language.register(app)


def main() -> None:
    """The `colibri` command."""
    guarded(app)


def exporter_main() -> None:
    """The `python -m colibri.exporter` command: the same options as `colibri export`."""
    sys.argv = ["colibri", "export", *sys.argv[1:]]
    guarded(lambda: app(prog_name="colibri"))
