"""C7: nothing from a path, a name or a model reaches make, a shell or C as anything but a name."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from colibri import exporter
from colibri.build import firmware as project
from colibri.build import toolchain
from colibri.errors import ColibriError, ExportError
from colibri.ir.graph import Graph
from tests.cross.firmware.test_boards import need
from tests.engine.conftest import compiler, example
from tests.graphs import linear

# Each does harm where make, a shell, a compiler's driver or C reads it; the last has them all.
PATHS = [
    "two words",
    "$(shell touch harm)",
    "$$(touch harm)",
    "`touch harm`",
    "a;touch harm",
    "a&touch harm",
    "it's",
    'say "x"',
    "line\nbreak",
    "-o harm",
    "@harm",
    "per%cent",
    "hash#",
    "comma,colon:",
    "back\\slash",
    "ünï☃",
    "~",
    "*",
    "a=b",
]
PATHS.append("-x " + "".join(PATHS[:9]) + "@%#,:\\ü*")
TEXTS = ["*/ #error harm /*", '"); system("harm', "a\\\n#error harm", "??/\n#error harm", "\n#error harm\n", "ünï☃",
         "\0\x1b[31m", "$(touch harm)", "<script>harm()</script>", "\udcff", "x" * 100]  # fmt: skip


def no_harm(folder: Path) -> bool:
    return not any(path.name == "harm" for path in [*folder.rglob("*"), *toolchain.engine_directory().iterdir()])


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_a_project_in_a_hostile_path_is_built(relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler, with make in the written project, and from inside."""
    need("cortex-m7")
    monkeypatch.chdir(tmp_path)
    folder = Path(PATHS[-1]) if relative else tmp_path / PATHS[-1]
    exporter.write(example("top1"), folder)
    written, built = project.write(folder, "cortex-m7", None if relative else folder / PATHS[-1])
    assert built.flash_bytes and built.stack and all(built.stack.values())
    done = subprocess.run(["make", "-s", "build/model.o"], cwd=written, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert no_harm(tmp_path)


def test_the_library_is_built_into_a_hostile_path(tmp_path: Path) -> None:
    exporter.write(example("dense"), tmp_path / "export")
    built = toolchain.build(tmp_path / "export", tmp_path / PATHS[-1])
    assert built.shared_library is not None and built.shared_library.parent == (tmp_path / PATHS[-1]).resolve()
    assert built.shared_library.is_file() and built.static_library.is_file() and no_harm(tmp_path)


@pytest.mark.parametrize("name", PATHS)
def test_make_gets_a_plain_name_for_any_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with toolchain.plain_name((tmp_path / name).resolve()) as place:
        assert str(place).replace("/", "").replace("-", "").replace("_", "").replace(".", "").isalnum()
        (place / "file").write_text("x")
    assert (tmp_path / name / "file").read_text() == "x" and not os.path.lexists(place)


@pytest.mark.parametrize("word", ["$(shell touch harm)", "`touch harm`", "$$", "it's", "a b", "x;touch harm"])
def test_a_word_of_a_command_stays_one_through_make(word: str, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("all:\n\t@$(CC)\n")
    done = subprocess.run(["make", "-s", f"CC={toolchain.for_make(['printf', '%s', word])}"], cwd=tmp_path,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == word and no_harm(tmp_path)
    with pytest.raises(ColibriError, match="line break"):
        toolchain.for_make(["cc", "-I/a\nb"])


@pytest.mark.parametrize("text", TEXTS)
def test_names_of_a_model_are_comments_and_no_code(text: str, tmp_path: Path) -> None:
    made = []
    for port in (text, "x"):  # a port's name that is no name is refused
        graph, rng = Graph(text), np.random.default_rng(0)
        with contextlib.suppress(ExportError):
            graph.outputs = [linear(graph, rng, graph.add_input(port, (3,)), 2, True)]
            made.append(exporter.build(graph))
    if not made:
        return  # and so is the model's
    exporter.write(made[0], tmp_path, exporter.Style(prefix="meter"))
    for name in ("model.c", "model.h"):
        flags = ["-std=c11", "-trigraphs", "-Wall", "-Wextra", "-Werror", "-DCOLIBRI_GENERATED", "-Wno-unused-function"]
        done = subprocess.run([compiler("gcc"), *flags, *toolchain.source_flags(), "-fsyntax-only", "-xc", name],
                              cwd=tmp_path, capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "<script" not in (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("prefix", ["", "A", "9a", "a b", "a;", "a\n", "a-b", "ä", "a" * 33, "clb", "../a", "$(a)"])
def test_a_prefix_that_is_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ExportError, match="prefix"):
        exporter.Style(prefix=prefix)


def test_nothing_of_the_directory_is_run_as_python(tmp_path: Path) -> None:
    """zig's command is a module of Python; one beside the model is not it."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang/__main__.py").write_text("open('harm', 'w')")
    command = toolchain.ZIG
    subprocess.run([*command, "version"], cwd=tmp_path, capture_output=True, check=False)
    assert no_harm(tmp_path)
