"""The pin advisor on traces whose answer is known: chance, stable skew, drift, and what only looks like skew."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.errors import ColibriError
from colibri.format.package import Package
from colibri.report import advise as advisor
from colibri.report import traces
from colibri.report.advise import PAGE, advise, chi_square_tail, locality, skew
from colibri.report.traces import RouteTrace
from colibri.runtime import engine
from tests.report.models import WIDTH, eight_experts, random_trace

EVEN = [1.0] * 8
SKEWED = [1, 30, 1, 1, 1, 30, 1, 1]
MOST = 5 * PAGE  # holds three of the eight experts, which take one or two pages
PAIR = 4 * PAGE  # holds the two that a skewed trace uses


def package(layers: int = 1) -> Package:
    return engine.load(eight_experts(layers).image).package


def sizes(of: Package) -> list[int]:
    return [-(-int(e["bytes"]) // PAGE) * PAGE for e in of.experts]


def test_even_use_is_chance_and_nothing_is_pinned() -> None:
    made = package(2)
    skewed = pins = 0
    for seed in range(40):
        advice = advise(made, random_trace(EVEN, 400, layers=2, seed=seed))
        skewed += any(s.p_all < advisor.LEVEL for s in advice.skew)
        pins += any(plan.pin for plan in advice.plans)
    assert pins <= skewed <= 5  # the tests' level allows 5 % of 40, which are 2
    advice = advise(made, random_trace(EVEN, 400, layers=2))
    assert all("within chance" in plan.reason for plan in advice.plans)


def test_stable_skew_pins_the_experts_that_are_used() -> None:
    made = package(2)
    held = sizes(made)
    budget = sum(held[layer * 8 + e] for layer in range(2) for e in (1, 5))
    (plan,) = advise(made, random_trace(SKEWED, 600, layers=2), [budget]).plans
    assert plan.pin, plan.reason
    assert sorted((p.layer, p.expert) for p in plan.pins) == [(0, 1), (0, 5), (1, 1), (1, 5)]
    assert plan.pinned_bytes == budget
    assert plan.policies["static"].bytes.value < plan.policies["lru"].bytes.value
    assert plan.gain.low > 0 and "not chosen on" in plan.reason
    for pin in plan.pins:
        entry = made.experts[pin.entry]
        assert (pin.offset, pin.bytes) == (int(entry["offset"]), int(entry["bytes"]))
        assert (pin.layer, pin.expert) == (int(entry["layer"]), int(entry["index"]))
        assert pin.share > 0.8


def test_drift_is_not_pinned() -> None:
    weights = np.ones((600, 8))
    weights[:300, [0, 1]] = weights[300:, [6, 7]] = 30
    reasons = []
    for seed in range(10):
        for plan in advise(package(), random_trace(weights, 600, seed=seed), [PAIR, MOST, 2 * PAIR]).plans:
            assert not plan.pin
            reasons.append(plan.reason)
    assert sum("no less than LRU" in reason for reason in reasons) >= 20


def test_no_choice_is_no_skew() -> None:
    made = engine.load(eight_experts(1, 8).image).package
    advice = advise(made, RouteTrace([np.tile(np.arange(8, dtype=np.int32), (50, 1, 1))]))
    assert advice.skew[0].method == "no choice" and not any(plan.pin for plan in advice.plans)


def test_a_budget_for_everything_or_nothing_needs_no_advice() -> None:
    made = package()
    nothing, everything = advise(made, random_trace(SKEWED, 200), [100, sum(sizes(made))]).plans
    assert not nothing.pin and "holds no expert" in nothing.reason
    assert not everything.pin and "holds every expert" in everything.reason
    assert everything.policies["optimum"].bytes.value == 0


def test_nothing_is_judged_on_the_rows_it_was_learned_from() -> None:
    """The second half changes no pin, and the first changes no figure of static except through its pins."""
    trace = random_trace(SKEWED, 600)
    other = RouteTrace([trace.layers[0].copy()])
    other.layers[0][300:] = random_trace(SKEWED, 300, seed=9).layers[0]
    plans = [advise(package(), t, [PAIR]).plans[0] for t in (trace, other)]
    assert plans[0].pin and plans[1].pin and plans[0].pins == plans[1].pins
    shuffled = RouteTrace([np.concatenate([np.random.default_rng(1).permutation(trace.layers[0][:300]),
                                      trace.layers[0][300:]])])  # fmt: skip
    again = advise(package(), shuffled, [PAIR]).plans[0]
    assert again.policies["static"] == plans[0].policies["static"]


def test_the_optimum_is_best_and_intervals_hold_the_estimate() -> None:
    for seed, weights in enumerate((EVEN, SKEWED)):
        for plan in advise(package(), random_trace(weights, 300, seed=seed)).plans:
            for policy in plan.policies.values():
                assert policy.bytes.value >= plan.policies["optimum"].bytes.value
                for estimate in (policy.bytes, policy.hits):
                    assert estimate.low <= estimate.value <= estimate.high


def test_advice_is_the_same_every_time() -> None:
    trace = random_trace(SKEWED, 200)
    assert advise(package(), trace).to_dict() == advise(package(), trace).to_dict()


# --- the tests of skew ------------------------------------------------------------------------------------------------

CRITICAL = [(3.841458820694124, 1, 0.05), (5.991464547107979, 2, 0.05), (7.814727903251179, 3, 0.05),
            (18.307038053275146, 10, 0.05), (23.209251158954356, 10, 0.01), (124.34211340400407, 100, 0.05),
            (0.0, 7, 1.0)]  # fmt: skip


@pytest.mark.parametrize(("x", "freedom", "p"), CRITICAL)
def test_the_chi_square_tail_has_the_tables_values(x: float, freedom: int, p: float) -> None:
    assert chi_square_tail(x, freedom) == pytest.approx(p, rel=1e-9)


def test_the_chi_square_tail_holds_far_out_and_for_many_degrees() -> None:
    assert chi_square_tail(1e5, 63) == 0
    assert 0.4 < chi_square_tail(4095, 4095) < 0.5
    assert chi_square_tail(1e-9, 4095) == pytest.approx(1)


@pytest.mark.parametrize(
    ("rows", "k", "method"), [(400, 1, "chi-square"), (400, 3, "chi-square"), (12, 2, "Monte Carlo")]
)
def test_chance_is_called_skew_as_often_as_stated(rows: int, k: int, method: str) -> None:
    found = [skew(random_trace(EVEN, rows, k, seed=seed).layers[0], 0, 8) for seed in range(300)]
    assert {s.method for s in found} == {method}
    assert sum(s.p < 0.05 for s in found) <= 0.08 * 300  # 5 % and three standard deviations of 300 trials
    assert sum(s.p < 0.5 for s in found) >= 0.25 * 300  # and the test is not empty: the correction may only be careful


def test_rows_like_their_neighbours_are_no_skew() -> None:
    """Experts used evenly in the long run, but for ten rows at a time: independent rows would look skewed."""
    wrong = naive = 0
    for seed in range(60):
        chosen = np.repeat(random_trace(EVEN, 40, 1, seed=seed).layers[0], 10, axis=0)
        s = skew(chosen, 0, 8)
        assert s.design_effect > 2
        wrong += s.p < 0.05
        naive += chi_square_tail(s.statistic * s.design_effect, s.freedom) < 0.05
    assert naive > 40 and wrong < 12


def test_skew_is_found_in_few_and_in_many_rows() -> None:
    assert skew(random_trace(SKEWED, 15).layers[0], 0, 8).p < 0.01
    assert skew(random_trace(SKEWED, 2000).layers[0], 0, 8).p < 1e-6


def test_layers_are_judged_together() -> None:
    advice = advise(package(2), RouteTrace([random_trace(EVEN, 300).layers[0], random_trace(SKEWED, 300).layers[0]]))
    even, uneven = advice.skew
    assert uneven.p_all == min(1, 2 * uneven.p) < 0.05 < even.p_all
    assert even.p_all >= even.p


def test_locality_is_what_neighbours_share_beyond_chance() -> None:
    cycle = np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]] * 10, np.int32)
    near = locality(cycle)
    assert near.overlap == pytest.approx(20 / 39) and near.chance == pytest.approx(19 / 39)
    independent = locality(random_trace(SKEWED, 4000).layers[0])
    assert independent.overlap == pytest.approx(independent.chance, abs=0.02)
    assert locality(np.repeat(random_trace(EVEN, 50).layers[0], 20, axis=0)).overlap > 0.9


def test_dropped_choices_count_as_no_expert() -> None:
    chosen = random_trace(EVEN, 60).layers[0].copy()
    chosen[::3, :, 1] = traces.NONE
    advice = advise(package(), RouteTrace([chosen]))
    assert advice.asked < advise(package(), random_trace(EVEN, 60)).asked
    assert locality(np.full((5, 1, 2), traces.NONE, np.int32)).overlap == 0


# --- traces -----------------------------------------------------------------------------------------------------------


def test_a_recorded_trace_is_what_the_model_routes_and_survives_the_file(tmp_path: Path) -> None:
    model = engine.load(eight_experts(2).image)
    x = np.random.default_rng(0).standard_normal((50, 1, WIDTH), np.float32)
    recorded = traces.record(model, [x])
    traces.save(recorded, tmp_path / "trace")
    for want, have in zip(model.routes(x), traces.load(tmp_path / "trace").layers, strict=True):
        assert np.array_equal(want, have)


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    traces.save(random_trace(EVEN, 60), path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at])
        with pytest.raises(ColibriError, match="trace"):
            traces.load(path)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(ColibriError):  # a byte that nobody reads may differ
            assert [layer.shape for layer in traces.load(path).layers] == [(60, 1, 2)]
    one = np.zeros((3, 1, 1), np.int32)
    wrong: dict[str, dict[str, Any]] = {
        "no version": {"layer_0": one},
        "a gap": {"colibri_trace": 1, "layer_1": one},
        "floats": {"colibri_trace": 1, "layer_0": one.astype(float)},
        "no rows": {"colibri_trace": 1, "layer_0": one[:0]},
    }
    for name, arrays in wrong.items():
        np.savez(path, **arrays)
        with pytest.raises(ColibriError, match="no trace"):
            traces.load(path)
            pytest.fail(name)


def pruned(full: Package, kept: list[int]) -> Package:
    """The directory as it is after pruning: fewer experts, under their original numbers."""
    layers = full.layers.copy()
    layers["experts"] = len(kept)
    return dataclasses.replace(full, layers=layers, experts=full.experts[kept].copy())


def test_a_trace_of_the_whole_model_serves_a_pruned_one_that_has_its_experts() -> None:
    small = pruned(package(), [1, 2, 5, 7])
    trace = random_trace([1e-300, 1, 1, 1e-300, 1e-300, 1, 1e-300, 1], 60)
    found = traces.positions(trace, small)[0]
    assert np.array_equal(np.array([1, 2, 5, 7])[found], trace.layers[0])
    assert {p.expert for p in advise(small, random_trace([1e-300, 9, 1, 1e-300, 1e-300, 9, 1e-300, 1], 400),
                                     [PAIR]).plans[0].pins} <= {1, 2, 5, 7}  # fmt: skip
    with pytest.raises(ColibriError, match=r"expert [0346] in layer 0"):
        traces.positions(random_trace(EVEN, 60), small)


def test_a_trace_of_another_model_is_refused() -> None:
    with pytest.raises(ColibriError, match="2 MoE layers"):
        advise(package(), random_trace(EVEN, 60, layers=2))
    with pytest.raises(ColibriError, match="expert 9"):
        advise(package(), RouteTrace([np.full((60, 1, 1), 9, np.int32)]))
    for strange in (-2, 2**31 - 1, -(2**31)):
        with pytest.raises(ColibriError, match=f"expert {strange} in"):
            advise(package(), RouteTrace([np.full((60, 1, 1), strange, np.int32)]))
    with pytest.raises(ColibriError, match="record more"):
        advise(package(), random_trace(EVEN, 39))
