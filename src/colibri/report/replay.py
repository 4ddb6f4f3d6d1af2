"""Replay of a sequence of expert requests through a memory of some bytes: what each policy would have to read.

A row is what one forward asks for. Every function gives the bytes read for each row: those of the requested experts
that were not in the memory. An expert larger than the memory passes through it and displaces nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence

Requests = Sequence[Sequence[int]]  # rows of experts; each a position in `sizes`
Sizes = Sequence[int]  # bytes an expert takes


def lru(requests: Requests, sizes: Sizes, budget: int) -> list[int]:
    """Every expert read is kept; the one unused for longest makes room."""
    held: dict[int, None] = {}  # in the order of the last use
    used, read = 0, []
    for row in requests:
        missed = 0
        for e in row:
            if e in held:
                del held[e]
            else:
                missed += sizes[e]
                if sizes[e] > budget:
                    continue
                while used + sizes[e] > budget:
                    oldest = next(iter(held))
                    del held[oldest]
                    used -= sizes[oldest]
                used += sizes[e]
            held[e] = None
        read.append(missed)
    return read


def lfu(requests: Requests, sizes: Sizes, budget: int) -> list[int]:
    """Every expert read is kept; the one requested least often so far makes room, of equals the one unused for longest.

    An expert's requests are counted from the beginning, also while it is not held.
    """
    held: set[int] = set()
    counts: Counter[int] = Counter()
    order: list[tuple[int, int, int]] = []  # heap of (requests, time of the last, expert); outdated ones are skipped
    last: dict[int, int] = {}
    used, time, read = 0, 0, []
    for row in requests:
        missed = 0
        for e in row:
            time += 1
            counts[e] += 1
            last[e] = time
            if e not in held:
                missed += sizes[e]
                if sizes[e] > budget:
                    continue
                while used + sizes[e] > budget:
                    _, when, candidate = heapq.heappop(order)
                    if candidate in held and last[candidate] == when:
                        held.remove(candidate)
                        used -= sizes[candidate]
                held.add(e)
                used += sizes[e]
            heapq.heappush(order, (counts[e], time, e))
        read.append(missed)
    return read


def static(requests: Requests, sizes: Sizes, pinned: Collection[int]) -> list[int]:
    """The pinned experts are always there, and no other ever is."""
    pinned = frozenset(pinned)
    return [sum(sizes[e] for e in row if e not in pinned) for row in requests]


def most_used(requests: Requests, sizes: Sizes, budget: int) -> list[int]:
    """The experts to pin: the most requested first, of equals the lower position, each that still fits."""
    counts = Counter(e for row in requests for e in row)
    chosen = []
    for e in sorted(counts, key=lambda e: (-counts[e], e)):
        if sizes[e] <= budget:
            chosen.append(e)
            budget -= sizes[e]
    return chosen


def optimum(requests: Requests, sizes: Sizes, budget: int) -> list[int]:
    """Belady's rule, which knows the future: evict the expert needed latest, byte by byte.

    It begins with the best content. Parts of experts may be held, so the total is a lower bound for every policy,
    for all expert sizes; with equal sizes that divide the budget, it is the least any policy can read.
    """
    flat = [e for row in requests for e in row]
    never = len(flat)
    following = [never] * never
    upcoming: dict[int, int] = {}
    for time in range(never - 1, -1, -1):
        following[time] = upcoming.get(flat[time], never)
        upcoming[flat[time]] = time
    held: dict[int, int] = {}  # bytes
    needed: dict[int, int] = {}  # the next use
    latest: list[tuple[int, int]] = []  # heap of (-next use, expert); outdated ones are skipped
    used, time, read = 0, 0, []

    def keep(e: int, at: int) -> int:
        """Hold all of an expert until its use `at`, and make room; returns the bytes in use."""
        total = used + sizes[e] - held.get(e, 0)
        held[e], needed[e] = sizes[e], at
        heapq.heappush(latest, (-at, e))
        while total > budget:
            when, candidate = latest[0]
            if needed[candidate] == -when and held[candidate]:
                cut = min(held[candidate], total - budget)
                held[candidate] -= cut
                total -= cut
            if needed[candidate] != -when or not held[candidate]:
                heapq.heappop(latest)
        return total

    for e, first in upcoming.items():
        used = keep(e, first)
    for row in requests:
        missed = 0
        for e in row:
            missed += sizes[e] - held.get(e, 0)
            used = keep(e, following[time])
            time += 1
        read.append(missed)
    return read
