"""Updating a model: a changed expert changes its own pages, `colibri diff` says so, and a running process is safe."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri import exporter
from colibri.exporter import Quantization, Selection
from colibri.ir.graph import Graph, Router
from colibri.report.diff import PAGE, _pages, compare
from colibri.runtime import engine
from tests.cli.test_cli import colibri_command, succeed
from tests.graphs import expert, linear

EXPERTS, CHANGED = 6, 3
DTYPES = ["fp32", "fp16", "int8", "int4"]


def model(changed: float = 1.0, router: float = 1.0, head: float = 1.0) -> Graph:
    """One MoE of experts of several pages; `changed` scales a weight of one of them."""
    rng = np.random.default_rng(0)
    graph = Graph("model")
    x = graph.add_input("x", (64,))
    experts = [expert(e, 64, 96, 64, 0) for e in range(EXPERTS)]
    first = next(iter(experts[CHANGED].constants))
    experts[CHANGED].constants[first] = experts[CHANGED].array(first) * np.float32(changed)
    logits = linear(graph, rng, x, EXPERTS, True)
    graph.constants["w_0"] = graph.array("w_0") * np.float32(router)
    mixed = graph.add("moe", x, logits, router=Router(EXPERTS, 2), experts=experts)
    graph.outputs = [linear(graph, rng, mixed, 5, False)]
    name = graph.nodes[-1].inputs[1]
    graph.constants[name] = graph.array(name) * np.float32(head)
    return graph


def built(dtype: str = "fp32", **changes: float) -> exporter.Export:
    return exporter.build(model(**changes), quantization=Quantization(dtype))


def pages(a: bytes, b: bytes) -> set[int]:
    """The pages in which two files of one size differ."""
    assert len(a) == len(b)
    return {n for n in range(0, -(-len(a) // PAGE)) if a[n * PAGE : (n + 1) * PAGE] != b[n * PAGE : (n + 1) * PAGE]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_expert_changes_only_its_own_pages_and_the_metadata(dtype: str) -> None:
    old, new = built(dtype), built(dtype, changed=1.5)
    package = engine.load(new.image).package
    assert [int(e["offset"]) for e in engine.load(old.image).package.experts] == [
        int(e["offset"]) for e in package.experts
    ]
    at, size = int(package.experts[CHANGED]["offset"]), int(package.experts[CHANGED]["bytes"])
    own = set(range(at // PAGE, -(-(at + size) // PAGE)))
    metadata = set(range(-(-int(package.header["meta_bytes"]) // PAGE)))
    assert own & pages(old.image, new.image) and pages(old.image, new.image) <= own | metadata
    first, end = (
        int(package.header["meta_bytes"]),
        int(package.header["meta_bytes"]) + int(package.header["shared_bytes"]),
    )
    assert old.image[first:end] == new.image[first:end]


def test_calibrated_int8_leaves_the_other_experts_of_the_layer_alone() -> None:
    rows = [np.random.default_rng(1).standard_normal((50, 64), np.float32)]
    how = Quantization("int8", outlier_share=0.01)
    old, new = (exporter.build(model(**c), quantization=how, calibration=rows) for c in ({}, {"changed": 1.5}))
    difference = compare(engine.load(old.image).package, engine.load(new.image).package)
    assert [(e.expert, e.change) for e in difference.experts] == [(CHANGED, "weights")] and not difference.router


def test_pruning_leaves_other_experts_their_bytes() -> None:
    old = exporter.build(model(), selection=Selection("proven", ((0, 5),)))
    new = exporter.build(model(changed=1.5), selection=Selection("proven", ((0, 5),)))
    difference = compare(engine.load(old.image).package, engine.load(new.image).package)
    assert [(e.expert, e.change) for e in difference.experts] == [(CHANGED, "weights")] and not difference.shared


@pytest.mark.parametrize("dtype", DTYPES)
def test_rsync_sends_little_more_than_the_changed_expert(dtype: str, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    here, there = tmp_path / "new.bin", tmp_path / "there.bin"
    old, new = built(dtype), built(dtype, changed=1.5)
    exporter.write(old, there)
    exporter.write(new, here)
    command = ["rsync", "--stats", "--no-whole-file", "--ignore-times", here, there]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"})
    assert there.read_bytes() == new.image
    sent = int(re.search(r"Literal data: ([\d,]+)", done.stdout)[1].replace(",", ""))  # type: ignore[index]
    package = engine.load(new.image).package
    block = 700  # bytes: rsync's least block; it sends whole ones
    most = int(package.experts[CHANGED]["bytes"]) + int(package.header["meta_bytes"]) + 4 * block
    assert 0 < sent <= most < len(new.image) / 2


def test_colibri_diff_says_what_changed(tmp_path: Path) -> None:
    places = {}
    for name, changes in (("old", {}), ("expert", {"changed": 1.5}), ("router", {"router": 1.5}),
                          ("head", {"head": 1.5})):  # fmt: skip
        places[name] = exporter.write(built(**changes), tmp_path / name)
    told = succeed("diff", places["old"], tmp_path / "expert")
    assert [(e["layer"], e["expert"], e["change"]) for e in told["experts"]] == [(0, CHANGED, "weights")]
    assert told["experts"][0]["before"] == told["experts"][0]["after"] > PAGE
    assert (told["router"], told["program"], told["shared"], told["certificate"]) == (False, False, False, True)
    assert told["pages"] == len(pages(*(places[n].read_bytes() for n in ("old", "expert")))) < told["pages_of"]
    told = succeed("diff", places["old"], places["router"])
    assert (told["experts"], told["router"], told["program"], told["shared"]) == ([], True, False, False)
    told = succeed("diff", places["old"], places["head"])
    assert (told["experts"], told["router"], told["program"], told["shared"]) == ([], False, False, True)
    assert succeed("diff", places["old"], places["old"])["same"] is True
    shown = colibri_command("diff", places["old"], places["expert"]).stdout
    assert f"layer 0, expert {CHANGED}: weights" in shown and "pages of 4,096 bytes differ" in shown
    done = colibri_command("diff", places["old"], tmp_path / "missing")
    assert done.returncode == 1 and "does not exist" in done.stderr and "Traceback" not in done.stderr


def test_diff_names_experts_that_came_and_went_by_their_original_numbers() -> None:
    whole = engine.load(built().image).package
    without = engine.load(exporter.build(model(), selection=Selection("none", ((0, 1), (0, 4)))).image).package
    gone, back = compare(whole, without), compare(without, whole)
    assert [(e.expert, e.change) for e in gone.experts if e.change != "moved"] == [(1, "removed"), (4, "removed")]
    assert [(e.expert, e.change) for e in back.experts if e.change != "moved"] == [(1, "added"), (4, "added")]
    assert gone.router and gone.program and not gone.shared and not gone.same
    assert asdict(gone)["bytes_before"] == gone.bytes_before > gone.bytes_after


@pytest.mark.parametrize("longer", [0, 1, PAGE, 3 * PAGE + 5])
def test_pages_count_what_only_one_file_has(longer: int) -> None:
    a = np.zeros(2 * PAGE + 7, np.uint8)
    b = np.concatenate([a, np.zeros(longer, np.uint8)])
    b[PAGE] = 1
    assert _pages(a, b) == _pages(b, a) == 1 + (-(-len(b) // PAGE) - 2 if longer else 0)


RUNNING = """
import sys
import numpy as np
import colibri
from colibri.format import package
if sys.argv[3] == "mapped":
    package._COPIED = 0
