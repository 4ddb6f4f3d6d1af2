"""Writes model.h, the sizes as constants, and model.c, the model as a constant array for firmware."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import numpy as np

from colibri import spec
from colibri.emit import c_program
from colibri.emit.c_text import comment
from colibri.errors import ExportError
from colibri.package import Package, parse
from colibri.program import Program

_EMBED_LIMIT = 4 << 20  # bytes; above, a C array takes compilers minutes and gigabytes
_FUNCTIONS = (
    "colibri_context_t *{p}_init(void *mem, size_t mem_size, const uint8_t *model_bin);",
    "void {p}_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size);",
    "void {p}_free(colibri_context_t *ctx);",
    "size_t {p}_model_size(const uint8_t *model_bin);",
    "int {p}_get_num_experts(const uint8_t *model_bin);",
    "int {p}_selftest(colibri_context_t *ctx, float *output);",
)


@dataclass(frozen=True)
class Style:
    """How the C is written. `prefix` is what its names begin with, so that several models can live in one firmware;
    `expert_sections` gives each expert's weights a section of their own, for a linker to place.
    """

    prefix: str = "colibri"
    expert_sections: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", self.prefix):
            raise ExportError(f"prefix {self.prefix!r} is no name: use up to 32 lower-case letters, digits and _")


PLAIN = Style()


def files(program: Program, image: bytes, style: Style) -> dict[str, str]:
    """The texts of model.h and model.c, and with sections for experts of experts.ld, by file name."""
    package = parse(np.frombuffer(image, np.uint8), "model.bin")
    texts = {"model.h": header(program, len(image), style), "model.c": _source(program, package, style)}
    if style.expert_sections:
        texts["experts.ld"] = _linker_lines(package)
    return texts


def header(program: Program, size: int, style: Style) -> str:
    """The text of model.h for a model of `size` bytes."""
    name = style.prefix.upper()
    constants = {
        "BYTES": (size, "flash the model takes"),
        "CONTEXT_BYTES": (program.context_bytes, f"RAM a context takes: {style.prefix}_model_size()"),
        "MAX_BATCH": (program.max_batch, "largest batch_size"),
        "INPUT_SIZE": (program.input_floats, "floats of one input row"),
        "OUTPUT_SIZE": (program.output_floats, "floats of one output row"),
        "LAYERS": (len(program.layers), "MoE layers"),
        "EXPERTS": (len(program.experts), f"experts in all layers: {style.prefix}_get_num_experts()"),
        "WORST_MACS": (program.macs, "multiply-accumulates of one row, costliest route"),
        "WORST_WORK": (program.work, "elementary steps of one row at most, these products included"),
        "WORST_WEIGHT_BYTES": (program.weight_bytes, "weight bytes one row reads, costliest route"),
    }
    include = "<stdint.h>" if style == PLAIN else '"colibri.h"'
    lines = [
        f"/* {comment(program.name)}: sizes of this model. Written by colibri {spec.VERSION}; do not edit. */",
        f"#ifndef {name}_MODEL_H", f"#define {name}_MODEL_H", "", f"#include {include}", "",
    ]  # fmt: skip
    lines += [f"#define {name}_MODEL_{key} {value}u /* {doc} */" for key, (value, doc) in constants.items()]
    for kind, ports in (("input", program.inputs), ("output", program.outputs)):
        offset = 0
        for port, shape in ports:
            end = offset + prod(shape) - 1
            lines.append(f"/* {kind} {comment(port)}: shape {list(shape)}, floats {offset} to {end} of a row */")
            offset = end + 1
    length = "" if style.expert_sections else f"{name}_MODEL_BYTES"
    lines += ["", f"extern const uint8_t {style.prefix}_model[{length}]; /* {spec.ALIGN_MODEL}-byte aligned */", ""]
    if style.prefix != "colibri":
        lines += ["/* As in colibri.h and colibri_inspect.h; in model.c compiled with COLIBRI_GENERATED. */",
                  *(declaration.format(p=style.prefix) for declaration in _FUNCTIONS), ""]  # fmt: skip
    lines += [
        "#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L",
        f'_Static_assert({name}_MODEL_CONTEXT_BYTES >= {spec.HEAD_BYTES}u, "the context holds its own head");',
        f"_Static_assert({name}_MODEL_BYTES <= SIZE_MAX / 4 && {name}_MODEL_CONTEXT_BYTES <= SIZE_MAX / 4,",
        '               "the model does not fit this target\'s address space");',
        "#endif", "", "#endif", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _source(program: Program, package: Package, style: Style) -> str:
    """model.c: the model's bytes, and under COLIBRI_GENERATED its program as code."""
    model, size = f"{style.prefix}_model", len(package.data)
    places = [int(e["offset"]) for e in package.experts]
    lines = [f"/* {comment(program.name)}: the model. Written by colibri {spec.VERSION}; do not edit. */",
             '#include "model.h"', ""]  # fmt: skip
    if style.expert_sections:
        lines += ["#if !defined(COLIBRI_GENERATED)",
                  "#error \"with experts in sections of their own the model is no single block: compile as firmware\"",
                  "#endif", ""]  # fmt: skip
        shared = int(package.header["meta_bytes"]) + int(package.header["shared_bytes"])
        lines += _array(package, model, ".rodata.model", 0, shared)
        for n, (place, e) in enumerate(zip(places, package.experts, strict=True)):
            if e["ops"] == 0:
                continue
            lines += _array(package, f"{model}_expert_{n}", f".rodata.model.expert_{n}", place, int(e["bytes"]))
        experts = [f"{model}_expert_{n}" if e["ops"] else "NULL" for n, e in enumerate(package.experts)]
    else:
        lines += _array(package, model, ".rodata.model", 0, size)
        experts = [f"{model} + {place}" for place in places]
    lines += ["#if defined(COLIBRI_GENERATED) /* compile with -I of the engine's include and src; needs no library */"]
    if style.prefix != "colibri":
        names = ["model", *(re.findall(r"{p}_(\w+)", f)[0] for f in _FUNCTIONS)]
        lines += [f"#define colibri_{name} {style.prefix}_{name}" for name in names]
    lines += [c_program.text(program, package, experts) + "#endif", ""]
    return "\n".join(lines)


