"""Pruning: what is proven keeps every bit for every input, what is asked for is measured, and what went is gone."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colibri
from colibri import exporter
from colibri.errors import ExportError
from colibri.exporter import Selection
from colibri.ir import graph
from colibri.ir.graph import Graph, Router
from colibri.passes import prune
from colibri.reference.interpreter import Trace, run
from colibri.runtime import engine
from tests.cli.test_cli import colibri_command, source, succeed  # noqa: F401
from tests.engine.conftest import compile_c, compiler
from tests.graphs import FORMATS, ROUTERS, expert
from tests.pipeline.test_export import moe_graph

Floats = np.ndarray[Any, np.dtype[np.float32]]
NONE = Selection("none")
INF = np.float32(np.inf)
SPECIAL = [np.nan, INF, -INF, 3e38, -3e38, 1e-42, -0.0, 0.0]


def routed(router: Router, weight: Any, bias: Any = None, kind: int = 0, fmt: str = "fp32", d_out: int = 4) -> Graph:
    """Tokens into an MoE behind a product with this matrix and bias."""
    made, d = Graph("routed"), np.shape(weight)[1]
    x = made.add_input("x", (d,))
    parts = [made.add_constant("router", weight)]
    parts += [] if bias is None else [made.add_constant("router.bias", bias)]
    logits = made.add("linear", x, *parts, output="logits")
    experts = [expert(e, d, 5, d_out, kind, fmt) for e in range(router.experts)]
    made.outputs = [made.add("moe", x, logits, output="mix", router=router, experts=experts)]
    return made


def proofs(made: Graph) -> list[int]:
    (node,) = made.moe_nodes()
    return list(prune.never_chosen(made, node))


def beasts(rng: np.random.Generator, count: int, d: int) -> Floats:
    """Rows of every kind: ordinary, tiny, huge, and with values that are no ordinary numbers."""
    x = (rng.standard_normal((count, d)) * 10.0 ** rng.integers(-3, 4, (count, 1))).astype(np.float32)
    x[rng.random(x.shape) < 0.15] = 0
    odd = (rng.random(x.shape) < 0.3) & (rng.random((count, 1)) < 0.5)
    x[odd] = rng.choice(np.array(SPECIAL, np.float32), int(odd.sum()))
    x[0], x[1], x[2] = np.nan, INF, 3e38
    return x


@st.composite
def tied_routers(draw: st.DrawFn) -> Graph:
    """Routers whose rows come from few, whose biases tie, nearly tie or are -inf, with every score."""
    experts = draw(st.integers(1, 10))
    k = draw(st.integers(1, min(3, experts)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    d = draw(st.sampled_from([1, 3, 9, 300]))
    patterns = rng.standard_normal((3, d)).astype(np.float32)
    patterns[0] = rng.choice(np.array([0.0, -0.0, 1.0], np.float32), d)
    weight = patterns[[draw(st.integers(0, 2)) for _ in range(experts)]]
    near = np.array([0.0, -0.0, 1.0, np.nextafter(np.float32(1), np.float32(2)), -2.0, 3e38], np.float32)
    bias = np.array([draw(st.sampled_from([*near, -INF])) for _ in range(experts)], np.float32)
    score, normalize = draw(st.sampled_from(ROUTERS))
    router = Router(experts, k, score, normalize, draw(st.sampled_from([1.0, 2.5])))
    return routed(router, weight, draw(st.sampled_from([None, bias])), draw(st.sampled_from([0, 1])),
                  draw(st.sampled_from(["fp32", "int8", "int4"])))  # fmt: skip


@given(tied_routers(), st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=150)
def test_proven_pruning_keeps_every_choice_and_every_bit(made: Graph, seed: int) -> None:
    whole, pruned = exporter.build(made, selection=NONE), exporter.build(made, max_batch=5)
    x = beasts(np.random.default_rng(seed), 40, made.shapes["x"][0])
    before, after = engine.load(whole.image), engine.load(pruned.image)
    chosen = before.routes(x)[0]
    assert np.array_equal(chosen, after.routes(x)[0])
    gone = {p.expert: p.reason for p in pruned.pruning.experts}
    always = [e for e, reason in gone.items() if "every input but" not in reason]
    assert not np.isin(chosen, always).any()
    # The other proofs speak of inputs whose logits keep k experts ahead.
    trace = Trace()
    run(made, [x], trace)
    logits = trace.logits[0].reshape(len(x), -1)
    held = np.array([[(row[e + 1 :] > -np.inf).sum() + e for e in gone if e not in always] for row in logits])
    spoken = (held.reshape(len(x), -1) >= chosen.shape[-1]).all(axis=1)
    assert not np.isin(chosen[spoken], list(gone)).any()
    want, have = before(x), after(x)
    assert want[spoken].tobytes() == have[spoken].tobytes()
    assert have.tobytes() == run(pruned.graph, [x])[0].tobytes()


ROW, OTHER = [1.0, 2.0], [1.0, 2.5]
DECIDED: list[tuple[str, int, list[list[float]], list[float] | None, list[int]]] = [
    ("a router of zeros always takes the first", 2, [[0.0, 0.0]] * 4, None, [2, 3]),
    ("the same row and bias: the lower number wins", 1, [ROW, OTHER, ROW], [0, 0, 0], [2]),
    ("a larger bias at a lower number", 1, [ROW, OTHER, ROW], [1, 0, 0], [2]),
    ("a larger bias at a higher number may round to a tie", 1, [ROW, OTHER, ROW], [0, 0, 1], []),
    ("zero and minus zero are one bias", 1, [ROW, ROW], [-0.0, 0.0], [1]),
    ("rows that differ in the sign of a zero are not the same", 1, [[0.0, 1.0], [-0.0, 1.0]], None, []),
    ("one ahead is not enough for two places", 2, [ROW, OTHER, ROW], [0, 0, 0], []),
    ("a bias of -inf behind k others", 2, [ROW, OTHER, [3.0, 4.0]], [0, 0, -np.inf], [2]),
    ("a bias of -inf before the others", 1, [ROW, OTHER], [-np.inf, 0], [0]),
    ("two of three masked, k = 1", 1, [ROW, OTHER, ROW], [-np.inf, -np.inf, 0], [0, 1]),
    ("masked, but needed to make k", 2, [ROW, OTHER, ROW], [-np.inf, -np.inf, 0], [1]),
]


@pytest.mark.parametrize(("name", "k", "weight", "bias", "want"), DECIDED, ids=[d[0] for d in DECIDED])
def test_what_is_proven(name: str, k: int, weight: Any, bias: Any, want: list[int]) -> None:
    assert proofs(routed(Router(len(weight), k), weight, bias)) == want


def test_a_larger_bias_at_a_higher_number_does_round_to_a_tie() -> None:
    made = routed(Router(2, 1), [[1.0], [1.0]], [0.0, 1e-9])
    model = engine.load(exporter.build(made).image)
    assert model.routes(np.array([[100.0], [0.0]], np.float32))[0].ravel().tolist() == [0, 1]


def test_the_proof_names_who_is_ahead_and_for_which_inputs() -> None:
    made = routed(Router(4, 2, "sigmoid", "sum"), [ROW, ROW, OTHER, ROW], [1, 1, 0, 0.5])
    (found,) = exporter.build(made).pruning.experts
    assert (found.layer, found.expert, found.why) == (0, 3, "proven")
    assert "for every input: experts 0, 1, with the same router row" in found.reason
    masked = routed(Router(2, 1), [ROW, OTHER], [-np.inf, 0])
    assert "but those that are NaN or infinite" in exporter.build(masked).pruning.experts[0].reason


@dataclasses.dataclass(frozen=True)
class LaterRouter(Router):
    """A router that says more than the proofs were made for."""

    affinity: Any = None
    shards: int = 1


@pytest.mark.parametrize("extra", [{"shards": 2}, {"affinity": np.zeros(4, np.float32)}])
def test_nothing_is_proven_or_removed_of_a_router_with_fields_unknown_here(extra: Any) -> None:
    weight = [[0.0, 0.0]] * 4
    assert proofs(routed(LaterRouter(4, 2), weight)) == [2, 3]
    made = routed(LaterRouter(4, 2, **extra), weight)
    assert proofs(made) == []
    with pytest.raises(ExportError, match=f"layer 0: its router has {next(iter(extra))}"):
        prune.prune(made, Selection("proven", ((0, 3),)), [np.zeros((1, 2), np.float32)], True)


@pytest.mark.parametrize("mask", [[1], [3], [0, 2]])
def test_a_pytorch_module_whose_gate_is_masked_is_recognised_and_pruned(mask: list[int], tmp_path: Path) -> None:
    import torch
    from torch import nn

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
            with torch.no_grad():
                self.gate.bias[mask] = -np.inf

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
            w = w / w.sum(-1, keepdim=True)
            each = [(w * (chosen == e)).sum(-1, keepdim=True) * m(x) for e, m in enumerate(self.experts)]
            return torch.stack(each).sum(0)

    torch.manual_seed(0)
    report = colibri.export(Masked(), torch.randn(9, 8), tmp_path / "out")
    assert report.pruning is not None and report.pruning.by_layer() == {0: mask}
    assert report.to_dict()["pruning"]["bytes"] == report.pruning.bytes > 0 and "pruned layer 0" in str(report)


def test_nothing_is_proven_where_logits_are_more_than_a_product() -> None:
    made = routed(Router(3, 1), [[0.0, 0.0]] * 3)
    made.nodes[0] = dataclasses.replace(made.nodes[0], attrs={"activation": "tanh"})
    assert proofs(made) == []


@pytest.mark.parametrize("score", [kind for kind in ROUTERS if kind[0] != "sparse_mixer"])
def test_a_softmax_over_all_experts_still_counts_the_pruned_ones(score: tuple[str, str]) -> None:
    made = routed(Router(3, 1, *score), [ROW, OTHER, ROW], [0.5, 0, 0.5])
    whole, pruned = exporter.build(made, selection=NONE), exporter.build(made)
    assert [e.ops for e in pruned.program.experts].count(0) == 1
    x = np.random.default_rng(0).standard_normal((50, 2), np.float32)
    assert engine.load(whole.image)(x).tobytes() == engine.load(pruned.image)(x).tobytes()


def test_no_proof_is_made_of_a_router_it_does_not_cover() -> None:
    for router in (Router(3, 1, "sparse_mixer"), Router(3, 1, bias=(0.0, 1.0, 2.0)), Router(3, 1, capacity=2)):
        assert proofs(routed(router, [ROW, OTHER, ROW], [0.5, 0, 0.5])) == []


# --- on request -------------------------------------------------------------------------------------------------------


def wide(fmt: str = "fp32", k: int = 2) -> Graph:
    """Six experts of which experts 1 and 4 are far behind, but not provably so."""
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((6, 8)) / 4).astype(np.float32)
    return routed(Router(6, k, "softmax", "sum"), weight, np.float32([0, -30, 0, 0, -30, 0]), 1, fmt)


def rows(count: int = 200) -> Floats:
    return np.random.default_rng(2).standard_normal((count, 8), np.float32)


def weight_bytes(export: exporter.Export, index: int) -> bytes:
    return next(e.section.data() for e in export.program.experts if e.index == index)


@pytest.mark.parametrize("fmt", FORMATS)
def test_pruned_experts_are_gone_from_model_bin_and_model_c(fmt: str) -> None:
    made = wide(fmt)
    whole = exporter.build(made, selection=NONE)
    pruned = exporter.build(made, selection=Selection("unused", ((0, 2),)), calibration=[rows()])
    assert pruned.pruning.by_layer() == {0: [1, 2, 4]}
    array = pruned.files()["model.c"].decode().partition("= {")[2].partition("};")[0]
    values = " ".join(line for line in array.splitlines() if not line.startswith("#"))
    listed = bytes(int(b, 16) for b in values.replace(",", " ").split())
    for index in range(6):
        data = weight_bytes(whole, index)
        part = data[: len(data) // 2].rstrip(b"\0")
        assert len(part) > 16 and part in whole.image
        for held in (pruned.image, listed):
            assert (part in held) == (index not in (1, 2, 4))
    router = np.ascontiguousarray(made.array("router"))
    columns = [np.ascontiguousarray(np.pad(router, ((0, 2), (0, 0)))[:, n]).tobytes() for n in range(8)]
    assert all(c in whole.image and c not in pruned.image for c in columns)
    saved = sum(len(weight_bytes(whole, n)) for n in (1, 2, 4))
    # Random outliers make every expert a shape of its own: then it counts without the padding of its tensors.
    assert pruned.pruning.bytes == saved or ("outliers" in fmt and saved / 3 < pruned.pruning.bytes < saved)
    assert len(pruned.image) <= len(whole.image) - 3 * 4096


def test_a_proven_expert_is_gone_from_model_bin_and_model_c() -> None:
    made = routed(Router(3, 1), [ROW, ROW, OTHER])
    whole, pruned = exporter.build(made, selection=NONE), exporter.build(made)
    data = weight_bytes(whole, 1)[:60]
    assert data in whole.image and data not in pruned.image
    text = pruned.files()["model.c"].decode()
    assert ", ".join(f"0x{b:02X}" for b in data[:20]) in whole.files()["model.c"].decode().replace(",\n    ", ", ")
    assert ", ".join(f"0x{b:02X}" for b in data[:20]) not in text.replace(",\n    ", ", ")
    assert pruned.pruning.bytes == len(weight_bytes(whole, 1))


def test_the_next_best_take_over_and_the_change_is_measured() -> None:
    made, x = wide(), rows()
    whole = engine.load(exporter.build(made).image)
    pruned = exporter.build(made, selection=Selection("proven", ((0, 3),)), calibration=[x])
    model, effect = engine.load(pruned.image), pruned.pruning.effect
    before, after = whole.routes(x)[0][:, 0], model.routes(x)[0][:, 0]
    assert effect is not None and effect.given and effect.rows == len(x)
    touched = (before == 3).any(axis=1)
    assert effect.layers == [prune.Rerouted(0, len(x), int(touched.sum()))] and 0 < touched.sum() < len(x)
    assert 3 not in after
    delta = np.abs(model(x).astype(np.float64) - whole(x))
    assert effect.outputs[0].largest == delta.max() > 0 and np.isclose(effect.outputs[0].mean, delta.mean(), rtol=1e-12)
    # Both chose the same two, and a softmax divided by its sum over the chosen is the same up to rounding.
    np.testing.assert_allclose(model(x)[~touched], whole(x)[~touched], rtol=1e-5, atol=1e-6)
    assert "rerouted" in str(pruned.pruning) and "requested" in str(pruned.pruning)


def test_experts_keep_their_original_numbers_in_reports() -> None:
    pruned = exporter.build(wide(), selection=Selection("unused"), calibration=[rows()])
    model = engine.load(pruned.image)
    assert model.package.numbers(0).tolist() == [0, 2, 3, 5] and model.package.pruned == {0: [1, 4]}
    assert set(model.routes(rows())[0].ravel().tolist()) == {0, 2, 3, 5}
    assert model.package.summary()["layers"][0]["pruned"] == [1, 4]
    assert model.package.experts["index"].tolist() == [0, 2, 3, 5]
    assert [p.expert for p in pruned.pruning.experts] == [1, 4]
    model.selftest()


def test_unused_prefers_the_exact_way_where_there_is_a_proof() -> None:
    made = wide()
    made.constants["router"] = np.concatenate([made.array("router")[:5], made.array("router")[:1]])
    made.constants["router.bias"] = np.float32([0, -30, 0, 0, -30, -1])
    made.nodes[1] = dataclasses.replace(made.nodes[1], attrs={**made.nodes[1].attrs, "router": Router(6, 1)})
    found = exporter.build(made, selection=Selection("unused"), calibration=[rows()]).pruning.experts
    assert [(p.expert, p.why) for p in found] == [(1, "unused"), (4, "unused"), (5, "proven")]


def test_a_proof_that_rested_on_an_expert_that_goes_is_not_used() -> None:
    made = routed(Router(3, 1), [ROW, ROW, OTHER], [0, 0, 0])
    x = np.random.default_rng(0).standard_normal((50, 2), np.float32)
    assert exporter.build(made).pruning.by_layer() == {0: [1]}
    asked = exporter.build(made, selection=Selection("proven", ((0, 0),)), calibration=[x])
    assert asked.pruning.by_layer() == {0: [0]}
    assert set(engine.load(asked.image).routes(x)[0].ravel().tolist()) == {1, 2}


def test_logits_that_are_no_product_lose_their_columns() -> None:
    made = moe_graph(Router(4, 2, "softmax", "sum"))
    x = np.random.default_rng(0).standard_normal((30, 1, 6), np.float32)
    pruned = exporter.build(made, selection=Selection("none", ((0, 1),)), calibration=[x])
    model = engine.load(pruned.image)
    kept = [0, 2, 3]
    want = np.array(kept)[np.argsort(-x[:, :, kept], axis=-1, kind="stable")[..., :2]]
    assert np.array_equal(model.routes(x)[0], want)


REFUSED = [
    (Selection("proven", ((1, 0),)), "no layer 1"),
    (Selection("proven", ((0, 6),)), "no expert 6: it has 0 to 5"),
    (Selection("proven", tuple((0, e) for e in range(5))), "1 left, but its router chooses k = 2"),
    (Selection("unused"), "--calibration"),
]


@pytest.mark.parametrize(("selection", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_cannot_be_pruned_is_refused_by_name(selection: Selection, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        exporter.build(wide(), selection=selection)


def test_only_minus_infinity_and_only_at_a_router_is_allowed() -> None:
    for bias in ([np.inf, 0], [np.nan, 0]):
        with pytest.raises(ExportError, match="NaN or infinity"):
            exporter.build(routed(Router(2, 1), [ROW, OTHER], bias))
    made = Graph("dense")
    made.outputs = [made.add("linear", made.add_input("x", (2,)), made.add_constant("w", [ROW]),
                             made.add_constant("b", [-np.inf]))]  # fmt: skip
    with pytest.raises(ExportError, match="NaN or infinity"):
        exporter.build(made)


def test_a_mask_added_to_the_logits_prunes() -> None:
    made = Graph("masked")
    x = made.add_input("x", (2,))
    logits = made.add("linear", x, made.add_constant("router", [ROW, OTHER, ROW]))
    masked = made.add("binary", logits, made.add_constant("mask", [0, 0, -np.inf]), func="add")
    experts = [expert(e, 2, 5, 4, 0) for e in range(3)]
    made.outputs = [made.add("moe", x, masked, router=Router(3, 2, "logit", "softmax"), experts=experts)]
    assert exporter.build(made).pruning.by_layer() == {0: [2]}


# --- in C and on the command line -------------------------------------------------------------------------------------

RUN = r"""
#include "model.h"
#include "colibri.h"
#include <stdio.h>
_Alignas(64) static unsigned char memory[COLIBRI_MODEL_CONTEXT_BYTES];
int main(void)
{
    float x[COLIBRI_MODEL_INPUT_SIZE], y[COLIBRI_MODEL_OUTPUT_SIZE];
    colibri_context_t *ctx = colibri_init(memory, sizeof memory, colibri_model);
    while (ctx != NULL && fread(x, sizeof x, 1, stdin) == 1) {
        colibri_forward(ctx, x, y, 1);
        fwrite(y, sizeof y, 1, stdout);
    }
    return ctx == NULL;
}
"""


@pytest.mark.parametrize("sections", [False, True])
def test_generated_code_gives_the_same_bits(tmp_path: Path, sections: bool) -> None:
    made = routed(Router(4, 1, "sigmoid"), [ROW, OTHER, ROW, [3.0, -1.0]], [-np.inf, 0, 0, 0])
    export = exporter.build(made)
    assert export.pruning.by_layer() == {0: [0]}
    exporter.write(export, tmp_path, exporter.Style(expert_sections=sections))
    (tmp_path / "run.c").write_text(RUN)
    program = compile_c(compiler("gcc"), tmp_path / "run", [tmp_path / "run.c", tmp_path / "model.c"], "-std=c11",
                        "-O2", "-ffp-contract=off", "-DCOLIBRI_GENERATED", f"-I{tmp_path}")  # fmt: skip
    x = beasts(np.random.default_rng(4), 60, 2)
    done = subprocess.run([program], input=x.tobytes(), capture_output=True, check=True)
    assert done.stdout == engine.load(export.image)(x).tobytes()
    assert engine.load(export.image).routes(x[:1])[0].tolist() == [[[0]]]  # NaN takes the first: it counts as zeros


def test_the_command_line_prunes_and_reports(source: Path, tmp_path: Path) -> None:  # noqa: F811
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((40, 2, 6), np.float32))
    out = tmp_path / "out"
    common = ("export", "--model", source, "-o", out, "--calibration", tmp_path / "rows.npy")
    told = succeed(*common, "--prune-experts", "0:1")["pruning"]
    assert told["experts"][0]["expert"] == 1 and told["bytes"] > 0 and told["effect"]["layers"][0]["rerouted"] > 0
    assert colibri.load(out).package.pruned == {0: [1]}
    assert succeed("inspect", out)["layers"][0]["pruned"] == [1]
    shown = colibri_command(*common, "--prune-experts", "0:1").stdout
    assert "pruned layer 0" in shown and "rerouted" in shown
    errors = [(("--prune-experts", "3"), "0:3,0:5"), (("--prune", "some"), "proven, unused, none"),
              (("--prune-experts", "0:0,0:1"), "k = 2")]  # fmt: skip
    for args, message in errors:
        done = colibri_command(*common, *args, "--json")
        assert done.returncode == 1 and message in json.loads(done.stdout)["error"]
    done = colibri_command("export", "--model", source, "-o", out, "--prune", "unused")
    assert done.returncode == 1 and "--calibration" in done.stderr


def test_an_absent_expert_is_zeros_and_nothing_else_is_absent() -> None:
    body = expert(0, 3, 4, 5, 0)
    absent = graph.absent_expert(body)
    assert graph.is_absent(absent) and not graph.is_absent(body)
    assert not run(absent, [np.ones((2, 3), np.float32)])[0].any()
    name = absent.outputs[0]
    absent.constants[name] = np.float32([0, 0, -0.0, 0, 0])
    assert not graph.is_absent(absent)
