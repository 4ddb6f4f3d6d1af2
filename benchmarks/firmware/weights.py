"""The trained model for the hand-written variants: its answers in float64, and its weights as C headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Weights = Mapping[str, Floats]
FEATURES, HIDDEN, WIDTH, EXPERTS = 70, 32, 16, 3
PADDED = -(-FEATURES // 4) * 4  # columns in whole words of four bytes
SIZES = f"enum {{ FEATURES = {FEATURES}, HIDDEN = {HIDDEN}, WIDTH = {WIDTH}, EXPERTS = {EXPERTS} }};\n"


def activations(weights: Weights, x: NDArray[np.floating]) -> dict[str, NDArray[np.float64]]:
    """Float64, of rows (rows, FEATURES): logits, each expert's hidden and output after their ReLU, and the answers."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    x = x.astype(np.float64)
    logits = x @ w["moe.gate.weight"].T + w["moe.gate.bias"]
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    hidden, out = [], []
    for e in range(EXPERTS):
        hidden.append(np.maximum(x @ w[f"moe.experts.{e}.0.weight"].T + w[f"moe.experts.{e}.0.bias"], 0))
        out.append(np.maximum(hidden[e] @ w[f"moe.experts.{e}.2.weight"].T + w[f"moe.experts.{e}.2.bias"], 0))
    chosen = logits.argmax(1)
    rows = np.arange(len(x))
    mixed = scores.max(1)[:, None] * np.stack(out)[chosen, rows]
    answers = (mixed @ w["head.weight"].T)[:, 0] + w["head.bias"][0]
    return {"logits": logits, "hidden": np.stack(hidden), "out": np.stack(out), "answers": answers, "chosen": chosen}


def _stack(weights: Weights, layer: int, kind: str) -> Floats:
    return np.stack([weights[f"moe.experts.{e}.{layer}.{kind}"] for e in range(EXPERTS)])


def _matrices(weights: Weights) -> dict[str, tuple[Floats, Floats]]:
    """Weight (…, rows, columns) and bias (…, rows) by the names of the C arrays."""
    return {
        "gate": (weights["moe.gate.weight"], weights["moe.gate.bias"]),
        "first": (_stack(weights, 0, "weight"), _stack(weights, 0, "bias")),
        "second": (_stack(weights, 2, "weight"), _stack(weights, 2, "bias")),
        "head": (weights["head.weight"], weights["head.bias"]),
    }


def array(ctype: str, name: str, values: NDArray[np.generic]) -> str:
    """`values` (…, n) as a C array; all axes but a leading one of experts are one."""
    rows = values.reshape(len(values), -1) if name.startswith(("first", "second")) else values.reshape(1, -1)
    text = [", ".join(x.hex() + "f" if isinstance(x, float) else str(x) for x in row.tolist()) for row in rows]
    if len(rows) == 1:
        return f"static const {ctype} {name}[{rows.shape[1]}] = {{{text[0]}}};\n"
    inner = ",\n".join("{" + row + "}" for row in text)
    return f"static const {ctype} {name}[{len(rows)}][{rows.shape[1]}] = {{\n{inner}}};\n"


def _header(arrays: Iterable[tuple[str, str, NDArray[np.generic]]], *more: str) -> str:
    return "".join(["#include <stdint.h>\n", SIZES, *more, *(array(*each) for each in arrays)])


