"""Warning about a quantised model that is far from its original: which matrix causes it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from colibri.ir.graph import Array, Graph
from colibri.quantize.choose import own_errors
from colibri.quantize.report import Quality

LIMITS = {"fp16": 0.01, "int8": 0.05, "int4": 0.3, "mixed": 0.3}  # ‖Δ‖ / ‖y‖ of an output
_ROWS = 64
_APART = 1e4  # between the sizes of inputs of one matrix: more than an integer's steps can tell apart


def large_error(
    reference: Graph, new: Graph, quality: Quality, dtype: str, activations: str, rows: Sequence[Array]
) -> list[str]:
    """A sentence where an output's error passes the limit of its format; none otherwise."""
    limit, worst = LIMITS.get(dtype, 1.0), max(quality.outputs, key=lambda output: output.error)
    if worst.error <= limit:
        return []
    said = (
        f"{dtype} moves output {worst.name} by {worst.error:.2%} on {quality.rows} rows, above the {limit:.0%} that "
        "are usual"
    )
    found = own_errors(reference, new, [x[:_ROWS] for x in rows], activations)
    if not found:
        return [f"{said}: use a wider format"]
    name, error, largest, least = max(found, key=lambda f: f[1])
    said += f"; the most is lost in {name}, whose output moves by {error:.2%}"
    if least > 0 and largest / least > _APART:
        return [
            f"{said} and whose inputs have sizes from {least:.2g} to {largest:.2g}: scale the inputs of the model to "
            "about 1 each, and the weights against it, or use fp32"
        ]
    return [f"{said}: use dtype mixed with a max_error, which gives such a matrix more bits, or a wider format"]


__all__ = ["LIMITS", "large_error"]
