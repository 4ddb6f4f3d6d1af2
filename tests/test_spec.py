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
