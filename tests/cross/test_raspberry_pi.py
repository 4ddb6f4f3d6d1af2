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

from colibri.format import spec
from colibri.runtime import engine

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


def test_the_board_forecasts_as_this_machine_does_and_refuses_a_damaged_model(tmp_path: Path) -> None:
    for tool in TOOLS:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    for name in ("raspberry_pi", "smart_meter"):
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("build", "__pycache__"))
    assert list(steps()) == ["export", "build", "rehearse", "compare"]
    for script in steps().values():
        run(script, tmp_path / "raspberry_pi")
    built = tmp_path / "raspberry_pi/build"

    model = engine.load(built / "meter")
    rows = np.fromfile(built / "day.f32", "<f4").reshape(-1, model.inputs[0].shape[-1])
    wanted = model(rows)
    assert isinstance(wanted, np.ndarray) and len(rows) == 48
    for printed in ("pi/pi4.txt", "pi/pi5.txt", "pc.txt"):
        assert np.loadtxt(built / printed, dtype=np.float32).tobytes() == wanted[:, 0].tobytes(), printed

    image = (built / "pi/model.bin").read_bytes()
    changed = image[:-1] + bytes([image[-1] ^ 1])
    for damaged, reason in ((image[: len(image) // 2], "TRUNCATED"), (changed, "CHECKSUM"), (bytes(4096), "MAGIC")):
        (built / "pi/model.bin").write_bytes(damaged)
        command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "./forecast", "./libcolibri.so", "model.bin"]
        done = subprocess.run(command, cwd=built / "pi", capture_output=True, text=True, check=False,
                              stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 1 and done.stdout == "" and dict(spec.ERRORS)[reason] in done.stderr
