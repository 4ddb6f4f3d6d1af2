"""One fact, one place: what is generated is current, and everything that names the same things agrees."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import colibri
from colibri.format import spec
from colibri.ir.graph import OPS
from colibri.reference import interpreter, ops

ROOT = Path(__file__).resolve().parents[1]


def test_generated_files_are_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "generate.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_version_is_one() -> None:
    header = (ROOT / "engine/include/colibri.h").read_text()
    assert re.search(r'#define COLIBRI_VERSION "(.*)"', header).group(1) == spec.VERSION == colibri.__version__  # type: ignore[union-attr]
    assert f"## {spec.VERSION}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("record", spec.RECORDS.values(), ids=lambda r: r.name)
def test_records_have_their_size_and_aligned_fields(record: spec.Record) -> None:
    assert record.dtype.itemsize == record.bytes
    assert record.bytes % 8 == 0
    for name in record.dtype.names or ():
        field, offset = record.dtype.fields[name][:2]  # type: ignore[index]
        assert offset % field.base.alignment == 0, name


def test_every_operation_and_function_has_a_reference() -> None:
    assert set(interpreter.OPS) | {"moe", "state", "step", "collect"} == set(OPS)
    assert tuple(ops.UNARY) == spec.ENUMS["unary"]
    assert tuple(ops.BINARY) == spec.ENUMS["binary"]


def test_error_sentences_say_what_to_do() -> None:
    for name, sentence in spec.ERRORS[1:]:
        assert ":" in sentence, name
        assert sentence[0].islower() and not sentence.endswith("."), name


def test_stages_import_only_earlier_ones() -> None:
    order = [
        "_engine",
        "errors",
        "compare",
        "options",
        "names",
        "npz",
        "strict_json",
        "folder",
        "weights",
        "graph",
        "spec",
        "arithmetic",
        "layouts",
        "unicode_probe",
        "split_regex",
        "tokenizer_bin",
        "template_worker",
        "chat_template",
        "declared_tokens",
        "spelled_tokens",
        "tokenizer",
        "answers",
        "package",
        "diff",
        "reference",
        "passes",
        "quantize",
        "program",
        "views",
        "lower",
        "plan",
        "certify",
        "emit",
        "engine",
        "streaming",
        "language",
        "evaluate",
        "context_length",
        "report",
        "targets",
        "callgraph",
        "elf",
        "toolchain",
        "firmware",
        "language_export",
        "exporter",
        "frontends",
        "api",
        "terminal",
        "sources",
        "cli_language",
        "cli",
    ]
    for path in (ROOT / "src/colibri").rglob("*.py"):
        stage = path.relative_to(ROOT / "src/colibri").parts[0].removesuffix(".py")
        if stage in ("__init__", "_engine_build"):
            continue
        for used in re.findall(r"^(?:from|import) colibri\.(\w+)", path.read_text(), re.M):
            assert order.index(used) <= order.index(stage), f"{path.name} imports {used}"
        for used in re.findall(r"^from colibri import (.*)$", path.read_text(), re.M):
            for name in used.split(", "):
                assert order.index(name) <= order.index(stage), f"{path.name} imports {name}"
