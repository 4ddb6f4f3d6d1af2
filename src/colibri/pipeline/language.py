"""Export of a language model: weights are read, quantised and written one at a time, for models larger than memory.

The graph's weights are deferred (`colibri.ir.weights.Deferred`). Everything but them is known before any is read:
formats by role, the program, where each byte lies in the file, the size of the certificate.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colibri.emit import c_source, writer
from colibri.emit.files import write_files
from colibri.errors import ExportError, ModelError
from colibri.format import spec
from colibri.format.package import open_package
from colibri.ir.graph import Array, Graph, logit_masks
from colibri.lowering.program import Program
from colibri.passes.read import read_weights
from colibri.pipeline import stages
from colibri.quantize.deferred import Energies, quantize_deferred
from colibri.reference import arithmetic
from colibri.reference.certificate import TEXT_ROWS, Certificate, assemble, certify, flat
from colibri.runtime.engine import load
from colibri.text.tokenizer import Tokenizer, read_files, write_all

CHUNK, SOURCE = 256, 512  # tokens the engine takes at once, of a source text too
_REFERENCE_WORK = 1 << 32  # multiply-accumulates the reference is given; it takes some 20 s for them
_REFERENCE_BYTES = 1 << 26  # of weights, of which the reference holds some as float32
_GENERATED_BYTES = 4 << 20  # above, C source for firmware is of no use

Certifier = Callable[[Path, Sequence[Array], int], Certificate]


@arithmetic.standard()
def export_lm(
    graph: Graph,
    path: str | Path,
    *,
    dtype: str = "int8",
    activations: str = "int8",
    share: float = 0.0,
    energies: Energies | None = None,
    max_batch: int | None = None,
    text: Sequence[Array] | None = None,
    golden_rows: int = TEXT_ROWS,
    certifier: Certifier | None = None,
    expert_align: int = spec.ALIGN_EXPERT,
    sources: Sequence[Path] = (),
    tokenizer: Path | None = None,
    workers: int | None = None,
    style: c_source.Style = c_source.PLAIN,
    on_stage: stages.Stage | None = None,
    on_progress: writer.OnProgress | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Export a language model to the directory `path`, or to one `….bin` file; returns the figures of the export.

    dtype, activations, share, energies: see `colibri.quantize.deferred`. max_batch: tokens the engine takes at once,
    and so the longest source text of an encoder-decoder; by default CHUNK, of that SOURCE.
    text: rows (n, *shape) for each input, the tokens of one text from its beginning, for the certificate; without it,
    random ones. certifier(path, text, golden_rows) computes the certificate of a model too large for the reference
    interpreter; by default the engine does. sources: the files that the weights come from, by
    whose size and time an interrupted export knows whether it may go on. tokenizer: the directory whose tokenizer goes
    along, into an export that is a directory. workers: processes, by default up to 4.
    on_progress(bytes done, bytes in all, what) after every part. say(sentence) tells what becomes of an interrupted
    export.

    Raises ExportError for anything that cannot be exported or written; KeyboardInterrupt, with a sentence, on Ctrl-C.
    """
    if not graph.context:
        raise ExportError(f"{graph.name} is no language model: its graph has no context length")
    if max_batch is None:
        max_batch = min(graph.context, SOURCE) if graph.encoder() else CHUNK
    if not 1 <= max_batch <= spec.MAX_BATCH:
        raise ExportError(f"max_batch {max_batch} is not between 1 and {spec.MAX_BATCH}")
    stage = on_stage or stages.silent
    path = Path(path)
    image = path if path.suffix == ".bin" else path / "model.bin"
    carried = {} if tokenizer is None else read_files(tokenizer)
    graph = stages.optimized(graph, stage)
    graph = quantize_deferred(graph, dtype, activations=activations, share=share, energies=energies,
                              masks=frozenset(logit_masks(graph)))  # fmt: skip
    graph, program = stages.planned(graph, max_batch, stage)
    rows = stages.random_rows(graph) if text is None else [x[: graph.context] for x in text]
    golden_rows = min(golden_rows, len(rows[0]))
    small = program.macs * len(rows[0]) <= _REFERENCE_WORK and _weights(program) <= _REFERENCE_BYTES
    by = "reference" if small else "engine"

    def certificate(file: Path) -> Certificate:
        try:
            found = (certifier or certify_by_engine)(file, rows, golden_rows)
        except ExportError:
            file.unlink(missing_ok=True)  # going on with it later would end here again
            raise
        if not small:
            return found
        sure = certify(read_weights(graph), rows, golden_rows)
        if any(a.output_crc != b.output_crc for a, b in zip(sure.golden, found.golden, strict=True)):
            raise ExportError("the engine differs from the reference on this model: please report it")
        return sure

    start = {"start": graph.start} if program.encoder_ops else {}
    info = stages.info(graph, dtype, text is not None, certificate=by, **start)
    writer.write(program, image, certificate, info=info, golden_rows=golden_rows,
                 expert_align=expert_align, workers=min(os.cpu_count() or 1, 4) if workers is None else workers,
                 key=_key(dtype, activations, share, energies, sources), on_progress=on_progress, say=say,
                 companions=lambda file: _c_files(program, file, path, style) if path != image else {})  # fmt: skip
    if path != image and tokenizer is not None:
        _carry_tokenizer(tokenizer, carried, path, say)
    stage("export", image)
    return {**open_package(image).summary(), "planner_lower_bound": program.lower_bound, "certificate": by}


