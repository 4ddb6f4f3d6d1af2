"""Builds model files from program records alone, so that a test can say what no exporter would."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from colibri.format import spec

Record = Any
HEAD = spec.HEAD_BYTES


def at(space: str = "none", offset: int = 0, sample: int = 0, row: int = 0, step: int = 0) -> Record:
    """An operand: offset in bytes, strides in floats."""
    r = np.zeros((), spec.OPERAND.dtype)
    r["space"], r["offset"] = spec.SPACES.index(space), offset
    r["sample_stride"], r["row_stride"], r["step_stride"] = sample, row, step
    return r


def arena(first: int = 0, sample: int = 0, row: int = 0, step: int = 0) -> Record:
    """An operand in the context block, `first` floats behind its head."""
    return at("arena", HEAD + 4 * first, sample, row, step)


def op(code: str, func: str = "identity", **values: Any) -> Record:
    """An operation; operands left out are none, tensors are none, and it has one row."""
    r = np.zeros((), spec.OP.dtype)
    names = {"binary": "binary", "reduce": "reduce"}.get(code, "unary")
    r["code"], r["func"], r["rows"] = spec.OPCODES.index(code), list(spec.ENUMS[names]).index(func), 1
    r["w0"] = r["w1"] = r["w2"] = spec.NONE
    for name, value in values.items():
        if r[name].shape and not isinstance(value, np.ndarray):
            r[name][: len(value)] = value
        else:
            r[name] = value
    return r


def move(a: Record, out: Record, n: int, func: str = "identity", **values: Any) -> Record:
    """n neighbouring floats from one place to another."""
    return op(
        "unary", func, a=a, out=out, dims=(1, 1, 1, n), strides_a=(0, 0, 0, 1), strides_out=(n, n, n, 1), **values
    )


def tensor(offset: int, size: int, layout: str, rows: int, cols: int) -> Record:
    """A shared tensor, `offset` bytes from where the shared weights begin."""
    r = np.zeros((), spec.TENSOR.dtype)
    r["offset"], r["bytes"], r["rows"], r["cols"] = offset, size, rows, cols
    r["layout"] = list(spec.ENUMS["layout"]).index(layout)
    return r


def port(name: bytes, floats: int) -> Record:
    """A port of one axis."""
    r = np.zeros((), spec.PORT.dtype)
    r["name"][: len(name)] = np.frombuffer(name, np.uint8)
    r["floats"] = floats
    r["rank"], r["dims"][0] = 1, floats
    return r


def model(
    ops: Sequence[Record],
    floats_in: int,
    floats_out: int,
    arena_floats: int,
    tensors: Sequence[Record] = (),
    shared: bytes = b"",
    names: tuple[bytes, bytes] = (b"x", b"y"),
    info: bytes = b"{}",
    **header: int,
) -> bytes:
    """A model of a main program alone; `header` sets fields otherwise. Its checksums fit."""
    shared = shared.ljust(spec.align(len(shared), spec.ALIGN_MODEL), b"\0")
    count = {"ports": 2, "ops": len(ops), "tensors": len(tensors), "layers": 0, "experts": 0, "golden": 0}
    sizes = {"ports": 2 * spec.PORT.bytes, "ops": len(ops) * spec.OP.bytes, "tensors": len(tensors) * spec.TENSOR.bytes,
             "layers": 0, "experts": 0, "golden": 0, "info": len(info)}  # fmt: skip
    places, end = {}, HEADER_BYTES
    for name, size in sizes.items():
        places[name] = end
        end = spec.align(end + size, 8)
    meta = spec.align(end, spec.ALIGN_MODEL)
    moved = [t.copy() for t in tensors]
    for t in moved:
        t["offset"] += np.uint64(meta)
    parts = {"ports": [port(names[0], floats_in), port(names[1], floats_out)], "ops": ops, "tensors": moved}
    image = bytearray(meta)
    for name, rows in parts.items():
        data = b"".join(r.tobytes() for r in rows)
        image[places[name] : places[name] + len(data)] = data
    image[places["info"] : places["info"] + len(info)] = info
    h = np.zeros((), spec.HEADER.dtype)
    h["magic"], h["version"], h["max_batch"] = np.frombuffer(spec.MAGIC, np.uint8), spec.FORMAT_VERSION, 1
    h["total_bytes"], h["meta_bytes"], h["shared_bytes"] = meta + len(shared), meta, len(shared)
    h["context_bytes"] = h["cleared_bytes"] = HEAD + 4 * arena_floats
    h["worst_work"], h["worst_bytes"] = (1 << 64) - 2, len(shared)
    h["input_floats"], h["output_floats"] = floats_in, floats_out
    for name, place in places.items():
        h[f"{name}_offset"] = place
    h["inputs"] = h["outputs"] = 1
    h["ops"] = h["main_ops"] = h["tail_op"] = count["ops"]
    h["tensors"], h["info_bytes"] = count["tensors"], len(info)
    for name, value in header.items():
        h[name] = value
    h["meta_crc"], h["shared_crc"] = zlib.crc32(image[HEADER_BYTES:]), zlib.crc32(shared)
    h["header_crc"] = zlib.crc32(h.tobytes()[: HEADER_BYTES - 4])
    image[:HEADER_BYTES] = h.tobytes()
    return bytes(image) + shared


HEADER_BYTES = spec.HEADER.bytes
