"""A directory of tensors as Hugging Face stores models: config.json beside safetensors files, one or many.

Nothing but headers is read at first. A tensor is read when it is needed, a few rows of it where no more are, and comes
as float32 whatever it is stored as: float32, float16, bfloat16, FP8 (e4m3) with a scale for each block, or MXFP4.
Nothing here knows what a tensor is for; that each is used, and once, is kept count of.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri.errors import ExportError
from colibri.graph import Array
from colibri.weights import Deferred

Rows = Callable[[int, int], Array]  # first row, end -> those rows of the first axis

BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E8M0": 1,
}  # fmt: skip
DECODED = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8}
MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MXFP4_GROUP = 32  # values that share one exponent


def _e4m3() -> Array:
    """The numbers of the 256 codes of FP8 e4m3 (OCP 8-bit floating point): no infinities, one NaN of each sign."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    size[(code & 127) == 127] = np.nan
    return np.where(code > 127, -size, size).astype(np.float32)


E4M3 = _e4m3()


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


class Checkpoint:
    """The tensors of a directory by name, and its configuration."""

    def __init__(self, directory: str | Path) -> None:
        """Read the configuration and all headers; raises ExportError where something is missing or damaged."""
        self.directory = Path(directory)
        self.config = _json(self.directory / "config.json", "is no directory of a Hugging Face model")
        self.tensors: dict[str, Stored] = {}
        self._taken: set[str] = set()
        for path, wanted in self._files():
            for stored in read_header(path):
                if stored.name in self.tensors:
                    raise ExportError(f"tensor {stored.name!r} is in two files of {self.directory}: remove one")
                self.tensors[stored.name] = stored
            for name in wanted:
                if name not in self.tensors:
                    raise ExportError(f"{path} lacks tensor {name!r}, which the index says is there: fetch it again")
        self._combine()

    def _files(self) -> list[tuple[Path, list[str]]]:
        """Each file, and the tensors the index says are in it."""
        whole, index = self.directory / "model.safetensors", self.directory / "model.safetensors.index.json"
        if whole.is_file():
            return [(whole, [])]
        if not index.is_file():
            others = sorted(p.name for p in self.directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            hint = f"; {others[0]} is in a format that is not read: save the model as safetensors" if others else ""
            raise ExportError(f"{self.directory} has no model.safetensors and no model.safetensors.index.json{hint}")
        listed = _json(index, "is no index").get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise ExportError(f"{index} has no weight_map from tensors to files: fetch it again")
        shards: dict[str, list[str]] = {}
        for name, file in listed.items():
            shards.setdefault(file, []).append(name)
        for file, names in shards.items():
            if Path(file).name != file or not (self.directory / file).is_file():
                raise ExportError(
                    f"{index} names {file!r} for {names[0]!r}, which is not there: fetch the missing file"
                )
        return [(self.directory / file, names) for file, names in sorted(shards.items())]

    def _combine(self) -> None:
        """Tensors stored in two parts, numbers and scales, become one."""
        for name in [*self.tensors]:
            if name.endswith("_blocks") and (scales := name.removesuffix("_blocks") + "_scales") in self.tensors:
                whole = name.removesuffix("_blocks")
                self.tensors[whole] = _mxfp4(whole, self.tensors.pop(name), self.tensors.pop(scales))
            elif name.endswith("_scale_inv") and (numbers := name.removesuffix("_scale_inv")) in self.tensors:
                block = (self.config.get("quantization_config") or {}).get("weight_block_size")
                self.tensors[numbers] = _scaled(self.tensors[numbers], self.tensors.pop(name), block)
        for name, stored in self.tensors.items():
            if stored.kind == "F8_E4M3":
                raise ExportError(f"tensor {name!r} is FP8 without its {name}_scale_inv: fetch the checkpoint again")

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def either(self, *names: str) -> str:
        """The first of the names there is a tensor of; the first where there is none."""
        return next((name for name in names if name in self.tensors), names[0])

    def take(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The tensor `name`, which must have this shape and not have been taken before."""
        if name not in self.tensors:
            near = [n for n in self.tensors if n.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:]][:1]
            hint = f" (there is {near[0]!r})" if near else ""
            raise ExportError(
                f"tensor {name!r} of shape {shape} is missing{hint}: the checkpoint is incomplete, or its config.json "
                "describes another model"
            )
        stored = self.tensors[name]
        if stored.shape != shape:
            raise ExportError(
                f"tensor {name!r} has shape {stored.shape}, not {shape} as config.json asks: the two do not belong "
                "together"
            )
        if stored.kind not in (*DECODED, "MXFP4", "FP8"):
            raise ExportError(f"tensor {name!r} holds {stored.kind}, not floats: use an unquantised checkpoint")
        if name in self._taken:
            raise ExportError(f"tensor {name!r} is used twice: the family's description is wrong; please report it")
        self._taken.add(name)
        return stored

    def finish(self, ignored: Iterable[str]) -> None:
        """Raise ExportError where a tensor has not been taken and matches none of the patterns."""
        patterns = [re.compile(p) for p in ignored]
        left = [n for n in self.tensors if n not in self._taken and not any(p.fullmatch(n) for p in patterns)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ExportError(
                f"tensor {left[0]!r}{more} has no place in this model: config.json describes another model, or the "
                "checkpoint has parts (adapters, prediction heads) that are not supported; remove what does not belong"
            )

    def equal(self, a: str, b: str) -> bool:
        """Whether two tensors hold the same numbers, compared a few rows at a time."""
        first, second = self.tensors[a], self.tensors[b]
        step = max(1, (1 << 22) // max(1, math.prod(first.shape[1:])))
        return first.shape == second.shape and all(
            np.array_equal(first.rows(n, min(n + step, first.shape[0])), second.rows(n, min(n + step, first.shape[0])))
            for n in range(0, first.shape[0], step)
        )


def _json(path: Path, otherwise: str) -> dict[str, Any]:
    if not path.is_file():
        raise ExportError(f"{path} is missing: {path.parent} {otherwise}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ExportError(f"{path} is not an object of names and values")
    return found


def read_header(path: Path) -> list[Stored]:
    """The tensors of a safetensors file, none read yet; raises ExportError where the file is damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ExportError(f"{path} is no safetensors file, or is cut short: fetch it again")
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ExportError(f"{path} has a damaged header: fetch it again") from None
    found = []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            kind, shape, (start, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
            if kind in BYTES and (min(shape, default=1) < 0 or end - start != math.prod(shape) * BYTES[kind]):
                raise ExportError(f"{path}: tensor {name!r} of shape {shape} has {end - start} bytes: fetch it again")
            if start < 0 or 8 + length + end > size:
                raise ExportError(f"{path} is cut short: tensor {name!r} ends beyond it; fetch it again")
            found.append(Stored(name, shape, kind, _reader(path, 8 + length + start, kind, shape)))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ExportError(f"{path} has a damaged header: fetch it again") from None
    return found


def _reader(path: Path, offset: int, kind: str, shape: tuple[int, ...]) -> Rows:
    width = math.prod(shape[1:])

    def rows(start: int, stop: int) -> Array:
        dtype = np.dtype(DECODED.get(kind, np.uint8))
        raw = np.fromfile(path, dtype, (stop - start) * width, offset=offset + start * width * dtype.itemsize)
        if raw.size != (stop - start) * width:
            raise ExportError(f"{path} became shorter while it was read: fetch it again")
        if kind == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        elif kind == "F8_E4M3":
            raw = E4M3[raw]
        values = raw if raw.dtype == np.uint8 else raw.astype(np.float32, copy=False)
        return values.reshape(stop - start, *shape[1:])

    return rows


def _mxfp4(name: str, blocks: Stored, scales: Stored) -> Stored:
    """Groups of 32 four-bit floats, 16 bytes, the low half first, times a power of two (OCP Microscaling Formats)."""
    if {blocks.kind, scales.kind} - {"U8"} or blocks.shape != (*scales.shape, MXFP4_GROUP // 2):
        raise ExportError(f"tensor {name!r}: blocks {blocks.shape} and scales {scales.shape} are no MXFP4 tensor")
    shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4_GROUP)

    def rows(start: int, stop: int) -> Array:
        codes = blocks.rows(start, stop).astype(np.uint8, copy=False)
        exponents = scales.rows(start, stop).astype(np.int32) - 127
        values = np.stack([MXFP4_VALUES[codes & 15], MXFP4_VALUES[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)
        scaled = np.ldexp(values, exponents[..., None])
        # Exponent 255 is the format's NaN.
        return np.where(exponents[..., None] == 128, np.float32(np.nan), scaled).reshape(stop - start, *shape[1:])

    return Stored(name, shape, "MXFP4", rows)


def _scaled(numbers: Stored, scales: Stored, block: Any) -> Stored:
    """FP8 times a float32 for each block of rows and columns."""
    sizes = block if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) for n in block) else None
    if sizes is None or min(sizes) < 1:
        raise ExportError(
            f"tensor {numbers.name!r} is scaled in blocks, but quantization_config.weight_block_size is {block!r}"
        )
    high, wide = sizes
    fits = len(numbers.shape) == 2 and scales.shape == (-(-numbers.shape[0] // high), -(-numbers.shape[1] // wide))
    if numbers.kind != "F8_E4M3" or not fits:
        raise ExportError(
            f"tensor {numbers.name!r} ({numbers.kind}, {numbers.shape}) and its scales {scales.shape} do not fit "
            f"blocks of {high} x {wide}: use a checkpoint in float, or FP8 (e4m3) scaled in blocks"
        )

    def rows(start: int, stop: int) -> Array:
        first = start // high
        factor = scales.rows(first, -(-stop // high)).repeat(high, 0)[start - first * high :][: stop - start]
        return numbers.rows(start, stop) * factor.repeat(wide, 1)[:, : numbers.shape[1]]

    return Stored(numbers.name, numbers.shape, "FP8", rows)
