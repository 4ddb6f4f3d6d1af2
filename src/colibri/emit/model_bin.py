"""Writer of a planned program as model.bin; every record and enumeration comes from `colibri.format.spec`.

`arrange` says where everything lies, `head` gives all bytes but the weights'; `write` puts a file together in memory,
`colibri.emit.writer` on disk.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from colibri.common.names import port_names
from colibri.errors import ExportError
from colibri.format import spec
from colibri.ir.graph import Shape
from colibri.lowering.program import Op, Operand, Program, Tensor
from colibri.reference.certificate import Golden


@dataclass(frozen=True)
class Arrangement:
    """Where everything lies in the file: known before any weight is read and before the certificate is computed."""

    offsets: dict[str, int]  # of the parts of the metadata, in the order they lie
    sizes: dict[str, int]
    golden_rows: int
    choices: int  # a golden row has
    meta_bytes: int  # where the shared weights begin
    places: tuple[int, ...]  # of the experts
    total: int


def arrange(
    program: Program, golden_rows: int, info: Mapping[str, Any], expert_align: int = spec.ALIGN_EXPERT
) -> Arrangement:
    """Where everything of a planned program lies; raises ExportError where the alignment is none."""
    if expert_align % spec.ALIGN_MODEL or expert_align <= 0:
        raise ExportError(f"expert alignment {expert_align} is not a multiple of {spec.ALIGN_MODEL}")
    choices = sum(layer.tokens * layer.router.k for layer in program.layers)
    golden_bytes = spec.GOLDEN.bytes + 4 * program.input_floats + spec.align(2 * choices, 4)
    sizes = {
        "ports": (len(program.inputs) + len(program.outputs)) * spec.PORT.bytes,
        "ops": (len(program.ops) + len(program.expert_ops)) * spec.OP.bytes,
        "tensors": len(program.tensors) * spec.TENSOR.bytes,
        "layers": len(program.layers) * spec.LAYER.bytes,
        "experts": len(program.experts) * spec.EXPERT.bytes,
        "golden": golden_rows * golden_bytes,
        "info": len(_info(info)),
    }
    offsets, end = {}, spec.HEADER.bytes
    for name, size in sizes.items():
        offsets[name] = end
        end = spec.align(end + size, 8)
    meta_bytes = spec.align(end, spec.ALIGN_MODEL)
    if meta_bytes > spec.MAX_META:
        raise ExportError(f"the model's program and certificate take {meta_bytes:,} bytes, more than the format's "
                          f"{spec.MAX_META:,}: certify it with fewer rows")  # fmt: skip
    places, end = [], meta_bytes + program.shared.size
    for expert in program.experts:
        places.append(spec.align(end, expert_align) if expert.section.size else end)
        end = places[-1] + spec.align(expert.section.size, spec.ALIGN_MODEL)
    return Arrangement(offsets, sizes, golden_rows, choices, meta_bytes, tuple(places), end)


def write(
    program: Program,
    golden: Sequence[Golden] = (),
    frequencies: Sequence[float] = (),
    info: Mapping[str, Any] | None = None,
    expert_align: int = spec.ALIGN_EXPERT,
) -> bytes:
    """The bytes of model.bin. `frequencies` are the experts' shares of the calibration tokens, in program order.

    Raises ExportError where a field cannot hold its value.
    """
    info = info or {}
    at = arrange(program, len(golden), info, expert_align)
    shared, weights = program.shared.data(), [expert.section.data() for expert in program.experts]
    image = bytearray(at.total)
    image[: at.meta_bytes] = head(
        program, at, info, golden, frequencies, zlib.crc32(shared), list(map(zlib.crc32, weights))
    )
    for place, data in ((at.meta_bytes, shared), *zip(at.places, weights, strict=True)):
        image[place : place + len(data)] = data
    return bytes(image)


def head(
    program: Program,
    at: Arrangement,
    info: Mapping[str, Any],
    golden: Sequence[Golden],
    frequencies: Sequence[float],
    shared_crc: int,
    expert_crcs: Sequence[int],
) -> bytes:
    """Header and metadata, which precede the weights; only the weights' checksums are needed."""
    numbers = {tensor: n for n, tensor in enumerate(program.tensors)}
    shares = frequencies or [0.0] * len(program.experts)
    rows = zip(at.places, expert_crcs, shares, strict=True)
    parts = {
        "ports": np.concatenate([_ports(program.inputs), _ports(program.outputs)]).tobytes(),
        "ops": np.array([_op(op, numbers) for op in (*program.ops, *program.expert_ops)]).tobytes(),
        "tensors": b"".join(_tensor(t, at.meta_bytes) for t in program.tensors),
        "layers": b"".join(_layer(program, n) for n in range(len(program.layers))),
        "experts": b"".join(_expert(program, n, *row) for n, row in enumerate(rows)),
        "golden": b"".join(map(_golden, golden)),
        "info": _info(info),
    }
    image = bytearray(at.meta_bytes)
    for name, data in parts.items():
        if len(data) != at.sizes[name]:
            raise ExportError(f"the {name} take {len(data)} bytes, but {at.sizes[name]} were set aside: please report "
                              "this model")  # fmt: skip
        image[at.offsets[name] : at.offsets[name] + len(data)] = data
    values = {
        "magic": np.frombuffer(spec.MAGIC, np.uint8),
        "version": spec.FORMAT_VERSION, "max_batch": program.max_batch, "total_bytes": at.total,
        "meta_bytes": at.meta_bytes, "shared_bytes": program.shared.size, "context_bytes": program.context_bytes,
        "worst_macs": program.macs, "worst_bytes": program.weight_bytes,
        "worst_work": program.work, "cleared_bytes": program.cleared_bytes,
        "input_floats": program.input_floats, "output_floats": program.output_floats,
        "inputs": len(program.inputs), "outputs": len(program.outputs),
        "ops": len(program.ops) + len(program.expert_ops), "main_ops": len(program.ops),
        "tensors": len(program.tensors), "layers": len(program.layers), "experts": len(program.experts),
        "golden_rows": at.golden_rows, "golden_bytes": at.sizes["golden"] // max(1, at.golden_rows),
        "info_bytes": at.sizes["info"],
        "shared_crc": shared_crc,
        "context_tokens": program.context_tokens, "tail_op": program.tail_op,
        "encoder_ops": program.encoder_ops,
        **{f"{name}_offset": offset for name, offset in at.offsets.items()},
    }  # fmt: skip
    return sealed(image, _fill(spec.HEADER.dtype, values))


