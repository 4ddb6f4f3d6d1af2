"""Writers of model.h, the sizes as constants, and model.c, the model as a constant array for firmware."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from colibri.emit import c_program
from colibri.emit.c_text import comment
from colibri.errors import ExportError
from colibri.format import spec
from colibri.format.package import Bytes, Package, parse
from colibri.ir.graph import ENDLESS
from colibri.lowering.program import Program

_EMBED_LIMIT = 4 << 20  # bytes; above, a C array takes compilers minutes and gigabytes
_FUNCTIONS = (
    "colibri_context_t *{p}_init(void *mem, size_t mem_size, const uint8_t *model_bin);",
    "void {p}_forward(colibri_context_t *ctx, const float *input, float *output, int batch_size);",
    "void {p}_free(colibri_context_t *ctx);",
    "size_t {p}_model_size(const uint8_t *model_bin);",
    "int {p}_get_num_experts(const uint8_t *model_bin);",
    "int {p}_selftest(colibri_context_t *ctx, float *output);",
)
_CHECK = """\
/* In model.c compiled with COLIBRI_GENERATED only: check the next `bytes` bytes of the model in flash against their
 * checksums, as from a watchdog's loop. Behind the last byte it begins again, and a call ends there: with UINT32_MAX
 * one call is a whole pass, of {flash} bytes at some {cost} instructions each. `scan` is all zeros before the first
 * call. Returns COLIBRI_OK; COLIBRI_ERR_CHECKSUM where a part that ends in this slice is damaged; COLIBRI_ERR_NULL. */
struct colibri_scan; /* colibri_inspect.h */
int {p}_check_flash(struct colibri_scan *scan, uint32_t bytes);
"""
CHECK_COST = 10  # instructions a byte of clb_crc32 on a Cortex-M7; tests/cross measures them


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
        if self.prefix == "clb":
            raise ExportError("prefix 'clb' is the engine's own: choose another")


PLAIN = Style()


def files(program: Program, image: bytes, style: Style) -> dict[str, str]:
    """The texts of model.h and model.c, and with sections for experts of experts.ld, by file name."""
    package = parse(np.frombuffer(image, np.uint8), "model.bin")
    texts = {"model.h": header(program, package, style), "model.c": _source(program, package, style)}
    if style.expert_sections:
        texts["experts.ld"] = _linker_lines(package)
    return texts


def header(program: Program, package: Package, style: Style) -> str:
    """The text of model.h."""
    name = style.prefix.upper()
    flash = sum(part.size for part in _parts(program, package, style))
    constants = {
        "DIGEST": (f"{digest(package):#010x}", "of model.bin: a checksum over all of it"),
        "BYTES": (len(package.data), "of model.bin"),
        "FLASH_BYTES": (flash, "of the model in firmware, where experts need no pages of their own"),
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
    for layer, experts in package.untested.items():
        numbers = ", ".join(map(str, experts))
        lines.append(f"/* layer {layer}: no golden row chooses expert {numbers}: the self-test does not run it */")
    rows = [f"(ctx)->{kind}_size == {name}_MODEL_{kind.upper()}_SIZE" for kind in ("input", "output")]
    lines += ["", "/* Whether a context's model has rows of the sizes above: ask first where model.bin can be replaced",
              "   without compiling the program again. */",
              f"#define {name}_MODEL_FITS(ctx) \\", f"    ({' && '.join(rows)})", "",
              "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
              f"extern const uint8_t {style.prefix}_model[]; /* {spec.ALIGN_MODEL}-byte aligned */", ""]  # fmt: skip
    if style.prefix != "colibri":
        lines += ["/* As in colibri.h and colibri_inspect.h; in model.c compiled with COLIBRI_GENERATED. */",
                  *(declaration.format(p=style.prefix) for declaration in _FUNCTIONS), ""]  # fmt: skip
    lines += [
        _CHECK.format(p=style.prefix, flash=flash, cost=CHECK_COST),
        "#ifdef __cplusplus", "}", "#endif", "",
        "#if defined(__cplusplus) && __cplusplus >= 201103L",
        f"#define {name}_MODEL_ASSERT static_assert",
        "#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L",
        f"#define {name}_MODEL_ASSERT _Static_assert",
        "#endif",
        f"#if defined({name}_MODEL_ASSERT)",
        f'{name}_MODEL_ASSERT({name}_MODEL_CONTEXT_BYTES >= {spec.HEAD_BYTES}u, "the context holds its own head");',
        f"{name}_MODEL_ASSERT({name}_MODEL_BYTES <= SIZE_MAX / 4 && {name}_MODEL_CONTEXT_BYTES <= SIZE_MAX / 4,",
        '               "the model does not fit this target\'s address space");',
        "#endif", "", "#endif", "",
    ]  # fmt: skip
    return "\n".join(lines)


def digest(package: Package) -> int:
    """What model.h and model.c know their model.bin by: the header's checksum, which covers all other checksums."""
    return int(package.header["header_crc"])