def _four_rows(w: NDArray[np.generic], unit: int) -> NDArray[np.generic]:
    """Rows (…, rows, columns) in groups of four, side by side: (…, groups, columns / unit, 4, unit).

    Rows are padded with zeros to whole groups; the head's single one stays as it is.
    """
    rows, columns = w.shape[-2:]
    if rows == 1:
        return w
    w = np.concatenate([w, np.zeros((*w.shape[:-2], -rows % 4, columns), w.dtype)], -2)
    return w.reshape(*w.shape[:-2], -1, 4, columns // unit, unit).swapaxes(-2, -3)


def fp32(weights: Weights, packed: bool = False) -> str:
    """Everything as float, rows one after the other or in groups of four."""
    return _header(
        ("float", f"{name}_{kind}", _four_rows(values, 1) if packed and kind == "weight" else values)
        for name, pair in _matrices(weights).items()
        for kind, values in zip(("weight", "bias"), pair, strict=True)
    )


def gate_fp32(weights: Weights) -> str:
    """The gate, and the head's bias: what is left to write by hand around nets that hold the rest."""
    gate, bias = _matrices(weights)["gate"]
    return _header(
        [("float", "gate_weight", gate), ("float", "gate_bias", bias), ("float", "head_bias", weights["head.bias"])]
    )


def q16(weights: Weights) -> str:
    """Everything in Q16.16, as structures of one integer."""
    text = fp32({name: np.rint(values * 65536).astype(np.int32) for name, values in weights.items()})
    return text.replace("static const float ", "static constexpr Value ")


def rows_int8(w: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Rounded rows, their columns padded with zeros to whole words, and the rows' scales (float32)."""
    scale = np.abs(w).max(-1) / np.float32(127)
    q = np.rint(w / scale[..., None]).astype(np.int8)
    pad = -w.shape[-1] % 4
    return np.concatenate([q, np.zeros((*q.shape[:-1], pad), np.int8)], -1), scale.astype(np.float32)


WORDS = "_Alignas(4) int8_t"


def int8(weights: Weights, packed: bool = False) -> str:
    """Int8 with a scale for each row, rows one after the other or in groups of four; gate and head as float too."""
    matrices = _matrices(weights)
    head, head_bias = matrices.pop("head")
    arrays: list[tuple[str, str, NDArray[np.generic]]] = [
        ("float", "gate_float", matrices["gate"][0]), ("float", "head_float", head), ("float", "head_bias", head_bias)
    ]  # fmt: skip
    for name, (w, bias) in matrices.items():
        rows, scale = rows_int8(w)
        q = _four_rows(rows, 4) if packed else rows
        arrays += [(WORDS, f"{name}_weight", q), ("float", f"{name}_scale", scale), ("float", f"{name}_bias", bias)]
    return _header(arrays, f"enum {{ FEATURES_WORDS = {PADDED // 4} }};\n")


def affine(weights: Weights, calibration: Floats) -> str:
    """Int8 as TFLite has it: ranges of activations from `calibration`, symmetric rows, integer biases and factors."""
    seen = activations(weights, calibration)
    low, high = min(float(calibration.min()), 0.0), max(float(calibration.max()), 0.0)
    input_scale = (high - low) / 255
    input_zero = round(-128 - low / input_scale)
    # After a ReLU a range starts at 0, which is then -128; ranges are each expert's own.
    used = [seen["chosen"] == e for e in range(EXPERTS)]
    hidden_scale, out_scale = (
        np.array([seen[name][e][used[e]].max() / 255 for e in range(EXPERTS)]) for name in ("hidden", "out")
    )
    made = {name: (*rows_int8(w), bias) for name, (w, bias) in _matrices(weights).items()}

    def dense(name: str, scale: NDArray[np.float64], zero: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Scales of the sums (…, rows), and the biases in their units; input scales are of shape (…, 1)."""
        q, row_scale, bias = made[name]
        unit = scale * row_scale.astype(np.float64)
        return unit, (np.rint(bias / unit) - zero * q.astype(np.int64).sum(-1)).astype(np.int32)

    one = np.array(input_scale)
    gate_unit, gate_bias = dense("gate", one, input_zero)
    first_unit, first_bias = dense("first", one, input_zero)
    second_unit, second_bias = dense("second", hidden_scale[:, None], -128)
    head_q, head_row, _ = made["head"]
    factors = {"first": first_unit / hidden_scale[:, None], "second": second_unit / out_scale[:, None]}
    assert all(f.max() < 1 for f in factors.values())
    arrays: list[tuple[str, str, NDArray[np.generic]]] = [("float", "gate_scale", gate_unit.astype(np.float32))]
    arrays += [("int8_t", f"{name}_weight", made[name][0]) for name in made]
    arrays += [("int32_t", "gate_bias", gate_bias), ("int32_t", "first_bias", first_bias)]
    arrays += [("int32_t", "second_bias", second_bias)]
    arrays += [("int32_t", f"{k}_factor", np.rint(v * 2**31).astype(np.int32)) for k, v in factors.items()]
    arrays += [("float", "head_scale", (out_scale * float(head_row[0])).astype(np.float32)),
               ("int32_t", "head_offset", 128 * head_q.astype(np.int32).sum(-1)),
               ("float", "head_bias", weights["head.bias"])]  # fmt: skip
    constants = f"enum {{ FEATURES_PADDED = {PADDED}, INPUT_ZERO = {input_zero} }};\n"
    constants += f"static const float INPUT_INVERSE = {float(np.float32(1 / input_scale)).hex()}f;\n"
    text = _header(arrays, constants).replace("static const", "static constexpr")
    return text.replace("static constexpr int8_t", "alignas(4) static constexpr int8_t")


def write(weights: Weights, calibration: Floats, folder: Path) -> None:
    """All headers into `folder`, and the checkpoint for generate.py."""
    headers: dict[str, Callable[[Weights], str]] = {
        "weights_fp32.h": fp32, "gate_fp32.h": gate_fp32, "weights_q16.h": q16, "weights_int8.h": int8,
        "weights_affine.h": lambda w: affine(w, calibration),
        "packed_fp32.h": lambda w: fp32(w, packed=True), "packed_int8.h": lambda w: int8(w, packed=True),
    }  # fmt: skip
    for name, make in headers.items():
        (folder / name).write_text(make(weights), encoding="utf-8")
    np.savez(folder / "weights.npz", **weights)
