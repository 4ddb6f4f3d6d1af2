"""Experts: their places, their programs, and experts that were pruned."""

from __future__ import annotations

from tests.hostile.cases.table import U32, U64, Fields, of, table, values
from tests.hostile.editor import Editor


def pruned(*numbers: int) -> Fields:
    """Experts that give zeros."""
    return {f"experts[{n}].{field}": 0 for n in numbers for field in ("ops", "bytes", "macs")}


def _macs_without_experts(e: Editor) -> int:
    return int(e["header.worst_macs"] - e["moe.rows"] * e["layers.k"] * int(e.records["experts"]["macs"].max()))


ALL = range(4)  # of top1
CASES = [
    *values(
        "top2_shared",
        ("experts.layer", "EXPERT", 1),
        ("experts.offset", "EXPERT", 0, U64 - 63),
        ("experts.bytes", "EXPERT", U64),
        ("experts.first_op", "EXPERT", 0, U32),
        ("experts.ops", "EXPERT", U32),
    ),
    *table(
        "top2_shared",
        ("expert off its alignment", "EXPERT", {"experts[1].offset": of("experts[1].offset", 32)}),
        ("all experts share one weight range", "OK",
         {f"experts[{n}].offset": of("experts.offset") for n in range(1, 5)}),
        ("pruned expert whose first operation is another program", "OK",
         {**pruned(0), "experts.first_op": of("header.ops")}),
    ),
    *table(
        "top1",
        ("expert shrunk below its tensors", "PROGRAM", {"experts[2].bytes": 64}),
        ("expert without operations", "EXPERT", {f"experts[{n}].ops": 0 for n in ALL}),
        ("expert reserved not zero", "EXPERT", {"experts.reserved": 1}),
        ("expert macs one less", "PROGRAM", {"experts.macs": of("experts.macs", -1)}),
        ("expert macs one more", "PROGRAM", {"experts.macs": of("experts.macs", 1)}),
        ("pruned expert between two that share a program", "OK", pruned(1)),
        ("pruned expert with weights", "EXPERT", {**pruned(1), "experts[1].bytes": 64}),
        ("pruned expert with work", "EXPERT", {**pruned(1), "experts[1].macs": 1}),
        ("every expert pruned but the cost stated", "PROGRAM", pruned(*ALL)),
        ("every expert pruned", "OK", {
            "header.worst_macs": _macs_without_experts, "header.worst_bytes": of("header.shared_bytes"),
            **pruned(*ALL),
        }),
    ),
]  # fmt: skip
