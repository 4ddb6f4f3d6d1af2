"""The page's sections on experts, calls, heavy-tailed weights, bytes, memory and start-up."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.tables import percent, size_of, table, time
from benchmarks.layers.page.cells import ORDER, Data, cell

_BYTES_NOTE = """libcolibri is stripped; it is all that a device or a C program needs. Colibri's package is its sources
and the engine's Python module, not stripped."""
_STARTUP_NOTE = """*Start-up*: a fresh process to its first output, median (one start where it takes over 5 s); the
harness, NumPy included, is the same for all in Python. *Beyond the weights*: peak resident memory of the process, after
all inputs, minus the weight files. *Over both*: that minus what the process had after its imports; negative where not
all of a mapped file was touched."""
_TAILS_NOTE = """Weights from Student's t, heavy-tailed as trained ones are: relative error (‖Δ‖ / ‖exact‖) of a K × K
matrix with a scale a row (*plain*) and with the sparse outliers E besides, and of the output of a gated expert made of
such matrices. No calibration: all inputs count alike."""
_SPEED_NOTE = """Speed with E in C, one thread, beside Colibri's fp16 in C and, from Python, the nearest peer to 8 bits
with a scale for each group of 32: time, time ÷ that of int8 with E, error."""
GROUPED = "ort-loop-n8"  # the nearest peer to 8 bits with a scale for each group


def sharing(data: Data) -> str:
    """Batch 4 against batch 1 where the rows visit the same experts."""
    found = {(r["peer"], r["size"]): r for r in data["shared"]}
    if not found:
        return ""
    sizes = list(dict.fromkeys(size for _, size in found))
    rows = [
        [peer, *(f"{time(r['one_us'])} → {time(r['four_us'])} ({r['ratio']:.2f}×)" if (r := found.get((peer, size)))
                 else "" for size in sizes)]
        for peer in dict.fromkeys(peer for peer, _ in found)
    ]  # fmt: skip
    return f"""## Sharing experts

One thread: batch 1 → batch 4 whose rows visit the same experts (a row repeated with a little noise; the routes were
checked). The weights are read once for all four.

{table(["peer", *sizes], rows)}"""


def switching(data: Data) -> str:
    if not data["switching"]:
        return ""
    sizes = list(dict.fromkeys(s["size"] for s in data["switching"]))
    by = {(s["peer"], s["size"]): s for s in data["switching"]}
    rows = [
        [peer, *(f"{time(s['same_us'])} → {time(s['alternating_us'])} ({s['switch_us']:+.1f} µs)"
                 if (s := by.get((peer, size))) else "" for size in sizes)]
        for peer in dict.fromkeys(s["peer"] for s in data["switching"])
    ]  # fmt: skip
    return f"""## Switching experts

Batch 1, one thread: rows that all visit the same experts → rows whose experts change with every row (and, in brackets,
the median difference for each expert that is new). What differs is only which weights are in the caches.

{table(["peer", *sizes], rows)}"""


def experts(data: Data) -> str:
    """Batch 1 against the number of experts."""
    if not data["ladder"]:
        return ""
    first, last = data["ladder"][0], data["ladder"][-1]
    rows = [
        [r["experts"], size_of(r["bytes"]), time(r["router_us"]), time(r["same_us"]), time(net(r, "same")),
         f"{growth(first, r, 'same'):+.0%}", time(r["any_us"]), time(net(r, "any")), f"{growth(first, r, 'any'):+.0%}"]
        for r in data["ladder"]
    ]  # fmt: skip
    same, anywhere = (f"{growth(first, last, kind):+.0%}" for kind in ("same", "any"))
    head = ["experts", "weights", "router's product", "same experts", "without router", "growth", "any experts",
            "without router", "growth"]  # fmt: skip
    return f"""## Number of experts

Colibri in C, int8, batch 1, one thread: d 256, ff 512, top-2, from {first["experts"]} to {last["experts"]} experts. The
router's product (its matrix grows with the experts) is measured as a model of its own and taken out. *Same experts*:
every row visits the same two, which stay in the cache: {same}. *Any experts*: rows that visit all of them in turn;
what grows is the way to weights no cache holds: {anywhere}.

{table(head, rows)}"""


def net(row: Data, kind: str) -> float:
    """Microseconds without the router's product."""
    return float(row[f"{kind}_us"] - row["router_us"])


def growth(first: Data, row: Data, kind: str) -> float:
    """Share by which a call takes longer than with the fewest experts, the router's product taken out."""
    return net(row, kind) / net(first, kind) - 1


def overheads(data: Data) -> dict[str, float]:
    """Microseconds of Python's call by precision: from Python minus in C, on the tiny layer."""
    us = {r["peer"]: r["us"] for r in data["calls"]}
    return {d: us[f"colibri-python-{d}"] - us[f"colibri-c-{d}"] for d in ORDER
            if {f"colibri-python-{d}", f"colibri-c-{d}"} <= us.keys()}  # fmt: skip