def _array(package: Package, symbol: str, section: str, first: int, size: int) -> list[str]:
    """Some bytes of the model in a section of flash; where they are many, the assembler takes them from model.bin."""
    if len(package.data) > _EMBED_LIMIT:
        return [
            "/* model.bin must be on the assembler's include path (-Wa,-I…). */",
            f"extern const uint8_t {symbol}[];",
            f'__asm__(".section {section},\\"a\\"\\n"', f'        ".balign {spec.ALIGN_MODEL}\\n"',
            f'        ".globl {symbol}\\n"', f'        "{symbol}:\\n"',
            f'        ".incbin \\"model.bin\\", {first}, {size}\\n"', '        ".previous\\n");', "",
        ]  # fmt: skip
    data = package.data[first : first + size].tobytes()
    rows = (data[at : at + 20] for at in range(0, size, 20))
    return [
        "#if defined(__GNUC__) && !defined(__APPLE__)", f'__attribute__((section("{section}")))', "#endif",
        f"_Alignas({spec.ALIGN_MODEL}) const uint8_t {symbol}[{size}] = {{",
        *("    " + ", ".join(f"0x{b:02X}" for b in row) + "," for row in rows), "};", "",
    ]  # fmt: skip


def _linker_lines(package: Package) -> str:
    """Lines for a linker script that place experts' weights, the most used first."""
    order = sorted(range(len(package.experts)), key=lambda n: -float(package.experts[n]["frequency"]))
    lines = [
        "/* The experts' weights, the most used on the calibration data first: lines for an output section of fast",
        "   memory, as .fast in board.ld, that stands before the section of .rodata.model. An expert without a line",
        "   there stays in flash. The start-up code copies the section. */",
    ]
    for n in order:
        e = package.experts[n]
        if e["ops"] == 0:
            continue
        lines.append(f"*(.rodata.model.expert_{n}) /* layer {e['layer']}, expert {e['index']}: "
                     f"{float(e['frequency']):.1%} of its layer's tokens, {e['bytes']} bytes */")  # fmt: skip
    return "\n".join([*lines, ""])
