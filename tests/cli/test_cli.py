"""The command line as a user meets it: results, JSON, and errors that say what failed, where, and what next."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import colibri
from colibri import exporter
from colibri.build import targets
from colibri.format import spec
from colibri.ir import graph
from tests.pipeline.test_export import moe_graph

ROOT = Path(__file__).resolve().parents[2]


def colibri_command(*args: object, module: str = "colibri.cli") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *map(str, args)], capture_output=True, text=True, check=False)


def succeed(*args: object, **kwargs: Any) -> Any:
    done = colibri_command(*args, "--json", **kwargs)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A safetensors file with its architecture file."""
    folder = tmp_path_factory.mktemp("source")
    made = moe_graph(graph.Router(3, 2, "softmax", "sum"), tokens=2)
    tensors: dict[str, Any] = {}
    for e, body in enumerate(made.nodes[-1].attrs["experts"]):
        renamed = {name: f"experts.{e}.{name}" for name in body.constants}
        tensors |= {renamed[name]: value for name, value in body.constants.items()}
    text = json.loads(graph.to_json(made))
    for e, expert in enumerate(text["nodes"][-1]["experts"]):
        for node in expert["nodes"]:
            node["inputs"] = [f"experts.{e}.{i}" if f"experts.{e}.{i}" in tensors else i for i in node["inputs"]]
    save_file(tensors, folder / "model.safetensors")
    (folder / "architecture.json").write_text(json.dumps(text))
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "model"
    succeed("export", "--model", source, "--output", out, "--max-batch", 4)
    return out


def test_export_writes_three_files_and_reports_them(exported: Path) -> None:
    assert {p.name for p in exported.iterdir()} >= {"model.bin", "model.h", "model.c"}
    figures = succeed("inspect", exported)
    assert figures["max_batch"] == 4 and figures["layers"][0]["experts"] == 3
    assert figures["context_bytes"] == colibri.load(exported).context_bytes
    assert figures["file_bytes"] == (exported / "model.bin").stat().st_size


def test_the_exporter_door_has_the_same_effect(source: Path, exported: Path, tmp_path: Path) -> None:
    args = ["--model", source, "--dtype", "fp32", "--output", f"{tmp_path}/", "--max-batch", 4]
    succeed(*args, module="colibri.exporter")
    for name in ("model.bin", "model.h", "model.c"):
        assert (tmp_path / name).read_bytes() == (exported / name).read_bytes()


def test_text_output_is_for_people(exported: Path) -> None:
    for command in ("inspect", "verify"):
        done = colibri_command(command, exported)
        assert done.returncode == 0 and "{" not in done.stdout.splitlines()[0]
    assert "expert" in colibri_command("inspect", exported).stdout


@pytest.mark.parametrize("stage", ["graph", "tidy", "constants", "affine", "fuse", "program", "plan"])
def test_inspect_shows_every_stage(source: Path, stage: str) -> None:
    text = succeed("inspect", source, "--stage", stage)["text"]
    assert ("moe_0@" in text or "output+0" in text) if stage in ("program", "plan") else text.startswith("graph moe")
    assert "expert" in text


