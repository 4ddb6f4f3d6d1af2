"""Traces: the experts that every row of a run chose, in the order of the rows, by their original numbers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from colibri.errors import ColibriError
from colibri.format.package import Package
from colibri.runtime.engine import Model

Routes = np.ndarray[Any, np.dtype[np.int32]]

NONE = -1  # a choice that no expert took
UNREADABLE = (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, BadZipFile, struct.error, zlib.error)
"""What reading a damaged .npz file can raise."""

_VERSION = 1


@dataclass(frozen=True)
class RouteTrace:
    """The choices of every MoE layer, (rows, tokens, k) int32: original expert numbers, best first, NONE for none."""

    layers: list[Routes]

    @property
    def rows(self) -> int:
        """Rows of the run."""
        return len(self.layers[0])


def record(model: Model, inputs: Sequence[Any]) -> RouteTrace:
    """Run `inputs` (rows, *shape), rows in the order of time; raises ColibriError for a model without MoE layers."""
    require_layers(model.package)
    return RouteTrace(model.routes(*inputs))


def require_layers(package: Package) -> None:
    """Raise ColibriError where a model has nothing to route."""
    if not len(package.layers):
        raise ColibriError(f"{package.path} has no MoE layer, so it has no routes: pass a model with experts")


def save(trace: RouteTrace, path: Path) -> None:
    """Write a .npz file: `layer_0`, `layer_1`, … and the version of this form."""
    named = {f"layer_{n}": layer for n, layer in enumerate(trace.layers)}
    try:
        with path.open("wb") as file:  # np.savez would add a suffix to the name
            np.savez_compressed(file, colibri_trace=np.int32(_VERSION), **named)  # type: ignore[arg-type]
    except OSError as error:
        raise ColibriError(f"{path} cannot be written: {error.strerror}: choose another output file") from None


def load(path: Path) -> RouteTrace:
    """Read what `save` wrote; raises ColibriError for anything else."""
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except UNREADABLE as error:
        raise ColibriError(f"{path} cannot be read: {error}: pass the file that `colibri trace` wrote") from None
    layers = [arrays[f"layer_{n}"] for n in range(len(arrays) - 1) if f"layer_{n}" in arrays]
    sound = all(a.ndim == 3 and a.dtype == np.int32 and a.size and len(a) == len(layers[0]) for a in layers)
    if "colibri_trace" not in arrays or not layers or len(layers) != len(arrays) - 1 or not sound:
        raise ColibriError(f"{path} is no trace of routes: pass the file that `colibri trace` wrote")
    if arrays["colibri_trace"] != _VERSION:
        raise ColibriError(f"{path} is a trace of version {arrays['colibri_trace']}, not {_VERSION}: record it again")
    return RouteTrace(layers)


def positions(trace: RouteTrace, package: Package) -> list[Routes]:
    """The trace's choices as positions in the file's expert directory (NONE stays).

    Raises ColibriError where the trace names layers or experts that the file has not.
    """
    require_layers(package)
    if len(trace.layers) != len(package.layers):
        raise ColibriError(f"the trace has {len(trace.layers)} MoE layers, but {package.path} has "
                           f"{len(package.layers)}: record one with this model")  # fmt: skip
    found = []
    for n, layer in enumerate(trace.layers):
        numbers = package.numbers(n)
        strange = ~np.isin(layer, [NONE, *numbers])
        if strange.any():
            raise ColibriError(f"the trace has expert {layer[strange][0]} in layer {n}, which {package.path} has not: "
                               "record one with this model")  # fmt: skip
        place = np.full(int(numbers.max()) + 2, NONE, np.int32)  # the last for NONE, which indexes from the end
        place[numbers] = np.arange(len(numbers)) + int(package.layers[n]["first_expert"])
        found.append(place[layer])
    return found


def requests(routes: Sequence[Routes]) -> list[list[int]]:
    """What each row asks for: its distinct experts by position in the directory, in the order the engine runs them.

    The engine runs a row's tokens together, so an expert that several of them choose is read once.
    """
    asked: list[list[int]] = [[] for _ in range(len(routes[0]))]
    for layer in routes:
        for row, chosen in zip(asked, layer.reshape(len(layer), -1).tolist(), strict=True):
            row += sorted(set(chosen) - {NONE})
    return asked