@dataclass(frozen=True)
class _Part:
    """Some bytes of model.bin that lie together in flash, pieces of them as (offset, size), under a C symbol."""

    symbol: str
    section: str
    pieces: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.pieces)

    def crc(self, data: Bytes) -> int:
        return zlib.crc32(b"".join(data[at : at + size].tobytes() for at, size in self.pieces))


def _parts(program: Program, package: Package, style: Style) -> list[_Part]:
    """The arrays of the firmware: without the gaps that bring experts to pages of their own."""
    model, section = f"{style.prefix}_model", ".rodata.model"
    common = _common(program, package)
    used = [(n, int(e["offset"]), int(e["bytes"])) for n, e in enumerate(package.experts) if e["bytes"]]
    if style.expert_sections:
        apart = [_Part(f"{model}_expert_{n}", f"{section}.expert_{n}", ((at, size),)) for n, at, size in used]
        return [_Part(model, section, common), *apart]
    experts = ((at, spec.align(size, spec.ALIGN_MODEL)) for _, at, size in used)
    return [_Part(model, section, (*common, *experts))]


def _common(program: Program, package: Package) -> tuple[tuple[int, int], ...]:
    """What stands before the experts: all of it, or where the records are constants of the code, what it still reads.

    The golden rows come with as many of the bytes before them as align the weights behind them. colibri_lm_rewind looks
    for the operations of a text in the model's bytes.
    """
    head = package.header
    weights, shared = int(head["meta_bytes"]), int(head["shared_bytes"])
    if not c_program.folds(program) or 0 < program.context_tokens < ENDLESS:
        return ((0, weights + shared),)
    size = int(head["golden_rows"]) * int(head["golden_bytes"])
    golden, end = spec.align(size, spec.ALIGN_MODEL), int(head["golden_offset"]) + size
    pieces = ((0, spec.HEADER.bytes), (end - golden, golden), (weights, shared))
    return tuple(piece for piece in pieces if piece[1])


def _place(part: _Part, offset: int) -> int:
    """Where a part has the byte at an offset of model.bin."""
    before = 0
    for at, size in part.pieces:
        if at <= offset < at + size:
            return before + offset - at
        before += size
    return before  # of what takes no bytes


def _places(package: Package, parts: Sequence[_Part]) -> list[str]:
    """In C, where the firmware has each expert's weights."""
    places = []
    first, *others = parts
    symbols = [part.symbol for part in others]
    for expert in package.experts:
        if expert["bytes"] == 0:
            places.append("NULL")
        elif symbols:
            places.append(symbols.pop(0))
        else:
            places.append(f"{first.symbol} + {_place(first, int(expert['offset']))}")
    return places


