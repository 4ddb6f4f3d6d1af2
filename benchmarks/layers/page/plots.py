"""The plots of the page: time by peer for each size, and start-up and memory; small PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_COLOURS = {"fp32": "#4c72b0", "fp16": "#55a868", "int8": "#dd8452", "int4": "#937860"}
_SHOWN = (1, 32)  # batches


def draw(data: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Paths of the plots drawn, by size, and `footprint`."""
    drawn = {}
    for size in data["sizes"]:
        cells = [c for c in data["cells"] if c["size"] == size and c["threads"] == 1]
        batches = [b for b in _SHOWN if any(c["batch"] == b for c in cells)]
        if cells and batches:
            drawn[size] = _save(_times(cells, batches), folder / f"performance-{size}.png")
    if data["startup"]:
        drawn["footprint"] = _save(_footprint(data["startup"]), folder / "performance-footprint.png")
    return drawn


def _times(cells: list[dict[str, Any]], batches: list[int]) -> Figure:
    tallest = max(sum(c["batch"] == b for c in cells) for b in batches)
    figure, axes = plt.subplots(1, len(batches), figsize=(5.5 * len(batches), 0.9 + 0.21 * tallest), squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        here = sorted((c for c in cells if c["batch"] == batch), key=lambda c: -c["us"])
        scale, unit = (1e3, "ms") if here[0]["us"] > 5e4 else (1, "µs")
        for n, c in enumerate(here):
            spread = [[(c["us"] - c["p10"]) / scale], [(c["p90"] - c["us"]) / scale]]
            axis.barh(
                n, c["us"] / scale, xerr=spread, color=_COLOURS[c["dtype"]], error_kw={"lw": 0.8, "ecolor": "#555"}
            )
            if "bound_us" in c:
                axis.plot([c["bound_us"] / scale] * 2, [n - 0.4, n + 0.4], color="black", lw=1.5)
        smallest = min(min(c["us"], c.get("bound_us", c["us"])) for c in here) / scale
        title = f"batch {batch}, 1 thread: {unit} a call (log); black: bound"
        _finish(axis, [c["peer"] for c in here], smallest, title)
    marks = [Patch(color=colour) for colour in _COLOURS.values()]
    figure.legend(marks, list(_COLOURS), loc="lower center", ncols=4, fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def _footprint(rows: list[dict[str, Any]]) -> Figure:
    rows = [r for r in rows if r["size"] == rows[-1]["size"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.8 + 0.21 * len(rows)))
    by_time = sorted(rows, key=lambda r: -r["startup_s"])
    left.barh(range(len(rows)), [r["startup_s"] * 1e3 for r in by_time], color=_shade(by_time))
    _finish(left, [r["peer"] for r in by_time], by_time[-1]["startup_s"] * 1e3, "start-up to first output, ms (log)")
    by_peak = sorted(rows, key=lambda r: -r["peak_bytes"])
    title = f"peak memory of the process, MB (log), size {rows[0]['size']}"
    right.barh(range(len(rows)), [r["peak_bytes"] / 1e6 for r in by_peak], color=_shade(by_peak))
    _finish(right, [r["peer"] for r in by_peak], by_peak[-1]["peak_bytes"] / 1e6, title)
    figure.tight_layout()
    return figure


def _shade(rows: list[dict[str, Any]]) -> list[str]:
    return ["#c44e52" if r["peer"].startswith("colibri") else "#8c8c8c" for r in rows]


def _finish(axis: Axes, names: list[str], smallest: float, title: str) -> None:
    axis.set_xscale("log")
    axis.set_xlim(left=0.7 * smallest)  # bars on a logarithmic scale have no natural start
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_yticks(range(len(names)), names, fontsize=7)
    for label in axis.get_yticklabels():
        if label.get_text().startswith("colibri"):
            label.set_fontweight("bold")
            label.set_color("#c44e52")
    axis.tick_params(axis="x", labelsize=7)
    axis.set_title(title, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", lw=0.3)
    axis.margins(y=0.01)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=80)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)
    return path
