"""Writes the page of results: performance.md and its plots, from results.json alone.

python benchmarks/report.py           docs/performance.md from the committed benchmarks/results.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import plots

HERE = Path(__file__).resolve().parent
_MILLISECOND = 1000.0
_EVEN = 1.05  # times closer than this are called even
# What is compared with what: a name, the precisions, and whether the loop around the calls is in C.
_CLASSES = (
    ("fp32 in C", ("fp32",), True),
    ("fp32", ("fp32",), False),
    ("16 or 8 bits", ("fp16", "int8"), False),
    ("4 bits", ("int4",), False),
)
_ORDER = ("fp32", "fp16", "int8", "int4")
Cell = dict[str, Any]

_BYTES_NOTE = """libcolibri is stripped; it is all that a device or a C program needs. Colibri's package is its sources
and the engine's Python module, not stripped."""
_STARTUP_NOTE = """*Start-up*: a fresh process to its first output, median; the harness, NumPy included, is the same
for all in Python. *Peak over both*: peak resident memory, after all inputs, minus what the process had after its
imports, minus the weight files; negative where not all of a mapped file was touched."""


def write(results: Path, folder: Path) -> Path:
    """The page's path in `folder`, where its plots are too."""
    data = json.loads(results.read_text())
    data["cells"] = _tied(data["cells"])
    images = plots.draw(data, folder)
    sections = [
        _opening(data), _summary(data), _limits(data), *(_size(data, name, images) for name in data["sizes"]),
        _wins(data), _footprint(data, images), _switching(data), _left_out(data), _method(data),
    ]  # fmt: skip
    page = folder / "performance.md"
    page.write_text("\n\n".join(s for s in sections if s) + "\n")
    return page


def _tied(cells: list[Cell]) -> list[Cell]:
    """One cell a peer, size, batch and thread count: the anchor that ties groups together appears several times."""
    return list({(c["peer"], c["size"], c["batch"], c["threads"]): c for c in cells}.values())


def _opening(data: dict[str, Any]) -> str:
    m = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    caches = ", ".join(f"{level} {size >> 10} KiB" for level, size in m["caches"].items())
    quick = "\nThis was a quick run (`--quick`): fewer sizes, batches and rounds." if data["settings"]["quick"] else ""
    return f"""# Performance

Written by `benchmarks/report.py`; do not edit. One MoE layer (softmax top-k router, SwiGLU experts, no biases) with the
same weights and inputs for everyone, all outputs compared with float64, all peers measured in turn.
{quick}

- *Machine*: {m["cpu"]}, {m["cpus"]} processors, {caches}, {m["memory_gib"]} GiB
- *System*: Linux {m["kernel"]}; {m["compiler"]}; Python {m["python"]}
- *Versions*: {versions}
- *Commit*: {m["commit"]}; *date*: {m["date"]}
- *Load average* before and after: {m["load"]:.1f} and {m.get("load_at_end", 0):.1f} (this run adds about 1)

The machine is virtual and shared: expect 10–15 % from run to run, and up to a factor of two below 100 µs. A load above
0.5 before the start means that other work ran beside. Peers are interleaved, so that what disturbs one disturbs all,
and ratios are steadier than times.

To repeat it: `make bench` (about ten minutes, page in `build/bench/`) or `make bench-all` (hours; needs about 60 GB of
disk and 24 GB of memory, and writes this page)."""


def _summary(data: dict[str, Any]) -> str:
    batches = sorted({c["batch"] for c in data["cells"]})
    rows: dict[tuple[Any, ...], dict[int, str]] = {}
    for size, batch, threads, label, ours, peer in _contests(data):
        ratio = peer["us"] / ours["us"]
        shown = f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"
        text = f"{shown} ({_time(ours['us'])}; {peer['peer']} {_time(peer['us'])})"
        rows.setdefault((size, threads, label), {})[batch] = text
    head = ["size", "threads", "weights", *(f"batch {b}" for b in batches)]
    table = _table(head, [[*place, *(row.get(b, "") for b in batches)] for place, row in rows.items()])
    return f"""## In short

Time of the fastest peer ÷ time of Colibri, like with like: from Python against peers called from Python, in C against
C. Above 1 (bold) Colibri is faster. Quantised kinds differ in error: the tables below show it.

{table}"""


