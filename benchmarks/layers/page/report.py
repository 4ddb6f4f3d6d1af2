"""Writes the page of results: performance.md and its plots, from results.json alone.

python -m benchmarks.layers.page.report      docs/measured/performance.md from the committed results.json
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common.environment import ROOT
from benchmarks.common.tables import table, time
from benchmarks.layers.page import plots
from benchmarks.layers.page.cells import EVEN, ORDER, Cell, Data, contests
from benchmarks.layers.page.extras import calls, experts, footprint, heavy_tails, sharing, switching
from benchmarks.layers.page.goals import goals
from benchmarks.layers.page.limits import limits, shares, speed_up


def write(results: Path, folder: Path) -> Path:
    """The page's path in `folder`, where its plots are too."""
    data = json.loads(results.read_text())
    data["cells"] = _tied(data["cells"])
    images = plots.draw(data, folder)
    sections = [
        _opening(data), _summary(data), goals(data), _wins(data), limits(data), shares(data), speed_up(data),
        *(_size(data, name, images) for name in data["sizes"]),
        sharing(data), switching(data), experts(data), calls(data), heavy_tails(data), footprint(data, images),
        _left_out(data), _method(data),
    ]  # fmt: skip
    page = folder / "performance.md"
    page.write_text("\n\n".join(s for s in sections if s) + "\n")
    return page


def _tied(cells: list[Cell]) -> list[Cell]:
    """One cell a peer, size, batch and thread count: the anchor that ties groups together appears several times."""
    return list({(c["peer"], c["size"], c["batch"], c["threads"]): c for c in cells}.values())


def _opening(data: Data) -> str:
    m = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    caches = ", ".join(f"{level} {size >> 10} KiB" for level, size in m["caches"].items())
    notes = []
    if data["settings"]["quick"]:
        notes.append("This was a quick run (`--quick`): fewer sizes, batches and rounds.")
    if "load_at_end" not in m:
        notes.append("**The run was interrupted or still goes on**: these are the results so far.")
    return f"""# Performance

Written by `benchmarks/layers`; do not edit. One MoE layer (softmax top-k router, SwiGLU experts, no biases) with the
same weights and inputs for everyone, all outputs compared with float64, all peers measured in turn.
{"".join(chr(10) + note + chr(10) for note in notes)}
- *Machine*: {m["cpu"]}, {m["cpus"]} processors, {caches}, {m["memory_gib"]} GiB
- *Instructions*: {", ".join(m["features"])}; Colibri chose its {m.get("kernels", "best")} kernels
- *System*: Linux {m["kernel"]}; {m["compiler"]}; Python {m["python"]}
- *Versions*: {versions}
- *Commit*: {m["commit"]}; *date*: {m["date"]}
- *Load average* before and after: {m["load"]:.1f} and {m.get("load_at_end", 0):.1f} (this run adds about 1)

The machine is virtual and shared: expect 10–15 % from run to run, and up to a factor of two below 100 µs. A load above
0.5 before the start means that other work ran beside. Peers are interleaved, so that what disturbs one disturbs all,
and ratios are steadier than times.

To repeat it: `make bench` (about ten minutes, page in `build/bench/`) or `make bench-all` (an hour; needs about 60 GB
of disk and 24 GB of memory, and writes this page). Why goals are missed:
[performance-notes.md](performance-notes.md)."""


def _summary(data: Data) -> str:
    batches = sorted({c["batch"] for c in data["cells"]})
    rows: dict[tuple[str, int, str], dict[int, str]] = {}
    for size, batch, threads, label, mine, peer in contests(data):
        ratio = peer["us"] / mine["us"]
        shown = f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"
        text = f"{shown} ({time(mine['us'])}; {peer['peer']} {time(peer['us'])})"
        rows.setdefault((size, threads, label), {})[batch] = text
    head = ["size", "threads", "weights", *(f"batch {b}" for b in batches)]
    shown_rows = [[*place, *(row.get(b, "") for b in batches)] for place, row in rows.items()]
    return f"""## In short

Time of the fastest peer ÷ time of Colibri, like with like: from Python against peers called from Python, in C against
C. Above 1 (bold) Colibri is faster. Quantised kinds differ in error: the tables below show it.

{table(head, shown_rows)}"""


