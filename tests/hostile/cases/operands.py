"""Operands: spaces, offsets, strides, and what may lie over what."""

from __future__ import annotations

import numpy as np

from colibri.format import spec
from tests.hostile.cases.table import U32, U64, of, table
from tests.hostile.editor import BATCH, Editor

HALF = 1 << 16


def _copy_to_output(e: Editor, floats: int = 0) -> int:
    """A copy to a later output; of so many floats."""
    ops = e.ops[: e.main_ops]
    found = (ops["code"] == spec.OPCODES.index("unary")) & (ops["out"]["space"] == spec.SPACES.index("output"))
    if floats:
        found &= ops["dims"].prod(1) == floats
    else:
        found &= (ops["func"] == 0) & (ops["out"]["offset"] > 0)
    return int(np.flatnonzero(found)[0])


def _expert_numbers(e: Editor) -> int:
    """Where the workspace of a layer holds the experts that were chosen."""
    choices = BATCH * e["moe.rows"] * e["layers.k"]
    return int(e["moe.work.offset"] + 4 * choices * (e["layers.d_out"] + 1))


CASES = [
    *table(
        "top2_shared",
        ("expert scratch over the index lists", "PROGRAM", {"expert linear.out": {
            "space": "arena", "offset": _expert_numbers, "sample_stride": of("expert linear.outputs")}}),
        ("expert scratch ends inside the workspace", "PROGRAM",
         {"expert linear.out": {"space": "arena", "offset": of("moe.work.offset", -32)}}),
        ("moe tokens times k overflow", "PROGRAM", {"moe.rows": (1 << 31) // (BATCH * 2) + 1}),
    ),
    *table(
        "top1",
        ("moe output over its own workspace", "ORDER",
         {"moe.out": {"space": "arena", "offset": of("moe.work.offset")}}),
        ("expert writes the context head", "PROGRAM", {"expert linear.out": {"space": "arena", "offset": 64}}),
        ("operation writes the context head", "PROGRAM", {"linear.out": {"space": "arena", "offset": 0}}),
        ("workspace over the context head", "PROGRAM", {"moe.work.offset": 0}),
        ("workspace past the context", "PROGRAM", {"moe.work.offset": of("header.context_bytes", -32)}),
        ("workspace far past the context", "PROGRAM", {"moe.work.offset": U64 - 31}),
        ("workspace unaligned", "PROGRAM", {"moe.work.offset": of("moe.work.offset", 4)}),
        ("workspace outside the arena", "PROGRAM", {"moe.work.space": "output"}),
        ("moe tokens overflow", "PROGRAM", {"moe.rows": 1 << 30}),
        ("moe inside an expert", "PROGRAM", {"expert linear": lambda e: e["moe"]}),
        ("rows written over each other", "PROGRAM", {"linear.out.row_stride": 0}),
        ("samples written over each other", "PROGRAM", {"linear.out.sample_stride": 0}),
        ("rows times stride overflow", "PROGRAM",
         {"linear.rows": 1 << 30, "linear.out.row_stride": 1 << 30, "linear.a.row_stride": 0}),
        ("rows times the largest stride wraps", "PROGRAM",
         {"linear.rows": (1 << 30) - 1, "linear.out.row_stride": U32, "linear.out.sample_stride": U32}),
        ("offset that is no float", "PROGRAM", {"linear.a.offset": 2}),
        ("offset that wraps", "PROGRAM", {"linear.a.offset": U64 - 3}),
        ("token written over the input", "PROGRAM",
         {"expert linear.out": {"space": "token_in", "offset": 0, "sample_stride": 0}}),
        ("main program reads a token", "PROGRAM",
         {"linear.a": {"space": "token_in", "sample_stride": 0, "row_stride": 0}}),
        ("expert reads the model input", "PROGRAM", {"expert linear.a": {"space": "input", "offset": 0}}),
        # Inside max_batch rows, outside the one row that colibri_forward is given with batch_size 1.
        ("tokens of a row that a smaller batch does not have", "PROGRAM", {"moe.a": {
            "space": "input", "offset": lambda e: 2 * e["header.input_floats"] * 4, "sample_stride": 0}}),
        ("matrix product onto its own input", "ORDER", {"expert linear.a": {
            "space": "arena", "offset": of("expert linear.out.offset"),
            "sample_stride": of("expert linear.out.sample_stride")}}),
    ),
    *table(
        "dense",
        ("input written", "PROGRAM", {"softmax.out": {"space": "input", "offset": 0, "sample_stride": 9}}),
        ("input of a row that a smaller batch does not have", "PROGRAM",
         {"linear.a": {"offset": 2 * 9 * 4, "sample_stride": 0}}),
    ),
    *table(
        "many_ports",
        ("elements written over each other", "PROGRAM", {"unary.strides_out": 0}),
        ("reach of four axes overflows", "PROGRAM", {"unary.sizes": 1 << 30, "unary.strides_a": U32}),
        ("read of one element far away", "PROGRAM", {"binary.strides_a": 1 << 30}),
        ("constant written", "PROGRAM", {"unary.out": {"space": "const", "offset": 0}}),
        # Every row of the output would be a sum over half the context: work in the square of the memory.
        ("a reduction that reads its input again for every row", "PROGRAM", {
            "header.context_bytes": 8 * HALF + spec.HEAD_BYTES, "reduce.rows": HALF // BATCH,
            "reduce.dims": [1, HALF, 1, 0], "reduce.strides_a": [0, 1, 0, 0], "reduce.strides_out": 0,
            "reduce.a": {"space": "arena", "offset": spec.HEAD_BYTES, "sample_stride": 0, "row_stride": 0},
            "reduce.out": {"space": "arena", "offset": spec.HEAD_BYTES + 4 * HALF, "sample_stride": HALF // BATCH,
                           "row_stride": 1}}),
    ),
    *table(
        "many_ports",
        ("output of a row that a smaller batch does not have", "PROGRAM",
         {"here.out": {"offset": lambda e: 4 * e["header.output_floats"], "sample_stride": 4}}),
        here=lambda e: _copy_to_output(e, 4),
    ),
    *table(
        "many_ports",
        ("copy shifted onto itself", "ORDER", {"here.a": lambda e: {
            "space": "output", "offset": e["here.out.offset"] - 4, "sample_stride": e["here.out.sample_stride"]}}),
        here=_copy_to_output,
    ),
]  # fmt: skip
