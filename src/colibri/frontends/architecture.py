"""Reader of a safetensors file with an architecture file (the graph's text form) next to it; needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

from colibri.common.folder import Folder
from colibri.errors import ExportError
from colibri.frontends.tensor_files import PLAIN, read_header
from colibri.ir.graph import Array, Graph, from_json


def from_architecture(weights: str | Path, architecture: str | Path | None = None) -> Graph:
    """The graph of `architecture` (default: architecture.json next to the weights) with the tensors of `weights`.

    Raises ExportError where a file is missing, unreadable, or the two do not fit together.
    """
    weights = Path(weights)
    text = Path(architecture) if architecture else weights.with_name("architecture.json")
    if not text.is_file():
        raise ExportError(
            f"{text} is missing: a safetensors file needs an architecture file; pass it with --architecture"
        )
    text = text.resolve()  # what the user names may be a link to anywhere
    return from_json(Folder(text.parent).text(text.name), read_tensors(weights))


def read_tensors(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file as float32; raises ExportError for other kinds than 16- to 64-bit floats."""
    path, tensors = path.resolve(), dict[str, Array]()
    for stored in read_header(Folder(path.parent), path.name):
        if stored.kind not in PLAIN:
            raise ExportError(f"{path}: tensor {stored.name!r} holds {stored.kind}, not floats of 16 to 64 bits")
        tensors[stored.name] = stored.rows(0, stored.shape[0] if stored.shape else 1).reshape(stored.shape)
    return tensors
