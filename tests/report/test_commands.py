"""colibri routes, trace and advise on the smart-meter model, as a user meets them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri import exporter
from colibri.frontends.architecture import from_architecture
from colibri.report import advise, routes, tables, traces
from tests.cli.test_cli import colibri_command, succeed
from tests.engine.conftest import compiler
from tests.report.models import chosen_by_input

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "smart_meter"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as fp32/, int8/ and int4/, and the rows of its test weeks, test.npy."""
    folder = tmp_path_factory.mktemp("meter")
    demand = data.load()
    calibration = data.split(demand, data.VALIDATION).features
    for dtype in ("fp32", "int8", "int4"):
        graph = from_architecture(EXAMPLE / "checkpoint.safetensors")
        export = exporter.build(graph, quantization=exporter.Quantization(dtype), calibration=[calibration])
        exporter.write(export, folder / dtype)
    np.save(folder / "test.npy", data.split(demand, data.TEST).features)
    return folder


@pytest.fixture(scope="module")
def trace(meter: Path) -> Path:
    done = succeed("trace", meter / "int8", "--input", meter / "test.npy", "--output", meter / "trace.npz")
    assert (done["rows"], done["layers"]) == (672, 1)
    return meter / "trace.npz"


def test_routes_are_those_of_the_engine(meter: Path) -> None:
    report = succeed("routes", meter / "int8", "--input", meter / "test.npy")
    chosen = colibri.load(meter / "int8").routes(np.load(meter / "test.npy"))[0].reshape(-1)
    assert report["layers"][0]["shares"] == pytest.approx((np.bincount(chosen) / len(chosen)).tolist())
    assert report["budget"]["worst_macs"] == report["budget"]["header_macs"] == 2978
    assert report["budget"]["worst_bytes"] == report["budget"]["header_bytes"]
    assert "672 rows" in report["measured"] and report["budget"]["stack_bytes"] is None


def test_without_rows_the_exports_own_measurement_is_shown(meter: Path) -> None:
    report = succeed("routes", meter / "int8")
    frequencies = succeed("inspect", meter / "int8")["layers"][0]["frequencies"]
    assert report["layers"][0]["shares"] == pytest.approx(frequencies, abs=1e-4)
    assert "calibration" in report["measured"]


def test_flips_are_reported_against_another_export(meter: Path) -> None:
    report = succeed("routes", meter / "int4", "--input", meter / "test.npy", "--against", meter / "fp32")
    (layer,) = report["flips"]
    # The router stays float32, and reads the features themselves.
    assert (layer["flipped"], layer["tokens"], layer["pairs"]) == (0, 672, [])
    assert list(layer["margin_quantiles"]) == [str(q) for q in routes.QUANTILES]
    assert layer["flipped_margin_quantiles"]["0.5"] is None


def test_stack_is_that_of_the_build(meter: Path) -> None:
    report = succeed("routes", meter / "int8", "--stack")
    assert report["budget"]["stack_bytes"].keys() == {"colibri_init", "colibri_forward", "colibri_selftest"}
    assert 0 < report["budget"]["stack_bytes"]["colibri_forward"] <= 6144


def test_stack_of_another_machine(meter: Path) -> None:
    compiler("arm-none-eabi-gcc")
    report = succeed("routes", meter / "int8", "--target", "cortex-m7")
    assert 0 < report["budget"]["stack_bytes"]["colibri_forward"] <= 2048


def test_advice_names_what_to_do_at_every_budget(meter: Path, trace: Path) -> None:
    report = succeed("advise", meter / "int8", "--trace", trace, "--budget", "8KB", "--budget", "1MB")
    small, large = report["plans"]
    assert (small["budget"], large["budget"]) == (8192, 1 << 20)
    assert not small["pin"] and not large["pin"] and small["pins"] == []
    assert "holds every expert" in large["reason"]
    assert report["locality"][0]["overlap"] > 2 * report["locality"][0]["chance"]
    assert report == advise.advise(colibri.load(meter / "int8").package, traces.load(trace), [8192, 1 << 20]).to_dict()


def test_pins_name_parts_of_the_file(meter: Path) -> None:
    """Every other row takes expert 1, the others alternate: one place in memory is best given to expert 1 for good."""
    rows = [[[1]], [[0]], [[1]], [[2]]] * 100
    traces.save(traces.RouteTrace([np.array(rows, np.int32)]), meter / "alternating.npz")
    (plan,) = succeed("advise", meter / "int8", "--trace", meter / "alternating.npz", "--budget", "4KB")["plans"]
    (pin,) = plan["pins"]
    entry = colibri.load(meter / "int8").package.experts[1]
    assert plan["pin"] and (pin["layer"], pin["expert"], pin["entry"]) == (0, 1, 1)
    assert (pin["offset"], pin["bytes"]) == (int(entry["offset"]), int(entry["bytes"]))
    assert plan["pinned_bytes"] == 4096 and pin["share"] == 0.5
    shown = colibri_command("advise", meter / "int8", "--trace", meter / "alternating.npz", "--budget", "4KB").stdout
    assert (
        "4,096 bytes: pin: pinning saves 50.0% of LRU's reads" in shown
        and "1 to lock, 4,096 bytes: layer 0: 1" in shown
    )


