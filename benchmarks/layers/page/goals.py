"""The page's table of goals: what was aimed at, what was measured, and whether it was reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.common.tables import percent, size_of, table, time
from benchmarks.layers.bounds import bound_us
from benchmarks.layers.page.cells import ORDER, Data, cell, fastest, in_c, ours, places
from benchmarks.layers.page.extras import GROUPED, beyond, growth, library_share, overheads
from benchmarks.layers.page.limits import COMPUTE, computed, gain, reached

_LARGE = ("medium", "mixtral")
_COMPARABLE = 2.0  # a peer's error may be so many times Colibri's
_DECODE = {"fp32": 0.92, "fp16": 0.92, "int8": 0.92, "int4": 0.85}
_PEAKS = {"fp32": 0.75, "int8": 0.8}


@dataclass(frozen=True)
class _Figure:
    what: str
    goal: str
    measured: str
    met: bool | None  # None where it was not measured


def goals(data: Data) -> str:
    """One row a figure, from the results alone."""
    if "unmeasured" in data["limits"]:
        return ""
    figures = [f for part in (_tiny, _small, _decode, _compute, _peers, _threads, _sharing, _tails, _memory, _experts)
               for f in part(data)]  # fmt: skip
    answer = {True: "yes", False: "**no**", None: "not measured"}
    rows = [[f.what, f.goal, f.measured, answer[f.met]] for f in figures]
    met, known = sum(f.met is True for f in figures), sum(f.met is not None for f in figures)
    return f"""## Goals

{met} of the {known} figures measured are reached. One thread and from C unless said; *of reading* is against reading a
working set of the layer's bytes, *of peak* against the fastest instruction this processor has (see the limits). The
accuracy goal of the smart-meter model is a test: `tests/examples/test_smart_meter.py`.