def sealed(meta: bytearray, header: Any) -> bytes:
    """Metadata with this record in front, whose checksums of both are set."""
    header["meta_crc"] = zlib.crc32(meta[spec.HEADER.bytes :])
    header["header_crc"] = zlib.crc32(header.tobytes()[: spec.HEADER.bytes - 4])
    meta[: spec.HEADER.bytes] = header.tobytes()
    return bytes(meta)


def _info(info: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(info), sort_keys=True).encode()


def _fill(dtype: np.dtype[Any], values: Mapping[str, Any]) -> Any:
    """A record of `dtype`, other fields zero; refuses what does not fit instead of wrapping."""
    record = np.zeros((), dtype)
    for name, value in values.items():
        field = dtype[name]
        if field.kind == "u" and not 0 <= int(value) <= np.iinfo(field).max:
            raise ExportError(f"{name} = {value} does not fit the model format's {field}")
        record[name] = value
    return record


def _value(enum: str, name: str) -> int:
    return list(spec.ENUMS[enum]).index(name)


def _ports(ports: Sequence[tuple[str, Shape]]) -> Any:
    rows = np.zeros(len(ports), spec.PORT.dtype)
    texts = port_names([name for name, _ in ports], spec.PORT.fields[0].count - 1)
    for row, text, (name, shape) in zip(rows, texts, ports, strict=True):
        row["name"][: len(text)] = np.frombuffer(text, np.uint8)
        if len(shape) > 6:
            raise ExportError(f"{name}: {len(shape)} axes; the model format holds 6: reshape it in the model")
        row["floats"], row["rank"] = prod(shape), len(shape)
        row["dims"][: len(shape)] = shape
    return rows


