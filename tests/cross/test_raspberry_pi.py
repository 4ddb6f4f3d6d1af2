"""The Raspberry Pi walk-through, step by step as its README has it: this machine's forecasts, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from colibri import engine, spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = (EXAMPLES / "raspberry_pi/README.md").read_text(encoding="utf-8")
TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


def steps() -> dict[str, str]:
    """The README's blocks that are run, by name, in their order."""
    return dict(re.findall(r"<!-- test: (\w+) -->\n```sh\n(.*?)```", README, re.S))


def run(script: str, folder: Path) -> None:
    """A block of the README, with `python` and `colibri` those of this environment."""
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name, command in (("python", ""), ("colibri", "-m colibri.cli")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n', encoding="utf-8")
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["sh", "-e", "-c", script], cwd=folder, env={**os.environ, "PATH": path},
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's directory after every step."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("examples")
    for name in ("raspberry_pi", "smart_meter"):
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("build", "__pycache__"))
    for script in steps().values():
        run(script, folder / "raspberry_pi")
    return folder / "raspberry_pi/build"


def test_the_board_forecasts_as_this_machine_does(walked: Path) -> None:
    assert list(steps()) == ["export", "build", "rehearse", "compare"]
    model = engine.load(walked / "meter")
    rows = np.fromfile(walked / "day.f32", "<f4").reshape(-1, model.inputs[0].shape[-1])
    wanted = model(rows)
    assert isinstance(wanted, np.ndarray) and len(rows) == 48
    for printed in ("pi/pi4.txt", "pi/pi5.txt", "pc.txt"):
        assert np.loadtxt(walked / printed, dtype=np.float32).tobytes() == wanted[:, 0].tobytes(), printed


@pytest.mark.parametrize(("name", "reason"), [("cut", "TRUNCATED"), ("changed", "CHECKSUM"), ("other", "MAGIC")])
def test_a_damaged_model_is_refused_on_the_board(name: str, reason: str, walked: Path, tmp_path: Path) -> None:
    image = bytearray((walked / "pi/model.bin").read_bytes())
    if name == "changed":
        image[-1] ^= 1
    damaged = {"cut": bytes(image[: len(image) // 2]), "changed": bytes(image), "other": bytes(4096)}[name]
    (tmp_path / "model.bin").write_bytes(damaged)
    command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "./forecast", "./libcolibri.so", tmp_path / "model.bin"]
    done = subprocess.run(command, cwd=walked / "pi", capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    text = next(why for error, why in spec.ERRORS if error == reason)
    assert done.returncode == 1 and done.stdout == "" and text in done.stderr
