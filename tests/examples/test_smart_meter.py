"""The smart-meter example: the demo runs, the checkpoint forecasts as PyTorch did, and int8 costs almost nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.errors import ExportError
from colibri.frontends.architecture import from_architecture
from colibri.runtime import engine

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smart_meter"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402

RESULT = json.loads((EXAMPLE / "result.json").read_text())


def forecast(**how: Any) -> tuple[float, list[float], exporter.Export]:
    """MAPE on the test weeks, the share of rows of each expert, and the export, calibrated on the validation week."""
    graph = from_architecture(EXAMPLE / "checkpoint.safetensors")
    rows = data.split(data.load(), data.VALIDATION).features
    export = exporter.build(graph, quantization=exporter.Quantization(**how), calibration=[rows])
    model, test = engine.load(export.image), data.split(data.load(), data.TEST)
    usage = np.bincount(model.routes(test.features)[0].reshape(-1), minlength=model.num_experts) / len(test.features)
    return data.mape(data.to_megawatts(model(test.features)[:, 0], test.now), test.demand), usage.tolist(), export


def test_float32_forecasts_as_pytorch_did() -> None:
    error, usage, _ = forecast()
    assert error == pytest.approx(RESULT["checkpoint"]["test_mape"], rel=1e-5)
    assert usage == pytest.approx(RESULT["checkpoint"]["expert_usage"]) and min(usage) > 0.1
    assert error < RESULT["seasonal_naive_mape"] / 3


def test_int8_loses_less_than_a_third_of_a_percent_of_the_metric() -> None:
    reference, _, wide = forecast()
    error, _, narrow = forecast(dtype="int8")
    assert error <= reference * 1.003
    sections = [narrow.program.shared, *(e.section for e in narrow.program.experts)]
    assert sum(section.size for section in sections) < 13_000
    assert narrow.quality is not None and narrow.quality.flips[0].flipped == 0
    assert len(wide.image) > 2 * len(narrow.image) or wide.program.weight_bytes > 2 * narrow.program.weight_bytes


def test_mixed_meets_a_budget() -> None:
    _, _, export = forecast(dtype="mixed", budget=9000)
    assert sum(choice.bytes for choice in export.choices) <= 9000
    assert {choice.format for choice in export.choices} > {"fp32"}


def test_a_missed_error_limit_is_refused() -> None:
    with pytest.raises(ExportError, match="allowed"):
        forecast(dtype="int4", max_error=0.001)


def test_the_demo_shows_its_table_and_picture(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "demo.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = f"{RESULT['checkpoint']['test_mape']:.3f} %"
    assert done.stdout.count(expected) == 2 and "experts used" in done.stdout and "bytes RAM" in done.stdout
    assert (tmp_path / "build/smart_meter/forecast.png").read_bytes().startswith(b"\x89PNG")