def _limits(data: dict[str, Any]) -> str:
    limits = data["limits"]
    if "unmeasured" in limits:
        return f"## Limits of the machine\n\nNot measured: {limits['unmeasured']}. So there are no bounds below."
    rows = [
        [
            s["name"],
            s["threads"],
            f"{s['best']:.1f}",
            f"{s['median']:.1f}",
            "GB/s" if s["name"][0] in "LD" else "GMAC/s",
        ]
        for s in limits["samples"]
    ]
    return f"""## Limits of the machine

`benchmarks/limits.c`, best and median sample. Caches and memory: reading; two threads read a part each. *fp32 fused*
is a fused multiply-add, which Colibri does not use (one answer everywhere); *fp32 multiply add* is what it uses. *int8*
is maddubs, madd, add; *int8 paired* adds two products in 16 bits first, which needs operands of about 7 bits.

{_table(["what", "threads", "best", "median", "unit"], rows)}

**Bound** below is the larger of multiply-accumulates ÷ peak (fp32 and fp16: fused; int8: int8; int4: paired) and bytes
of the distinct experts visited ÷ read bandwidth of the smallest cache that holds the whole layer (int4 with a
half-precision scale for each 32 weights). Activations, routing and calls are not counted: tiny layers are far from it
for everyone. Slightly less than the bound can be measured where a part of a large layer is still in the last cache."""


def _size(data: dict[str, Any], name: str, images: dict[str, Path]) -> str:
    s = data["sizes"][name]
    cells = [c for c in data["cells"] if c["size"] == name]
    if not cells:
        return ""
    parts = [f"## {name.capitalize()}: d {s['d']}, ff {s['ff']}, {s['experts']} experts, top-{s['k']}"]
    if name in images:
        parts.append(f"![Time of a call by peer, {name}]({images[name].name})")
    for threads in sorted({c["threads"] for c in cells}):
        here = [c for c in cells if c["threads"] == threads]
        batches = sorted({c["batch"] for c in here})
        by = {(c["peer"], c["batch"]): c for c in here}
        fastest = {(b, d): min(c["us"] for c in here if (c["batch"], c["dtype"]) == (b, d))
                   for b in batches for d in {c["dtype"] for c in here if c["batch"] == b}}  # fmt: skip
        rows = []
        for dtype in (d for d in _ORDER if any(c["dtype"] == d for c in here)):
            bounds = {b: c["bound_us"] for (_, b), c in by.items() if c["dtype"] == dtype and "bound_us" in c}
            if bounds:
                rows.append(
                    [f"*bound {dtype}*", "", "", *(f"*{_time(bounds[b])}*" if b in bounds else "" for b in batches)]
                )
            for peer in dict.fromkeys(c["peer"] for c in here if c["dtype"] == dtype):
                mine = [by[peer, b] for b in batches if (peer, b) in by]
                error = max(c["error"] for c in mine)
                shown = [_cell(by.get((peer, b)), fastest.get((b, dtype), 0)) for b in batches]
                rows.append([peer, dtype, f"{error:.0e}", *shown])
        head = ["peer", "weights", "error", *(f"batch {b}" for b in batches)]
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}: median (10th–90th percentile) · times the bound; "
                     f"bold is the fastest of its precision\n\n{_table(head, rows)}")  # fmt: skip
    return "\n\n".join(parts)


def _wins(data: dict[str, Any]) -> str:
    lines = []
    for size, batch, threads, label, ours, peer in _contests(data):
        if peer["us"] * _EVEN < ours["us"]:
            row = [f"{c['peer']} ({_time(c['us'])}, error {c['error']:.0e})" for c in (peer, ours)]
            lines.append([size, batch, threads, label, *row, f"{ours['us'] / peer['us']:.2f}×"])
    head = ["size", "batch", "threads", "weights", "peer", "Colibri", "peer is faster by"]
    text = f"By more than 5 %:\n\n{_table(head, lines)}" if lines else "In no cell that was measured, beyond 5 %."
    for threads in sorted({c["threads"] for c in data["cells"]} - {c["threads"] for c in data["cells"] if _ours(c)}):
        text += (
            f"\n\nColibri was not measured with {threads} threads: wherever a peer gains from them, it wins there too."
        )
    return f"## Where a peer wins\n\n{text}"


