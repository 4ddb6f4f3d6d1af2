"""Stored weights stand for what they were made from, outliers pay, and formats are chosen as promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from colibri.errors import ExportError
from colibri.ir.graph import Array, Graph, Router
from colibri.ir.weights import Fp16Weight, Int4Weight, Int8Weight, StoredWeight, check, outlier_bytes
from colibri.quantize import choose, formats
from colibri.quantize.choose import Choice, quantize, stored_bytes
from colibri.quantize.report import measure, relative_error, weight_error
from colibri.reference import ops
from colibri.reference.interpreter import run

RNG = np.random.default_rng
TINY = np.float32(1e-40)  # denormal


def heavy(shape: tuple[int, int], df: float = 4, seed: int = 0) -> Array:
    """Student-t weights (rows, cols)."""
    return np.asarray(RNG(seed).standard_t(df, shape) * 0.02, np.float32)


def skewed(cols: int, seed: int = 1) -> Array:
    """Input energies (cols,) as spread as those of language models: lognormal."""
    return np.asarray(np.exp(3 * RNG(seed).standard_normal(cols)), np.float32)


def plain_int8(matrix: Array) -> Int8Weight:
    """Per-channel int8 as everyone does it: the scale holds the largest weight."""
    scale = np.abs(matrix).max(axis=1) / np.float32(127)
    return Int8Weight(np.rint(matrix / scale[:, None]).astype(np.int8), scale)


def parts(weight: Any) -> tuple[Any, ...]:
    e = weight.outliers
    return (
        weight.q.tobytes(),
        weight.scale.tobytes(),
        e and (e.counts.tobytes(), e.columns.tobytes(), e.values.tobytes()),
    )


# --- formats ----------------------------------------------------------------------------------------------------------

GAUSS = np.asarray(RNG(0).standard_normal((24, 200)), np.float32)
SPIKE = GAUSS.copy()
SPIKE[5, 7] = 1e4
EDGES: dict[str, tuple[Array, float, float]] = {  # matrix, largest relative error of int8 and int4
    "gauss": (GAUSS, 0.008, 0.1),
    "zero": (np.zeros((9, 40), np.float32), 0.0, 0.0),
    "zero rows": (GAUSS * (np.arange(24) % 2)[:, None].astype(np.float32), 0.008, 0.1),
    "equal": (np.full((8, 64), -0.3, np.float32), 1e-6, 1e-3),
    "ones": (np.ones((8, 64), np.float32), 1e-6, 1e-3),
    "one column": (GAUSS[:, :1], 1e-6, 1e-3),
    "one row": (GAUSS[:1], 0.008, 0.12),
    "one": (GAUSS[:1, :1], 1e-6, 1e-3),
    "33 columns": (np.ascontiguousarray(GAUSS[:, :33]), 0.008, 0.1),
    "spike": (SPIKE, 2e-3, 2e-3),
    "denormal": (np.full((8, 64), TINY), 0.01, 1.0),
    "denormal rows": (np.where(np.arange(24)[:, None] % 2, GAUSS, TINY), 0.008, 0.1),
    "near float16's end": (GAUSS * np.float32(1.5e4), 0.008, 0.1),
    "very wide": (np.asarray(RNG(2).standard_normal((2, 70_000)), np.float32), 0.011, 0.1),
}


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("name", EDGES)
def test_weights_come_back_close(name: str, share: float) -> None:
    matrix, most8, most4 = EDGES[name]
    for weight, most in ((formats.int8(matrix, share=share), most8), (formats.int4(matrix, share=share), most4)):
        check(weight)
        assert weight.shape == matrix.shape and np.isfinite(weight.dense()).all()
        assert weight_error(matrix, weight) <= most
        again = (formats.int8 if isinstance(weight, Int8Weight) else formats.int4)(matrix, share=share)
        assert parts(again) == parts(weight)


@pytest.mark.parametrize("encode", [formats.int8, formats.int4])
@pytest.mark.parametrize("spike", [50.0, 1e4, 6e4])
def test_the_outliers_takes_spikes_from_their_neighbours(encode: Callable[..., StoredWeight], spike: float) -> None:
    matrix = GAUSS.copy()
    matrix[:, 3] = spike
    weight = encode(matrix, share=0.1)
    check(weight)
    assert relative_error(matrix[:, 4:], weight.dense()[:, 4:]) < 1.05 * weight_error(GAUSS, encode(GAUSS, share=0.1))
    np.testing.assert_allclose(weight.dense()[:, 3], spike, rtol=1e-4)


def test_int8_reaches_beyond_float16() -> None:
    matrix = GAUSS.copy()
    matrix[:, 3] = 1e6
    weight = formats.int8(matrix, share=0.1)
    check(weight)
    assert (np.abs(weight.dense() - matrix) <= 0.51 * weight.scale[:, None]).all()


def test_saturation_stays_inside_the_limits() -> None:
    weight8, weight4 = formats.int8(heavy((64, 512)), share=0.05), formats.int4(heavy((64, 512)), share=0.05)
    assert (weight8.q.min(), weight8.q.max()) == (-127, 127)
    assert (weight4.q.min(), weight4.q.max()) == (-8, 7)


@pytest.mark.parametrize(
    ("encode", "value", "words"),
    [
        (formats.fp16, 7e4, "fp16.*int8"),
        (formats.int4, 7e4, "int4.*int8"),
        (formats.int8, 1e13, "int8.*fp32"),
        (formats.fp16, np.nan, "NaN"),
        (formats.int8, np.inf, "infinite"),
        (formats.int4, -np.inf, "infinite"),
    ],
)
def test_values_that_do_not_fit_are_refused(encode: Callable[[Array], StoredWeight], value: float, words: str) -> None:
    matrix = GAUSS.copy()
    matrix[3, 3] = value
    with pytest.raises(ExportError, match=words):
        encode(matrix)


def test_fp16_rounds_to_nearest() -> None:
    weight = formats.fp16(GAUSS)
    assert weight.dense().tobytes() == GAUSS.astype(np.float16).astype(np.float32).tobytes()
    assert 0 < weight_error(GAUSS, weight) < 5e-4


# --- the outliers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(1, 4096), (7, 1500), (64, 512), (33, 1000), (16, 64), (512, 8)])
@pytest.mark.parametrize("share", [0.01, 0.003, 0.1])
def test_outliers_has_exactly_the_entries_its_share_pays_for(kind: str, shape: tuple[int, int], share: float) -> None:
    entries = formats.outlier_entries(*shape, share, kind)
    for matrix in (heavy(shape), np.zeros(shape, np.float32)):
        weight = getattr(formats, kind)(matrix, share=share)
        check(weight)
        bare = weight.q.size / (1 if kind == "int8" else 2) + weight.scale.nbytes
        if weight.outliers is None:
            assert entries == 0 and share * bare < outlier_bytes(shape, 1)
            continue
        assert len(weight.outliers.values) == entries > 0
        room = share * bare - outlier_bytes(shape, entries)
        assert room >= 0 and (room < 5 or entries == shape[0] * shape[1])
        places = weight.outliers.rows * shape[1] + weight.outliers.columns
        assert (np.diff(places) > 0).all()


def test_one_row_may_take_most_entries() -> None:
    matrix = heavy((8, 4096)) / 100
    matrix[3] = heavy((1, 4096), 1.5)[0] * 100
    weight = formats.int8(matrix, share=0.1)
    check(weight)
    assert weight.outliers is not None and weight.outliers.counts[3] > 700
    assert len(weight.outliers.values) == formats.outlier_entries(8, 4096, 0.1, "int8")


def test_entries_go_where_the_output_error_is() -> None:
    matrix, energy = heavy((64, 1024)), skewed(1024)
    x = RNG(5).standard_normal((300, 1024)) * np.sqrt(energy)
    for encode, gain in ((formats.int8, 0.85), (formats.int4, 0.95)):
        aware, blind = (relative_error(x @ matrix.T, x @ encode(matrix, e).dense().T) for e in (energy, None))
        assert aware < gain * blind


def test_unusable_energies_count_all_inputs_alike() -> None:
    matrix = heavy((16, 512))
    for energy in (np.zeros(512, np.float32), np.full(512, np.nan, np.float32), np.full(512, np.inf, np.float32)):
        assert parts(formats.int8(matrix, energy)) == parts(formats.int8(matrix))


@pytest.mark.parametrize("df", [3, 4])
def test_heavy_tails_lose_at_most_half_of_plain_int8(df: int) -> None:
    matrix, energy = heavy((256, 2048), df), skewed(2048)
    assert weight_error(matrix, formats.int8(matrix)) < 0.5 * weight_error(matrix, plain_int8(matrix))
    error = weight_error(matrix, formats.int8(matrix, energy), energy)
    assert error < 0.5 * weight_error(matrix, plain_int8(matrix), energy)
    assert error < 0.01


def test_outliers_is_there_by_default_only_where_it_pays() -> None:
    def entries(kind: str, df: float) -> int:
        graph = Graph("one")
        weight = graph.add_constant("w", heavy((64, 1024), df))
        graph.outputs = [graph.add("linear", graph.add_input("x", (1024,)), weight)]
        stored = quantize(graph, kind)[0].constants["w"]
        assert isinstance(stored, Int8Weight | Int4Weight)
        return 0 if stored.outliers is None else len(stored.outliers.values)

    assert entries("int8", 1000) == entries("int4", 1000) == 0
    assert entries("int8", 3) == formats.outlier_entries(64, 1024, formats.SHARE, "int8")


def test_weights_beyond_float16_keep_a_finite_residual() -> None:
    matrix = heavy((64, 4096), 0.5)
    matrix = np.clip(matrix, -1e11, 1e11)
    weight = formats.int8(matrix)
    check(weight)
    assert weight_error(matrix, weight) < 0.1


def test_outliers_helps_int4_and_gaussian_weights_too() -> None:
    for matrix in (heavy((64, 1024), 3), heavy((64, 1024), 100)):
        for encode in (formats.int8, formats.int4):
            assert weight_error(matrix, encode(matrix)) < 0.99 * weight_error(matrix, encode(matrix, share=0))


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("encode", [formats.fp16, formats.int8, formats.int4])
@pytest.mark.parametrize("cols", [1, 31, 128, 300, 1024])
def test_reference_linear_is_the_stored_matrix_times_what_it_reads(
    encode: Callable[[Array], StoredWeight], activations: str, cols: int
) -> None:
    matrix, rng = heavy((20, cols)), RNG(3)
    weight, x = encode(matrix), np.asarray(rng.standard_normal((9, cols)), np.float32)
    bias = np.asarray(rng.standard_normal(20), np.float32)
    read = x.astype(np.float64)
    if isinstance(weight, Int4Weight) or (isinstance(weight, Int8Weight) and activations == "int8"):
        for start in range(0, cols, 128):
            part = read[:, start : start + 128]
            step = np.abs(part).max(axis=1, keepdims=True) / 127
            # Halves may round either way in float32, which moves the sum by less than the tolerance.
            read[:, start : start + 128] = np.rint(part / step) * step
    want = read @ weight.dense().astype(np.float64).T + bias
    np.testing.assert_allclose(ops.linear(x, weight, bias, activations), want, rtol=1e-4, atol=1e-5)


# --- choosing ---------------------------------------------------------------------------------------------------------


def linear(graph: Graph, x: str, name: str, out: int, seed: int, **attrs: Any) -> str:
    cols = graph.shapes[x][-1]
    matrix = heavy((out, cols), 4, seed) * 35 / np.sqrt(np.float32(cols))
    return graph.add("linear", x, graph.add_constant(name, matrix), output=f"{name} out", **attrs)


def model(experts: int = 4, width: int = 96) -> Graph:
    """Gate network on the input itself, so that no token flips; MoE with gated experts; head. A token is 64 numbers."""
    graph = Graph("model")
    x = graph.add_input("x", (64,))
    h = linear(graph, x, "in", 64, 1, activation="tanh")
    logits = linear(graph, linear(graph, x, "gate 1", 16, 2, activation="relu"), "gate 2", experts, 3)
    bodies = []
    for e in range(experts):
        body = Graph(f"expert{e}")
        t = body.add_input("t", (64,))
        gate = linear(body, t, "gate", width, 10 * e + 10, activation="silu")
        up = body.add("binary", gate, linear(body, t, "up", width, 10 * e + 11), func="mul")
        body.outputs = [linear(body, up, "down", 64, 10 * e + 12)]
        bodies.append(body)
    y = graph.add("moe", h, logits, output="moe", router=Router(experts, 2, normalize="sum"), experts=bodies)
    graph.outputs = [linear(graph, y, "head", 10, 4)]
    graph.validate()
    return graph


MODEL = model()
ROWS = [np.asarray(RNG(7).standard_normal((48, 64)), np.float32)]
FULL = stored_bytes(MODEL)


def formats_of(choices: list[Choice]) -> dict[str, str]:
    return {choice.name: choice.format for choice in choices}


@pytest.mark.parametrize(
    ("dtype", "kind", "most"),
    [("fp32", np.ndarray, 0.0), ("fp16", Fp16Weight, 1e-3), ("int8", Int8Weight, 0.05), ("int4", Int4Weight, 0.3)],
)
def test_every_weight_but_the_routers_takes_the_format(dtype: str, kind: type, most: float) -> None:
    new, choices = quantize(MODEL, dtype, ROWS)
    new.validate()
    kept = {choice.name for choice in choices if choice.kept == "router"}
    assert kept == {"gate 1", "gate 2"}
    for name, value in new.constants.items():
        assert isinstance(value, np.ndarray if name in kept else kind), name
    experts = next(new.moe_nodes()).attrs["experts"]
    assert all(isinstance(value, kind) for body in experts for value in body.constants.values())
    assert len({body.signature() for body in experts}) == 1
    assert sum(choice.bytes for choice in choices) == stored_bytes(new)
    assert relative_error(run(MODEL, ROWS)[0], run(new, ROWS)[0]) <= most
    assert [isinstance(v, np.ndarray) for v in MODEL.constants.values()] == [True] * 4  # the original is untouched


def test_logits_that_are_read_elsewhere_still_come_from_a_float32_router() -> None:
    graph = model(2, 8)
    logits = next(graph.moe_nodes()).inputs[1]
    graph.outputs.append(graph.add("softmax", logits))
    choices = {c.name: c for c in quantize(graph, "int8", ROWS)[1]}
    assert choices["gate 2"].kept == "router" and choices["gate 1"].format == "int8"


def test_weights_stay_that_others_read_or_that_would_not_shrink() -> None:
    graph = Graph("odd")
    x = graph.add_input("x", (4, 6))
    y = graph.add("linear", x, graph.add_constant("shared", heavy((4, 6))))
    z = graph.add("linear", graph.add("reduce", y, func="sum", axis=0), graph.add_constant("square", heavy((6, 4))))
    n = graph.add("linear", graph.add("reshape", z, shape=(6, 1)), graph.add_constant("narrow", heavy((6, 1))))
    graph.outputs = [n, graph.add("binary", x, "shared", func="add")]
    new, choices = quantize(graph, "int8", [np.ones((3, 4, 6), np.float32)])
    assert {c.name: c.kept for c in choices} == {
        "shared": "read by other operations", "square": "", "narrow": "no smaller in another format",
    }  # fmt: skip
    run(new, [np.ones((3, 4, 6), np.float32)])


def test_float_activations_are_asked_of_int8_weights_only() -> None:
    new, _ = quantize(MODEL, "int8", ROWS, activations="float")
    read = {node.inputs[1]: node.attrs.get("activations") for node in new.nodes if node.op == "linear"}
    assert read == {"in": "float", "gate 1": None, "gate 2": None, "head": "float"}
    bodies = next(new.moe_nodes()).attrs["experts"]
    assert all(n.attrs["activations"] == "float" for body in bodies for n in body.nodes if n.op == "linear")
    want = run(MODEL, ROWS)[0]
    quantised = run(quantize(MODEL, "int8", ROWS)[0], ROWS)[0]
    assert relative_error(want, run(new, ROWS)[0]) < 0.95 * relative_error(want, quantised)


@pytest.mark.parametrize("rows", [ROWS, None])
@pytest.mark.parametrize("share", [0.55, 0.4, 0.3, 0.25])
def test_mixed_meets_its_budget_and_is_reproducible(share: float, rows: list[Array] | None) -> None:
    budget = int(share * FULL)
    new, choices = quantize(MODEL, "mixed", rows, budget=budget)
    assert 0.8 * budget < stored_bytes(new) <= budget
    assert quantize(MODEL, "mixed", rows, budget=budget)[1] == choices
    assert len(set(formats_of(choices).values())) > 1
    assert all(c.format == "fp32" for c in choices if c.kept)
    assert all(c.sensitivity is not None for c in choices)


@pytest.mark.parametrize("work", [choose._MOST_WORK, 0])  # sensitivities from whole runs, from each weight's output
def test_mixed_beats_one_format(work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_MOST_WORK", work)
    one, _ = quantize(MODEL, "int4", ROWS)
    new, _ = quantize(MODEL, "mixed", ROWS, budget=stored_bytes(quantize(MODEL, "int8", ROWS)[0]))
    want = run(MODEL, ROWS)[0]
    assert relative_error(want, run(new, ROWS)[0]) < 0.5 * relative_error(want, run(one, ROWS)[0])


def test_rare_experts_are_the_first_to_shrink() -> None:
    graph = model()
    moe = next(graph.moe_nodes())
    bias = graph.add_constant("push", np.array([0, 0, 0, -1e3], np.float32))
    gate = graph.producers()[moe.inputs[1]]
    graph.nodes[graph.nodes.index(gate)] = type(gate)(gate.op, gate.output, (*gate.inputs, bias), gate.attrs)
    _, choices = quantize(graph, "mixed", ROWS, budget=int(0.8 * FULL))
    kinds = formats_of(choices)
    assert {kinds[f"moe.expert3: {name}"] for name in ("gate", "up", "down")} == {"int4"}
    assert {kind for name, kind in kinds.items() if "expert3" not in name} <= {"fp32", "fp16"}


def test_max_error_is_honoured() -> None:
    sizes = []
    for limit in (0.3, 0.03, 1e-3, 1e-9):
        new, _ = quantize(MODEL, "mixed", ROWS, max_error=limit)
        assert relative_error(run(MODEL, ROWS)[0], run(new, ROWS)[0]) <= limit
        sizes.append(stored_bytes(new))
    assert sizes == sorted(sizes) and sizes[0] < 0.3 * FULL and sizes[-1] == FULL


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        ("int4", {"max_error": 1e-3}, "output error of .*allowed"),
        ("mixed", {"budget": FULL // 4, "max_error": 1e-6}, "output error of .*allowed"),
        ("int8", {"budget": FULL // 8}, "use --dtype mixed"),
        ("mixed", {"budget": 1000}, "the smallest this model gets is [0-9,]+ bytes"),
        ("mixed", {}, "needs a budget"),
        ("int3", {}, "is not one of"),
        ("int4", {"activations": "float"}, "int8 activations"),
        ("int8", {"activations": "int4"}, "activations"),
    ],
)
def test_what_cannot_be_met_is_refused(dtype: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        quantize(MODEL, dtype, ROWS, **options)


def test_max_error_needs_rows() -> None:
    with pytest.raises(ExportError, match="calibration rows"):
        quantize(MODEL, "int8", None, max_error=0.1)


def test_a_weight_that_does_not_fit_is_named_or_passed_over() -> None:
    graph = model(2, 8)
    graph.array("head")[0, 0] = 1e5
    with pytest.raises(ExportError, match=r"head.*fp16"):
        quantize(graph, "fp16", ROWS)
    _, choices = quantize(graph, "mixed", ROWS, budget=int(0.45 * stored_bytes(graph)))
    assert formats_of(choices)["head"] in ("fp32", "int8")


def test_the_smallest_size_named_can_be_reached() -> None:
    with pytest.raises(ExportError) as refused:
        quantize(MODEL, "mixed", ROWS, budget=1)
    smallest = int(str(refused.value).split("gets is ")[1].split()[0].replace(",", ""))
    assert stored_bytes(quantize(MODEL, "mixed", ROWS, budget=smallest)[0]) == smallest


# --- report -----------------------------------------------------------------------------------------------------------


def routed(bias: list[float], k: int) -> Graph:
    """Three experts that scale by 1, 2 and 3; the input plus `bias` is the logits."""
    graph = Graph("routed")
    x = graph.add_input("x", (3,))
    logits = graph.add("binary", x, graph.add_constant("bias", np.array(bias)), func="add")
    experts = []
    for e in range(3):
        body = Graph(f"expert{e}")
        body.outputs = [body.add("linear", body.add_input("t", (3,)), body.add_constant("w", np.eye(3) * (e + 1)))]
        experts.append(body)
    moe = graph.add(
        "moe", x, logits, output="moe", router=Router(3, k, normalize="one", score="logit"), experts=experts
    )
    graph.outputs = [moe]
    return graph


TOKENS = [np.array([[3, 1, 0], [2, 1.5, 0], [0, 5, 1], [1, 0, 4]], np.float32)]


@pytest.mark.parametrize(
    ("k", "bias", "flipped", "pairs", "median", "largest", "usage"),
    [
        (1, [0, 0, 0], 0, [], 0, 0, [0.5, 0.25, 0.25]),
        (1, [0, 1, 0], 1, [(0, 1, 1)], 0.5, 0.5, [0.25, 0.5, 0.25]),
        (1, [0, 3, 0], 2, [(0, 1, 2)], 1.25, 2, [0, 0.75, 0.25]),
        (1, [0, 9, 0], 3, [(0, 1, 2), (2, 1, 1)], 2, 3, [0, 1, 0]),
        (2, [0, 0, 2.5], 2, [(1, 2, 2)], 1.25, 1.5, [0.375, 0.125, 0.5]),
    ],
)
def test_flips_are_counted(
    k: int, bias: list[float], flipped: int, pairs: list[Any], median: float, largest: float, usage: list[float]
) -> None:
    quality = measure(routed([0, 0, 0], k), routed(bias, k), TOKENS)
    (flips,) = quality.flips
    assert (flips.layer, flips.tokens, flips.flipped, flips.share) == ("moe", 4, flipped, flipped / 4)
    assert flips.pairs == pairs and flips.usage_now == usage
    assert (flips.median_margin, flips.largest_margin) == (median, largest)
    assert (quality.error > 0) == (flipped > 0)


def test_report_says_what_the_outliers_is_worth() -> None:
    new, _ = quantize(MODEL, "int8", ROWS, share=0.1)
    quality = measure(MODEL, new, ROWS, scorer=lambda outputs: float(outputs[0].mean()))
    for value in (*quality.layers, *quality.outputs):
        assert 0 < value.error < 0.5 * value.without_outliers
    assert quality.error == relative_error(run(MODEL, ROWS)[0], run(new, ROWS)[0])
    assert quality.metric is not None and quality.metric.reference == float(run(MODEL, ROWS)[0].mean())
    assert len({quality.metric.reference, quality.metric.quantised, quality.metric.without_outliers}) == 3
    text, plain = str(quality), json.loads(json.dumps(quality.to_dict()))
    assert all(word in text for word in ("layer moe", "router moe", "without E", "metric"))
    assert plain["error"] == quality.error and plain["flips"][0]["share"] == quality.flips[0].share


@pytest.mark.parametrize(
    ("want", "have", "error"),
    [([3, 4], [3, 4], 0), ([3, 4], [3, 3], 0.2), ([0, 0], [0, 0], 0), ([0, 0], [0, 1], np.inf),
     ([1, np.nan], [1, np.nan], 0), ([1, np.inf], [1, np.inf], 0), ([1, 2], [1, np.nan], np.inf)],
)  # fmt: skip
def test_relative_error(want: list[float], have: list[float], error: float) -> None:
    assert relative_error(np.array(want, np.float32), np.array(have, np.float32)) == error


def test_graphs_of_different_models_are_refused() -> None:
    with pytest.raises(ExportError, match="not of one model"):
        measure(MODEL, routed([0, 0, 0], 1), ROWS)


@pytest.mark.parametrize("width", [1, 7, 8, 31, 32, 128, 129, 300, 1027])
@pytest.mark.parametrize("limits", [(-127, 127), (-8, 7)])
def test_costs_of_scales_are_numpys(width: int, limits: tuple[int, int]) -> None:
    rng = np.random.default_rng(width)
    weight = (rng.standard_normal((5, 3, width)) * 10.0 ** rng.uniform(-30, 3, (5, 3, 1))).astype(np.float32)
    weight[rng.random(weight.shape) < 0.2] = 0
    scales = np.abs(weight).max(axis=-1) / rng.uniform(1, 200, (4, 5, 3)).astype(np.float32)
    scales[0, 0] = 0
    scales[1] *= -1
    random = np.asarray(rng.random((3, width)), np.float32)
    for energy, price in ((np.ones_like(random), np.inf), (random, np.inf), (random, 1e-3)):
        want = [np.minimum(formats._errors(weight, energy, s, limits), np.float32(price)).sum(axis=-1) for s in scales]
        assert np.array_equal(formats._costs(weight, energy, scales, limits, np.float32(price)), np.stack(want))
