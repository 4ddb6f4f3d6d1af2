"""Files of tensors (safetensors): a strict reader of their headers, and of rows of a tensor as float32.

Nothing but headers is read at first. What a header says of sizes is compared with the file before anything is made of
it. Nothing here knows what a tensor is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri.common import strict_json
from colibri.common.folder import Folder
from colibri.common.names import check_name, shown
from colibri.errors import ExportError
from colibri.ir.graph import Array
from colibri.ir.weights import Deferred

Rows = Callable[[int, int], Array]  # first row, end -> those rows of the first axis

HEADER_BYTES = 1 << 25  # a release of 384 experts and 61 layers in one file would take half of it
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
PLAIN = ("F64", "F32", "F16", "BF16")  # what holds numbers of its own accord
FP8 = ("F8_E4M3", "F8_E5M2")
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_AXES = 8


def _e4m3() -> Array:
    """The numbers of the 256 codes of FP8 e4m3 (OCP 8-bit floating point): no infinities, one NaN of each sign."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    size[(code & 127) == 127] = np.nan
    return np.asarray(np.where(code > 127, -size, size), np.float32)


def _e8m0() -> Array:
    """The powers of two of the 256 codes of e8m0 (OCP Microscaling Formats); the last is NaN."""
    powers = np.ldexp(np.float32(1), np.arange(-127, 129, dtype=np.int32).clip(max=127))
    powers[255] = np.nan
    return np.asarray(powers, np.float32)


CODES = {
    "F8_E4M3": _e4m3(),
    # e5m2 is the upper half of a float16.
    "F8_E5M2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
    "F8_E8M0": _e8m0(),
}


@dataclass(frozen=True)
class Stored:
    """A tensor: its shape, how it is stored, and how its rows are read."""

    name: str
    shape: tuple[int, ...]
    kind: str
    rows: Rows

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Rows of the first axis as float32; raises ExportError where one holds a NaN or an infinity."""
        found = self.rows(start, self.shape[0] if stop is None else stop)
        if not np.isfinite(found).all():
            row = start + int(np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(1))[0])
            raise ExportError(
                f"tensor {self.name!r} holds a NaN or an infinity (row {row}): the file is damaged or the training "
                "went astray; use another copy of the checkpoint"
            )
        return found

    def part(
        self,
        shape: tuple[int, ...],
        start: int = 0,
        stop: int | None = None,
        then: Callable[[Array], Array] | None = None,
    ) -> Deferred:
        """A weight of `shape`, read when needed: the rows from `start` to `stop`, and what `then` makes of them."""

        def load() -> Array:
            found = self.read(start, stop)
            return np.ascontiguousarray(found if then is None else then(found)).reshape(shape)

        plain = then is None and len(shape) == 2 and shape[1:] == self.shape[1:]
        return Deferred(shape, np.ndarray, load,
                        rows=(lambda first, end: self.read(start + first, start + end)) if plain else None)  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    """What a header says of a tensor; `start` and `end` are places in the data behind the header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(folder: Folder, name: str) -> list[Stored]:
    """The tensors of a safetensors file, none read yet; raises ExportError where the file is damaged or cut short."""
    path = folder.path / name
    with folder.open(name) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ExportError(f"{path} is no safetensors file, or is cut short: fetch it again")
        if length > HEADER_BYTES:
            raise ExportError(f"{path} has a header of {length:,} bytes, where at most {HEADER_BYTES:,} are expected: "
                              "fetch it again")  # fmt: skip
        text = file.read(length)
    try:
        header = strict_json.loads(text)
    except strict_json.JsonError as error:
        raise ExportError(f"{path} has a damaged header, which {error}: fetch it again") from None
    if not isinstance(header, dict):
        raise ExportError(f"{path} has a damaged header, which is no object: fetch it again")
    header.pop("__metadata__", None)
    entries = [_entry(path, tensor, said) for tensor, said in header.items()]
    _check_places(path, entries, size - 8 - length)
    real = folder.file(name)
    return [Stored(e.name, e.shape, e.kind, _reader(real, 8 + length + e.start, e.kind, e.shape)) for e in entries]


def _entry(path: Path, name: str, said: Any) -> _Entry:
    check_name(name, f"a tensor of {path}")

    def refuse(what: str) -> ExportError:
        return ExportError(f"{path}: tensor {name!r} {what}: fetch it again")

    if not isinstance(said, dict) or {*said} != {"dtype", "shape", "data_offsets"}:
        raise refuse("is not described by dtype, shape and data_offsets")
    kind, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(kind, str) or kind not in BITS:
        raise refuse(f"is stored as {shown(kind)}, which is not known")
    if not _counts(shape) or len(shape) > _AXES:
        raise refuse(f"has the shape {shown(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"lies from and to {shown(offsets)}")
    start, end = offsets
    if 8 * (end - start) != math.prod(shape) * BITS[kind]:
        raise refuse(f"of {kind} and shape {shown(shape)} has {end - start} bytes")
    return _Entry(name, kind, tuple(shape), start, end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)


def _check_places(path: Path, entries: list[_Entry], size: int) -> None:
    """The format has every byte of the data in one tensor and no other."""
    at = 0
    for entry in sorted(entries, key=lambda e: (e.start, e.end)):
        if entry.end > size:
            raise ExportError(f"{path} is cut short: tensor {entry.name!r} ends beyond it; fetch it again")
        if entry.start != at:
            how = "overlaps the tensor before it" if entry.start < at else "leaves a gap before it"
            raise ExportError(f"{path}: tensor {entry.name!r} {how}: fetch it again")
        at = entry.end
    if at != size:
        raise ExportError(f"{path} has {size - at:,} bytes behind its last tensor: fetch it again")


def _reader(path: Path, offset: int, kind: str, shape: tuple[int, ...]) -> Rows:
    width = math.prod(shape[1:])
    dtype = np.dtype(_DTYPES.get(kind, np.uint8))

    def rows(start: int, stop: int) -> Array:
        try:
            raw = np.fromfile(path, dtype, (stop - start) * width, offset=offset + start * width * dtype.itemsize)
        except OSError as error:
            raise ExportError(f"{path} cannot be read: {error.strerror}: fetch it again") from None
        if raw.size != (stop - start) * width:
            raise ExportError(f"{path} became shorter while it was read: fetch it again")
        return decoded(raw, kind).reshape(stop - start, *shape[1:])

    return rows


def decoded(raw: Any, kind: str) -> Array:
    """What is stored, as float32; bytes that hold no floats stay bytes."""
    if kind == "BF16":
        return np.asarray((raw.astype(np.uint32) << 16).view(np.float32))
    if kind in CODES:
        return np.asarray(CODES[kind][raw])
    if raw.dtype == np.uint8:
        return np.asarray(raw)
    with np.errstate(over="ignore"):  # a float64 beyond float32 is an infinity, which `read` refuses
        return np.asarray(raw.astype(np.float32, copy=False))


__all__ = ["BITS", "CODES", "FP8", "PLAIN", "Stored", "decoded", "read_header"]
