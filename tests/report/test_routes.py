"""The route report: use, balance, flips, and the worst route, walked and measured."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri import exporter
from colibri.build import toolchain
from colibri.errors import ColibriError
from colibri.ir.graph import Graph, Router
from colibri.reference import ops
from colibri.reference.interpreter import Trace, run
from colibri.report import routes, traces
from colibri.runtime import engine
from tests.engine.conftest import compile_c, compiler
from tests.graphs import expert, linear
from tests.report.models import WIDTH, chosen_by_input, eight_experts, every_route, token_for

HERE = Path(__file__).parent
UNEQUAL = [(2, [40, 90, 20, 60]), (1, [30, 110, 70])]  # layers: k, hidden width of every expert


def macs_run(export: exporter.Export, row: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Multiply-accumulates of one row, counted product by product as the reference interpreter makes them."""
    total = 0
    plain = ops.linear

    def counted(x: Any, weight: Any, *rest: Any) -> Any:
        nonlocal total
        total += x.size // x.shape[-1] * weight.shape[0] * weight.shape[1]
        return plain(x, weight, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "linear", counted)
        run(export.graph, [row[None]])
    return total


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("fmt", ["fp32", "int8"])
def test_the_worst_route_of_all_costs_what_the_report_and_the_header_say(
    tokens: int, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = chosen_by_input(UNEQUAL, tokens, fmt)
    package = engine.load(export.image).package
    ways = list(itertools.product(every_route(UNEQUAL), repeat=tokens))
    rows = np.stack([np.stack([token_for(route, UNEQUAL) for route in way]) for way in ways])
    taken = engine.load(export.image).routes(rows)
    assert len({tuple(np.sort(layer[n]).tobytes() for layer in taken) for n in range(len(ways))}) == 18**tokens
    macs = [macs_run(export, row, monkeypatch) for row in rows]
    sizes = [int(e["bytes"]) for e in package.experts]
    first = [int(layer["first_expert"]) for layer in package.layers]
    read = [
        int(package.header["shared_bytes"])
        + sum(sizes[at + e] for at, layer in zip(first, taken, strict=True) for e in set(layer[n].reshape(-1).tolist()))
        for n in range(len(ways))
    ]
    found = routes.budget(package)
    assert found.worst_macs == max(macs) == int(package.header["worst_macs"]) == export.program.macs
    assert found.worst_bytes == max(read) == int(package.header["worst_bytes"]) == export.program.weight_bytes
    assert (found.least_macs, found.least_bytes) == (min(macs), min(read))
    assert [sorted(layer.costliest) for layer in found.layers] == [[1, 3], [1]]
    assert [sorted(layer.cheapest) for layer in found.layers] == [[0, 2], [0]]
    assert f"MODEL_WORST_MACS {found.worst_macs}u" in export.files()["model.h"].decode()


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_the_engine_and_the_exporter_agree_on_the_costliest_experts(data: st.DataObject) -> None:
    """The validator refuses a file whose header does not state the true cost."""
    widths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=9))
    k = data.draw(st.integers(1, len(widths)))
    export = chosen_by_input([(k, widths)])
    found = routes.budget(engine.load(export.image).package)
    costs = sorted((int(e["macs"]) for e in engine.load(export.image).package.experts), reverse=True)
    assert found.worst_macs == found.header_macs == sum(costs[:k])
    assert found.least_macs == sum(costs[-k:])


