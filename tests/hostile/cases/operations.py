"""Every operation: operands nowhere, no rows, sizes and functions beyond what there is, codes of no operation."""

from __future__ import annotations

from colibri.format import spec
from tests.hostile.cases.table import U16, U32, Hostile, place, table

# A model with each.
BASES = {
    "linear": "dense", "linear_q": "quantized", "quantize": "quantized", "unary": "soft", "binary": "top2_shared",
    "softmax": "dense", "layernorm": "deep", "rmsnorm": "top2_shared", "reduce": "deep", "loop": "steps", "moe": "top1",
    "embed": "steps", "rope": "text", "cache": "text", "attention": "text", "delay": "text", "delta": "text_delta",
}  # fmt: skip
SPACES = (0, len(spec.SPACES), len(spec.SPACES) + 1, U32)
TOO_MANY = (0, spec.LIMIT + 1, U32)
FUNCTIONS = {"linear": spec.UNARY, "unary": spec.UNARY, "binary": spec.BINARY, "reduce": spec.REDUCE}


def _of(code: str) -> list[Hostile]:
    # A delay may only store, or only recall; a loop has no operands.
    spaces = SPACES[1:] if code in ("delay", "loop") else SPACES
    operands = ("a", "b" if code == "cache" else "out")
    functions = (len(FUNCTIONS[code]), U16) if code in FUNCTIONS else ()
    own = code != "moe"
    return table(
        BASES[code],
        *((f"{code} {o} in space {n}", "PROGRAM", {f"here.{o}.space": n}) for o in operands for n in spaces),
        *((f"{code} with {n} rows", "PROGRAM", {"here.rows": n}) for n in TOO_MANY),
        *((f"{code} of sizes {n}", "PROGRAM", {"here.dims": n}) for n in TOO_MANY if own),
        *((f"{code} with function {n}", "PROGRAM", {"here.func": n}) for n in functions),
        *((f"{code} {w} beyond the tensors", "PROGRAM", {f"here.{w}": 1 << 20}) for w in ("w0", "w1") if own),
        *((f"{code} turned into operation {n}", "PROGRAM", {"here.code": n}) for n in (len(spec.OPCODES), U16)),
        here=place(code),
    )


CASES = [case for code in spec.OPCODES for case in _of(code)]
