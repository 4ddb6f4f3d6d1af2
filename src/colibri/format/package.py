"""Strict reader of model.bin: counterpart of `colibri.emit.model_bin`, separate from everything that runs a model."""

from __future__ import annotations

import io
import os
import stat
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from colibri._engine import ffi, lib
from colibri.common import strict_json
from colibri.common.names import check_port, shown
from colibri.errors import ModelError
from colibri.format import spec
from colibri.ir.graph import Shape

Records = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_COPIED = 1 << 26  # bytes of a file up to which it is read as a whole instead of mapped


@dataclass(frozen=True)
class Port:
    """One input or output: its name and per-row shape."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Package:
    """A model file, its records as NumPy structured arrays that look into `data`."""

    path: str
    data: Bytes
    header: Any
    inputs: list[Port]
    outputs: list[Port]
    ops: Records
    tensors: Records
    layers: Records
    experts: Records
    info: dict[str, Any]
    mapped: Any = None  # the host layer's map, where `data` is one

    def check_unchanged(self) -> None:
        """Raise ModelError where the file behind a mapped model has been written to, shortened or cannot be read."""
        if self.mapped is not None:
            error = lib.colibri_map_status(self.mapped)
            if error:
                raise ModelError(f"{self.path}: {spec.error_text(error)}", error)

    def check_weights(self) -> None:
        """Raise ModelError where the shared weights or an expert's do not match their checksum."""
        first = int(self.header["meta_bytes"])
        parts = [("shared weights", first, int(self.header["shared_bytes"]), int(self.header["shared_crc"]))]
        for n, e in enumerate(self.experts):
            parts.append((f"expert {n}", int(e["offset"]), int(e["bytes"]), int(e["crc"])))
        for name, at, size, crc in parts:
            if at + size > len(self.data) or _crc32(self.data[at : at + size]) != crc:
                self.check_unchanged()  # which is the better reason
                raise _error("CHECKSUM", f"{self.path}: {name} do not match their checksum")

    def numbers(self, layer: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The number in the original model of each expert of a layer, by the number the engine knows it by."""
        first = int(self.layers[layer]["first_expert"])
        return self.experts["index"][first : first + int(self.layers[layer]["experts"])].astype(np.int32)

    @property
    def pruned(self) -> dict[int, list[int]]:
        """The original numbers of the experts that were taken out at export, by layer."""
        pruned = self.info.get("pruned")
        return {int(k): list(v) for k, v in pruned.items()} if isinstance(pruned, dict) else {}

    @property
    def untested(self) -> dict[int, list[int]]:
        """By layer the original numbers of the experts that no golden row chooses: the self-test does not run them."""
        h = self.header
        tokens = {int(op["layer"]): int(op["rows"]) for op in spec.named_all(self.ops, "moe")}
        widths = [tokens.get(n, 0) * int(layer["k"]) for n, layer in enumerate(self.layers)]
        ends = np.cumsum([0, *widths])
        first = spec.GOLDEN.bytes + 4 * int(h["input_floats"])
        chosen: list[set[int]] = [set() for _ in self.layers]
        for row in range(int(h["golden_rows"])):
            at = int(h["golden_offset"]) + row * int(h["golden_bytes"]) + first
            if at + 2 * int(ends[-1]) > len(self.data):
                raise _error("HEADER", f"{self.path}: the certificate lies outside the file")
            choices = np.frombuffer(self.data, "<u2", int(ends[-1]), at)
            for n, found in enumerate(chosen):
                found.update(choices[ends[n] : ends[n + 1]].tolist())
        missing: dict[int, list[int]] = {}
        for n, layer in enumerate(self.layers):
            run = self.experts["ops"][int(layer["first_expert"]) :][: int(layer["experts"])] > 0
            left = [int(self.numbers(n)[e]) for e in np.flatnonzero(run) if int(e) not in chosen[n]]
            if left:
                missing[n] = left
        return missing

    def summary(self) -> dict[str, Any]:
        """The figures a user asks for first."""
        h = self.header
        return {
            "path": self.path,
            "name": self.info.get("name", ""),
            "dtype": self.info.get("dtype", ""),
            "certified_on": f"{self.info.get('calibration', 'unknown')} rows",
            "format_version": int(h["version"]),
            "inputs": {p.name: list(p.shape) for p in self.inputs},
            "outputs": {p.name: list(p.shape) for p in self.outputs},
            "max_batch": int(h["max_batch"]),
            "context_bytes": int(h["context_bytes"]),
            "file_bytes": int(h["total_bytes"]),
            "weight_bytes": int(h["shared_bytes"]) + int(self.experts["bytes"].sum()),
            "worst_route_macs": int(h["worst_macs"]),
            "worst_route_work": int(h["worst_work"]),
            "worst_route_weight_bytes": int(h["worst_bytes"]),
            "operations": int(h["ops"]),
            "golden_rows": int(h["golden_rows"]),
            **({"untested_experts": untested} if (untested := self.untested) else {}),
            "layers": [
                {
                    "experts": int(layer["experts"]),
                    "k": int(layer["k"]),
                    "score": spec.ENUMS["score"][layer["score"]],
                    "normalize": spec.ENUMS["normalize"][layer["normalize"]],
                    "scale": float(layer["scale"]),
                    "frequencies": [
                        round(float(e["frequency"]), 4)
                        for e in self.experts[layer["first_expert"] :][: layer["experts"]]
                    ],
                    **({"pruned": self.pruned[n]} if n in self.pruned else {}),
                }
                for n, layer in enumerate(self.layers)
            ],
        }


def _error(code: str, message: str) -> ModelError:
    number = spec.error_code(code)
    return ModelError(f"{message} ({spec.error_text(number)})", number)


def _crc32(data: Bytes) -> int:
    return zlib.crc32(data.data)


def find(path: str | Path) -> Path:
    """The model.bin that `path` means: the file itself, or the one in an export directory."""
    path = Path(path)
    if path.is_dir():
        path = path / "model.bin"
        if not path.is_file():
            raise ModelError(f"{path.parent} is a directory without a model.bin: pass the directory of an export")
    if not path.is_file():
        raise ModelError(f"{path} does not exist: pass a model.bin or the directory of an export")
    return path


def open_package(path: str | Path) -> Package:
    """Read a model file and prove its structure; its metadata, and of small files all, are a copy.

    So the file may change: weights of large files alone are mapped, and `Package.check_unchanged` tells. Replace model
    files by renaming. Raises ModelError where the file is missing, not a model, truncated, or not a sound one.
    """
    path = find(path)
    try:
        stream = path.open("rb", buffering=0)
    except OSError as reason:
        raise _error("OPEN_FAILED", f"{path}: {reason.strerror}") from None
    with stream:
        about = os.fstat(stream.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise _error("OPEN_FAILED", f"{path} is no regular file")
        if about.st_size < spec.HEADER.bytes:
            raise _error("TRUNCATED", f"{path} has {about.st_size} bytes, fewer than a model's header")
        data, mapped = _map(path) if about.st_size > _COPIED else (None, None)
        if data is None:
            data = aligned(about.st_size, spec.ALIGN_MODEL)
            data = data[: _read(stream, data)]
    package = replace(parse(data, str(path)), mapped=mapped)
    error = lib.colibri_check(ffi.from_buffer("uint8_t[]", data), len(data), lib.COLIBRI_CHECK_STRUCTURE)
    if error:
        raise ModelError(f"{path}: {spec.error_text(error)}", error)
    return package


def aligned(size: int, to: int) -> Bytes:
    """`size` uninitialised bytes whose address is a multiple of `to`."""
    raw = np.empty(size + to, np.uint8)
    start = -raw.ctypes.data % to
    return raw[start : start + size]


def _read(stream: io.FileIO, data: Bytes) -> int:
    """Fill `data`; the bytes there are, which are fewer where the file has become shorter."""
    done = 0
    while done < len(data) and (count := stream.readinto(data[done:].data)):
        done += count
    return done


def _map(path: Path) -> tuple[Bytes | None, Any]:
    """A large model's bytes, mapped behind a copy of its metadata, and the map; none where the system maps nothing.

    The map is closed with the last look at the bytes.
    """
    mapped = ffi.new("colibri_map_t *")
    error = lib.colibri_map_open(mapped, os.fsencode(path), lib.COLIBRI_MAP_UNCHECKED)
    if error == spec.error_code("UNSUPPORTED"):
        return None, None
    if error:
        raise ModelError(f"{path}: {spec.error_text(error)}", error)
    model = ffi.gc(lib.colibri_map_model(mapped), lambda _: lib.colibri_map_close(mapped))
    size = int(np.frombuffer(ffi.buffer(model, spec.HEADER.bytes), spec.HEADER.dtype)[0]["total_bytes"])
    return np.frombuffer(ffi.buffer(model, size), np.uint8), mapped


def parse(data: Bytes, path: str) -> Package:
    """Read the metadata of the model in `data` (bytes as uint8); raises ModelError like `open_package`."""
    h = np.frombuffer(data, spec.HEADER.dtype, 1)[0]
    if bytes(h["magic"]) != spec.MAGIC:
        raise _error("MAGIC", f"{path} is not a Colibri model")
    if h["version"] != spec.FORMAT_VERSION:
        raise _error("VERSION", f"{path} has format version {h['version']}, not {spec.FORMAT_VERSION}")
    if _crc32(data[: spec.HEADER.bytes - 4]) != h["header_crc"]:
        raise _error("HEADER", f"{path}: the header does not match its checksum")
    if len(data) < h["total_bytes"]:
        raise _error("TRUNCATED", f"{path} has {len(data)} bytes, but its header says {h['total_bytes']}")
    meta = int(h["meta_bytes"])
    if not spec.HEADER.bytes <= meta <= len(data) or _crc32(data[spec.HEADER.bytes : meta]) != h["meta_crc"]:
        raise _error("CHECKSUM", f"{path}: the metadata does not match its checksum")

    def records(name: str, record: spec.Record, count: int) -> Records:
        first = int(h[f"{name}_offset"])
        if first < spec.HEADER.bytes or first + count * record.bytes > meta:
            raise _error("HEADER", f"{path}: the {name} lie outside the metadata")
        return np.frombuffer(data, record.dtype, count, first)

    found = records("ports", spec.PORT, int(h["inputs"]) + int(h["outputs"]))
    ports = [_port(path, p) for p in found]
    inputs, outputs = ports[: int(h["inputs"])], ports[int(h["inputs"]) :]
    for some in (inputs, outputs):
        if len({port.name for port in some}) != len(some):
            raise _error("HEADER", f"{path}: two inputs or two outputs have one name")
    at, size = int(h["info_offset"]), int(h["info_bytes"])
    if not spec.HEADER.bytes <= at <= at + size <= meta:
        raise _error("HEADER", f"{path}: the information text lies outside the metadata")
    return Package(
        path, data, h, inputs, outputs,
        records("ops", spec.OP, int(h["ops"])), records("tensors", spec.TENSOR, int(h["tensors"])),
        records("layers", spec.LAYER, int(h["layers"])), records("experts", spec.EXPERT, int(h["experts"])),
        _information(path, data[at : at + size].tobytes()),
    )  # fmt: skip


def _port(path: str, record: Any) -> Port:
    name = bytes(record["name"]).rstrip(b"\0").decode("utf-8", "replace")
    try:
        check_port(name, "an input or output", ModelError)
    except ModelError as error:
        raise _error("HEADER", f"{path}: {error}") from None
    return Port(name, tuple(int(n) for n in record["dims"][: record["rank"]]))


_TEXTS = ("name", "dtype", "producer", "certificate", "calibration")


def _information(path: str, text: bytes) -> dict[str, Any]:
    """The information text, whose known fields are of their kind and whose texts are printable."""
    try:
        info = strict_json.loads(text)
    except strict_json.JsonError as error:
        raise _error("HEADER", f"{path}: the information text {error}") from None
    if not isinstance(info, dict):
        raise _error("HEADER", f"{path}: the information text is no object")
    for name in info:
        if not _sound(name, info[name]):
            raise _error("HEADER", f"{path}: the information text says {shown(info[name])} of {shown(name)}")
    return info


def _sound(name: str, value: Any) -> bool:
    if name in _TEXTS:
        return isinstance(value, str) and value.isprintable()
    if name == "start":
        return _whole(value)
    if name == "latency":
        return isinstance(value, dict) and all(key.isprintable() and _whole(n) for key, n in value.items())
    if name == "pruned":
        numbered = isinstance(value, dict) and all(key.isdecimal() and len(key) < 9 for key in value)
        return numbered and all(isinstance(few, list) and all(map(_whole, few)) for few in value.values())
    return True


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31
