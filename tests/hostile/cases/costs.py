"""Multiply-accumulates that a header owns up to, so that something else must refuse the model."""

from __future__ import annotations

from colibri.format import spec
from tests.hostile.editor import Editor


def of_loops(e: Editor) -> int:
    """Of the main program outside MoE layers, loops as often as they say."""
    total, steps, left = 0, 1, 0
    for n in range(e["header.main_ops"]):
        code = spec.OPCODES[e[f"ops[{n}].code"]]
        if code == "loop":
            steps, left = e[f"ops[{n}].steps"], e[f"ops[{n}].body"]
            continue
        if code.startswith("linear"):
            total += (steps if left else 1) * e[f"ops[{n}].rows"] * e[f"ops[{n}].inputs"] * e[f"ops[{n}].outputs"]
        left -= left > 0
    return total


def of_text(e: Editor) -> int:
    """Of attention on the last token of a full context, and of the delta rule."""
    tokens, total = e["header.context_tokens"], 0
    for n in (f"ops[{n}]" for n, code in enumerate(e.ops["code"]) if code == spec.OPCODES.index("attention")):
        seen = min(tokens, e[f"{n}.window"] or tokens)
        total += e[f"{n}.rows"] * (e[f"{n}.key"] + e[f"{n}.value"]) * seen
    for n in (f"ops[{n}]" for n, code in enumerate(e.ops["code"]) if code == spec.OPCODES.index("delta")):
        total += 3 * e[f"{n}.rows"] * e[f"{n}.key"] * e[f"{n}.value"]
    return total
