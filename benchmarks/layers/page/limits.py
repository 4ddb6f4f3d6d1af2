"""The page's sections on the machine's limits, how close Colibri comes to them, and what a second thread brings."""

from __future__ import annotations

from benchmarks.common.tables import percent, size_of, table, time
from benchmarks.layers.bounds import WEIGHT_BYTES, memory_rate, peak, peak_name, reading
from benchmarks.layers.page.cells import ORDER, Cell, Data, cell

COMPUTE = ("fp32", "int8")  # what is compared with the peaks
THREADS = (1, 2)


def limits(data: Data) -> str:
    """What the machine can do, and what follows from it for the bounds."""
    measured = data["limits"]
    if "unmeasured" in measured:
        return f"## Limits of the machine\n\nNot measured: {measured['unmeasured']}. So there are no bounds below."
    levels = [s for s in measured["samples"] if not s["name"].startswith("working set")]
    rows = [[s["name"], s["threads"], f"{s['best']:.1f}", f"{s['median']:.1f}", "GB/s" if s["bytes"] and s["name"][0] in
             "LD" else "GMAC/s"] for s in levels]  # fmt: skip
    sets = sorted({1 << (s["bytes"] - 1).bit_length() for s in measured["samples"] if s["name"] == "working set"})
    curve = [[size_of(n), *(f"{reading(measured, n, t):.1f}" for t in THREADS)] for n in sets if n >= 1 << 18]
    peaks = ", ".join(f"{kind}: *{peak_name(measured, kind)}*" for kind in ORDER)
    return f"""## Limits of the machine

`benchmarks/limits`, best and median sample. Caches and memory: reading; two threads read a part each. *fp32 fused*
is a fused multiply-add, *fp32 multiply add* the two in separate instructions, whose results are the same on every
machine. *int8* is maddubs, madd, add; *int8 paired* adds two products in 16 bits first, which needs operands of about 7
bits; *vpdpbusd* does it in one instruction. *512* is with AVX-512. Where *int8 amx* is shown, it bounds nothing here:
matrix tiles need a system call for permission, and Colibri makes none.

{table(["what", "threads", "best", "median", "unit"], rows)}

Reading so many bytes again and again, GB/s (a virtual machine need not have all of the cache that it is told of):

{table(["working set", "1 thread", "2 threads"], curve)}

**Bound** below is the larger of multiply-accumulates ÷ peak and bytes of the distinct experts visited ÷ the rate of
reading a working set as large as the whole layer (int4 with a half-precision scale for each 32 weights). The peaks are
{peaks}. Activations, routing and calls are not counted: tiny layers are far from it for everyone. Slightly less than
the bound can be measured where experts are visited again soon."""


def reached(data: Data, size: str, kind: str, threads: int) -> tuple[float, float] | None:
    """GB/s of active weights that Colibri reads at batch 1 in C, and the limit for a layer of these bytes."""
    found = cell(data, f"colibri-c-{kind}", size, 1, threads)
    if found is None or "unmeasured" in data["limits"]:
        return None
    work = data["work"][size]["1"]
    rate = work["weights"] * WEIGHT_BYTES[kind] / found["us"] / 1e3
    return rate, reading(data["limits"], work["held"] * WEIGHT_BYTES[kind], threads)


def computed(data: Data, size: str, batch: int, kind: str, threads: int) -> tuple[float, float, Cell] | None:
    """10^9 multiply-accumulates a second of Colibri in C, the peak, and the result they are from."""
    found = cell(data, f"colibri-c-{kind}", size, batch, threads)
    if found is None or "unmeasured" in data["limits"]:
        return None
    return data["work"][size][str(batch)]["macs"] / found["us"] / 1e3, peak(data["limits"], kind, threads), found


def shares(data: Data) -> str:
    """Bandwidth at batch 1 and arithmetic at larger batches, as shares of the limits."""
    decode, compute = [], []
    for size in (n for n in data["sizes"] if n != "tiny"):
        for kind in ORDER:
            row = []
            for threads in THREADS:
                if (got := reached(data, size, kind, threads)) is None:
                    row += ["", "", ""]
                    continue
                rate, limit = got
                memory = memory_rate(data["limits"], threads)
                row += [f"{rate:.1f} of {limit:.1f} GB/s", f"**{percent(rate / limit)}**", percent(rate / memory)]
            if any(row):
                held = data["work"][size]["1"]["held"] * WEIGHT_BYTES[kind]
                decode.append([size, kind, size_of(held), *row])
        for batch in (32, 128):
            for kind in COMPUTE:
                row = []
                for threads in THREADS:
                    if (done := computed(data, size, batch, kind, threads)) is None:
                        row += ["", "", ""]
                        continue
                    rate, limit, found = done
                    most = data["work"][size][str(batch)]["macs"] / found["bound_us"] / 1e3
                    shown = f"**{percent(rate / limit)}**"
                    if kind == "fp32":
                        shown += f" ({percent(rate / peak(data['limits'], 'separate', threads))})"
                    row += [f"{rate:.1f} of {limit:.1f} GMAC/s", shown, percent(most / limit)]
                if any(row):
                    compute.append([size, batch, kind, *row])
    if not decode and not compute:
        return ""
    each = [text for t in ("1 thread", "2 threads") for text in (t, "share", "of DRAM")]
    each_peak = [text for t in ("1 thread", "2 threads") for text in (t, "share of peak", "possible")]
    return f"""## Share of the limit

Colibri in C. Batch 1: bytes of the active weights ÷ time, against reading a working set of the layer's bytes
(*share*), and against reading from DRAM.

{table(["size", "weights", "layer", *each], decode)}

Batches: multiply-accumulates ÷ time against the peak; for fp32 in brackets against a separate multiply and add.
*Possible* is what the bound leaves where reading the weights takes longer than the arithmetic.

{table(["size", "batch", "weights", *each_peak], compute)}"""


def gain(data: Data, size: str, batch: int, kind: str) -> float | None:
    """Time of Colibri in C with one thread ÷ with two."""
    one, two = (cell(data, f"colibri-c-{kind}", size, batch, t) for t in THREADS)
    return one["us"] / two["us"] if one and two else None


def speed_up(data: Data) -> str:
    """What a second thread brings."""
    batches = sorted({c["batch"] for c in data["cells"]})
    rows = []
    for size in data["sizes"]:
        for kind in ORDER:
            gains = [gain(data, size, batch, kind) for batch in batches]
            if any(gains):
                one = cell(data, f"colibri-c-{kind}", size, batches[0])
                rows.append([size, kind, time(one["us"]) if one else "", *(f"{g:.2f}×" if g else "" for g in gains)])
    if not rows:
        return ""
    head = ["size", "weights", f"batch {batches[0]}, 1 thread", *(f"batch {b}" for b in batches)]
    return f"""## Two threads

Time of Colibri in C with one thread ÷ with two. Batch 1 cannot gain more than reading does (see the limits).

{table(head, rows)}"""