model = colibri.load(sys.argv[1])
x = np.load(sys.argv[2])
for _ in sys.stdin:
    try:
        model.package.check_weights()
        model.selftest()
        print(model(x).tobytes().hex(), flush=True)
    except colibri.ModelError as error:
        print(error, flush=True)
"""


class Running:
    """A process that has a model loaded, or mapped as large ones are, and forecasts when asked."""

    def __init__(self, path: Path, x: np.ndarray[Any, Any], mapped: bool) -> None:
        np.save(path.parent / "x.npy", x)
        command = [sys.executable, "-c", RUNNING, path, path.parent / "x.npy", "mapped" if mapped else "copied"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=60)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_running_process_keeps_the_old_model_when_the_file_is_replaced(tmp_path: Path, mapped: bool) -> None:
    x = np.random.default_rng(1).standard_normal((9, 64), np.float32)
    old, new = built(), built(changed=1.5)
    path = exporter.write(old, tmp_path / "out")
    running = Running(path, x, mapped)
    try:
        before = running.ask()
        exporter.write(new, tmp_path / "out")
        assert path.read_bytes() == new.image
        assert running.ask() == before == engine.load(old.image)(x).tobytes().hex()
        if shutil.which("rsync") is not None:  # it, too, writes a new file and renames it
            exporter.write(old, tmp_path / "old.bin")
            subprocess.run(["rsync", "--no-whole-file", "--ignore-times", tmp_path / "old.bin", path], check=True)
            exporter.write(new, tmp_path / "out")
            assert running.ask() == before
        assert colibri.load(path)(x).tobytes().hex() == engine.load(new.image)(x).tobytes().hex() != before
    finally:
        running.end()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_overwritten_in_place_changes_nothing_or_is_noticed(tmp_path: Path, mapped: bool) -> None:
    x = np.random.default_rng(1).standard_normal((9, 64), np.float32)
    old, new = built(), built(changed=1.5)
    path = exporter.write(old, tmp_path / "out")
    running = Running(path, x, mapped)
    try:
        before = running.ask()
        at = int(engine.load(old.image).package.experts[CHANGED]["offset"])
        with path.open("r+b") as file:  # as a copy that has come as far as the expert, or began there
            file.seek(at)
            file.write(new.image[at:])
        answer = running.ask()
        assert "the model file was changed while it was mapped" in answer if mapped else answer == before
    finally:
        running.end()
    done = colibri_command("verify", path)
    assert done.returncode == 1 and "expert 3" in done.stderr.replace("\n", " ")
    with pytest.raises(colibri.ModelError, match="expert 3"):
        colibri.load(path)
