"""One fact, one place: what is generated is current, and everything that names the same things agrees."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import colibri
from colibri.build import callgraph
from colibri.format import spec
from colibri.ir.graph import ALL_SAMPLES, OPS
from colibri.lowering.program import WORK
from colibri.pipeline.context_length import RESIZE
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


def test_a_word_of_an_operation_has_a_name_of_its_own() -> None:
    fields = {name: place[1] for name, place in (spec.OP.dtype.fields or {}).items()}
    own = {name for name, at in fields.items() if fields["w0"] <= at < fields["before"]}
    assert own == fields.keys() - set(spec.OP_COMMON)
    for known in spec.OPERATIONS:
        assert not known.words.keys() & {*spec.OP_COMMON, "comment"}, known.name
        words = [at for word in known.words.values() for at in range(word.at, word.at + word.count)]
        assert words == sorted(set(words)) and words[-1] < (fields["before"] - fields["w0"]) // 4, known.name


@pytest.mark.parametrize("known", spec.OPERATIONS, ids=lambda o: o.name)
def test_an_operation_says_all_that_other_files_ask_of_it(known: spec.Operation) -> None:
    assert known.walk in ("rows", "product", "batch", known.name)
    assert set(known.traits) <= spec.TRAITS.keys()
    assert set(known.calls) <= set(spec.ENUMS["unary"])
    assert known.functions in ("", *spec.ENUMS)
    assert (known.proof in WORK) != (known.name in ("loop", "moe")), "its work, but of what only runs others"


def test_what_keeps_something_of_a_text_can_follow_another_context() -> None:
    proofs = callgraph.proofs(ROOT / "engine")
    keep = {o.view for o in spec.operations(trait="knows_positions") if "kept" in proofs[o.proof]}
    assert keep == RESIZE.keys()


def test_an_operation_whose_proof_leaves_something_out_has_rows_of_floats() -> None:
    """The engine then takes the first size for the floats of a row that is read and written, and for its work."""
    (floats,) = spec.VIEWS["row"]
    proofs = callgraph.proofs(ROOT / "engine")
    plain = [o for o in spec.OPERATIONS if o.proof in WORK and not {"uses", "work"} <= proofs[o.proof].keys()]
    assert {"softmax", "rope", "quantize"} <= {o.name for o in plain}
    for known in plain:
        assert [w.count for w in known.words.values() if w.at == floats.at] == [1], known.name


def test_a_recurrence_refuses_what_runs_on_all_samples() -> None:
    assert set(ALL_SAMPLES) == {o.name for o in spec.operations(trait="runs_all_samples")} & OPS.keys()


def test_error_sentences_say_what_to_do() -> None:
    for name, sentence in spec.ERRORS[1:]:
        assert ":" in sentence, name
        assert sentence[0].islower() and not sentence.endswith("."), name
