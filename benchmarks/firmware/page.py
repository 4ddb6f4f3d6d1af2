"""The page docs/measured/firmware.md, from what compare.py measured: its sentences hold for any numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.firmware.hand_count import Count

Counts = Mapping[str, Count]
Profiles = Mapping[str, Mapping[str, int]]  # instructions by function, by precision
SHOWN = 10  # functions of a profile
BEHIND_STREAM = "## The hand count\n"

# Figures that others publish: what of, the figure, where.
PUBLISHED = (
    (
        "LiteRT for Microcontrollers (TFLM), core runtime, Cortex-M3",
        '"just fits in 16 KB"',
        "*LiteRT for Microcontrollers*, overview, developers.google.com/edge/litert/microcontrollers/overview",
    ),
    (
        "TFLM, framework without kernels, model and arena, Arm bluepill (Cortex-M3)",
        "9,732 bytes of code",
        "*TFLM Code Size FAQ*, tensorflow/tflite-micro, pull request 549",
    ),
    (
        "STM32Cube.AI 10.0.0, ST MNIST, int8 CNN, STM32H7 (Cortex-M7)",
        "46.8 KiB code, 10.08 KiB weights, 4.49 KiB runtime RAM, 17.21 KiB activations",
        "model card *ST MNIST*, huggingface.co/STMicroelectronics/st_mnist",
    ),
    (
        "STM32Cube.AI 10.0.0, hand posture, float CNN, STM32F4 (Cortex-M4)",
        "14.37 KiB code, 10.75 KiB weights, 2.08 KiB runtime RAM, 1.07 KiB activations",
        "model card *CNN2D ST HandPosture*, huggingface.co/STMicroelectronics/CNN2D-ST-HandPosture-model",
    ),
    ("CMSIS-NN against plain kernels, Cortex-M7", "4.6 × the throughput", "Lai, Suda, Chandra 2018, arXiv 1801.06601"),
    ("emlearn, smallest models", "from 2 kB flash, from 50 bytes RAM", "README, emlearn/emlearn"),
)


class Variant(Protocol):
    """What the page asks of compare.Variant."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def dense(self) -> bool: ...


class Row(Protocol):
    """What the page asks of compare.Row."""

    @property
    def variant(self) -> Variant: ...
    @property
    def code(self) -> int: ...
    @property
    def weights(self) -> int: ...
    @property
    def ram(self) -> int: ...
    @property
    def stack(self) -> int: ...
    @property
    def instructions(self) -> int: ...
    @property
    def error(self) -> float: ...
    @property
    def mape(self) -> float: ...


@dataclass(frozen=True)
class Facts:
    """What else the page says; bytes, and errors in the model's unit or in percent."""

    compiler: str
    emulator: str
    rows: int
    empty_flash: int
    selftest_code: int
    float_mape: float
    float_tolerance: float
    mape_tolerance: float


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], text_columns: int = 1) -> str:
    """A table whose columns but the first ones are numbers."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, rule, *rows))


def table(rows: Sequence[Row], counts: Counts) -> str:
    """Everything measured."""
    head = ["variant", "weights", "experts run", "code", "constants", "RAM", "stack", "instructions", "÷ hand count",
            "largest error", "MAPE"]  # fmt: skip
    return markdown(
        head,
        (
            (r.variant.name, r.variant.dtype, "all 3" if r.variant.dense else 1, f"{r.code:,}", f"{r.weights:,}",
             f"{r.ram:,}", f"{r.stack:,}", f"{r.instructions:,}", _ratio(r, counts), f"{r.error:.1e}",
             f"{r.mape:.3f} %")
            for r in rows
        ),
        text_columns=2,
    )  # fmt: skip


def _ratio(row: Row, counts: Counts) -> str:
    count = counts.get(row.variant.dtype)
    return f"{row.instructions / count.total:.2f}" if count else ""


def counts(found: Counts, rows: Sequence[Row]) -> str:
    """The hand count by kinds, and Colibri beside it."""
    kinds = list(dict.fromkeys(kind for count in found.values() for kind in count.kinds))
    body: list[list[object]] = [[kind, *(f"{c.kinds.get(kind, 0):,}" for c in found.values())] for kind in kinds]
    body += [["**sum**", *(f"**{c.total:,}**" for c in found.values())]]
    colibri = {r.variant.dtype: r for r in rows if "Colibri" in r.variant.name}
    least = {d: min((r for r in rows if r.variant.dtype == d), key=lambda r: r.instructions) for d in found}
    body += [["Colibri ÷ sum", *(_ratio(colibri[d], found) for d in found)]]
    body += [["the least measured ÷ sum", *(_ratio(least[d], found) for d in found)]]
    return markdown(["instructions of a forecast", *found], body)


def _beside(rows: Sequence[Row], dtype: str) -> str:
    """Where peers of the same weights are better than Colibri, and where not, in numbers."""
    mine = next(r for r in rows if "Colibri" in r.variant.name and r.variant.dtype == dtype)
    peers = [r for r in rows if r.variant.dtype == dtype and r is not mine]
    lines = []
    for what, least in (
        ("instructions", lambda r: r.instructions),
        ("flash (code and constants)", lambda r: r.code + r.weights),
        ("RAM and stack together", lambda r: r.ram + r.stack),
    ):
        best = min(peers, key=least)
        fewer = [r for r in peers if least(r) < least(mine)]
        factor = least(mine) / least(best)
        verdict = f"{factor:.1f} × the least, {best.variant.name}" if factor >= 1 else "the least"
        lines.append(f"- {dtype}, {what}: {least(mine):,}; {len(fewer)} of {len(peers)} peers need less; {verdict}.")
    return "\n".join(lines)


def profiles(found: Profiles) -> str:
    """Colibri's functions with the most instructions, and the rest as one."""
    body = []
    for dtype, functions in found.items():
        whole = sum(functions.values())
        shown = [*list(functions.items())[:SHOWN], ("all others", sum(list(functions.values())[SHOWN:]))]
        body += [[dtype, f"`{name}`" if name in functions else name, f"{n:,}", f"{100 * n / whole:.0f} %"]
                 for name, n in shown]  # fmt: skip
    return markdown(["weights", "function", "instructions", "share"], body, text_columns=2)


