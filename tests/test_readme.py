"""The README's examples are compiled and run as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def example(kind: str) -> str:
    found = re.search(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found, kind
    return found.group(1)


def test_the_examples_work_one_after_the_other(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("build"))
    python = (
        example("python") + "\nassert y.shape == (32, 8)\nprint(float(model(np.zeros((1, 8), np.float32))[0, 0]))\n"
    )
    first = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "k=2" in first.stdout or "top-2" in first.stdout
    (tmp_path / "main.c").write_text(example("c"))
    second = subprocess.run(
        ["sh", "-e", "-c", example("sh")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert second.returncode == 0, second.stderr
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    assert float(printed) == pytest.approx(float(first.stdout.splitlines()[-1]), rel=1e-5)


def test_ten_lines_are_ten_lines() -> None:
    assert len([line for line in example("c").splitlines() if line.strip(" {}")]) <= 12


def test_the_tree_names_what_is_there() -> None:
    tree = re.search(r"## The tree\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert tree
    package = ROOT / "src/colibri"
    for line in tree.group(1).splitlines():
        name = line.split()[0]
        assert any(
            (folder / name).exists() for folder in (ROOT, package, ROOT / "engine", ROOT / "examples", ROOT / "docs")
        ), name