def test_a_row_reads_every_page_of_its_experts_and_none_of_any_other(tmp_path: Path) -> None:
    export = chosen_by_input(UNEQUAL)
    (tmp_path / "model.bin").write_bytes(export.image)
    model = engine.load(export.image)
    found = routes.budget(model.package)
    ways = [((1, 3), (1,)), ((0, 2), (0,)), ((2, 3), (2,))]  # the worst, the least, and one between
    rows = np.stack([token_for(way, UNEQUAL)[None] for way in ways])
    np.save(tmp_path / "rows.npy", rows)
    done = subprocess.run([sys.executable, HERE / "pages.py", tmp_path / "model.bin", tmp_path / "rows.npy"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    read = []
    for way, pages in zip(ways, json.loads(done.stdout), strict=True):
        directory = {(int(e["layer"]), int(e["index"])): e for e in model.package.experts}
        mine = [directory[layer, e] for layer, chosen in enumerate(way) for e in chosen]
        want = [
            page for e in mine for page in range(int(e["offset"]) // 4096, -(-int(e["offset"] + e["bytes"]) // 4096))
        ]
        assert pages == want
        assert 0 <= len(pages) * 4096 - sum(int(e["bytes"]) for e in mine) < len(mine) * 4096
        read.append(int(model.package.header["shared_bytes"]) + sum(int(e["bytes"]) for e in mine))
    assert read[:2] == [found.worst_bytes, found.least_bytes] and read[1] < read[2] < read[0]


def test_no_route_is_deeper_than_the_stack_bound(tmp_path: Path) -> None:
    gcc = compiler("gcc")
    export = chosen_by_input(UNEQUAL, fmt="int8")
    exporter.write(export, tmp_path)
    built = toolchain.build(tmp_path, compiler=gcc)
    assert built.stack is not None
    rows = np.stack([token_for(route, UNEQUAL) for route in every_route(UNEQUAL)])
    (tmp_path / "rows").write_bytes(rows.astype("<f4").tobytes())
    program = compile_c(gcc, tmp_path / "stack", [HERE / "stack.c", built.static_library], "-std=gnu11", "-O1",
                        "-pthread", "-Wl,-z,now")  # fmt: skip
    arguments = (tmp_path / "model.bin", len(export.image), tmp_path / "rows", len(rows), export.program.context_bytes)
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True)
    used = [int(line) for line in done.stdout.split()]
    red_zone = 128  # below a leaf's frame, which gcc does not count
    assert len(used) == 18 and 200 < min(used) <= max(used) <= built.stack["colibri_forward"] + red_zone


# --- use and balance --------------------------------------------------------------------------------------------------


def test_balance_has_the_values_of_its_formulas() -> None:
    even = routes.use(0, 2, [0, 1, 2, 3], [0.5] * 4)
    assert (even.entropy, even.effective, even.variation, even.largest, even.unused) == (
        pytest.approx(1), pytest.approx(4), 0, 0.25, 0)  # fmt: skip
    alone = routes.use(0, 1, [0, 1, 2, 3], [0, 1, 0, 0])
    assert (alone.entropy, alone.effective, alone.variation, alone.largest, alone.unused) == (
        0, 1, pytest.approx(math.sqrt(3)), 1, 3)  # fmt: skip
    half = routes.use(0, 1, [0, 1, 2, 3], [0.5, 0.5, 0, 0])
    assert (half.entropy, half.effective, half.variation) == (pytest.approx(0.5), pytest.approx(2), pytest.approx(1))
    assert routes.use(0, 1, [0], [1.0]).entropy == 1
    nothing = routes.use(0, 1, [0, 1], [0.0, 0.0])
    assert (nothing.entropy, nothing.effective, nothing.unused) == (0, 0, 2)


def test_measured_use_is_counted_over_the_rows() -> None:
    model = engine.load(chosen_by_input(UNEQUAL).image)
    ways = [((0, 1), (2,)), ((0, 3), (2,)), ((0, 1), (0,)), ((1, 2), (2,))]
    rows = np.stack([token_for(way, UNEQUAL)[None] for way in ways])
    first, second = routes.measured_use(model.package, traces.record(model, [rows]))
    assert first.shares == [0.75, 0.75, 0.25, 0.25] and second.shares == [0.25, 0, 0.75]
    assert second.unused == 1 and sum(first.shares) == 2


def test_calibrated_use_is_that_of_the_calibration_rows() -> None:
    export = eight_experts(2)
    model = engine.load(export.image)
    rows = np.random.default_rng(0).standard_normal((64, 1, WIDTH), np.float32)  # what an export without rows runs
    measured = routes.measured_use(model.package, traces.record(model, [rows]))
    for calibrated, counted in zip(routes.calibrated_use(model.package), measured, strict=True):
        assert calibrated.shares == pytest.approx(counted.shares)


# --- flips ------------------------------------------------------------------------------------------------------------


def gated(scale: float = 0.0, kept: Sequence[int] = range(6), fmt: str = "fp32") -> exporter.Export:
    """Two MoE layers, the second's router behind the first; the first router disturbed, the second's experts pruned."""
    rng = np.random.default_rng(3)
    graph = Graph("gated")
    x = graph.add_input("x", (2, 16))
    first = rng.standard_normal((6, 16)) + scale * np.random.default_rng(5).standard_normal((6, 16))
    logits = graph.add("linear", x, graph.add_constant("gate", first))
    experts = [expert(e, 16, 24, 16, 0, fmt) for e in range(6)]
    value = graph.add("moe", x, logits, router=Router(6, 2, "softmax", "sum"), experts=experts)
    hidden = linear(graph, rng, value, 16, True, fmt)
    second = graph.add_constant("gate2", rng.standard_normal((6, 16))[list(kept)])
    graph.outputs = [
        graph.add("moe", hidden, graph.add("linear", hidden, second),
                  router=Router(len(kept), 1), experts=[expert(10 + e, 16, 8, 16, 1, fmt) for e in kept])
    ]  # fmt: skip
    return exporter.build(graph, max_batch=16)


def loaded(export: exporter.Export, kept: Sequence[int] = range(6)) -> engine.Model:
    """The model, its second layer's experts under their original numbers."""
    model = engine.load(export.image)
    experts = model.package.experts.copy()
    experts["index"][6:] = kept
    object.__setattr__(model.package, "experts", experts)
    return model


ROWS = np.random.default_rng(1).standard_normal((100, 2, 16), np.float32)


def test_an_export_does_not_flip_against_itself() -> None:
    for layer in routes.flips(loaded(gated()), loaded(gated()), [ROWS]):
        assert layer.flips.flipped == 0 and layer.flips.tokens == 200 and layer.flipped_margins == [None] * 5
        assert all(q is not None and q >= 0 for q in layer.margins)


def test_flips_are_the_tokens_that_went_elsewhere_with_the_references_margins() -> None:
    ours, theirs = gated(0.1), gated()
    before, after = Trace(), Trace()
    run(theirs.graph, [ROWS], before)
    run(ours.graph, [ROWS], after)
    found = routes.flips(loaded(ours), loaded(theirs), [ROWS])
    assert found[0].flips.flipped > 0 and found[1].flips.flipped > 0
    for layer, old, new, logits in zip(found, before.routes, after.routes, before.logits, strict=True):
        k = old.shape[-1]
        sets = [[set(t) for t in r.reshape(-1, k).tolist()] for r in (old, new)]
        changed = [n for n, (a, b) in enumerate(zip(*sets, strict=True)) if a != b]
        ranked = np.sort(logits.reshape(-1, 6), axis=1)[:, ::-1].astype(float)
        margins = ranked[:, k - 1] - ranked[:, k]
        assert layer.flips.flipped == len(changed)
        assert sum(n for _, _, n in layer.flips.pairs) == sum(len(sets[0][n] - sets[1][n]) for n in changed)
        assert layer.margins == pytest.approx(list(np.quantile(margins, routes.QUANTILES)))
        assert layer.flipped_margins == pytest.approx(list(np.quantile(margins[changed], routes.QUANTILES)))
        assert layer.flips.median_margin == pytest.approx(layer.flipped_margins[2])
    flipped, whole = found[0].flipped_margins[2], found[0].margins[2]
    assert flipped is not None and whole is not None and flipped < whole  # the undecided change their mind


def test_quantising_flips_only_behind_what_it_changed() -> None:
    narrow, wide = loaded(gated(fmt="int4")), loaded(gated(fmt="int4 with outliers"))
    first, second = routes.flips(narrow, wide, [ROWS])
    assert first.flips.flipped == 0 < second.flips.flipped


def test_a_pruned_export_flips_where_its_expert_was_chosen() -> None:
    kept = [0, 1, 3, 5]
    whole, pruned = loaded(gated()), loaded(gated(kept=kept), kept)
    chosen = whole.routes(ROWS)[1].reshape(-1)
    first, second = routes.flips(pruned, whole, [ROWS])
    assert first.flips.flipped == 0
    assert second.flips.flipped == np.isin(chosen, [2, 4]).sum() > 0
    assert {a for a, _, _ in second.flips.pairs} <= {2, 4} and {b for _, b, _ in second.flips.pairs} <= set(kept)
    assert second.flips.usage_now[2] == second.flips.usage_now[4] == 0
    back = routes.flips(whole, pruned, [ROWS])[1]
    assert back.flips.flipped == second.flips.flipped and {b for _, b, _ in back.flips.pairs} <= {2, 4}


def test_two_different_models_are_not_compared() -> None:
    with pytest.raises(ColibriError, match="not exports of one model"):
        routes.flips(loaded(gated()), engine.load(eight_experts().image), [ROWS])