def test_run_gives_what_load_gives(exported: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((7, 2, 6), np.float32)
    np.save(tmp_path / "x.npy", x)
    want = colibri.load(exported / "model.bin")(x)
    printed = succeed("run", exported, "--input", tmp_path / "x.npy")
    assert np.array_equal(np.array(printed["outputs"]["moe_0"], np.float32), want)
    succeed("run", exported, "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npz")
    assert np.array_equal(np.load(tmp_path / "y.npz")["moe_0"], want)


def test_verify_is_quick_and_fails_on_any_flipped_weight_bit(exported: Path, tmp_path: Path) -> None:
    assert succeed("verify", exported)["seconds"] < 0.5
    image = bytearray((exported / "model.bin").read_bytes())
    package = colibri.load(exported).package
    rng = np.random.default_rng(0)
    for e in package.experts:
        at = int(e["offset"]) + int(rng.integers(int(e["bytes"])))
        image[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "flipped.bin").write_bytes(image)
        image[at] = (exported / "model.bin").read_bytes()[at]
        done = colibri_command("verify", tmp_path / "flipped.bin", "--json")
        assert done.returncode == 1 and json.loads(done.stdout)["code"] == 7


def test_the_certificate_alone_notices_a_changed_weight(exported: Path) -> None:
    """With every checksum repaired, the golden outputs still tell."""
    made = exporter.build(moe_graph(graph.Router(3, 2)))
    other = moe_graph(graph.Router(3, 2))
    constants = other.nodes[-1].attrs["experts"][0].constants
    first = next(iter(constants))
    constants[first] = constants[first] * np.float32(1.001)
    from colibri.emit import model_bin

    forged = model_bin.write(exporter.build(other).program, made.certificate.golden)
    with pytest.raises(colibri.ModelError, match="SELFTEST"):
        colibri.load(forged).selftest()


def test_build_compiles_and_reports_sizes(exported: Path, tmp_path: Path) -> None:
    built = succeed("build", exported, "--output", tmp_path / "b")
    assert Path(built["static_library"]).is_file() and Path(built["shared_library"]).is_file()
    assert 0 < built["code_bytes"] < 250_000  # three instruction sets; 1 % of onnxruntime's library is 290 kB


ELF_MACHINES = {"aarch64": 183, "riscv64": 243, "riscv64-v": 243, "rv32imc": 243}  # e_machine; Arm is 40


@pytest.mark.parametrize("name", targets.TARGETS)
def test_build_for_another_machine(name: str, exported: Path, tmp_path: Path) -> None:
    target = targets.TARGETS[name]
    command = ("build", exported, "--target", name, "--toolchain", "debian", "--output", tmp_path / "b")
    if shutil.which(target.compiler) is None or shutil.which(target.archiver) is None:
        done = colibri_command(*command)
        assert done.returncode == 1 and target.packages in done.stderr
        pytest.skip(f"{target.compiler} is not installed")
    built = succeed(*command)
    bare = target.system == "bare"
    assert ("shared_library" in built) == (not bare)
    assert 0 < built["code_bytes"] < (60_000 if bare else 200_000)
    header = (exported / "model.h").read_text(encoding="utf-8")
    stated = re.search(rf"MODEL_{'FLASH_BYTES' if bare else 'BYTES'} (\d+)u", header)
    assert stated is not None and built["model_bytes"] == int(stated[1]) > built["weight_bytes"] > 0
    assert built["model_bytes"] <= (exported / "model.bin").stat().st_size
    assert (tmp_path / "b/include/colibri.h").is_file()
    if target.other_compiler:  # clang writes no call graph
        assert built["stack_bytes"] is None
        assert "not known with this compiler" in colibri_command(*command).stdout
    else:
        assert 0 < built["stack_bytes"]["colibri_init"] < built["stack_bytes"]["colibri_forward"] <= 6144
        assert built["stack_bytes"]["colibri_forward"] < built["stack_bytes"]["colibri_selftest"] <= 6144
    if bare:
        parts = ("code_bytes", "constant_bytes", "model_bytes")
        assert built["flash_bytes"] == sum(built[part] for part in parts)
        assert 0 < built["selftest_bytes"] < 600
    if target.system == "wasm":
        assert Path(built["shared_library"]).read_bytes()[:4] == b"\0asm"
    else:
        model = Path(built["model_object"]).read_bytes()
        assert int.from_bytes(model[18:20], "little") == ELF_MACHINES.get(name, 40)


def test_targets_are_listed_and_an_unknown_one_refused(exported: Path) -> None:
    assert list(succeed("targets")) == list(targets.TARGETS)
    done = colibri_command("build", exported, "--target", "pdp11")
    assert done.returncode == 1 and "cortex-m7" in done.stderr and "Traceback" not in done.stderr


ERRORS = [
    (["inspect", "{missing}"], "does not exist"),
    (["inspect", "{empty}"], "COLIBRI_ERR_TRUNCATED"),
    (["inspect", "{folder}"], "without a model.bin"),
    (["inspect", "{text}"], "COLIBRI_ERR_MAGIC"),
    (["verify", "{short}"], "COLIBRI_ERR_TRUNCATED"),
    (["inspect", "{model}", "--stage", "graph"], "is an export already"),
    (["export", "--model", "{missing}", "-o", "{out}"], "does not exist"),
    (["export", "--model", "{folder}", "-o", "{out}"], "is a directory without a config.json"),
    (["export", "--model", "{gguf}", "-o", "{out}"], "is a GGUF file"),
    (["export", "--model", "{ggufs}", "-o", "{out}"], "is a directory with a GGUF file"),
    (["export", "--model", "allenai/OLMoE-1B-7B-0924", "-o", "{out}"], "nothing is downloaded"),
    (["export", "--model", "{model}", "-o", "{out}"], "is a directory with an export"),
    (["inspect", "{ggufs}/m.gguf", "--stage", "graph"], "is a GGUF file"),
    (["export", "--model", "{empty_source}", "-o", "{out}"], "is empty"),
    (["export", "--model", "{text}", "-o", "{out}"], "unknown kind"),
    (["export", "--model", "{bare}", "-o", "{out}"], "architecture file"),
    (["export", "--model", "{source}", "-o", "{out}", "--dtype", "int3"], "fp32"),
    (["export", "--model", "{source}", "-o", "{out}", "--max-batch", "70000"], "65536"),
    (["export", "--model", "{source}", "-o", "{text}/sub"], "cannot be written"),
    (["export", "--model", "{source}", "-o", "{out}", "--expert-align", "96"], "multiple of 64"),
    (["run", "{model}", "-i", "{missing}"], "cannot be read"),
    (["run", "{model}", "-i", "{wrong}"], "has shape"),
    (["build", "{folder}"], "no model.c"),
    (["build", "{model}", "--cc", "no-such-compiler"], "is not installed"),
    (["build", "{model}", "--toolchain", "zig"], "pass --target"),
    (["build", "{model}", "--firmware"], "pass --target"),
    (["build", "{model}", "--firmware", "--target", "riscv64"], "cortex-m7"),
]


@pytest.mark.parametrize(("args", "message"), ERRORS, ids=[" ".join(a) for a, _ in ERRORS])
def test_errors_say_what_failed_without_a_traceback(
    args: list[str], message: str, source: Path, exported: Path, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("missing", "out", "folder", "short")}
    places |= {"empty": tmp_path / "empty.bin", "empty_source": tmp_path / "empty.safetensors",
               "text": tmp_path / "notes.txt", "bare": tmp_path / "bare.safetensors", "wrong": tmp_path / "wrong.npy",
               "model": exported, "source": source, "gguf": tmp_path / "m.GGUF",
               "ggufs": tmp_path / "ggufs"}  # fmt: skip
    for name in ("folder", "ggufs"):
        places[name].mkdir()
    for file in (places["gguf"], places["ggufs"] / "m.gguf"):
        file.write_bytes(b"GGUF" + bytes(60))
    for name in ("empty", "empty_source"):
        places[name].touch()
    places["text"].write_text("This is no model, but it is long enough to hold a header. " * 10)
    places["short"].write_bytes((exported / "model.bin").read_bytes()[:-100])
    save_file({"w": np.zeros(3, np.float32)}, places["bare"])
    np.save(places["wrong"], np.zeros((2, 5), np.float32))
    filled = [a.format(**{k: str(v) for k, v in places.items()}) for a in args]
    done = colibri_command(*filled)
    assert done.returncode == 1 and message in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr
    told = json.loads(colibri_command(*filled, "--json").stdout)
    assert message in told["error"]
    assert "Traceback" in colibri_command(*filled, "--debug").stderr


def test_the_version_is_printed() -> None:
    assert colibri_command("--version").stdout == f"colibri {spec.VERSION}\n"


def test_no_color_means_no_control_sequences(exported: Path) -> None:
    """D7."""
    for args in (["--help"], ["inspect", "nowhere"], ["inspect", str(exported)]):
        shown = {}
        for name in ("", "1"):
            master, slave = pty.openpty()
            process = subprocess.Popen([sys.executable, "-m", "colibri.cli", *args], stdout=slave, stderr=slave,
                                       env={**os.environ, "NO_COLOR": name, "TERM": "xterm-256color"})  # fmt: skip
            os.close(slave)
            shown[name] = b""
            with suppress(OSError):
                while part := os.read(master, 1 << 16):
                    shown[name] += part
            os.close(master)
            process.wait()
        assert b"\x1b[" not in shown["1"] and shown["1"]
        assert b"\x1b[" in shown[""] or args[0] == "inspect"


ARCHITECTURES = [
    ("{", "not JSON"),
    ("[]", '"format"'),
    ('{"format": "colibri-graph", "version": 2}', '"version"'),
    ('{"format": "colibri-graph", "version": 1, "name": "m"}', "inputs"),
    ('{"format": "colibri-graph", "version": 1, "name": "m", "inputs": {"x": [3]}, "outputs": ["y"], "nodes": '
     '[{"op": "linear", "output": "y", "inputs": ["x", "absent"]}]}', "absent"),
    ('{"format": "colibri-graph", "version": 1, "name": "m", "inputs": {"x": [3]}, "outputs": ["y"], "nodes": '
     '[{"op": "attention", "output": "y", "inputs": ["x"]}]}', "attention"),
    ('{"format": "colibri-graph", "version": 1, "name": "m", "inputs": {"x": [3]}, "outputs": ["z"], '
     '"nodes": []}', "z"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ARCHITECTURES, ids=[m for _, m in ARCHITECTURES])
def test_a_wrong_architecture_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "architecture.json").write_text(text)
    done = colibri_command("export", "--model", tmp_path / "model.safetensors", "-o", tmp_path / "out")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_the_graph_survives_its_text_form() -> None:
    made = moe_graph(graph.Router(2, 1, "sigmoid", "none", 1.5), tokens=2)
    tensors = {name: value for body in made.nodes[-1].attrs["experts"] for name, value in body.constants.items()}
    again = graph.from_json(graph.to_json(made), tensors)
    assert graph.to_json(again) == graph.to_json(made)
