"""Reads a safetensors file with a small architecture file (the graph's text form) beside it; needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from colibri.errors import ExportError
from colibri.graph import Array, Graph, from_json


def from_architecture(weights: str | Path, architecture: str | Path | None = None) -> Graph:
    """The graph of `architecture` (default: architecture.json beside the weights) with the tensors of `weights`.

    Raises ExportError where a file is missing, unreadable, or the two do not fit together.
    """
    weights = Path(weights)
    text = Path(architecture) if architecture else weights.with_name("architecture.json")
    if not text.is_file():
        raise ExportError(
            f"{text} is missing: a safetensors file needs an architecture file; pass it with --architecture"
        )
    return from_json(text.read_text(encoding="utf-8"), read_tensors(weights))


def read_tensors(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file as float32; raises ExportError for other kinds than 16- to 64-bit floats."""
    tensors: dict[str, Array] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):
                value = file.get_tensor(name)
                if value.dtype.kind != "f":
                    raise ExportError(f"{path}: tensor {name!r} holds {value.dtype}, not floats")
                tensors[name] = np.asarray(value, np.float32)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{path} cannot be read as safetensors: {error}") from None
    return tensors
