"""Replay of caching policies: sequences worked out by hand, and the optimum below every other policy, always."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.report import replay

A, B, C = 0, 1, 2


def singles(text: str) -> list[list[int]]:
    return [["abcdefg".index(letter)] for letter in text]


BY_HAND = [
    # policy, requests, sizes, budget, bytes read for each
    (replay.lru, "abacba", [1, 1, 1], 2, [1, 1, 0, 1, 1, 1]),
    (replay.lfu, "abacba", [1, 1, 1], 2, [1, 1, 0, 1, 1, 0]),
    (replay.optimum, "abacba", [1, 1, 1], 2, [0, 0, 0, 1, 0, 0]),
    (replay.lru, "abca", [3, 2, 4], 5, [3, 2, 4, 3]),
    (replay.lru, "abcabc", [1, 1, 1], 2, [1, 1, 1, 1, 1, 1]),  # one too few: nothing is ever found
    (replay.optimum, "abcabc", [1, 1, 1], 2, [0, 0, 1, 0, 0, 1]),
    (replay.lfu, "aabbc" + "a", [1, 1, 1], 2, [1, 0, 1, 0, 1, 1]),  # of equals the one unused for longest goes
    (replay.lfu, "aabca", [1, 1, 1], 2, [1, 0, 1, 1, 0]),
    (replay.lru, "acac", [1, 1, 6], 5, [1, 6, 0, 6]),  # what cannot fit displaces nothing
    (replay.lfu, "acac", [1, 1, 6], 5, [1, 6, 0, 6]),
    (replay.optimum, "cc", [1, 1, 6], 5, [1, 1]),  # of what cannot fit it may hold a part
    (replay.lru, "ab", [2, 2], 0, [2, 2]),
    (replay.optimum, "ab", [2, 2], 0, [2, 2]),
]


@pytest.mark.parametrize(("policy", "text", "sizes", "budget", "want"), BY_HAND)
def test_policies_read_what_was_worked_out_by_hand(policy, text, sizes, budget, want) -> None:  # type: ignore[no-untyped-def]
    assert policy(singles(text), sizes, budget) == want


def test_a_row_asks_for_several_experts() -> None:
    assert replay.lru([[A, B], [A, C], [B]], [1, 2, 4], 7) == [3, 4, 0]
    assert replay.static([[A, B], [A, C], [B]], [1, 2, 4], [A, C]) == [2, 0, 2]


def test_what_to_pin_is_the_most_used_that_fits() -> None:
    asked = singles("aaabbbcc")
    assert replay.most_used(asked, [2, 2, 2], 4) == [A, B]
    assert replay.most_used(asked, [5, 2, 2], 4) == [B, C]
    assert replay.most_used(asked, [5, 5, 5], 4) == []
    assert replay.most_used([], [1], 4) == []


sequences = st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=25)
all_sizes = st.lists(st.integers(1, 9), min_size=6, max_size=6)


@given(sequences, all_sizes, st.integers(0, 40), st.integers(0, 25))
def test_no_policy_reads_less_than_the_optimum(
    requests: list[list[int]], sizes: list[int], budget: int, start: int
) -> None:
    best = sum(replay.optimum(requests[start:], sizes, budget))
    assert sum(replay.lru(requests, sizes, budget)[start:]) >= best
    assert sum(replay.lfu(requests, sizes, budget)[start:]) >= best
    assert sum(replay.static(requests[start:], sizes, replay.most_used(requests[start:], sizes, budget))) >= best
    assert sum(replay.static(requests[start:], sizes, replay.most_used(requests[:start], sizes, budget))) >= best


@given(sequences, all_sizes)
def test_a_memory_for_everything_reads_each_expert_once(requests: list[list[int]], sizes: list[int]) -> None:
    used = {e for row in requests for e in row}
    for policy in (replay.lru, replay.lfu):
        assert sum(policy(requests, sizes, sum(sizes))) == sum(sizes[e] for e in used)
    assert sum(replay.optimum(requests, sizes, sum(sizes))) == 0


@given(sequences, all_sizes, st.integers(0, 40))
def test_more_memory_never_costs_the_optimum_anything(requests: list[list[int]], sizes: list[int], budget: int) -> None:
    reads = [sum(replay.optimum(requests, sizes, b)) for b in (budget, budget + 1)]
    assert reads[0] >= reads[1]


def least_possible(text: list[int], held: int) -> int:
    """By trying every content after every request."""
    experts = range(5)
    costs = {frozenset(c): 0 for c in combinations(experts, held)}
    for e in text:
        after: dict[frozenset[int], int] = {}
        for content, cost in costs.items():
            cost += e not in content
            for kept in combinations(sorted(content | {e}), held):
                after[frozenset(kept)] = min(cost, after.get(frozenset(kept), cost))
        costs = after
    return min(costs.values())


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 4))
def test_with_equal_sizes_the_optimum_is_the_least_possible(text: list[int], held: int) -> None:
    assert sum(replay.optimum([[e] for e in text], [1] * 5, held)) == least_possible(text, held)