def _source(program: Program, package: Package, style: Style) -> str:
    """model.c: the model's bytes, and under COLIBRI_GENERATED its program as code."""
    name = style.prefix.upper()
    lines = [
        f"/* {comment(program.name)}: the model. Written by colibri {spec.VERSION}; do not edit. */",
        '#include "model.h"', "",
        f"#if {name}_MODEL_DIGEST != {digest(package):#010x}u",
        '#error "this model.c and the model.h it includes are of different exports: export again, or copy both"',
        "#endif", "",
    ]  # fmt: skip
    if style.expert_sections:
        lines += ["#if !defined(COLIBRI_GENERATED)",
                  "#error \"with experts in sections of their own the model is no single block: compile as firmware\"",
                  "#endif", ""]  # fmt: skip
    parts = _parts(program, package, style)
    for part in parts:
        lines += _array(package, part)
    lines += ["#if defined(COLIBRI_GENERATED) /* compile with -I of the engine's include and src; needs no library */"]
    if style.prefix != "colibri":
        names = ["model", "check_flash", *(re.findall(r"{p}_(\w+)", f)[0] for f in _FUNCTIONS)]
        lines += [f"#define colibri_{name} {style.prefix}_{name}" for name in names]
    sums = [f"{{{part.symbol}, {part.size}u, {part.crc(package.data):#010x}u}}" for part in parts]
    lines += [f"#define CLB_DIGEST {name}_MODEL_DIGEST", "#define CLB_PARTS " + ", \\\n                  ".join(sums)]
    lines += [f"#define CLB_GOLDEN_AT(header) {_place(parts[0], int(package.header['golden_offset']))}u"]
    shared = _place(parts[0], int(package.header["meta_bytes"]))
    lines += [c_program.text(program, package, shared, _places(package, parts)) + "#endif", ""]
    return "\n".join(lines)


def _array(package: Package, part: _Part) -> list[str]:
    """A part in its section; the library's form has what lies between its pieces too, as model.bin has.

    Where the model is large, the assembler takes the bytes from model.bin.
    """
    large = len(package.data) > _EMBED_LIMIT
    rows: list[str] = []
    end = part.pieces[0][0]
    for at, size in part.pieces:
        gap = _bytes_of(package, end, at - end, large)
        rows += ["#if !defined(COLIBRI_GENERATED)", *gap, "#endif"] if gap else []
        rows += _bytes_of(package, at, size, large)
        end = at + size
    if large:
        return [
            "/* model.bin must be on the assembler's include path (-Wa,-I…). */",
            f"extern const uint8_t {part.symbol}[];",
            f'__asm__(".section {part.section},\\"a\\"\\n"', f'        ".balign {spec.ALIGN_MODEL}\\n"',
            f'        ".globl {part.symbol}\\n"', f'        "{part.symbol}:\\n"', *rows, '        ".previous\\n");', "",
        ]  # fmt: skip
    return [
        f"extern const uint8_t {part.symbol}[];",
        "#if defined(__GNUC__) && !defined(__APPLE__)", f'__attribute__((section("{part.section}")))', "#endif",
        f"_Alignas({spec.ALIGN_MODEL}) const uint8_t {part.symbol}[] = {{", *rows, "};", "",
    ]  # fmt: skip


def _bytes_of(package: Package, first: int, size: int, large: bool) -> list[str]:
    if large:
        return [f'        ".incbin \\"model.bin\\", {first}, {size}\\n"'] if size else []
    data = package.data[first : first + size].tobytes()
    rows = (data[at : at + 20] for at in range(0, size, 20))
    return ["    " + ", ".join(f"0x{b:02X}" for b in row) + "," for row in rows]


def _linker_lines(package: Package) -> str:
    """Lines for a linker script that place experts' weights, the most used first."""
    order = sorted(range(len(package.experts)), key=lambda n: -float(package.experts[n]["frequency"]))
    lines = [
        "/* The experts' weights, the most used on the calibration data first: lines for an output section of fast",
        "   memory, as .fast in board.ld, that stands before the section of .rodata.model. An expert without a line",
        f"   there stays in flash. The start-up code copies the section. Written by colibri {spec.VERSION}. */",
    ]
    for n in order:
        e = package.experts[n]
        if e["ops"] == 0:
            continue
        lines.append(f"*(.rodata.model.expert_{n}) /* layer {e['layer']}, expert {e['index']}: "
                     f"{float(e['frequency']):.1%} of its layer's tokens, {e['bytes']} bytes */")  # fmt: skip
    return "\n".join([*lines, ""])
