"""Trains the forecaster: writes checkpoint.safetensors, architecture.json and result.json beside this file.

Run `python examples/smart_meter/train.py`. Features, target and sizes were chosen by the validation error of
weeks 8, 9 and 10, each after training on the weeks before it; the test weeks decided nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import numpy as np
import torch
from model import Dense, Forecaster, active_parameters
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)  # the first one's MoE becomes the checkpoint, whatever its error
EPOCHS, BATCH, LEARNING_RATE, BALANCE = 60, 64, 2e-3, 0.01


def load_balance(logits: Tensor) -> Tensor:
    """Switch Transformer's auxiliary loss E · Σ f_e · P_e of (rows, E): 1 where the experts share equally."""
    experts = logits.shape[-1]
    fraction = nn.functional.one_hot(logits.argmax(dim=-1), experts).float().mean(dim=0)
    return experts * (fraction * logits.softmax(dim=-1).mean(dim=0)).sum()


@torch.no_grad()
def error(model: nn.Module, split: data.Split) -> float:
    """The model's MAPE on a split, in percent."""
    output = model(torch.from_numpy(split.features))[:, 0].numpy()
    return data.mape(data.to_megawatts(output, split.now), split.demand)


@torch.no_grad()
def expert_usage(model: Forecaster, split: data.Split) -> list[float]:
    """The share of a split's rows that goes to each expert."""
    chosen = model.moe.gate(torch.from_numpy(split.features)).argmax(dim=-1).numpy()
    return [float(n) / len(chosen) for n in np.bincount(chosen, minlength=len(model.moe.experts))]


def train(build: Callable[[int], nn.Module], seed: int, fit: data.Split, validation: data.Split) -> nn.Module:
    """Train a fresh model and return it as it was after the epoch with the least validation error."""
    torch.manual_seed(seed)
    model = build(data.FEATURES)
    x, y = torch.from_numpy(fit.features), torch.from_numpy(fit.target)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    best, kept = float("inf"), model.state_dict()
    for _ in range(EPOCHS):
        order = torch.randperm(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            loss = nn.functional.l1_loss(model(x[rows]), y[rows])
            if isinstance(model, Forecaster):
                loss = loss + BALANCE * load_balance(model.moe.gate(x[rows]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        now = error(model, validation)
        if now < best:
            best, kept = now, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(kept)
    return model


def architecture(model: Forecaster) -> dict[str, Any]:
    """The graph as `colibri.ir.graph.from_json` reads it; tensors go by their names in the checkpoint."""

    def linear(x: str, layer: str, output: str) -> dict[str, Any]:
        return {"op": "linear", "output": output, "inputs": [x, f"{layer}.weight", f"{layer}.bias"]}

    def relu(x: str, output: str) -> dict[str, Any]:
        return {"op": "unary", "output": output, "inputs": [x], "func": "relu"}

    experts = len(model.moe.experts)
    moe = {
        "op": "moe",
        "output": "mixed",
        "inputs": ["features", "logits"],
        "router": {"experts": experts, "k": 1, "score": "softmax", "normalize": "none", "scale": 1.0},
        "experts": {
            "count": experts,
            "input": "token",
            "nodes": [
                linear("token", "moe.experts.{e}.0", "hidden"),
                relu("hidden", "active"),
                linear("active", "moe.experts.{e}.2", "expert_output"),
            ],
            "output": "expert_output",
        },
    }
    return {
        "format": "colibri-graph",
        "version": 1,
        "name": "smart_meter",
        "inputs": {"features": [data.FEATURES]},
        "nodes": [
            linear("features", "moe.gate", "logits"),
            moe,
            relu("mixed", "mixed_active"),
            linear("mixed_active", "head", "change"),
        ],
        "outputs": ["change"],
    }


def main() -> None:
    """Train every seed of both nets, print the comparison, write the three files."""
    torch.set_num_threads(1)  # the net is too small to share, and one thread keeps the sums in one order
    demand = data.load()
    fit, validation, test = (data.split(demand, t) for t in (data.TRAIN, data.VALIDATION, data.TEST))

    moes: list[Forecaster] = []
    errors: dict[str, list[float]] = {"MoE": [], "dense": []}
    active = {"MoE": 0, "dense": 0}
    total = dict(active)
    for seed in SEEDS:
        for name, build in (("MoE", Forecaster), ("dense", Dense)):
            start = time.perf_counter()
            model = train(build, seed, fit, validation)
            seconds = time.perf_counter() - start
            on_validation, on_test = error(model, validation), error(model, test)
            errors[name].append(on_test)
            active[name], total[name] = active_parameters(model), sum(p.numel() for p in model.parameters())
            line = f"seed {seed} {name:5}  validation {on_validation:.3f} %  test {on_test:.3f} %"
            if isinstance(model, Forecaster):
                moes.append(model)
                line += "  experts " + " ".join(f"{100 * share:.0f} %" for share in expert_usage(model, test))
            print(f"{line}  ({seconds:.0f} s)", flush=True)

    baselines = {
        "same half hour last week": data.mape(data.seasonal_naive(demand, data.TEST), test.demand),
        "now + last week's change": data.mape(data.last_weeks_change(demand, data.TEST), test.demand),
    }
    print(f"\n{'next half hour, test weeks':28}{'MAPE %':>15}{'parameters':>12}{'active':>8}")
    for name, value in baselines.items():
        print(f"{name:28}{value:>15.3f}")
    for name, values in errors.items():
        spread = f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
        print(f"{name:28}{spread:>15}{total[name]:>12,}{active[name]:>8,}")

    result = {
        "checkpoint": {
            "seed": SEEDS[0],
            "test_mape": errors["MoE"][0],
            "validation_mape": error(moes[0], validation),
            "expert_usage": expert_usage(moes[0], test),
        },
        "seasonal_naive_mape": baselines["same half hour last week"],
        "last_weeks_change_mape": baselines["now + last week's change"],
        "seeds": list(SEEDS),
    } | {
        name.lower(): {
            "test_mape_mean": float(np.mean(values)),
            "test_mape_sd": float(np.std(values, ddof=1)),
            "parameters": total[name],
            "active_parameters": active[name],
        }
        for name, values in errors.items()
    }
    save_file(moes[0].state_dict(), HERE / "checkpoint.safetensors")
    (HERE / "architecture.json").write_text(json.dumps(architecture(moes[0]), indent=1) + "\n")
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
