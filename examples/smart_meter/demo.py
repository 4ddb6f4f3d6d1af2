"""The demo: export the trained checkpoint, compile it, forecast the two held-out weeks in C, show how it went.

Run `make demo`; needs a C compiler and make, but no PyTorch.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import data
import numpy as np
from rich.console import Console
from rich.table import Table

from colibri import exporter
from colibri.build import toolchain
from colibri.frontends.architecture import from_architecture

HERE = Path(__file__).parent
BUILD = Path("build") / "smart_meter"
CALIBRATION_ROWS = 512


def export_model() -> exporter.Export:
    """Export the checkpoint, with rows of the validation week for its certificate."""
    graph = from_architecture(HERE / "checkpoint.safetensors")
    rows = data.split(data.load(), data.VALIDATION).features[:CALIBRATION_ROWS]
    built = exporter.build(graph, calibration=[rows], expert_align=64)
    exporter.write(built, BUILD)
    return built


def compile_forecast() -> toolchain.Built:
    """Compile engine and model, then link the forecast program against them."""
    built = toolchain.build(BUILD)
    cc = shlex.split(os.environ.get("CC", "cc"))
    include = [f"-I{toolchain.engine_directory() / 'include'}", f"-I{BUILD}"]
    objects = [str(built.model_object), str(built.static_library)]
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", *include]
    subprocess.run([*cc, *flags, str(HERE / "forecast.c"), *objects, "-o", str(BUILD / "forecast")], check=True)
    return built


def forecast(test: data.Split) -> tuple[data.Demand, np.ndarray[Any, Any], dict[str, Any]]:
    """Forecasts in MW, the expert of each, and what the C program measured."""
    features, result = BUILD / "features.f32", BUILD / "forecast.csv"
    test.features.astype("<f4").tofile(features)
    done = subprocess.run([BUILD / "forecast", features, result], check=True, capture_output=True, text=True)
    table = np.loadtxt(result, delimiter=",")
    return data.to_megawatts(table[:, 0], test.now), table[:, 1].astype(int), json.loads(done.stdout)


def plot(target: Path, test: data.Split, forecast: data.Demand, experts: np.ndarray[Any, Any]) -> None:
    """Draw forecast against truth, coloured by the expert that answered, and the error below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    days = np.arange(len(forecast)) / data.DAY
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(13, 6.5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    top.plot(days, test.demand / 1000, color="0.75", linewidth=3, label="demand")
    for expert, colour in zip(range(experts.max() + 1), ("#1b6ca8", "#e07a1f", "#3a9d5d"), strict=False):
        mine = experts == expert
        top.scatter(days[mine], forecast[mine] / 1000, s=9, color=colour, label=f"expert {expert}", zorder=3)
        bottom.scatter(days[mine], (forecast - test.demand)[mine], s=6, color=colour)
    top.set_ylabel("demand (GW)")
    top.set_title("Half-hour-ahead forecast of the two held-out weeks, computed in C")
    top.legend(ncols=4, loc="upper right", frameon=False)
    bottom.axhline(0, color="0.75", zorder=0)
    bottom.set_ylabel("error (MW)")
    bottom.set_xlabel("day")
    bottom.set_xlim(0, days[-1])
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)


def main() -> None:
    """Run the whole demo and print its table."""
    console = Console()
    with console.status("exporting the trained checkpoint"):
        built = export_model()
    with console.status("compiling the engine and the model"):
        compiled = compile_forecast()
    test = data.split(demand := data.load(), data.TEST)
    with console.status("forecasting two weeks in C"):
        megawatts, experts, measured = forecast(test)
    picture = BUILD / "forecast.png"
    with console.status("drawing"):
        plot(picture, test, megawatts, experts)

    trained = json.loads((HERE / "result.json").read_text())
    figures = built.summary()
    usage = np.bincount(experts, minlength=measured["experts"]) / len(experts)
    rows = [
        ("error, same half hour last week", f"{data.mape(data.seasonal_naive(demand, data.TEST), test.demand):.3f} %"),
        ("error, PyTorch (as trained)", f"{trained['checkpoint']['test_mape']:.3f} %"),
        ("error, Colibri in C", f"{data.mape(megawatts, test.demand):.3f} %"),
        ("experts used", "  ".join(f"{n}: {share:.0%}" for n, share in enumerate(usage))),
        ("context", f"{figures['context_bytes']:,} bytes RAM"),
        ("weights", f"{figures['weight_bytes']:,} bytes, {figures['worst_route_weight_bytes']:,} read by one forecast"),
        ("engine code", f"{compiled.text_bytes:,} bytes on this machine, every operation"),
        ("time for one forecast", f"{measured['microseconds']:.2f} µs (median)"),
    ]
    table = Table(title="Electricity demand, half an hour ahead (errors: MAPE)", show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"picture: {picture}    model: {BUILD / 'model.bin'}", soft_wrap=True)


if __name__ == "__main__":
    main()
