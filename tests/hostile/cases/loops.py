"""Loops, and products of two computed matrices."""

from __future__ import annotations

from colibri.format import spec
from tests.hostile.cases import costs
from tests.hostile.cases.table import U32, of, place, table
from tests.hostile.editor import Editor

BASE = "steps"
TOO_MANY = (0, 1 << 20, spec.LIMIT, spec.LIMIT + 1, U32)


def _last_in_loop(e: Editor) -> int:
    """The operation that writes the next state."""
    return e.find("loop") + int(e["loop.body"])


def _product(e: Editor) -> int:
    """The first product of two computed matrices."""
    return next(n for n, op in enumerate(e.ops) if op["code"] == 0 and op["w0"] == spec.NONE)


CASES = [
    *table(
        BASE,
        *((f"loop of {n} steps", "PROGRAM", {"loop.steps": n}) for n in TOO_MANY),
        *((f"loop of {n} operations", "PROGRAM", {"loop.body": n}) for n in TOO_MANY),
        ("loop of one step", "ORDER", {"loop.steps": 1}),
        ("loop of one step more", "ORDER", {"loop.steps": 7}),
        ("loop the other way", "ORDER", {"loop.backward": 1}),
        ("loop of no direction", "PROGRAM", {"loop.backward": 2}),
        ("loop of fewer operations", "ORDER", {"loop.body": 3}),
        ("loop over another loop", "PROGRAM", {"loop.body": 12}),
        ("loop to the end of the program", "PROGRAM",
         {"loop.body": lambda e: e["header.main_ops"] - e.find("loop")}),
        ("loop in a text", "OK", {"header.context_tokens": 64}),
        ("loop across the tail", "PROGRAM", {"header.tail_op": place("loop", 2)}),
        ("a loop in an expert over its neighbour's operations", "PROGRAM", {"expert loop.body": 40}),
        ("a step outside loops", "OK", {"quantize.a.step_stride": 1 << 20}),
        cost=costs.of_loops,
    ),
    *table(
        BASE,
        ("loop over a layer of experts", "PROGRAM", {"here.dims[1]": 2, "here.dims[0]": 1, "here.code": "loop"}),
        here=place("moe", -2), cost=costs.of_loops,
    ),
    *table(
        BASE,
        *((f"{o} {n} apart in steps", "ORDER" if n == 11 else "PROGRAM", {f"here.{o}.step_stride": n})
          for n in (11, 1 << 12, spec.LIMIT, spec.LIMIT + 1, U32) for o in ("a", "out")),
        ("every step writes the same state", "ORDER", {"here.out.step_stride": 0}),
        ("states into the output beyond its row", "PROGRAM", {"here.out": {
            "space": "output", "offset": 0, "sample_stride": of("header.output_floats"), "step_stride": 1 << 10}}),
        ("states into the input", "PROGRAM", {"here.out": {"space": "input", "offset": 0}}),
        here=_last_in_loop, cost=costs.of_loops,
    ),
    *table(
        BASE,
        ("a product without a matrix", "PROGRAM", {"here.b.space": "none"}),
        ("a product with a matrix in the input", "PROGRAM or OK", {"here.b": {"space": "input", "offset": 0}}),
        ("a product with a constant matrix", "PROGRAM", {"here.b": {"space": "const", "offset": 0}}),
        ("a matrix that ends behind the context", "PROGRAM",
         {"here.b.offset": lambda e: e["header.context_bytes"] // 64 * 64 - 64}),
        ("matrices far apart", "PROGRAM", {"here.b.sample_stride": 1 << 20}),
        ("a matrix in the context's head", "PROGRAM", {"here.b.offset": 0}),
        *((f"a computed matrix of {n} columns", "PROGRAM", {"here.inputs": n})
          for n in (0, 1 << 16, spec.LIMIT, spec.LIMIT + 1, U32)),
        *((f"a computed matrix of {n} rows", "PROGRAM", {"here.outputs": n})
          for n in (0, 1 << 16, spec.LIMIT, spec.LIMIT + 1, U32)),
        here=_product, cost=costs.of_loops,
    ),
]  # fmt: skip
