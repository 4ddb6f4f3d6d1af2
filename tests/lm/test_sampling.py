"""The sampler of colibri_lm.h against one written here, which sorts where C keeps a heap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri._engine import ffi, lib
from colibri.reference import elementary

F = np.float32
MASK = (1 << 64) - 1


def sample(logits: Any, draws: int = 1, history: Any = (), **options: Any) -> list[int]:
    """Tokens drawn by C, one after another from the same logits."""
    logits, seen = np.asarray(logits, F), np.asarray(history, np.int32)
    sampler = ffi.new("colibri_sampler_t *", {"history_count": len(seen), **options})
    sampler.history = ffi.from_buffer("int32_t[]", seen)
    scratch, drawn = np.empty(len(logits), np.int32), []
    for _ in range(draws):
        row = logits.copy()
        drawn.append(lib.colibri_lm_sample(sampler, ffi.from_buffer("float[]", row), len(row),
                                           ffi.from_buffer("int32_t[]", scratch)))  # fmt: skip
    return drawn


def uniform(state: int) -> tuple[int, np.float32]:
    """SplitMix64's next state and its number from 0 to below 1."""
    z = state = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return state, F((z ^ z >> 31) >> 40) * F(2**-24)


@np.errstate(all="ignore")  # C lets logits overflow
def expected(
    logits: Any, draws: int = 1, history: Any = (), *, temperature: float = 0.0, top_k: int = 0, top_p: float = 0.0,
    min_p: float = 0.0, repetition_penalty: float = 0.0, seed: int = 0,
) -> list[int]:  # fmt: skip
    x, penalty = np.asarray(logits, F).copy(), F(repetition_penalty)
    if penalty not in (0, 1):
        for i in set(history):
            x[i] = x[i] / penalty if x[i] > 0 else x[i] * penalty
    best = max(range(len(x)), key=lambda i: (not np.isnan(x[i]), F(0) if np.isnan(x[i]) else x[i], -i))
    if not temperature:
        return [best] * draws
    weights = elementary.exp((x - x[best]) / F(temperature))
    weights[best] = 1
    weights = np.where(weights >= 0, weights, F(0))
    order = sorted(range(len(x)), key=lambda i: (-weights[i], i))
    kept, total = order, F(0)
    lanes = [F(0)] * 8
    for i, w in enumerate(weights):
        lanes[i % 8] += w
    total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]))
    if 0 < top_k < len(x):
        kept, total = order[:top_k], F(0)
        for i in kept:
            total += weights[i]
    if 0 < top_p < 1 or min_p > 0:
        share, taken, so_far = F(top_p) * total if 0 < top_p < 1 else F(np.inf), [], F(0)
        for i in kept:
            if not (so_far < share and weights[i] >= F(min_p)):
                break
            taken.append(i)
            so_far += weights[i]
        kept, total = taken or kept[:1], so_far if taken else F(1)
    tokens, state = [], seed
    for _ in range(draws):
        state, u = uniform(state)
        drawn, so_far = u * total, F(0)
        for i in kept:
            so_far += weights[i]
            if so_far > drawn:
                break
        tokens.append(i)
    return tokens


