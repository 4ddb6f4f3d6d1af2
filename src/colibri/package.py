"""Reads model.bin: the strict counterpart of `colibri.emit.model_bin`, separate from everything that runs a model."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri import spec, strict_json
from colibri.errors import ModelError
from colibri.graph import Shape
from colibri.names import check_port, shown

Records = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


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

    def check_weights(self) -> None:
        """Raise ModelError where the shared weights or an expert's do not match their checksum."""
        first = int(self.header["meta_bytes"])
        parts = [("shared weights", first, int(self.header["shared_bytes"]), int(self.header["shared_crc"]))]
        for n, e in enumerate(self.experts):
            parts.append((f"expert {n}", int(e["offset"]), int(e["bytes"]), int(e["crc"])))
        for name, at, size, crc in parts:
            if at + size > len(self.data) or _crc32(self.data[at : at + size]) != crc:
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
            "worst_route_weight_bytes": int(h["worst_bytes"]),
            "operations": int(h["ops"]),
            "golden_rows": int(h["golden_rows"]),
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
    """Map a model file and read its metadata; the engine proves its structure when it is loaded.

    Raises ModelError where the file is missing, empty, not a model, truncated, or its metadata is corrupt.
    """
    path = find(path)
    size = path.stat().st_size
    if size < spec.HEADER.bytes:
        raise _error("TRUNCATED", f"{path} has {size} bytes, fewer than a model's header")
    return parse(np.asarray(np.memmap(path, np.uint8, "r")), str(path))


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