def _footprint(data: dict[str, Any], images: dict[str, Path]) -> str:
    if not data["packages"]:
        return ""
    rows = []
    for p in data["packages"]:
        if "absent" in p:
            rows.append([p["package"], "not installed", "", ""])
            continue
        more = f"{_bytes(p['with_requirements'])} ({p['requirements']})" if "with_requirements" in p else ""
        libraries = _bytes(p["libraries"]) if "libraries" in p else ""
        rows.append([f"{p['package']} {p.get('version', '')}".strip(), _bytes(p["bytes"]), more, libraries])
    head = ["package", "installed", "with what it requires (packages)", "its shared libraries"]
    parts = ["## Bytes, memory, start-up", _table(head, rows), _BYTES_NOTE]
    if "footprint" in images:
        parts.append(f"![Start-up and memory by peer]({images['footprint'].name})")
    parts_of_memory = ("baseline", "weight", "over_weights")
    head = ["peer", "start-up", "before the model", "weight files", "peak over both"]
    for size in dict.fromkeys(s["size"] for s in data["startup"]):
        rows = [
            [s["peer"], _time(s["startup_s"] * 1e6), *(_bytes(s[f"{k}_bytes"]) for k in parts_of_memory)]
            for s in data["startup"] if s["size"] == size
        ]  # fmt: skip
        parts.append(f"Size {size}, one thread. {_STARTUP_NOTE}\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _switching(data: dict[str, Any]) -> str:
    if not data["switching"]:
        return ""
    sizes = list(dict.fromkeys(s["size"] for s in data["switching"]))
    by = {(s["peer"], s["size"]): s for s in data["switching"]}
    rows = [
        [peer, *(f"{_time(s['same_us'])} → {_time(s['alternating_us'])} ({s['switch_us']:+.1f} µs)"
                 if (s := by.get((peer, size))) else "" for size in sizes)]
        for peer in dict.fromkeys(s["peer"] for s in data["switching"])
    ]  # fmt: skip
    return f"""## Switching experts

Batch 1, one thread: rows that all visit the same experts → rows whose experts change with every row (and, in brackets,
the median difference for each expert that is new). What differs is only which weights are in the caches.

{_table(["peer", *sizes], rows)}"""


def _left_out(data: dict[str, Any]) -> str:
    parts = [f"- {name} could not be installed: {reason}" for name, reason in data["absent"].items()]
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in data["left_out"]:
        place = row["size"] + (f" batch {row['batch']}" if "batch" in row else "")
        places = grouped.setdefault((row["peer"], row["reason"]), [])
        if place not in places:
            places.append(place)
    parts += [f"- {peer} ({', '.join(places)}): {reason}" for (peer, reason), places in grouped.items()]
    return "## Left out\n\n" + "\n".join(parts) if parts else ""


def _method(data: dict[str, Any]) -> str:
    s = data["settings"]
    return f"""## How it is measured

- Every peer is alone in a process, with its thread pool set to the row's thread count; all processes of a size stay
  alive and are asked in turn, {s["rounds"]} rounds (fewer, at least 3, where a round takes long), in an order that
  rotates. A sample is as many calls as take {s["sample_ms"]:.0f} ms, at least one, on different inputs in turn, after
  as many untimed ones; the time is per call. Peers that do not fit in memory together run in groups, each with Colibri.
- *-c* is timed in a C loop, everything else from Python: NumPy in, NumPy out, call overhead included. *plain* is
  `benchmarks/plain.c`, straightforward loops with `gcc -O3 -march=native -ffast-math`.
- *ort-moe* and *ort-qmoe* are onnxruntime's contrib operators; *ort-loop* finds, gathers and scatters each expert's
  rows, *dq8* is its dynamic quantisation, *n8* and *n4* use MatMulNBits (blocks of 32, int8 activations); *dense*
  computes every expert for every row. *torch-int8* is fbgemm's dynamic quantisation. The router is float32 everywhere.
- *Error* is the largest over all inputs of the largest difference from float64, over the largest output. Quantised
  peers choose their own scales: compare error and time together."""


# --- pieces -----------------------------------------------------------------------------------------------------------


def _ours(cell: Cell) -> bool:
    return str(cell["peer"]).startswith("colibri")


def _places(data: dict[str, Any]) -> Iterable[tuple[str, int, int, list[Cell]]]:
    places = dict.fromkeys((c["size"], c["batch"], c["threads"]) for c in data["cells"])
    order = list(data["sizes"])
    for size, batch, threads in sorted(places, key=lambda p: (order.index(p[0]), p[2], p[1])):
        yield (
            size,
            batch,
            threads,
            [c for c in data["cells"] if (c["size"], c["batch"], c["threads"]) == (size, batch, threads)],
        )


def _contests(data: dict[str, Any]) -> Iterable[tuple[str, int, int, str, Cell, Cell]]:
    """size, batch, threads, label, Colibri's and the best other cell, for each precision and way of calling."""
    for size, batch, threads, cells in _places(data):
        for label, dtypes, in_c in _CLASSES:
            alike = [c for c in cells if c["dtype"] in dtypes and in_c == _in_c(c)]
            sides = [[c for c in alike if _ours(c) == mine] for mine in (True, False)]
            if all(sides):
                ours, peer = (min(side, key=lambda c: float(c["us"])) for side in sides)
                yield size, batch, threads, label, ours, peer


def _in_c(cell: Cell) -> bool:
    return str(cell["peer"]).startswith(("colibri-c-", "plain-c"))


def _cell(cell: Cell | None, fastest: float) -> str:
    if cell is None:
        return ""
    text = _time(cell["us"])
    bound = f" · {cell['over_bound']:.2g}×" if cell.get("over_bound", 1e9) < 100 else ""
    spread = f"({_time(cell['p10'], text)}–{_time(cell['p90'], text)})"
    return f"{f'**{text}**' if cell['us'] <= fastest else text} {spread}{bound}"


def _time(us: float, like: str = "") -> str:
    """`us` with three digits; in the unit of `like`, which is then left away."""
    milli = "ms" in like if like else us >= _MILLISECOND
    value = us / _MILLISECOND if milli else us
    text = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return text if like else f"{text} {'ms' if milli else 'µs'}"


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(write(HERE / "results.json", HERE.parent / "docs"))