def test_text_is_for_people(meter: Path, trace: Path) -> None:
    shown = colibri_command("routes", meter / "int4", "-i", meter / "test.npy", "--against", meter / "fp32").stdout
    assert "use of the experts" in shown and "in the header" in shown and "flips" in shown
    shown = colibri_command("advise", meter / "int8", "--trace", trace).stdout
    assert "optimum" in shown and "do not pin" in shown and "{" not in shown


ERRORS = [
    (["routes", "{int8}", "--against", "{int4}"], "pass --input"),
    (["routes", "{missing}"], "does not exist"),
    (["routes", "{int8}", "-i", "{wrong}"], "has shape"),
    (["routes", "{int8}", "-i", "{test}", "--against", "{missing}"], "does not exist"),
    (["routes", "{dense}"], "has no MoE layer"),
    (["routes", "{int8}", "--target", "pdp11"], "cortex-m7"),
    (["trace", "{int8}", "-i", "{test}", "-o", "{missing}/trace.npz"], "cannot be written"),
    (["trace", "{dense}", "-i", "{wrong}", "-o", "{missing}"], "has no MoE layer"),
    (["advise", "{int8}", "--trace", "{missing}"], "cannot be read"),
    (["advise", "{int8}", "--trace", "{test}"], "is no trace"),
    (["advise", "{int8}", "--trace", "{short}"], "record more"),
    (["advise", "{int8}", "--trace", "{other}"], "2 MoE layers"),
    (["advise", "{int8}", "--trace", "{short}", "--budget", "lots"], "is not a size"),
]


@pytest.mark.parametrize(("args", "message"), ERRORS, ids=[" ".join(a) for a, _ in ERRORS])
def test_errors_say_what_failed_without_a_traceback(args: list[str], message: str, meter: Path, tmp_path: Path) -> None:
    from tests.engine.conftest import example

    places = {name: meter / name for name in ("int8", "int4")}
    places |= {"test": meter / "test.npy", "missing": tmp_path / "missing"}
    for name in ("wrong.npy", "dense.bin", "short.npz", "other.npz"):
        places[name.split(".")[0]] = tmp_path / name
    np.save(places["wrong"], np.zeros((2, 9), np.float32))
    places["dense"].write_bytes(example("dense").image)
    traces.save(traces.RouteTrace([np.zeros((5, 1, 1), np.int32)]), places["short"])
    traces.save(traces.RouteTrace([np.zeros((50, 1, 1), np.int32)] * 2), places["other"])
    filled = [a.format(**{k: str(v) for k, v in places.items()}) for a in args]
    done = colibri_command(*filled)
    assert done.returncode == 1 and message in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr
    assert message in json.loads(colibri_command(*filled, "--json").stdout)["error"]


def test_the_documents_examples_are_what_is_printed(meter: Path, trace: Path) -> None:
    text = (ROOT / "docs/routes.md").read_text(encoding="utf-8")
    examples = re.findall(r"```\n\$ colibri (.*)\n((?:.|\n)*?)```", text)
    assert len(examples) == 3
    for command, want in examples:
        done = subprocess.run([sys.executable, "-m", "colibri.cli", *command.split()], cwd=meter, capture_output=True,
                              text=True, env={**os.environ, "COLUMNS": "120"}, check=True)  # fmt: skip
        assert [line.rstrip() for line in done.stdout.strip().splitlines()] == want.strip().splitlines(), command


def test_a_large_models_experts_are_counted_instead_of_listed() -> None:
    export = chosen_by_input([(2, [2] * 16)] * 2)
    package = colibri.load(export.image).package
    many = dataclasses.replace(package, experts=np.tile(package.experts, 3))

    shown = list(tables.use_tables(routes.calibrated_use(package), package, "here"))
    assert len(shown) == 3
    assert len(list(tables.use_tables(routes.calibrated_use(package), many, "here"))) == 2


@pytest.mark.parametrize(("size", "text"), [(0, "0 bytes"), (102399, "102,399 bytes"), (102400, "100.0 KB"),
                                            (3 << 20, "3.0 MB"), (5 * 2**30 + 2**29, "5.5 GB")])  # fmt: skip
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert tables.size_text(size) == text