{table(["figure", "goal", "measured", "reached"], rows)}"""


def _figure(what: str, goal: str, value: float | None, shown: str, met: bool) -> _Figure:
    return _Figure(what, goal, "" if value is None else shown, None if value is None else met)


def _at_least(what: str, least: float, value: float | None, unit: str = "×", note: str = "") -> _Figure:
    goal = f"≥ {percent(least)}" if unit == "%" else f"≥ {least:g}{unit}"
    shown = "" if value is None else (percent(value) if unit == "%" else f"{value:.2f}{unit}") + note
    return _figure(what, goal, value, shown, value is not None and value >= least)


def _at_most(what: str, most: float, value: float | None, shown: str = "{:.2f}×", goal: str = "") -> _Figure:
    text = "" if value is None else shown.format(value)
    return _figure(what, goal or f"≤ {most:g}×", value, text, value is not None and value <= most)


def _faster(data: Data, size: str, batch: int, mine: str, kinds: tuple[str, ...]) -> tuple[float | None, str]:
    """Time of onnxruntime's fastest ÷ Colibri's `mine`, and the two."""
    found, peer = cell(data, mine, size, batch), fastest(data, "ort-", size, batch, kinds)
    if not found or not peer:
        return None, ""
    return peer["us"] / found["us"], f" ({time(found['us'])}; {peer['peer']} {time(peer['us'])})"


def _tiny(data: Data) -> Iterator[_Figure]:
    ratio, note = _faster(data, "tiny", 1, "colibri-python-fp32", ORDER)
    yield _at_least("tiny, batch 1, fp32 from Python: faster than onnxruntime's best", 20, ratio, note=note)
    for kind in ORDER:
        found = cell(data, f"colibri-c-{kind}", "tiny", 1)
        value = None
        if found:
            bound = bound_us(data["limits"], data["work"]["tiny"]["1"], kind, 1)
            value = found["us"] / (bound + 0.1)
        yield _at_most(f"tiny, batch 1, {kind}: time ÷ (bound + 100 ns)", 2, value)
    call = statistics.median(overheads(data).values()) if overheads(data) else None
    yield _at_most("tiny: Python's call, median of the precisions", 1, call, "{:.2f} µs", "< 1 µs")


def _small(data: Data) -> Iterator[_Figure]:
    got = reached(data, "small", "fp32", 1) if "small" in data["sizes"] else None
    yield _at_least("small, batch 1, fp32: of reading", 0.85, got and got[0] / got[1], "%")
    ratio, note = _faster(data, "small", 1, "colibri-python-int8", ("int8",))
    yield _at_least("small, batch 1, int8 from Python: faster than onnxruntime's best int8", 5, ratio, note=note)
    ratio, note = _faster(data, "small", 32, "colibri-python-int8", ("int8",))
    what = "small, batch 32, int8 from Python: faster than onnxruntime's best int8"
    yield _at_least(what, round(490 / 330, 2), ratio, note=note)
    eight, four = (cell(data, f"colibri-c-{kind}", "small", 1) for kind in ("int8", "int4"))
    value = four["us"] / eight["us"] if eight and four else None
    yield _at_most("small, batch 1: time of int4 ÷ int8", 1, value, goal="< 1×")


def _decode(data: Data) -> Iterator[_Figure]:
    for size in _LARGE:
        for kind, least in _DECODE.items():
            got = reached(data, size, kind, 1) if size in data["sizes"] else None
            yield _at_least(f"{size}, batch 1, {kind}: of reading", least, got and got[0] / got[1], "%")


def _compute(data: Data) -> Iterator[_Figure]:
    for size in _LARGE:
        for batch in (32, 128):
            for kind in COMPUTE:
                done = computed(data, size, batch, kind, 1) if size in data["sizes"] else None
                value, note = None, ""
                if done:
                    rate, limit, found = done
                    value = rate / limit
                    most = data["work"][size][str(batch)]["macs"] / found["bound_us"] / 1e3 / limit
                    note = f" (reading the weights leaves {percent(most)})" if most < 1 else ""
                yield _at_least(f"{size}, batch {batch}, {kind}: of peak", _PEAKS[kind], value, "%", note)


def _peers(data: Data) -> Iterator[_Figure]:
    """Colibri from Python against every peer from Python with the same kind of weights and an error like its own."""
    for kind in COMPUTE:
        for batch in (32, 128):
            beaten, lost = 0, []
            for size, here, threads, cells in places(data):
                mine = cell(data, f"colibri-python-{kind}", size, here, threads)
                if here != batch or not mine:
                    continue
                for peer in cells:
                    if ours(peer) or in_c(peer) or peer["dtype"] != kind:
                        continue
                    if peer["error"] > max(_COMPARABLE * mine["error"], 1e-5):
                        continue
                    if peer["us"] <= mine["us"]:
                        lost.append(f"{peer['peer']} ({size}, {threads} thr., {mine['us'] / peer['us']:.2f}×)")
                    else:
                        beaten += 1
            total = beaten + len(lost)
            shown = f"{beaten} of {total}" + (f"; slower than {', '.join(lost)}" if lost else "")
            what = f"batch {batch}, {kind} from Python: faster than peers of comparable error (to twice its own)"
            yield _figure(what, "all", total or None, shown, not lost)


def _threads(data: Data) -> Iterator[_Figure]:
    for size in _LARGE:
        for kind in COMPUTE:
            gains = [g for batch in (32, 128) if (g := gain(data, size, batch, kind))]
            yield _at_least(f"{size}, batches 32 and 128, {kind}: gain of a second thread (worst)", 1.85,
                            min(gains, default=None))  # fmt: skip
        for kind in ORDER:
            got = reached(data, size, kind, 2) if size in data["sizes"] else None
            yield _at_least(f"{size}, batch 1, {kind}, 2 threads: of reading", 0.95, got and got[0] / got[1], "%")


def _sharing(data: Data) -> Iterator[_Figure]:
    found = {(r["peer"], r["size"]): r["ratio"] for r in data["shared"]}
    for size in ("small", "medium"):
        value = found.get(("colibri-c-int8", size))
        yield _at_most(f"{size}, int8: batch 4 ÷ batch 1, same experts", 1.35, value)


def _tails(data: Data) -> Iterator[_Figure]:
    rows = data["heavy_tails"]
    ratio = max((r["e_weight_error"] / r["plain_weight_error"] for r in rows), default=None)
    met = sum(r["e_weight_error"] <= r["plain_weight_error"] / 2 for r in rows)
    yield _at_most("heavy tails: weight error with E ÷ plain int8, worst", 0.5, ratio,
                   "{:.2f}" + f" ({met} of {len(rows)} cases reach it)", "≤ 0.5")  # fmt: skip
    share = max((r["e_share"] for r in rows), default=None)
    yield _at_most("heavy tails: E's share of the bytes", 0.01, share, "{:.2%}", "≤ 1 %")
    for what in ("weight", "output"):
        values = [r[f"e_{what}_error"] for r in rows]
        note = "{:.2%}" + f" ({sum(v < 0.01 for v in values)} of {len(values)} cases reach it)"
        yield _at_most(f"heavy tails: {what} error with E, worst", 0.01, max(values, default=None), note, "< 1 %")
    for size in (n for n in data["sizes"] if n != "tiny"):
        half, eight = (cell(data, f"colibri-c-{kind}", size, 1) for kind in ("fp16", "int8-e"))
        value = half["us"] / eight["us"] if half and eight else None
        group = cell(data, GROUPED, size, 1)
        note = f" ({group['us'] / eight['us']:.2f}× faster than {GROUPED})" if group and eight else ""
        yield _at_least(f"{size}, batch 1: int8 with E faster than fp16", 1.4, value, note=note)


def _memory(data: Data) -> Iterator[_Figure]:
    for size in dict.fromkeys(r["size"] for r in data["startup"]):
        rows = {r["peer"]: r for r in data["startup"] if r["size"] == size}
        for kind in ("fp32", "int8"):
            mine = rows.get(f"colibri-python-{kind}")
            dtypes = {c["peer"]: c["dtype"] for c in data["cells"]}
            peers = [r for name, r in rows.items() if name.startswith("ort-") and dtypes.get(name) == kind]
            if not mine or not peers:
                continue
            least = min(peers, key=beyond)
            note = f" ({size_of(beyond(mine))}; {least['peer']} {size_of(beyond(least))})"
            what = f"{size}, {kind} from Python: peak memory beyond the weights, below onnxruntime's least"
            yield _at_least(what, 0.41, 1 - beyond(mine) / beyond(least), "%", note)
    share = library_share(data)
    yield _at_most("bytes of libcolibri.so ÷ libonnxruntime.so", 0.01, share, "{:.2%}", "≤ 1 %")


def _experts(data: Data) -> Iterator[_Figure]:
    rows = data["ladder"]
    for kind, which in (("same", "the same two experts"), ("any", "any experts")):
        value = growth(rows[0], rows[-1], kind) if rows else None
        span = f"{rows[0]['experts']} → {rows[-1]['experts']}" if rows else "8 → 512"
        yield _at_most(f"{span} experts, {which}: cost without the router's product", 0.1, value, "{:+.1%}", "< +10 %")
