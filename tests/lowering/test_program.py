"""The program before it is packed: words by their names, as they are written and read, and the work they stand for."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.emit import model_bin
from colibri.errors import ExportError, ModelError
from colibri.format import package, spec
from colibri.lowering.program import Op, Operand
from colibri.runtime import engine
from tests.engine.conftest import EXCHANGES, GRAPHS, TEXTS, example

MODELS = (*GRAPHS, *TEXTS, *EXCHANGES)


def operations(export: exporter.Export) -> list[Op]:
    return [*export.program.ops, *export.program.expert_ops]


def records(export: exporter.Export) -> Any:
    return package.parse(np.frombuffer(export.image, np.uint8), "a model").ops


def test_every_operation_is_in_a_small_model() -> None:
    """So that what is tested of small models is tested of every operation."""
    assert {op.code for name in MODELS for op in operations(example(name, 64, 3))} == set(spec.OPCODES)


@pytest.mark.parametrize("name", MODELS)
def test_the_stated_work_is_what_the_engine_counts(name: str) -> None:
    """One step less is refused."""
    image = bytearray(example(name, 64, 3).image)
    header = np.frombuffer(image, spec.HEADER.dtype, 1)[0]
    engine.load(bytes(image))
    header["worst_work"] -= np.uint64(1)
    header["header_crc"] = zlib.crc32(image[: spec.HEADER.bytes - 4])
    with pytest.raises(ModelError, match="COLIBRI_ERR_PROGRAM"):
        engine.load(bytes(image))


@pytest.mark.parametrize("name", MODELS)
def test_words_are_written_and_read_by_one_name(name: str) -> None:
    """At the place that the table of the format says."""
    export = example(name, 64, 3)
    first = (spec.OP.dtype.fields or {})["w0"][1]
    for op, record in zip(operations(export), records(export), strict=True):
        for word in op.known.words.values():
            given, read = op[word.name], spec.named(record)[word.name]
            if word.type == "tensor":
                given = spec.NONE if given is None else export.program.tensors.index(given)
            elif word.count > 1:
                given = (word.least,) * (word.count - len(given)) + tuple(given)
            assert np.array_equal(np.asarray(given, read.dtype), read), f"{op.code}.{word.name}"
            at = first + 4 * word.at
            assert record.tobytes()[at : at + 4 * word.count] == read.tobytes(), f"{op.code}.{word.name}"


def test_what_is_written_to_a_name_is_written_to_the_record() -> None:
    ops = records(example("text_window", 64, 3)).copy()
    n = int(np.flatnonzero(ops["code"] == spec.OPCODES.index("attention"))[0])
    spec.named(ops[n])["window"] = 7
    assert ops["strides_a"][n, 0] == 7
    assert spec.named_all(ops, "attention")["window"].tolist() == [7]


def test_an_operation_has_the_words_of_its_kind_only() -> None:
    norm = Op("softmax", Operand(), Operand(), size=4)
    assert (norm["size"], norm["epsilon"], norm["gamma"], norm.sizes()) == (4, 0, None, (4,))
    with pytest.raises(KeyError, match="softmax has no 'window', but gamma, "):
        Op("softmax", Operand(), Operand(), window=4)
    with pytest.raises(KeyError, match="window"):
        norm["window"]


@pytest.mark.parametrize("size", [-1, spec.LIMIT + 1])
def test_a_word_that_the_format_cannot_hold_is_refused_by_name(size: int) -> None:
    graph = exporter.build(example("dense").graph).program
    product = next(op for op in graph.ops if op.code == "linear")
    product["outputs"] = size
    with pytest.raises(ExportError, match=f"outputs = {size} exceeds"):
        model_bin.write(graph)
