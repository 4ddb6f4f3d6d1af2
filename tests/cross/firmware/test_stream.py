"""B9: a stream as firmware answers as this machine does, in little more than plain C by hand takes, and does not grow.

After a change that is meant, `python -m tests.cross.firmware.test_stream` writes stream.json anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.firmware import compare, stream
from colibri import exporter
from colibri.build import targets
from colibri.ir.graph import Graph
from colibri.runtime import engine
from tests.graphs import FORMATS, linear

TABLE = Path(__file__).with_name("stream.json")
GROWTH, BY_HAND = 1.02, 1.2
FIGURES = ("flash", "ram", "stack", "instructions")


@pytest.fixture(autouse=True)
def tools() -> None:
    for tool in (targets.TARGETS["cortex-m7"].compiler, compare.BOARD.emulator[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.mark.parametrize("dtype", stream.TOLERANCE)
def test_a_stream_takes_little_more_than_plain_c_and_does_not_grow(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    x = stream.time_steps(stream.TIME_STEPS, 0)
    found = stream.colibri(dtype, x, tmp_path)
    known = json.loads(TABLE.read_text(encoding="utf-8"))[dtype]
    for what in FIGURES:
        assert getattr(found, what) <= GROWTH * known[what], f"{what}: {getattr(found, what)}, {known[what]} before"
    plain = next(v for v in stream.VARIANTS if v.dtype == dtype)
    by_hand = stream.by_hand(plain, x, compare.fresh(tmp_path / "hand"))
    assert found.instructions <= BY_HAND * by_hand.instructions
    assert found.flash <= BY_HAND * by_hand.flash


@pytest.mark.parametrize("formats", [FORMATS, ("fp32",) * len(FORMATS)], ids=["of every format", "of one format"])
def test_products_that_share_their_code_keep_every_bit(formats: tuple[str, ...], tmp_path: Path) -> None:
    """Of whole and of partial blocks, and of one group of inputs and several."""
    graph, rng = Graph("shared"), np.random.default_rng(0)
    x = graph.add_input("x", (7,))
    for width, fmt in zip((8, 300, 3, 13, 16, 1, 9), formats, strict=True):
        x = linear(graph, rng, x, width, width != 16, fmt)
    graph.outputs = [graph.add("softmax", x)]
    made = exporter.build(graph, expert_align=64)
    assert sum(op.code.startswith("linear") for op in made.program.ops) > 4
    rows = rng.normal(size=(5, 7)).astype(np.float32)
    image = compare.link_colibri(made, rows, tmp_path)
    assert "CLB_SHARED_PRODUCTS" in (tmp_path / "model.c").read_text(encoding="utf-8")
    assert compare.run(image)[1].tobytes() == np.ascontiguousarray(engine.load(made.image)(rows)[:, 0]).tobytes()


if __name__ == "__main__":
    import tempfile

    table = {}
    for kind in stream.TOLERANCE:
        with tempfile.TemporaryDirectory() as place:
            row = stream.colibri(kind, stream.time_steps(stream.TIME_STEPS, 0), Path(place))
            table[kind] = {what: getattr(row, what) for what in FIGURES}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
