"""Writes model.h, the sizes as constants, and model.c, the model as a constant array for firmware."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from colibri import spec
from colibri.graph import BINARY, UNARY
from colibri.program import Op, Program

_EMBED_LIMIT = 4 << 20  # bytes; above, a C array takes compilers minutes and gigabytes


def header(program: Program, image: bytes) -> str:
    """The text of model.h."""
    constants = {
        "MODEL_BYTES": (len(image), "flash the model takes"),
        "MODEL_CONTEXT_BYTES": (program.context_bytes, "RAM a context takes: colibri_model_size()"),
        "MODEL_MAX_BATCH": (program.max_batch, "largest batch_size"),
        "MODEL_INPUT_SIZE": (program.input_floats, "floats of one input row"),
        "MODEL_OUTPUT_SIZE": (program.output_floats, "floats of one output row"),
        "MODEL_LAYERS": (len(program.layers), "MoE layers"),
        "MODEL_EXPERTS": (len(program.experts), "experts in all layers: colibri_get_num_experts()"),
        "MODEL_WORST_MACS": (program.macs, "multiply-accumulates of one row, costliest route"),
        "MODEL_WORST_WEIGHT_BYTES": (program.weight_bytes, "weight bytes one row reads, costliest route"),
    }
    offset = 0
    lines = [
        f"/* {_comment(program.name)}: sizes of this model. Written by colibri {spec.VERSION}; do not edit. */",
        "#ifndef COLIBRI_MODEL_H", "#define COLIBRI_MODEL_H", "", "#include <stdint.h>", "",
    ]  # fmt: skip
    lines += [f"#define COLIBRI_{name} {value}u /* {doc} */" for name, (value, doc) in constants.items()]
    for kind, ports in (("input", program.inputs), ("output", program.outputs)):
        offset = 0
        for name, shape in ports:
            floats = 1
            for n in shape:
                floats *= n
            lines.append(
                f"/* {kind} {_comment(name)}: shape {list(shape)}, floats {offset} to {offset + floats - 1} of a row */"
            )
            offset += floats
    lines += [
        "",
        f"extern const uint8_t colibri_model[COLIBRI_MODEL_BYTES]; /* {spec.ALIGN_MODEL}-byte aligned */",
        "",
        "#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L",
        f'_Static_assert(COLIBRI_MODEL_CONTEXT_BYTES >= {spec.HEAD_BYTES}u, "the context holds its own head");',
        "_Static_assert(COLIBRI_MODEL_BYTES <= SIZE_MAX / 4 && COLIBRI_MODEL_CONTEXT_BYTES <= SIZE_MAX / 4,",
        '               "the model does not fit this target\'s address space");',
        "#endif",
        "",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def source(program: Program, image: bytes) -> str:
    """The text of model.c: the model's bytes, and under COLIBRI_GENERATED its program as code."""
    return _bytes(program, image) + "\n" + _generated(program, image)


def _generated(program: Program, image: bytes) -> str:
    """The program as straight-line calls of the engine's kernels, for firmware that carries only what it uses."""
    ops = [*program.ops, *program.expert_ops]
    unary = {UNARY.index(f) for op in ops for f in _functions(op)}
    binary = {BINARY.index(op.func) for op in ops if op.code == "map2"}
    products, quantized = (
        {spec.LAYOUTS.index(op.w0.layout) for op in ops if op.code == code and op.w0} for code in ("linear", "linear_q")
    )
    header = np.frombuffer(image[: spec.HEADER.bytes], spec.HEADER.dtype)[0]
    lines = [
        "#if defined(COLIBRI_GENERATED) /* compile with -I of the engine's src and link libcolibri.a */",
        *(f"#define CLB_USED_{name} {sum(1 << n for n in used):#x}ull" for name, used in
          (("UNARY", unary), ("BINARY", binary), ("PRODUCTS", products), ("PRODUCTS_Q", quantized))),
        f"#define CLB_USED_RESIDUAL {int(any(op.w2 for op in ops))}",
        f"#define MODEL_OPS_OFFSET {int(header['ops_offset'])}",
        '#include "generated.h"', "",
    ]  # fmt: skip
    first = len(program.ops)
    programs = sorted({(expert.layer, expert.first_op, expert.ops) for expert in program.experts})
    for layer in range(len(program.layers)):
        lines += [f"static void expert_{layer}(const clb_expert *expert, uint32_t count, const clb_frame *frame)", "{"]
        mine = [(start, count) for number, start, count in programs if number == layer]
        if len(mine) > 1:
            lines.append("    switch (expert->first_op) {")
            for start, count in mine:
                lines += [f"    case {first + start}:", *_calls(ops, first + start, count, "count", "        "),
                          "        break;"]  # fmt: skip
            lines.append("    }")
        else:
            lines += ["    (void)expert;", *_calls(ops, first + mine[0][0], mine[0][1], "count", "    ")]
        lines += ["}", ""]
    lines += ["static void program(const clb_model *model, uint32_t samples, const clb_frame *frame)", "{",
              *(["    (void)model;"] if not program.layers else []), *_calls(ops, 0, first, "samples", "    "),
              "}", "#endif", ""]  # fmt: skip
    return "\n".join(lines)


def _functions(op: Op) -> list[str]:
    """The elementwise functions an operation needs."""
    used = [op.func] if op.code in ("linear", "linear_q", "map1") else []
    return [f for f in (*used, op.before) if f != "identity"]


def _calls(ops: Sequence[Op], first: int, count: int, samples: str, indent: str) -> list[str]:
    """A call for each of `count` operations from `first` on."""
    calls = []
    for n, op in enumerate(ops[first : first + count], first):
        if op.code == "moe":
            call = f"clb_run_moe(model, OP({n}), expert_{op.layer}, {samples}, frame);"
        elif op.code in ("linear", "linear_q"):
            call = f"clb_run_linear(OP({n}), {samples}, frame);"
        else:
            call = f"clb_run_rows(clb_{op.code}, OP({n}), {samples}, frame);"
        calls.append(f"{indent}{call} /* {_comment(op.comment)} */")
    return calls


def _bytes(program: Program, image: bytes) -> str:
    """The model's bytes; a model too large for a C array is pulled in from model.bin by the assembler."""
    head = (
        f"/* {_comment(program.name)}: the model. Written by colibri {spec.VERSION}; do not edit. */\n"
        '#include "model.h"\n\n'
    )
    if len(image) > _EMBED_LIMIT:
        return head + (
            "/* model.bin must be on the assembler's include path (-Wa,-I…). */\n"
            '__asm__(".section .rodata.model,\\"a\\"\\n"\n'
            f'        ".balign {spec.ALIGN_MODEL}\\n"\n'
            '        ".globl colibri_model\\n"\n'
            '        "colibri_model:\\n"\n'
            '        ".incbin \\"model.bin\\"\\n"\n'
            '        ".previous\\n");\n'
        )
    rows = "\n".join(
        "    " + ", ".join(f"0x{b:02X}" for b in image[at : at + 20]) + "," for at in range(0, len(image), 20)
    )
    return head + (
        "#if defined(__GNUC__) && !defined(__APPLE__)\n"
        '__attribute__((section(".rodata.model")))\n'
        "#endif\n"
        f"_Alignas({spec.ALIGN_MODEL}) const uint8_t colibri_model[COLIBRI_MODEL_BYTES] = {{\n{rows}\n}};\n"
    )


def _comment(text: str) -> str:
    return re.sub(r"[^\w .,+-]", "_", text)
