"""Checkpoints with numbers stored as codes and scales: the fields of their configuration, and the reader.

FP8 (e4m3, e5m2) times a scale for each block or for the whole tensor, as DeepSeek's and MiniMax's releases are, the
scales being floats or powers of two (e8m0), and MXFP4 as GPT-OSS is. Everything else is refused by name: a scale that
is read wrongly gives logits that are wrong and look sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.common.names import shown
from colibri.errors import ExportError
from colibri.frontends.tensor_files import CODES, FP8, PLAIN, Stored
from colibri.ir.graph import Array

MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MXFP4_GROUP = 32  # values that share one exponent

_E4M3, _E5M2 = ("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")
# Lists of modules and whether the library dequantises: the tensors themselves say what is stored how.
_SILENT = {"quant_method", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"}
# By method, the fields that say how numbers are stored, with the values that are understood.
_KNOWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "mxfp4": {},
    "fp8": {"fmt": (None, *_E4M3, *_E5M2), "activation_scheme": (None, "dynamic"),
            "scale_fmt": (None, "float", "ue8m0"), "expert_dtype": (None, "fp8")},
}  # fmt: skip
_BLOCK = "weight_block_size"


@dataclass(frozen=True)
class Quantization:
    """How a configuration says that numbers are stored; `block` is (rows, columns), or None for one scale a tensor."""

    method: str | None = None
    kinds: tuple[str, ...] = FP8
    block: tuple[int, int] | None = None
    block_said: bool = False
    powers: bool = False  # whether bytes are scales, each the power of two of e8m0


def quantization_of(config: Mapping[str, Any]) -> Quantization:
    """What `quantization_config` says, of the model or of its text part.

    Raises ExportError naming every field that is not understood.
    """
    nested = config.get("text_config")
    places = [config, nested] if isinstance(nested, dict) else [config]
    found = [place["quantization_config"] for place in places if place.get("quantization_config") is not None]
    if not found:
        return Quantization()
    said = found[0] if isinstance(found[0], dict) else {"quant_method": found[0]}
    if any(other != found[0] for other in found):
        raise ExportError("config.json has two quantization_config that differ: leave the one that is true")
    method = said.get("quant_method")
    if not isinstance(method, str) or method not in _KNOWN:
        raise _refuse(f"quantization_config {shown(said)} is not supported")
    known = _KNOWN[method]
    strange = [
        f"{name} = {shown(value)}" for name, value in said.items()
        if not _understood(name, value, known) and not (name == _BLOCK and method == "fp8")
    ]  # fmt: skip
    if strange:
        raise _refuse(f"quantization_config of {method} has {', '.join(strange)}, which is not supported")
    form = said.get("fmt")
    kinds = FP8 if form is None else ("F8_E4M3",) if form in _E4M3 else ("F8_E5M2",)
    return Quantization(method, kinds, _block(said.get(_BLOCK)), _BLOCK in said, said.get("scale_fmt") == "ue8m0")


def _refuse(what: str) -> ExportError:
    return ExportError(
        f"{what}; known are mxfp4 and fp8 with scales for blocks or tensors: use the checkpoint in floats"
    )


def _understood(name: str, value: Any, known: Mapping[str, tuple[Any, ...]]) -> bool:
    if name in _SILENT:
        return True
    return name in known and any(type(value) is type(a) and value == a for a in known[name])


def _block(said: Any) -> tuple[int, int] | None:
    if said is None:
        return None
    pair = said if isinstance(said, list) and len(said) == 2 else []
    if not pair or not all(type(n) is int and 1 <= n <= 1 << 24 for n in pair):
        raise _refuse(f"quantization_config has {_BLOCK} = {shown(said)}, which is not a number of rows and columns")
    return pair[0], pair[1]


def combine(tensors: dict[str, Stored], said: Quantization) -> None:
    """Make one tensor of each that is stored in two parts; raises ExportError where the two are not understood."""
    for name in [*tensors]:
        if name.endswith("_blocks") and (scales := name.removesuffix("_blocks") + "_scales") in tensors:
            whole = name.removesuffix("_blocks")
            if whole in tensors:
                raise ExportError(f"tensor {whole!r} is stored twice, as it is and as {name!r}: remove one")
            tensors[whole] = _mxfp4(whole, tensors.pop(name), tensors.pop(scales))
        elif name.endswith("_scale_inv") and (numbers := name.removesuffix("_scale_inv")) in tensors:
            tensors[numbers] = _scaled(tensors[numbers], tensors.pop(name), said)
    if said.method is None:
        return
    for name, stored in tensors.items():
        if stored.kind in FP8:
            raise ExportError(f"tensor {name!r} is FP8 without its {name}_scale_inv: fetch the checkpoint again")


def _mxfp4(name: str, blocks: Stored, scales: Stored) -> Stored:
    """Groups of 32 four-bit floats, 16 bytes, the low half first, times a power of two (OCP Microscaling Formats)."""
    stored = blocks.kind == "U8" and scales.kind in ("U8", "F8_E8M0")
    if not stored or not scales.shape or blocks.shape != (*scales.shape, MXFP4_GROUP // 2):
        raise ExportError(
            f"tensor {name!r}: blocks ({blocks.kind}, {blocks.shape}) and scales ({scales.kind}, {scales.shape}) are "
            "no MXFP4 tensor"
        )
    shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4_GROUP)

    def rows(start: int, stop: int) -> Array:
        codes = blocks.rows(start, stop).astype(np.uint8, copy=False)
        values = np.stack([MXFP4_VALUES[codes & 15], MXFP4_VALUES[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)
        return _product(values, _powers(scales).rows(start, stop)[..., None]).reshape(stop - start, *shape[1:])

    return Stored(name, shape, "MXFP4", rows)


def _powers(scales: Stored) -> Stored:
    """Scales that are bytes as the powers of two they mean."""
    if scales.kind != "U8":
        return scales
    return Stored(scales.name, scales.shape, "F8_E8M0", lambda start, stop: CODES["F8_E8M0"][scales.rows(start, stop)])


def _scaled(numbers: Stored, scales: Stored, said: Quantization) -> Stored:
    """FP8 times a scale for each block of rows and columns, or for the whole."""
    what = f"tensor {numbers.name!r} ({numbers.kind}, {numbers.shape})"
    if numbers.kind not in said.kinds or said.method != "fp8":
        raise ExportError(
            f"{what} has scales, but config.json does not say that it is stored so (quantization_config): correct it, "
            "or use a checkpoint in float"
        )
    bytes_ = scales.kind == "U8" and said.powers
    if scales.kind not in (*PLAIN, "F8_E8M0") and not bytes_:
        raise ExportError(
            f"{what} has scales stored as {scales.kind}, which is not understood: only floats, F8_E8M0, and with "
            "quantization_config.scale_fmt = 'ue8m0' bytes are"
        )
    if not said.block_said:
        raise ExportError(f"{what} has scales, but quantization_config lacks {_BLOCK}: add it to config.json")
    scales = _powers(scales)
    if said.block is None:
        return _scaled_whole(numbers, scales, what)
    return _scaled_in_blocks(numbers, scales, said.block, what)


def _scaled_whole(numbers: Stored, scale: Stored, what: str) -> Stored:
    if scale.shape not in ((), (1,)):
        raise ExportError(f"{what} has scales {scale.shape}, but {_BLOCK} says that there is one: correct config.json")

    def rows(start: int, stop: int) -> Array:
        return _product(numbers.rows(start, stop), scale.rows(0, 1).reshape(()))

    return Stored(numbers.name, numbers.shape, "FP8", rows)


def _scaled_in_blocks(numbers: Stored, scales: Stored, block: tuple[int, int], what: str) -> Stored:
    """(…, rows, columns) and the scales of blocks of the last two axes."""
    high, wide = block
    outer, sizes = numbers.shape[:-2], numbers.shape[-2:]
    grid = tuple(-(-size // step) for size, step in zip(sizes, block, strict=False))
    if len(sizes) < 2 or scales.shape != (*outer, *grid):
        raise ExportError(
            f"{what} and its scales {scales.shape} do not fit blocks of {high} x {wide}: use a checkpoint in float, or "
            f"correct {_BLOCK}"
        )

    def rows(start: int, stop: int) -> Array:
        # Rows of the first axis, which is that of the blocks' rows where there is no other.
        first, end = (start, stop) if outer else (start // high, -(-stop // high))
        factor = scales.rows(first, end).repeat(high, -2).repeat(wide, -1)[..., : sizes[1]]
        factor = factor[..., : sizes[0], :] if outer else factor[start - first * high :][: stop - start]
        return _product(numbers.rows(start, stop), factor)

    return Stored(numbers.name, numbers.shape, "FP8", rows)


def _product(numbers: Array, scales: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):  # an infinity or a NaN, which `read` refuses
        return np.asarray(numbers * scales, np.float32)


__all__ = ["Quantization", "combine", "quantization_of"]
