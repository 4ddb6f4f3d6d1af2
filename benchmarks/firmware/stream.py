"""A stream as firmware: a convolution, a GRU and a classifier that take one time step a call, beside C by hand.

    python -m benchmarks.firmware.stream [--publish]

The size of a small keyword or appliance detector. Its weights are random: what is counted does not depend on them.
Prints the section of docs/measured/firmware.md, and with --publish puts it there. Needs PyTorch besides what
compare.py needs.
"""

from __future__ import annotations

import argparse
import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.firmware import compare, page
from benchmarks.firmware import weights as meter
from colibri import exporter
from colibri.runtime import engine

Floats = NDArray[np.float32]
CHANNELS, TAPS, WIDTH, HIDDEN, CLASSES = 8, 5, 24, 32, 8
TIME_STEPS = 96
TOLERANCE = {"fp32": 1e-5, "int8": 2e-2}  # the largest error of a probability


@functools.cache
def parameters() -> Mapping[str, Floats]:
    """As PyTorch initialises such layers, but of a generator of our own, which no release changes."""
    rng = np.random.default_rng(9)

    def uniform(*shape: int, by: int) -> Floats:
        return rng.uniform(-(by**-0.5), by**-0.5, shape).astype(np.float32)

    return {
        "conv.weight": uniform(WIDTH, CHANNELS, TAPS, by=CHANNELS * TAPS),
        "conv.bias": uniform(WIDTH, by=CHANNELS * TAPS),
        "gru.weight_ih_l0": uniform(3 * HIDDEN, WIDTH, by=HIDDEN), "gru.bias_ih_l0": uniform(3 * HIDDEN, by=HIDDEN),
        "gru.weight_hh_l0": uniform(3 * HIDDEN, HIDDEN, by=HIDDEN), "gru.bias_hh_l0": uniform(3 * HIDDEN, by=HIDDEN),
        "head.weight": uniform(CLASSES, HIDDEN, by=HIDDEN), "head.bias": uniform(CLASSES, by=HIDDEN),
    }  # fmt: skip


def time_steps(count: int, seed: int) -> Floats:
    """A made-up signal: time steps (count, CHANNELS) of slow and fast waves, and noise."""
    rng, at = np.random.default_rng(seed), np.arange(count)[:, None]
    waves = np.sin(at * rng.uniform(0.05, 1.5, CHANNELS) + rng.uniform(0, 6, CHANNELS))
    return (2 * waves + rng.normal(scale=0.5, size=(count, CHANNELS))).astype(np.float32)


def answers(x: Floats) -> NDArray[np.float64]:
    """What the model says of each time step, in float64: the probability of the first class."""
    w = {name: value.astype(np.float64) for name, value in parameters().items()}
    past, state, found = np.zeros((TAPS, CHANNELS)), np.zeros(HIDDEN), []
    for row in x.astype(np.float64):
        past = np.concatenate([past[1:], row[None]])
        y = np.maximum(np.einsum("oct,tc->o", w["conv.weight"], past) + w["conv.bias"], 0)
        now = (w["gru.weight_ih_l0"] @ y + w["gru.bias_ih_l0"]).reshape(3, HIDDEN)
        before = (w["gru.weight_hh_l0"] @ state + w["gru.bias_hh_l0"]).reshape(3, HIDDEN)
        reset, update = 1 / (1 + np.exp(-(now[:2] + before[:2])))
        state = (1 - update) * np.tanh(now[2] + reset * before[2]) + update * state
        scores = np.exp(w["head.weight"] @ state + w["head.bias"])
        found.append(scores[0] / scores.sum())
    return np.array(found)


def export(dtype: str) -> exporter.Export:
    """The PyTorch module as a stream, calibrated on signals of its own."""
    import torch
    from torch import nn

    from colibri.frontends.torch.export import from_torch

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(CHANNELS, WIDTH, TAPS)
            self.gru = nn.GRU(WIDTH, HIDDEN, batch_first=True)
            self.head = nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """(batch, time, CHANNELS) -> (batch, time, CLASSES)"""
            past = nn.functional.pad(x.transpose(1, 2), (TAPS - 1, 0))
            y, _ = self.gru(torch.relu(self.conv(past)).transpose(1, 2))
            return torch.softmax(self.head(y), dim=-1)

    detector = Detector().eval()
    detector.load_state_dict({name: torch.from_numpy(value) for name, value in parameters().items()})
    rows = torch.from_numpy(np.stack([time_steps(32, seed) for seed in range(1, 5)]))
    imported = from_torch(detector, (rows,), rows, "detector")
    return exporter.build(imported.graph, quantization=exporter.Quantization(dtype), calibration=imported.rows,
                          stream_axis=1)  # fmt: skip