def logits_of(seed: int, count: int, spread: float = 3.0) -> Any:
    return np.random.default_rng(seed).normal(0, spread, count).astype(F)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 20.0},
    "cold": {"temperature": 1e-3},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-1": {"temperature": 1.0, "top_k": 1},
    "top-k of all": {"temperature": 1.0, "top_k": 10_000},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "min-p above all": {"temperature": 1.5, "min_p": 2.0},
    "all filters": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    "penalty, greedy": {"repetition_penalty": 1.5},
    "reward": {"temperature": 1.0, "repetition_penalty": 0.7},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_the_same_tokens_as_the_reference(options: dict[str, Any], count: int) -> None:
    for seed in range(8):
        logits, history = logits_of(seed, count), [n * 3 % count for n in range(seed)]
        want = expected(logits, 20, history, seed=seed, **options)
        assert sample(logits, 20, history, seed=seed, **options) == want


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_logits_and_options(data: st.DataObject) -> None:
    draw = data.draw
    values = st.one_of(st.floats(-50, 50, width=32), st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38]))
    logits = draw(st.lists(values, min_size=1, max_size=20))
    if max((x for x in logits if x == x), default=-np.inf) == np.inf:
        logits = [min(x, 100.0) for x in logits]  # a logit of infinity: see below
    options = {
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])), "top_k": draw(st.integers(0, 22)),
        "top_p": draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])), "min_p": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "repetition_penalty": draw(st.sampled_from([0.0, 1.0, 1.3])), "seed": draw(st.integers(0, MASK)),
    }  # fmt: skip
    history = draw(st.lists(st.integers(0, len(logits) - 1), max_size=5))
    assert sample(logits, 5, history, **options) == expected(logits, 5, history, **options)


def test_of_equal_logits_the_lowest_id_comes_first() -> None:
    assert sample([1, 5, 5, 5, 0]) == [1]
    assert set(sample([1, 5, 5, 5, 0], 200, temperature=1.0, top_k=2, seed=1)) == {1, 2}


def test_minus_infinity_comes_before_a_nan() -> None:
    assert sample([np.nan, -np.inf]) == expected([np.nan, -np.inf]) == [1]


def test_a_nan_is_never_drawn_and_minus_infinity_neither() -> None:
    logits = [np.nan, 1.0, -np.inf, 1.0, np.nan]
    assert sample(logits) == [1]
    for options in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.001}):
        assert set(sample(logits, 300, temperature=2.0, seed=3, **options)) == {1, 3}
    assert sample([np.nan, np.nan, 2.0], 3, temperature=1.0) == [2, 2, 2]


def test_an_infinite_logit_is_the_answer() -> None:
    assert sample([1.0, np.inf, 2.0], 5, temperature=1.0) == [1] * 5


def test_ids_outside_the_vocabulary_are_no_history() -> None:
    assert sample([3.0, 2.9], history=[-1, 2, 1 << 30], repetition_penalty=2.0) == [0]
    assert sample([3.0, 2.9], history=[0, 0], repetition_penalty=2.0) == [1]


def test_a_seed_decides_and_another_one_differs() -> None:
    logits = logits_of(0, 100)
    runs = {seed: tuple(sample(logits, 50, temperature=1.0, seed=seed)) for seed in (0, 1, 2, MASK)}
    assert len(set(runs.values())) == len(runs)
    assert all(tuple(sample(logits, 50, temperature=1.0, seed=seed)) == run for seed, run in runs.items())


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.15}, {"repetition_penalty": 1.8}], ids=str
)
def test_tokens_are_as_frequent_as_they_are_likely(options: dict[str, Any]) -> None:
    """Pearson's chi-square stays below its 99.99th percentile; seeds are fixed, so that it does so for ever."""
    logits, temperature, draws, history = logits_of(4, 12, 1.5), 0.9, 20_000, [2, 5]
    x = logits.astype(np.float64)
    if "repetition_penalty" in options:
        for i in history:
            x[i] *= 1 / options["repetition_penalty"] if x[i] > 0 else options["repetition_penalty"]
    p = np.exp((x - x.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    if "top_k" in options:
        p[order[options["top_k"] :]] = 0
    if "top_p" in options:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= options["top_p"] * p.sum()]] = 0
    p[p < options.get("min_p", 0)] = 0
    p /= p.sum()
    seen = np.bincount(sample(logits, draws, history, temperature=temperature, seed=11, **options), minlength=len(p))
    assert not seen[p == 0].any()
    possible = p > 0
    chi = float(((seen - draws * p)[possible] ** 2 / (draws * p[possible])).sum())
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty (1931): the cube root of chi-square over its degrees is nearly normal.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3
    assert chi < limit
