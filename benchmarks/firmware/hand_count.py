"""Counts by hand what a forecast takes at the least on a Cortex-M7: instructions by kind, from the architecture alone.

Not a proof of a minimum, but what the arithmetic asks for once loops, calls and addresses cost nothing. Counted are:

- int8, the experts: a word load brings four weights; SXTB16, plain and rotated, widens them; two SMLAD multiply and
  add. Inputs are widened once, and an LDRD brings four of them, for ROWS_SHARED rows of weights, which is what the
  registers hold.
  Activations are quantised with a scale found for each vector, since Colibri and the int8 by hand do that; like theirs,
  the gate and the head are fp32.
- fp32: a load and a fused multiply-add for each weight; an input is loaded once for ROWS_SHARED rows.

Left out: loop control, address arithmetic, calls, saved registers, padding beyond whole words, saturation, checks.
Fewer instructions are possible: LDM brings several words in one, which a count of instructions, but hardly the memory,
rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ROWS_SHARED = 4
WEIGHTS_IN_WORD = 4

# Instructions a value, with what they are.
INT8_WORD = {"weight loads": 1, "SXTB16": 2, "SMLAD": 2}
QUANTISE = 8  # VLDR VABS VMAXNM for the largest; VLDR VMUL VADD VMOV, half a PKHBT and half a STR to quantise
QUANTISE_VECTOR = 2  # the scale and its inverse: two divisions
ROW_INT8 = 7  # VLDR scale and bias; VMOV, VCVT, VMUL by the inputs' scale, VFMA, VSTR
ROW_FP32 = 2  # VLDR bias, VSTR
RELU = 1  # VMAXNM
EXPONENTIAL = (
    15  # difference; VMUL, round, convert; two VFMA to reduce; five for the polynomial; three for the exponent; add
)
LARGEST = 3  # a score: VCMP, VMRS, a conditional move
PROBABILITY = 1  # the division by the sum


@dataclass(frozen=True)
class Layer:
    """A matrix that a forecast multiplies with, and whether a ReLU follows."""

    name: str
    rows: int
    columns: int
    relu: bool
    expert: bool


@dataclass(frozen=True)
class Count:
    """Instructions by kind; their sum; and the multiply-accumulates among the work."""

    kinds: dict[str, int]
    macs: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def costliest_route(architecture: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[Layer], int]:
    """The layers of one forecast and the number of experts, whichever is chosen: k of the largest.

    `architecture` is architecture.json's content, `shapes` those of the checkpoint's tensors.
    """
    layers: list[Layer] = []
    experts = 0

    def walk(nodes: list[dict[str, Any]], expert: int | None) -> list[Layer]:
        nonlocal experts
        found: list[Layer] = []
        for node, after in zip(nodes, [*nodes[1:], {}], strict=True):
            if node["op"] == "linear":
                name = node["inputs"][1] if expert is None else node["inputs"][1].replace("{e}", str(expert))
                rows, columns = shapes[name]
                # The chosen expert's output passes its ReLU outside the mixture.
                found.append(Layer(name, rows, columns, after.get("func") == "relu", expert is not None))
            elif node["op"] == "moe":
                experts = node["experts"]["count"]
                each = [walk(node["experts"]["nodes"], e) for e in range(experts)]
                each.sort(key=lambda own: -sum(layer.rows * layer.columns for layer in own))
                for own in each[: node["router"]["k"]]:
                    if after.get("func") == "relu":
                        own[-1] = replace(own[-1], relu=True)
                    found += own
        return found

    layers = walk(list(architecture["nodes"]), None)
    return layers, experts


def _groups(rows: int) -> int:
    return -(-rows // ROWS_SHARED)


def _activations(layers: list[Layer], experts: int) -> dict[str, int]:
    scores = LARGEST * (experts - 1) + EXPONENTIAL * (experts - 1) + PROBABILITY  # the chosen one's exponential is 1
    return {"ReLU": RELU * sum(layer.rows for layer in layers if layer.relu), "softmax": scores}


def _fp32_layers(layers: list[Layer]) -> dict[str, int]:
    macs = sum(layer.rows * layer.columns for layer in layers)
    return {
        "weight loads": macs,
        "VFMA": macs,
        "input loads": sum(_groups(layer.rows) * layer.columns for layer in layers),
        "scales and biases": ROW_FP32 * sum(layer.rows for layer in layers),
    }


def fp32(layers: list[Layer], experts: int) -> Count:
    """With fused multiply-adds, which Colibri's arithmetic does without."""
    macs = sum(layer.rows * layer.columns for layer in layers)
    return Count(_fp32_layers(layers) | _activations(layers, experts), macs)


def int8(layers: list[Layer], experts: int) -> Count:
    """With the DSP instructions in the experts."""
    kinds = _fp32_layers([layer for layer in layers if not layer.expert])
    inside = [layer for layer in layers if layer.expert]
    words = {layer: -(-layer.columns // WEIGHTS_IN_WORD) for layer in inside}
    for kind, n in INT8_WORD.items():
        kinds[kind] = kinds.get(kind, 0) + n * sum(layer.rows * words[layer] for layer in inside)
    kinds["input loads"] += sum(_groups(layer.rows) * words[layer] for layer in inside)
    kinds["scales and biases"] += ROW_INT8 * sum(layer.rows for layer in inside)
    vectors = {layer.columns for layer in inside}  # each quantised once
    kinds["quantising"] = QUANTISE * sum(vectors) + QUANTISE_VECTOR * len(vectors)
    return Count(kinds | _activations(layers, experts), sum(layer.rows * layer.columns for layer in layers))