def calls(data: Data) -> str:
    """What calling from Python costs."""
    us = {r["peer"]: r["us"] for r in data["calls"]}
    rows = [[d, time(us[f"colibri-c-{d}"]), time(us[f"colibri-python-{d}"]), time(extra)]
            for d, extra in overheads(data).items()]  # fmt: skip
    if not rows:
        return ""
    empty = f"\n\nonnxruntime's call of a model that does nothing (Identity): {time(us['ort-empty'])}." if (
        "ort-empty" in us) else ""  # fmt: skip
    return f"""## Calls

The tiny layer, batch 1, one thread: in C, from Python, and the difference, which is Python's call.

{table(["weights", "in C", "from Python", "difference"], rows)}{empty}"""


def heavy_tails(data: Data) -> str:
    """The accuracy and the speed of int8 with its outliers E."""
    parts = ["## int8 with E"]
    if data["heavy_tails"]:
        rows = [
            [r["degrees"], r["k"], f"{r['plain_weight_error']:.2%}", f"{r['e_weight_error']:.2%}",
             f"**{r['e_weight_error'] / r['plain_weight_error']:.2f}**", f"{r['plain_output_error']:.2%}",
             f"{r['e_output_error']:.2%}", f"{r['e_share']:.2%}"]
            for r in data["heavy_tails"]
        ]  # fmt: skip
        head = ["df", "K", "plain", "with E", "ratio", "output, plain", "output, with E", "bytes of E"]
        parts.append(f"{_TAILS_NOTE}\n\n{table(head, rows)}")
    rows = []
    for size in data["sizes"]:
        for batch in sorted({c["batch"] for c in data["cells"] if c["size"] == size}):
            ours = cell(data, "colibri-c-int8-e", size, batch)
            half, group = cell(data, "colibri-c-fp16", size, batch), cell(data, GROUPED, size, batch)
            if ours and (half or group):
                shown = [f"{time(c['us'])}, {c['us'] / ours['us']:.2f}×, error {c['error']:.0e}" if c else ""
                         for c in (half, group)]  # fmt: skip
                rows.append([size, batch, f"{time(ours['us'])}, error {ours['error']:.0e}", *shown])
    if rows:
        head = ["size", "batch", "int8 with E", "fp16", f"int8 in groups ({GROUPED})"]
        parts.append(f"{_SPEED_NOTE}\n\n{table(head, rows)}")
    return "\n\n".join(parts) if len(parts) > 1 else ""


def beyond(row: Data) -> float:
    """Peak resident bytes of the process beyond the weight files."""
    return float(row["peak_bytes"] - row["weight_bytes"])


def library_share(data: Data) -> float | None:
    """Bytes of libcolibri.so ÷ those of libonnxruntime.so."""
    found = {p["package"]: p["bytes"] for p in data["packages"] if "bytes" in p}
    both = found.get("libcolibri.so"), found.get("libonnxruntime.so")
    return both[0] / both[1] if both[0] and both[1] else None


def footprint(data: Data, images: dict[str, Path]) -> str:
    if not data["packages"]:
        return ""
    rows = []
    for p in data["packages"]:
        if "absent" in p:
            rows.append([p["package"], "not installed", "", ""])
            continue
        more = f"{size_of(p['with_requirements'])} ({p['requirements']})" if "with_requirements" in p else ""
        libraries = size_of(p["libraries"]) if "libraries" in p else ""
        rows.append([f"{p['package']} {p.get('version', '')}".strip(), size_of(p["bytes"]), more, libraries])
    head = ["package", "installed", "with what it requires (packages)", "its shared libraries"]
    parts = ["## Bytes, memory, start-up", table(head, rows), _BYTES_NOTE]
    if (share := library_share(data)) is not None:
        parts.append(f"libcolibri.so is {percent(share)} of libonnxruntime.so.")
    if "footprint" in images:
        parts.append(f"![Start-up and memory by peer]({images['footprint'].name})")
    head = ["peer", "start-up", "before the model", "weight files", "peak", "beyond the weights", "over both"]
    for size in dict.fromkeys(s["size"] for s in data["startup"]):
        rows = [
            [s["peer"], time(s["startup_s"] * 1e6), *(size_of(b) for b in (
                s["baseline_bytes"], s["weight_bytes"], s["peak_bytes"], beyond(s), s["over_weights_bytes"]))]
            for s in data["startup"] if s["size"] == size
        ]  # fmt: skip
        parts.append(f"Size {size}, one thread. {_STARTUP_NOTE}\n\n{table(head, rows)}")
    return "\n\n".join(parts)