def _carry_tokenizer(source: Path, files: dict[Path, bytes], target: Path, say: Callable[[str], None]) -> None:
    """The tokenizer's files beside the model, and tokenizer.bin for C; what is not there or refused is said."""
    if Path("tokenizer.json") not in files:
        say(f"{source} has no tokenizer.json, so that the export takes token ids only: for text, convert what it has "
            "(transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…)) and export again")  # fmt: skip
        return
    image = target / "tokenizer.bin"
    try:
        if source.resolve() != target.resolve():
            write_all(files, target)
        image.unlink(missing_ok=True)  # of another tokenizer, perhaps
        write_files({image: Tokenizer(source).write_c()}, target)
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error.strerror}: choose another output directory") from None
    except (ExportError, ModelError) as error:
        say(f"tokenizer.bin is not written, so that C takes token ids only: {error}")


def certify_by_engine(path: Path, text: Sequence[Array], golden_rows: int) -> Certificate:
    """The certificate of a model file as the engine on this machine computes it; see `certificate.certify`."""
    model = load(path, verify=False)
    found = model(*(x[:golden_rows] for x in text))
    outputs = found if isinstance(found, tuple) else (found,)
    for port, logits in zip(model.outputs, outputs, strict=True):
        _require_finite(port.name, logits)
    count = len(text[0])
    experts, k = (model.package.layers[name].tolist() for name in ("experts", "k"))
    routes = [chosen.reshape(count, -1, each) for chosen, each in zip(model.routes(*text), k, strict=True)]
    inputs = flat([x[:golden_rows] for x in text])
    return assemble(inputs, flat(outputs), routes, experts, range(golden_rows), count)


def _require_finite(name: str, found: Array) -> None:
    """Numbers that are not finite on the certificate's rows would be certified, and be of no use to anyone."""
    bad = np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(1))
    if len(bad):
        raise ExportError(
            f"the model is not written: its {name} are not finite for {len(bad)} of the certificate's {len(found)} "
            f"rows, the first being row {bad[0]}; a weight or a number of config.json is too large: correct it, "
            "or export with --dtype fp32"
        )


def _weights(program: Program) -> int:
    return program.shared.size + sum(expert.section.size for expert in program.experts)


def _key(*options: Any) -> str:
    """What the bytes of the weights depend on besides the program."""

    def text(value: Any) -> Any:
        if isinstance(value, Path):
            if not value.exists():  # a link to nowhere
                return str(value)
            found = value.stat()
            return [str(value.resolve()), found.st_size, found.st_mtime_ns]
        if isinstance(value, np.ndarray):
            return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return str(value)

    rows = [sorted((str(k), text(v)) for k, v in o.items()) if isinstance(o, dict) else o for o in options]
    return json.dumps(rows, default=text)


def _c_files(program: Program, image: Path, directory: Path, style: c_source.Style) -> dict[Path, bytes]:
    """model.h beside the model, and where it is small enough for firmware model.c."""
    if image.stat().st_size <= _GENERATED_BYTES:
        texts = c_source.files(program, image.read_bytes(), style)
    else:
        texts = {"model.h": c_source.header(program, open_package(image), style)}
    return {directory / name: text.encode() for name, text in texts.items()}
