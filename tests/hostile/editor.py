"""A valid model whose fields are read and changed by their names: `editor["moe.work.offset"] += 4`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from colibri.format import spec
from tests.engine.conftest import GRAPHS, example

TEXT_BASES = ["text", "text_window", "text_int8", "text_delta", "exchange"]
BASES = [*GRAPHS, *TEXT_BASES]
BATCH = 3
HEADER = spec.HEADER.bytes
SECTIONS = {
    "ports": spec.PORT, "ops": spec.OP, "layers": spec.LAYER, "tensors": spec.TENSOR, "experts": spec.EXPERT
}  # fmt: skip
PATH = re.compile(r"(expert )?(\w+)(?:\[([\w. ]+)\])?(?:\.(.+))?")


def image(base: str) -> bytes:
    """A valid model, its experts close together so that it is small."""
    return example(base, 64, BATCH).image


class Editor:
    """A copy of a valid model, with its records as writable arrays and its fields by path.

    A path is `header.FIELD`, `SECTION[row].FIELD`, or an operation and its field: `linear.out.offset` of the first one
    in the file, `moe[1].layer` of the second, `expert linear.inputs` of the first in an expert, `here.rows` of the one
    that a case is about. Operations have the fields of their record and those of `spec.VIEWS`. A row may be a path:
    `tensors[embed.table].layout`. Without a field the path is the whole record.
    """

    def __init__(self, base: str) -> None:
        self.base, self.original = base, image(base)
        self.image = bytearray(self.original)
        self.header = np.frombuffer(self.image, spec.HEADER.dtype, 1)
        counts = {name: self[f"header.{name}"] for name in SECTIONS if name != "ports"}
        counts["ports"] = self["header.inputs"] + self["header.outputs"]
        self.records = {
            name: np.frombuffer(self.image, record.dtype, counts[name], self[f"header.{name}_offset"])
            for name, record in SECTIONS.items()
        }
        self.ops = self.records["ops"]
        self.main_ops = self["header.main_ops"]
        self.here: int | None = None
        floats, size = self["header.input_floats"], self["header.golden_bytes"]
        row = [*spec.GOLDEN.dtype.descr, ("input", "<u4", (floats,)), ("chosen", "<u2", (size // 2 - 4 - 2 * floats,))]
        at = self["header.golden_offset"]
        self.records["golden"] = np.frombuffer(self.image, row, self["header.golden_rows"], at)

    def __getitem__(self, path: str) -> Any:
        """A number, or the copy of a record or an array."""
        view = self._view(path)[0]
        return view.item() if view.dtype.fields is None and view.size == 1 else view.copy()

    def __setitem__(self, path: str, value: Any) -> None:
        """Set a field to a number, modulo its range; to a name of its enumeration; or several to those in a dict."""
        if callable(value):
            value = value(self)
        if isinstance(value, dict):
            self.update({f"{path}.{field}": part for field, part in value.items()})
            return
        view = self._view(path)
        if isinstance(value, str):
            field = path.rsplit(".", 1)[1]
            value = list(spec.ENUMS[{"code": "op"}.get(field, field)]).index(value)
        view[...] = value % (1 << 8 * view.itemsize) if isinstance(value, int) and view.dtype.kind == "u" else value

    def _view(self, path: str) -> Any:
        expert, name, row, fields = PATH.fullmatch(path).groups()  # type: ignore[union-attr]
        n = 0 if row is None else int(row) if row.isdigit() else self[row]
        if name == "header":
            view = self.header
        elif name in self.records:
            view = self.records[name][n : n + 1]
        else:
            n = self.here if name == "here" else self.find(name, n, expert is not None)
            view = self.ops[n : n + 1]
        for part in fields.split(".") if fields else ():
            view = _field(view, part)
        return view

    def update(self, fields: dict[str, Any]) -> None:
        """Set several fields, one after another."""
        for path, value in fields.items():
            self[path] = value

    def find(self, code: str, nth: int = 0, expert: bool = False) -> int:
        """The number of an operation `code`: the nth in the file, or in the experts' programs."""
        first = self.main_ops if expert else 0
        return first + int(np.flatnonzero(self.ops["code"][first:] == spec.OPCODES.index(code))[nth])

    def sections(self) -> Iterator[tuple[str, spec.Record, int, int]]:
        """Name, record, file offset and count of every section of records, the golden rows' heads included."""
        yield "header", spec.HEADER, 0, 1
        for name, record in SECTIONS.items():
            yield name, record, self[f"header.{name}_offset"], len(self.records[name])
        yield "golden", spec.GOLDEN, self["header.golden_offset"], 1

    def patches(self) -> tuple[tuple[int, bytes], ...]:
        """Offset and value of every byte that was changed."""
        changed = np.frombuffer(self.original, np.uint8) != np.frombuffer(bytes(self.image), np.uint8)
        return tuple((int(at), bytes(self.image[at : at + 1])) for at in np.flatnonzero(changed))


def sealed(data: bytearray) -> bytes:
    """`data` with the checksums of its header and its metadata repaired; of the latter only where it is inside."""
    header = np.frombuffer(data, spec.HEADER.dtype, 1)
    meta = int(header["meta_bytes"][0])
    header["meta_crc"] = zlib.crc32(data[HEADER:meta]) if HEADER <= meta <= len(data) else 0
    header["header_crc"] = zlib.crc32(data[: HEADER - 4])
    return bytes(data)


def flipped_weight(data: bytes) -> bytes:
    """A model with one bit of its first shared weight flipped."""
    at = int(np.frombuffer(data, spec.HEADER.dtype, 1)[0]["meta_bytes"])
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def _field(view: Any, part: str) -> Any:
    """A field of one record, or one element of it: `dims`, `dims[1]`; the names of the operation's view come first."""
    name, _, element = part.rstrip("]").partition("[")
    if "code" in (view.dtype.names or ()) and view["code"][0] < len(spec.OPCODES):
        named = spec.VIEWS.get(spec.OPERATIONS[view["code"][0]].view, ())
        word = next((w for w in named if w.name == name), None)
        if word is not None:
            first = view.dtype.fields["w0"][1] // 4 + word.at
            found = view.view("<f4" if word.type == "f32" else "<u4")[first : first + word.count][None]
            return found[:, int(element or 0)] if word.count == 1 or element else found
    return view[name][:, int(element)] if element else view[name]
