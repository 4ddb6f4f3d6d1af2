"""Hand-written firmware of the comparison: it answers as the model does, or its figures would say nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.firmware import compare, hand_count, weights
from colibri import exporter
from colibri.build import targets
from tests.cross.targets import firmware

ROOT = Path(__file__).resolve().parents[3]
METER = ROOT / "examples/smart_meter"
BY_HAND = [v for v in compare.variants(Path("absent")) if v.source not in ("onnx.c", "emlearn.c")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> compare.Work:
    """A day of forecasts."""
    for tool in (targets.TARGETS["cortex-m7"].compiler, compare.BOARD.emulator[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    return compare.prepare(tmp_path_factory.mktemp("peers"), Path("absent"), firmware.ROWS)


@pytest.mark.parametrize("variant", BY_HAND, ids=lambda v: f"{v.name} {v.dtype}")
def test_firmware_by_hand_answers_as_the_model_does(variant: compare.Variant, work: compare.Work) -> None:
    row = compare.measure(variant, work, {"flash": 0, "ram": 0})
    assert row.instructions > 0 and 0 < row.stack < 2048


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_page_has_the_figures_that_are_measured(dtype: str, work: compare.Work, tmp_path: Path) -> None:
    """B8: docs/measured/firmware.md is written anew (compare.py --publish) when Colibri's rows change."""
    written = (ROOT / "docs/measured/firmware.md").read_text(encoding="utf-8")
    compiler = [targets.TARGETS["cortex-m7"].compiler, "--version"]
    version = subprocess.run(compiler, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    if version not in written:
        pytest.skip(f"the page is of another compiler than {version}")
    every = compare.prepare(tmp_path, Path("absent"))
    empty = compare.link(compare.Variant("empty", "empty.c", "fp32"), every.headers, compare.fresh(tmp_path / "empty"))[
        0
    ]
    row = compare.colibri(dtype, every, compare.image_bytes(empty))
    assert compare.page.table([row], compare.hand_counts()).splitlines()[-1] in written


def test_a_wrong_answer_is_left_out(work: compare.Work) -> None:
    wrong = compare.Work(work.rows, work.exact + 0.1, work.split, work.folder, work.peers_python)
    with pytest.raises(compare.LeftOut, match="wrong"):
        compare.measure(BY_HAND[0], wrong, {"flash": 0, "ram": 0})


def test_the_hand_count_is_of_the_exported_route(tmp_path: Path) -> None:
    checkpoint = load_file(METER / "checkpoint.safetensors")
    architecture = json.loads((METER / "architecture.json").read_text(encoding="utf-8"))
    layers, experts = hand_count.costliest_route(architecture, {k: v.shape for k, v in checkpoint.items()})
    made, _ = firmware.export("int8")
    exporter.write(made, tmp_path)
    found = re.search(r"WORST_MACS (\d+)u", (tmp_path / "model.h").read_text(encoding="utf-8"))
    assert found and int(found[1]) == hand_count.int8(layers, experts).macs == hand_count.fp32(layers, experts).macs
    assert [layer.relu for layer in layers] == [False, True, True, False]


def test_the_reference_is_the_trained_model() -> None:
    torch = pytest.importorskip("torch")
    import model  # of the example, on the path with firmware

    checkpoint = load_file(METER / "checkpoint.safetensors")
    forecaster = model.Forecaster(weights.FEATURES).double()
    forecaster.load_state_dict({k: torch.from_numpy(v).double() for k, v in checkpoint.items()})
    x = np.random.default_rng(0).normal(size=(64, weights.FEATURES))
    with torch.no_grad():
        expected = forecaster(torch.from_numpy(x))[:, 0].numpy()
    np.testing.assert_allclose(weights.activations(checkpoint, x)["answers"], expected, rtol=1e-12, atol=1e-12)