def _operand(operand: Operand) -> Any:
    buffer = operand.place.buffer
    base = 0 if buffer is None else buffer.offset
    return _fill(
        spec.OPERAND.dtype,
        {"offset": base + operand.offset * 4, "sample_stride": operand.place.sample_stride,
         "row_stride": operand.row_stride, "space": _value("space", operand.place.space),
         "step_stride": operand.step_stride},
    )  # fmt: skip


def _op(op: Op, numbers: Mapping[Tensor, int]) -> Any:
    record = _fill(
        spec.OP.dtype,
        {"code": _value("op", op.code), "func": _value(op.known.functions or "unary", op.func), "rows": op.rows,
         "before": _value("unary", op.before), "after": _value("unary", op.after),
         "w0": spec.NONE, "w1": spec.NONE, "w2": spec.NONE},
    )  # fmt: skip
    for name in ("a", "b", "out", "work"):
        record[name] = _operand(getattr(op, name))
    own = spec.named(record)
    for name, value in op.words.items():
        own[name] = _word(op, op.known.words[name], value, numbers)
    return record


def _word(op: Op, word: spec.Named, value: Any, numbers: Mapping[Tensor, int]) -> Any:
    if word.type == "tensor":
        return spec.NONE if value is None else numbers[value]
    if word.type == "f32":
        return value
    if word.count > 1:  # axes end at the last place, where the innermost loop is; one that is not there has size 1
        value = (word.least,) * (word.count - len(value)) + tuple(value)
    if any(not 0 <= v <= spec.LIMIT for v in np.atleast_1d(value)):
        raise ExportError(f"{op.comment}: {word.name} = {value} exceeds {spec.LIMIT}")
    return value


def _tensor(tensor: Tensor, meta_bytes: int) -> bytes:
    shared = tensor.scope == "shared"
    return bytes(
        _fill(
            spec.TENSOR.dtype,
            {"offset": tensor.offset + (meta_bytes if shared else 0), "bytes": tensor.bytes, "rows": tensor.rows,
             "cols": tensor.cols, "layout": _value("layout", tensor.layout), "scope": _value("scope", tensor.scope)},
        ).tobytes()
    )  # fmt: skip


def _layer(program: Program, number: int) -> bytes:
    layer = program.layers[number]
    router = layer.router
    return bytes(
        _fill(
            spec.LAYER.dtype,
            {"experts": router.experts, "k": router.k, "score": _value("score", router.score),
             "normalize": _value("normalize", router.normalize), "scale": router.scale,
             "first_expert": layer.first_expert, "d_in": layer.d_in, "d_out": layer.d_out, "tile": layer.tile,
             "groups": router.groups, "kept_groups": router.kept_groups,
             "group_rule": _value("group_rule", router.group_rule), "capacity": router.capacity,
             "apply": _value("apply", router.apply), "epsilon": router.epsilon,
             "quantized": layer.quantized},
        ).tobytes()
    )  # fmt: skip


def _expert(program: Program, number: int, place: int, crc: int, frequency: float) -> bytes:
    e = program.experts[number]
    return bytes(
        _fill(
            spec.EXPERT.dtype,
            {"offset": place, "bytes": e.section.size, "macs": e.macs, "crc": crc, "layer": e.layer,
             "first_op": len(program.ops) + e.first_op, "ops": e.ops, "index": e.index, "frequency": frequency},
        ).tobytes()
    )  # fmt: skip


def _golden(golden: Golden) -> bytes:
    head = _fill(spec.GOLDEN.dtype, {"output_crc": golden.output_crc, "choices": len(golden.choices)})
    choices = golden.choices.astype("<u2").tobytes()
    return bytes(head.tobytes()) + golden.input.astype("<f4").tobytes() + choices + bytes(len(choices) % 4)