def _against_dense(rows: Sequence[Row]) -> str:
    """Colibri fp32's instructions as a share of the least among those that run all experts."""
    mine = next(r for r in rows if "Colibri" in r.variant.name and r.variant.dtype == "fp32")
    return f"{100 * mine.instructions / min(r.instructions for r in rows if r.variant.dense):.0f} %"


def page(rows: Sequence[Row], found: Counts, by_function: Profiles, facts: Facts, stream: str) -> str:
    """The whole of docs/measured/firmware.md; `stream` is the section of stream.py."""
    macs = found["int8"].macs
    return f"""# Firmware beside its peers

Written by `python -m benchmarks.firmware.compare --publish`; do not edit. The smart-meter model
([examples/smart_meter](../../examples/smart_meter/README.md): 70 features, three experts of 32 hidden units, one
chosen, 8,630 trained weights, {macs:,} multiply-accumulates a forecast) as firmware, by Colibri and by others:

```sh
python3 -m venv build/firmware-peers && build/firmware-peers/bin/pip install -r benchmarks/firmware/requirements.txt
python -m benchmarks.firmware.compare
```

{table(rows, found)}

- Emulated Cortex-M7 (mps2-an500): {facts.emulator}.
- {facts.compiler}, -O2.
- Start-up code, linker script and harness are the same for all: {facts.empty_flash:,} bytes without a model, which are
  taken off.
- *code* is everything in flash beyond that image and the constants: functions, library functions, initial values of
  RAM. *constants* are the weights with what the variant stores beside them: scales, layer records; for Colibri the
  model image with its program, names and certificate. *RAM* is static (the 8 bytes of most rows are the C library's
  errno). *stack* is how deep a painted stack was overwritten below the caller's frame. All in bytes.
- *instructions* are those of the costliest of the {facts.rows} forecasts of the test weeks, to within 40. They are no
  cycles: a division counts as one, and so does a load of any number of registers.
- *largest error* is against the model in float64, in the model's unit of 950 MW. A variant is in the table only where
  fp32 stays below {facts.float_tolerance:g}, and others within {facts.mape_tolerance:g} points of float64's MAPE of
  {facts.float_mape:.3f} %. Colibri's answers are also compared, bit by bit, with those of the machine that ran this.

## Where peers are better, and why

{_beside(rows, "fp32")}
{_beside(rows, "int8")}

- **A model this small is quickly written by hand, and hand-written C is the yardstick**: it has no
  model file in flash, no context, no checks. What Colibri's bytes and instructions beyond it buy: any model in the same
  format, checksums, the same bits on every target, several contexts at a time,
  hooks, and a certificate that the device can recompute (`colibri_selftest`, which is not in the rows above, takes
  {facts.selftest_code:,} bytes of code more). Who needs none of this, and has one model that never changes, is better
  off with the loops.
- **The same bits everywhere cost fp32 instructions.** Colibri multiplies, rounds, then adds; the others leave the
  compiler to fuse, which is one instruction instead of two, and other bits on other machines.
- **Quantising** takes Colibri twice the hand count: a pass for the largest magnitude, one for the numbers, loops around
  both. The table below says where its other instructions are.
- SMLAD, which multiplies and adds two pairs in one instruction, separates int8 by hand in loops from the rows below it.
  On this core int8 without it is slower than fp32, which has a fused multiply-add.
- **Padding.** Colibri's rows of weights come in groups of eight; a small core computes the live rows only, but flash
  holds those of the gate and the head eight times over.
- **Routing** is what generated code without it lacks. Colibri fp32, running one expert, takes {_against_dense(rows)}
  of the instructions of the best that runs all three; the loops by hand show how much routing alone gives.
- Of int8 errors: with the gate in int8 too, near ties go to another expert, which makes the largest error of that row;
  a gate in fp32, which Colibri keeps, costs next to nothing here.

Where Colibri's instructions are, mean of a few forecasts, an inlined function being its caller's:

{profiles(by_function)}

## What each row is

- **Colibri**: `colibri export`, `colibri build --target cortex-m7`, as in
  [examples/firmware](../../examples/firmware/README.md).
- **Plain C, loops**: what one would write first for exactly this model: arrays, one loop a matrix, `expf` of picolibc,
  the chosen expert only. int8: a scale for each row of weights, one for each vector of inputs found as it comes; gate
  and head fp32.
- **four rows a pass**: the same, tuned by hand: weights of four rows side by side, so that an input is loaded once for
  four products. **with SMLAD**: the DSP instructions of this core through `arm_acle.h`.
- **C++ templates, in the style of TinyMind**: written for this comparison after its public headers, without copying
  them: sizes and number type as template parameters, an argmax that dispatches to one expert. TinyMind has such a layer
  (`moe.hpp`) and an int8 dense layer with SMLAD (`qdense.hpp`); it is neither in PyPI nor in Debian, and *its own code
  was not measured*. Weights are read from flash here, where TinyMind's float layers hold them in RAM. *fixed
  ranges* is the affine int8 of its quantised layers, of CMSIS-NN and of TFLite: ranges of activations calibrated on the
  validation week, zero points, integer rescaling; gate's sums int8.
- **emlearn** 0.23.2, real: it converts MLPs and has neither mixtures nor routing. Compared are three nets 70–32–16–1,
  each an expert with the head behind it, as its `loadable` C code; gate, softmax and dispatch around them are 20 lines
  by hand. Its int8 or fixed-point nets could not be compared: in this version the fixed-point layer is not implemented.
- **ONNX by emx-onnx-cgen** 1.4.0, real: code generated from an ONNX file. ONNX has operators, not routing: all experts
  run, and a mask keeps one; or the chosen expert's matrices are *gathered*, that is, copied to the stack, which takes
  more than computing all three. Temporaries are on the stack, not on its default heap.
- **in the style of onnx2c**: a small generator written for this comparison (`onnx_style.py`), after what onnx2c's
  templates write; onnx2c itself is neither in PyPI nor in Debian, and *its own code was not measured*.

{stream}{BEHIND_STREAM}
What the arithmetic asks for at the least, counted from the architecture (`benchmarks/firmware/hand_count.py`):

{counts(found, rows)}

- int8 is for the experts; gate and head are fp32, as Colibri and the int8 by hand have them. A load brings four
  weights, two SXTB16 (one rotated) widen them, two SMLAD multiply and add; an LDRD brings four inputs, widened once,
  for four rows. fp32: a load and a fused multiply-add a weight, an input loaded once for four rows.
- *scales and biases*: 7 a row of int8 (two loads, move, convert, two multiplications of which one adds, store), 2 of
  fp32. *quantising*: 8 a value (three to find the largest; load, scale, round, move, half a pack and half a store) and
  two divisions a vector. *ReLU*: one a unit. *softmax*: of two experts, the chosen one's exponential being 1: 15 for an
  exponential (reduction, five steps of a polynomial, the exponent), 3 to find the larger, one division.
- Not in it: loop control, addresses, calls, saved registers, saturation, checks. It is no proven minimum: LDM would
  bring several words in one instruction.

## Figures of others, from their own documents

Not measured here; of other models, and mostly on other cores. Sources of TFLM and CMSIS-NN, and STM32Cube.AI, could not
be had where this was written; the size of an interpreter depends little enough on the model to be worth naming.

{markdown(["what", "figure", "document"], PUBLISHED, text_columns=3)}
"""
