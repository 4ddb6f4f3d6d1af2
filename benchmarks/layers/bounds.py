"""What the limits say about a layer: the peak and the reading rate that apply, and the least time of a call."""

from __future__ import annotations

import math
from typing import Any

# Bytes a weight takes at best; int4 with a half-precision scale for each group of 32.
WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5625}
_FUSED = ("fp32 fused", "fp32 fused 512")
_SEPARATE = ("fp32 multiply add", "fp32 multiply add 512")
# The first of the groups that was measured counts. Four bits leave room to add two products in 16 bits first.
_PEAKS = {
    "fp32": (_FUSED,), "fp16": (_FUSED,), "separate": (_SEPARATE,),
    "int8": (("int8 vpdpbusd 512",), ("int8",)), "int4": (("int8 vpdpbusd 512",), ("int8 paired",)),
}  # fmt: skip
Limits = dict[str, Any]


def peak_name(limits: Limits, kind: str) -> str:
    """The sample that is the peak of a kind of weights (or of "separate", a multiply and an add in float32)."""
    names: set[str] = {s["name"] for s in limits["samples"]}
    group = next(g for g in _PEAKS[kind] if names & set(g))
    return max(names & set(group), key=lambda name: _best(limits, name, 1))


def peak(limits: Limits, kind: str, threads: int) -> float:
    """10^9 multiply-accumulates a second."""
    return _best(limits, peak_name(limits, kind), threads)


def reading(limits: Limits, held: float, threads: int) -> float:
    """GB/s of reading `held` bytes again and again, between the two nearest sizes that were measured.

    A larger set that was read faster shows that the smaller one was disturbed: it is no limit.
    """
    points: dict[float, float] = {}
    for s in limits["samples"]:
        if s["name"].startswith(("working set", "DRAM")) and s["threads"] == threads:
            at = float(1 << round(math.log2(s["bytes"])))
            points[at] = max(points.get(at, 0.0), s["best"])
    sizes = sorted(points)
    rates = [max(points[larger] for larger in sizes[n:]) for n in range(len(sizes))]
    for n, size in enumerate(sizes):
        if held <= size:
            if n == 0:
                return rates[0]
            part = math.log2(held / sizes[n - 1]) / math.log2(size / sizes[n - 1])
            return rates[n - 1] + part * (rates[n] - rates[n - 1])
    return rates[-1]


def memory_rate(limits: Limits, threads: int) -> float:
    """GB/s of reading from DRAM."""
    return max(_best(limits, name, threads) for name in ("DRAM", "DRAM streams"))


def bound_us(limits: Limits, work: dict[str, float], kind: str, threads: int) -> float:
    """Microseconds of the arithmetic at its peak, or of reading the active weights once, whichever takes longer.

    `work` is `sizes.work` of the call. The weights are taken to be read from where all experts lie, since the inputs
    visit all in turn; where the same are hit again sooner, a little less than this can be measured.
    """
    rate = reading(limits, work["held"] * WEIGHT_BYTES[kind], threads)
    return max(work["macs"] / peak(limits, kind, threads), work["weights"] * WEIGHT_BYTES[kind] / rate) / 1e3


def _best(limits: Limits, name: str, threads: int) -> float:
    return max((s["best"] for s in limits["samples"] if (s["name"], s["threads"]) == (name, threads)), default=0.0)