def _size(data: Data, name: str, images: dict[str, Path]) -> str:
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
        for dtype in (d for d in ORDER if any(c["dtype"] == d for c in here)):
            bounds = {b: c["bound_us"] for (_, b), c in by.items() if c["dtype"] == dtype and "bound_us" in c}
            if bounds:
                rows.append(
                    [f"*bound {dtype}*", "", "", *(f"*{time(bounds[b])}*" if b in bounds else "" for b in batches)]
                )
            for peer in dict.fromkeys(c["peer"] for c in here if c["dtype"] == dtype):
                mine = [by[peer, b] for b in batches if (peer, b) in by]
                error = max(c["error"] for c in mine)
                shown = [_cell(by.get((peer, b)), fastest.get((b, dtype), 0)) for b in batches]
                rows.append([peer, dtype, f"{error:.0e}", *shown])
        head = ["peer", "weights", "error", *(f"batch {b}" for b in batches)]
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}: median (10th–90th percentile) · times the bound; "
                     f"bold is the fastest of its precision\n\n{table(head, rows)}")  # fmt: skip
    return "\n\n".join(parts)


def _wins(data: Data) -> str:
    lines = []
    for size, batch, threads, label, mine, peer in contests(data):
        if peer["us"] * EVEN < mine["us"]:
            row = [f"{c['peer']} ({time(c['us'])}, error {c['error']:.0e})" for c in (peer, mine)]
            lines.append([size, batch, threads, label, *row, f"{mine['us'] / peer['us']:.2f}×"])
    head = ["size", "batch", "threads", "weights", "peer", "Colibri", "peer is faster by"]
    text = f"By more than 5 %:\n\n{table(head, lines)}" if lines else "In no cell that was measured, beyond 5 %."
    return f"## Where a peer wins\n\n{text}"


def _left_out(data: Data) -> str:
    parts = [f"- {name} could not be installed: {reason}" for name, reason in data["absent"].items()]
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in data["left_out"]:
        place = row["size"] + (f" batch {row['batch']}" if "batch" in row else "")
        places = grouped.setdefault((row["peer"], row["reason"]), [])
        if place not in places:
            places.append(place)
    parts += [f"- {peer} ({', '.join(places)}): {reason}" for (peer, reason), places in grouped.items()]
    parts.append("- onnxruntime from C: its wheel has the library but no headers; the empty call under \"Calls\" shows "
                 "Python's part in its times")  # fmt: skip
    return "## Left out\n\n" + "\n".join(parts)


def _method(data: Data) -> str:
    s = data["settings"]
    rounds = [len(c["samples"]) for c in data["cells"]] or [0]
    return f"""## How it is measured

- Every peer is alone in a process, with its thread pool set to the row's thread count; all processes of a size stay
  alive and are asked in turn, {min(rounds)} to {max(rounds)} rounds, as many as the {s["minutes"]:g} minutes of the run
  allow, in an order that rotates. A sample is as many calls as take {s["sample_ms"]:.0f} ms, at least one, on different
  inputs in turn, after as many untimed ones; the time is per call. Peers that do not fit in memory together run in
  groups, each with Colibri.
- *-c* is timed in a C loop, everything else from Python: NumPy in, NumPy out, call overhead included. *plain* is
  `benchmarks/layers/plain.c`, straightforward loops with `gcc -O3 -march=native -ffast-math`.
- *ort-moe* and *ort-qmoe* are onnxruntime's contrib operators; *ort-loop* finds, gathers and scatters each expert's
  rows, *dq8* is its dynamic quantisation, *n8* and *n4* use MatMulNBits (blocks of 32, int8 activations); *dense*
  computes every expert for every row. *torch-int8* is fbgemm's dynamic quantisation. The router is float32 everywhere.
- *colibri int8* is what the exporter makes by default: these weights are normally distributed, where the outliers E
  does not pay, so there is none; *int8-e* has it all the same, 1 % of the bytes.
- *Error* is the largest over all inputs of the largest difference from float64, over the largest output. Quantised
  peers choose their own scales: compare error and time together."""


def _cell(cell: Cell | None, fastest: float) -> str:
    if cell is None:
        return ""
    text = time(cell["us"])
    bound = f" · {cell['over_bound']:.2g}×" if cell.get("over_bound", 1e9) < 100 else ""
    spread = f"({time(cell['p10'], text)}–{time(cell['p90'], text)})"
    return f"{f'**{text}**' if cell['us'] <= fastest else text} {spread}{bound}"


if __name__ == "__main__":
    print(write(ROOT / "benchmarks" / "layers" / "results.json", ROOT / "docs" / "measured"))
