"""Golden rows visit every expert that the calibration rows choose; the others are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri import exporter
from colibri.ir.graph import Graph, Router
from colibri.reference.certificate import GOLDEN_ROWS, certify
from colibri.runtime import engine
from tests.graphs import expert

EXPERTS = 21
DEAD = (4, 17)  # no row of below chooses them


def mixture(k: int = 1) -> Graph:
    """Input i chooses expert i, and with k = 2 the next one too."""
    graph = Graph("mixture")
    x = graph.add_input("x", (EXPERTS,))
    gate = np.eye(EXPERTS, dtype=np.float32) * 4 + np.roll(np.eye(EXPERTS, dtype=np.float32), 1, 0)
    logits = graph.add("linear", x, graph.add_constant("gate", gate))
    body = [expert(e, EXPERTS, 6, EXPERTS, 0) for e in range(EXPERTS)]
    graph.outputs = [graph.add("moe", x, logits, router=Router(EXPERTS, k, "softmax", "none"), experts=body)]
    return graph


def rows(count: int, late: int = 0) -> np.ndarray:
    """Rows that choose every expert but DEAD in turn; expert 0 only from row `late` on."""
    alive = [e for e in range(EXPERTS) if e not in DEAD]
    numbers = np.array([alive[n % len(alive)] for n in range(count)])
    numbers[:late][numbers[:late] == 0] = 1
    return np.eye(EXPERTS, dtype=np.float32)[numbers]


def chosen(made: exporter.Export) -> set[int]:
    return {int(e) for golden in made.certificate.golden for e in golden.choices}


@pytest.mark.parametrize("k", [1, 2])
def test_golden_rows_choose_every_expert_that_rows_choose(k: int, tmp_path: Path) -> None:
    """B2: with more rows where eight are too few, and a named list of the experts that none reaches."""
    made = exporter.build(mixture(k), calibration=[rows(200)])
    reached = {int(e) for e in np.unique(engine.load(made.image).routes(rows(200))[0])}
    assert chosen(made) == reached
    missing = sorted(set(range(EXPERTS)) - reached)
    assert missing == ([*DEAD] if k == 1 else [])
    package = engine.load(made.image).package
    assert package.untested == ({0: missing} if missing else {})
    assert made.summary().get("untested_experts", {}) == package.untested
    assert len(made.certificate.golden) >= GOLDEN_ROWS
    exporter.write(made, tmp_path)
    header = (tmp_path / "model.h").read_text(encoding="utf-8")
    assert ("layer 0: no golden row chooses expert 4, 17" in header) == (k == 1)


def test_rows_are_searched_for_experts_that_the_first_do_not_choose() -> None:
    """B2: the measured rows are the first thousand, unless a later one chooses an expert they do not."""
    found = certify(mixture(), [rows(4000, late=2500)])
    assert 0 in {int(e) for golden in found.golden for e in golden.choices}
    assert found.rows == 4000  # two experts are searched for to the end


def test_a_wrong_bias_of_any_reached_expert_fails_the_selftest(tmp_path: Path) -> None:
    """B2: a flipped bit in what only one expert uses changes a golden row."""
    made = exporter.build(mixture(), calibration=[rows(60)])
    package = engine.load(made.image).package
    for number, record in enumerate(package.experts):
        image = bytearray(made.image)
        for at in range(int(record["offset"]), int(record["offset"]) + int(record["bytes"]), 4):
            image[at + 3] ^= 0x40  # the largest bit of a float's exponent
        model = engine.load(bytes(image), verify=False)
        if number in DEAD:
            model.selftest()
        else:
            with pytest.raises(Exception, match="SELFTEST"):
                model.selftest()
