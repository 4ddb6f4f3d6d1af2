"""An export that is stopped anywhere leaves the old model or the new one, never files of both that pass for one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.emit.files import require_one_export
from colibri.emit.journal import Journal
from colibri.errors import ColibriError, ExportError
from colibri.format import spec
from tests.engine.conftest import example
from tests.lm_graphs import language_model

OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "pwrite", "posix_fallocate")
SECTIONS = exporter.Style(expert_sections=True)


class Killed(BaseException):
    """What nothing catches on its way out, and after which nothing works any more."""


class Faults:
    """Fails the `number`-th operation on files; with `kill`, all that come after it too."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, kill: bool) -> None:
        self.left, self.kill, self.hit = number, kill, False
        for name in OPERATIONS:
            patch.setattr(os, name, self._faulty(getattr(os, name)))

    def _faulty(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 or (self.kill and self.left < 0):
                self.hit = True
                raise Killed if self.kill else OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **options)

        return call


def text_model(vocab: int) -> Callable[[Path], Any]:
    return lambda folder: exporter.export_lm(language_model(vocab=vocab, layers=1, context=8), folder, workers=1)


def module(name: str, style: exporter.Style = exporter.PLAIN) -> Callable[[Path], Any]:
    return lambda folder: exporter.write(example(name), folder, style)


PAIRS = {"modules": (module("top1"), module("top2_shared")),
         "without sections": (module("top1", SECTIONS), module("top2_shared")),
         "language models": (text_model(24), text_model(40))}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def points(folder: Path, pair: str, kill: bool) -> Iterator[tuple[Any, ...]]:
    """Every export that is stopped once: what was there, what is, and what would have been."""
    old_export, new_export = PAIRS[pair]
    old_export(folder / "old")
    new_export(folder / "new")
    old, new = contents(folder / "old"), contents(folder / "new")
    for number in range(1, 1000):
        place = folder / str(number)
        shutil.copytree(folder / "old", place)
        with pytest.MonkeyPatch.context() as faulty:
            faults = Faults(faulty, number, kill)
            with contextlib.suppress(Killed, ExportError):
                new_export(place)
        if not faults.hit:
            assert contents(place) == new
            return
        yield old, contents(place), new
        new_export(place)  # no litter is in the way, and none stays
        assert contents(place) == new
        shutil.rmtree(place)
    raise AssertionError("no end")


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "failed"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_stopped_export_leaves_the_old_model_or_the_new_one(pair: str, kill: bool, tmp_path: Path) -> None:
    """C9: whatever operation on files is the last, or fails."""
    seen = set()
    for old, now, new in points(tmp_path, pair, kill):
        whole = new if now["model.bin"] == new["model.bin"] else old
        seen.add(whole is new)
        assert now["model.bin"] == whole["model.bin"]
        assert now.get("model.h") in (None, whole["model.h"])  # without it no program is compiled
        if "model.h" in now:
            assert all(now.get(name) == whole.get(name) for name in ("model.c", "experts.ld"))
        if not kill and whole is old:
            assert {name: now[name] for name in old} == old
    assert seen == {True, False}


def test_a_killed_process_leaves_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    """C9: the same with a process that really ends, at random moments."""
    program = ("import sys; from colibri import exporter; from tests.engine.conftest import example\n"
               "models = [example('top1'), example('top2_shared')]; print('ready', flush=True)\n"
               "while True:\n    for model in models: exporter.write(model, sys.argv[1])")  # fmt: skip
    rng, root = np.random.default_rng(0), Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", program, str(tmp_path / "export")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        for _ in range(20):
            time.sleep(float(rng.uniform(0, 0.02)))
            process.send_signal(signal.SIGSTOP)
            if (tmp_path / "export/model.h").exists():
                header = (tmp_path / "export/model.h").read_text(encoding="utf-8")
                image = (tmp_path / "export/model.bin").read_bytes()
                found = re.search(r"MODEL_DIGEST (0x\w{8})u", header)
                stated = np.frombuffer(image[: spec.HEADER.bytes], spec.HEADER.dtype)[0]["header_crc"]
                assert found is not None and int(found[1], 16) == stated
            process.send_signal(signal.SIGCONT)
        process.kill()
    exporter.write(example("top1"), tmp_path / "export")
    assert set(contents(tmp_path / "export")) == {"model.bin", "model.h", "model.c"}


@pytest.mark.parametrize("name", ["model.h", "model.c"])
def test_files_of_two_exports_are_told_apart(name: str, tmp_path: Path) -> None:
    """C9: verify and build name the file that belongs to another model."""
    exporter.write(example("top1"), tmp_path / "a")
    exporter.write(example("top2_shared"), tmp_path / "b")
    require_one_export(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ColibriError, match=f"{name} was written for another model"):
        require_one_export(tmp_path / "a")


def test_links_are_never_written_through(tmp_path: Path) -> None:
    """C9: a journal, a partial file or an export's file that is a link leaves what it points to alone."""
    precious, folder = tmp_path / "precious", tmp_path / "export"
    precious.write_text("mine")
    folder.mkdir()
    for name in ("model.bin", "model.h", "model.c", ".model.h.new", ".model.h.old", "model.bin.partial"):
        (folder / name).symlink_to(precious)
    text_model(24)(folder)
    assert precious.read_text() == "mine"
    assert not any(path.is_symlink() for path in folder.iterdir())
    journal = folder / "model.bin.journal"
    journal.symlink_to(precious)
    with pytest.raises(ExportError, match=r"model\.bin"):
        text_model(40)(folder)
    journal.unlink()
    journal.hardlink_to(precious)
    with pytest.raises(ExportError, match="no plain file"):
        Journal(journal, "")
    assert precious.read_text() == "mine"
