"""Tensors: place, size, layout, scope, and who may read them."""

from __future__ import annotations

import numpy as np

from colibri.format import spec
from tests.hostile.cases import costs
from tests.hostile.cases.table import U32, U64, Count, of, table, values


def _first(scope: str) -> Count:
    return lambda e: int(np.flatnonzero(e.records["tensors"]["scope"] == spec.SCOPES.index(scope))[0])


CASES = [
    *values(
        "top2_shared",
        ("tensors.scope", "TENSOR", len(spec.SCOPES), U32),
        ("tensors.layout", "TENSOR", 0, len(spec.LAYOUTS)),
        ("tensors.rows", "TENSOR", 0, spec.LIMIT, spec.LIMIT + 1),
        ("tensors.cols", "TENSOR", 0, spec.LIMIT),
        ("tensors.bytes", "TENSOR", U64),
        ("tensors.offset", "TENSOR", 0, U64 - 63),
    ),
    *table("top2_shared", ("tensor off its alignment", "TENSOR", {"tensors.offset": of("tensors.offset", 32)})),
    *table(
        "top1",
        ("main program reads an experts tensor", "PROGRAM", {"linear.matrix": _first("expert")}),
        ("expert reads a shared tensor", "PROGRAM", {"expert linear.matrix": of("linear.matrix")}),
        # Moved to where a shared tensor may be, so that only its use gives it away.
        ("scope of an expert tensor changed", "PROGRAM",
         {"tensors[expert linear.matrix]": lambda e: e[f"tensors[{_first('shared')(e)}]"]}),
        ("expert tensor past the expert", "PROGRAM", {"tensors[expert linear.matrix].offset": of("experts.bytes")}),
        ("interleaved matrix read as a constant", "PROGRAM",
         {"linear.a": {"space": "const", "offset": 0, "sample_stride": 0}}),
    ),
    *table(
        "dense",
        ("bias shorter than the matrix", "PROGRAM", {
            "tensors[linear.bias].cols": of("tensors[linear.bias].cols", -1),
            "tensors[linear.bias].bytes": of("tensors[linear.bias].bytes", -4),
        }),
        ("matrix smaller than the operation says", "PROGRAM", {"linear.dims": lambda e: e["linear.dims"] + 8}),
    ),
    *table(
        "many_ports",
        ("constant read without a tensor", "PROGRAM", {"unary.w0": spec.NONE, "unary.a.space": "const"}),
    ),
    *table(
        "text",
        ("rope without a table", "PROGRAM", {"rope.table": spec.NONE}),
        ("rope with a matrix", "PROGRAM", {"rope.table": of("embed.table")}),
        ("embed without a table", "PROGRAM", {"embed.table": spec.NONE}),
        ("embed from a vector", "PROGRAM", {"embed.table": of("rope.table")}),
        cost=costs.of_text,
    ),
    *table(
        "text_int8",
        *((f"embed table in layout {n}", "TENSOR or PROGRAM", {"tensors[embed.table].layout": n})
          for n in range(len(spec.LAYOUTS) + 1) if n != spec.LAYOUTS.index("rows8_i8")),
        cost=costs.of_text,
    ),
    *table(
        "exchange",
        ("encoder-decoder: biases beside a source text", "PROGRAM", {"attention[2].biases": of("attention[1].biases")}),
        ("encoder-decoder: biases in a matrix", "PROGRAM", {"attention[1].biases": of("linear.matrix")}),
        ("encoder-decoder: biases from another section", "PROGRAM",
         {"attention[1].biases": of("header.tensors", -1)}),
        ("encoder-decoder: no biases", "OK", {"attention[1].biases": spec.NONE}),
    ),
]  # fmt: skip