def write_headers(folder: Path) -> None:
    """The weights by hand, float and int8, and the time steps."""
    w = parameters()
    matrices = {
        "conv": (w["conv.weight"].transpose(0, 2, 1).reshape(WIDTH, -1), w["conv.bias"]),
        "input": (w["gru.weight_ih_l0"], w["gru.bias_ih_l0"]), "state": (w["gru.weight_hh_l0"], w["gru.bias_hh_l0"]),
        "head": (w["head.weight"], w["head.bias"]),
    }  # fmt: skip
    sizes = {"CHANNELS": CHANNELS, "TAPS": TAPS, "WIDTH": WIDTH, "HIDDEN": HIDDEN, "CLASSES": CLASSES}
    head = "#include <stdint.h>\nenum { " + ", ".join(f"{name} = {n}" for name, n in sizes.items()) + " };\n"
    fp32, int8 = head, head
    for name, (weight, bias) in matrices.items():
        floats = meter.array("float", f"{name}_weight", weight)
        biases = meter.array("float", f"{name}_bias", bias)
        fp32 += floats + biases
        q, scale = meter.rows_int8(weight)
        rounded = meter.array(meter.WORDS, f"{name}_weight", q) + meter.array("float", f"{name}_scale", scale)
        int8 += (floats if name == "head" else rounded) + biases
    (folder / "stream_fp32.h").write_text(fp32, encoding="utf-8")
    (folder / "stream_int8.h").write_text(int8, encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """What the table shows of a variant; bytes beyond those of the empty image."""

    name: str
    dtype: str
    code: int
    constants: int
    ram: int
    stack: int
    instructions: int
    error: float

    @property
    def flash(self) -> int:
        return self.code + self.constants


VARIANTS = [
    compare.Variant("Plain C, loops", "hand_stream.c", "fp32", ("-DINT8=0",)),
    compare.Variant("Plain C, loops", "hand_stream.c", "int8", ("-DINT8=1",)),
    compare.Variant("C with SMLAD, a row a pass", "hand_stream.c", "int8", ("-DINT8=2",)),
]


def by_hand(variant: compare.Variant, x: Floats, folder: Path) -> Row:
    """Builds a variant, runs it and compares its answers; raises compare.LeftOut where they are wrong."""
    write_headers(folder)
    compare.write_rows(x, folder)
    image, peer = compare.link(variant, folder, folder)
    return _row(variant.name, variant.dtype, image, compare.constants(image, peer), x, folder)


def colibri(dtype: str, x: Floats, folder: Path, made: exporter.Export | None = None) -> Row:
    """Colibri's generated code, whose answers must also be this machine's, to the last bit."""
    made = made or export(dtype)
    image = compare.link_colibri(made, x, folder)
    here = np.ascontiguousarray(engine.load(made.image)(x)[:, 0])
    if compare.run(image)[1].tobytes() != here.tobytes():
        raise compare.LeftOut(f"Colibri's {dtype} answers are not this machine's")
    return _row("**Colibri**", dtype, image, compare.flash_of(made), x, folder)


def _row(name: str, dtype: str, image: Path, constants: int, x: Floats, folder: Path) -> Row:
    write_headers(folder)
    compare.write_rows(x, folder)
    empty, _ = compare.link(compare.Variant("empty", "empty.c", "fp32"), folder, compare.fresh(folder / "empty"))
    size, nothing = compare.image_bytes(image), compare.image_bytes(empty)
    values, found = compare.run(image)
    error = float(np.abs(found - answers(x)).max())
    if not error <= TOLERANCE[dtype]:
        raise compare.LeftOut(f"wrong: a probability is {error:.2g} off")
    return Row(name, dtype, size["flash"] - nothing["flash"] - constants, constants, size["ram"] - nothing["ram"],
               values["stack"], values["instructions"], error)  # fmt: skip


def measured() -> list[Row]:
    """Every row of the table."""
    x, rows = time_steps(TIME_STEPS, 0), []
    for dtype in TOLERANCE:
        with tempfile.TemporaryDirectory() as place:
            rows.append(colibri(dtype, x, Path(place)))
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as place:
            rows.append(by_hand(variant, x, Path(place)))
    return rows


def section(rows: Sequence[Row]) -> str:
    """What docs/measured/firmware.md says of it."""
    plain = {row.dtype: row for row in rows if row.name == VARIANTS[0].name}
    head = ["variant", "weights", "code", "constants", "RAM", "stack", "instructions", "÷ plain C", "flash ÷ plain C",
            "largest error"]  # fmt: skip
    body = [
        (r.name, r.dtype, f"{r.code:,}", f"{r.constants:,}", f"{r.ram:,}", f"{r.stack:,}", f"{r.instructions:,}",
         f"{r.instructions / plain[r.dtype].instructions:.2f}", f"{r.flash / plain[r.dtype].flash:.2f}",
         f"{r.error:.1e}")
        for r in rows
    ]  # fmt: skip
    macs = WIDTH * CHANNELS * TAPS + 3 * HIDDEN * (WIDTH + HIDDEN) + CLASSES * HIDDEN
    return f"""## A stream

A model of one time step a call (`stream=1`): {CHANNELS} channels, a causal convolution of {TAPS} taps to {WIDTH},
a GRU of {HIDDEN}, a classifier of {CLASSES} classes; {macs:,} multiply-accumulates a call, random weights, the same
board, compiler and harness; *instructions* are those of the costliest of {TIME_STEPS} calls, *error* that of a
probability. `python -m benchmarks.firmware.stream` measures it and writes this section.

{page.markdown(head, body, text_columns=2)}

- **Plain C, loops** is what one would write first: the past in static arrays, one loop a matrix, `expf` and `tanhf` of
  picolibc. int8: a scale for each row of weights and for each vector of inputs; the classifier is fp32.
- Colibri's code has no loop over operations: each is a few calls with literal sizes. A window of the past is one copy
  out of a ring, a gate's sum and its function one pass, and eight rows of weights share each load of an input.
- Its flash holds the header, the certificate's golden rows and the weights; of the records of its operations, which are
  constants of the code, nothing: {min(r.constants for r in rows if "Colibri" in r.name):,} bytes of constants at int8.

"""


def main() -> None:
    """Measures everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", action="store_true", help="write the section into docs/measured/firmware.md")
    options = parser.parse_args()
    text = section(measured())
    print(text)
    if options.publish:
        path = compare.ROOT / "docs/measured/firmware.md"
        whole = re.sub(r"## A stream\n.*?(?=^## )", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        before, behind = whole.split(page.BEHIND_STREAM)
        path.write_text(before + text + page.BEHIND_STREAM + behind, encoding="utf-8")


if __name__ == "__main__":
    main()
