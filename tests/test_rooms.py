"""The package's rooms in the order data moves: each imports only rooms before it, and no modules import each other.

Folders, here and in the rest of the repository, hold few files.
"""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
DOORS = ("exporter", "engine", "tokenizer", "spec")  # names that users import; nothing in the rooms does
ROOMS = ("_engine", "errors", "common", "ir", "format", "reference", "passes", "quantize", "lowering", "emit", "text",
         "runtime", "report", "build", "frontends", "frontends.checkpoints", "frontends.recognise", "frontends.torch",
         "pipeline", "api", "cli", *DOORS)  # fmt: skip
FOLDERS = ("benchmarks", "docs", "engine", "examples", "src", "tests", "tools")
BUILT = {"build", "__pycache__"}
MOST_FILES = 15  # of its own in a folder, without __init__.py


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a folder's __init__ has the folder's name."""
    files = {p: ".".join(p.relative_to(SOURCE).with_suffix("").parts) for p in SOURCE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in files.items() if path.stem != "_engine_build"}


def imported(path: Path, known: set[str]) -> set[str]:
    """The package's modules that a file imports, wherever in it; a name that is no module stands for its module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in known else node.module for full in names.values()}
    return {name for name in found if name.split(".")[0] == "colibri"}


def room(module: str) -> str:
    """Where a module stands: the innermost folder that is a room, or the module itself at the top."""
    inner = module.split(".")[1:]
    return next(".".join(inner[:n]) for n in range(len(inner), 0, -1) if ".".join(inner[:n]) in ROOMS)


MODULES = modules()
IMPORTS = {name: imported(path, set(MODULES)) for name, path in MODULES.items() if name != "colibri"}


@pytest.mark.parametrize("module", IMPORTS)
def test_a_module_imports_only_rooms_before_its_own(module: str) -> None:
    behind = {used for used in IMPORTS[module] if ROOMS.index(room(used)) > ROOMS.index(room(module))}
    assert not behind


def test_no_modules_import_each_other() -> None:
    list(TopologicalSorter(IMPORTS).static_order())


def own_files(folder: Path) -> list[Path]:
    """What is written by people: neither a package's door, nor the binding that setup.py builds, nor hidden."""
    built = re.compile(r"__init__\.py|_engine\..*|\..*")
    return [path for path in folder.iterdir() if path.is_file() and not built.fullmatch(path.name)]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_can_be_looked_over(name: str) -> None:
    folders = [ROOT / name, *(path for path in (ROOT / name).rglob("*") if path.is_dir())]
    written = [folder for folder in folders if not BUILT & set(folder.relative_to(ROOT).parts)]
    sizes = {str(folder.relative_to(ROOT)): len(own_files(folder)) for folder in written}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}
