"""From the weights a router gave, the router: for any router the engine has."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from colibri.frontends.recognise.routing import TOLERANCE, Seen, solve, telling_logits, weigh  # noqa: E402
from colibri.ir.graph import Router  # noqa: E402

torch.set_num_threads(1)

WEIGHTS = [("softmax", "none"), ("sigmoid", "none"), ("sqrt_softplus", "none"), ("logit", "one"), ("logit", "softmax"),
           ("sigmoid", "sum"), ("softmax", "sum"), ("sqrt_softplus", "sum"), ("sigmoid", "clamped")]  # fmt: skip


@st.composite
def routers(draw: Any) -> tuple[Router, dict[str, Any], int]:
    """A router, the tensors it has from the block, and the tokens that share a capacity."""
    experts = draw(st.sampled_from([2, 3, 4, 6, 8]))
    score, normalize = draw(st.sampled_from(WEIGHTS))
    capacity = draw(st.sampled_from([0, 0, 0, 2]))
    k = 1 if capacity else draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tensors = {}
    options: dict[str, Any] = {"scale": draw(st.sampled_from([1.0, 1.0, 2.5, 0.7]))}
    if normalize in ("sum", "clamped"):
        options["epsilon"] = draw(st.sampled_from([1e-9, 1e-6, 1e-3] if normalize == "clamped" else [0.0, 1e-20, 1e-6]))
    if score in ("softmax", "sigmoid") and k < experts and draw(st.booleans()):
        tensors["bias"] = torch.randn(experts, generator=generator) * 0.2
        options["bias"] = tuple(tensors["bias"].tolist())
    if draw(st.sampled_from([False, False, True])):
        tensors["scales"] = torch.rand(experts, generator=generator) + 0.5
        options |= {"expert_scale": tuple(tensors["scales"].tolist()), "scale": 1.0}
    groups = [n for n in (2, 4) if experts % n == 0 and experts // n >= 2]
    if groups and not capacity and score in ("softmax", "sigmoid") and draw(st.booleans()):
        number = draw(st.sampled_from(groups))
        kept = draw(st.integers(1, number - 1))
        if k <= kept * (experts // number):
            options |= {"groups": number, "kept_groups": kept, "group_rule": draw(st.sampled_from(["max", "top2"]))}
    return Router(experts, k, score, normalize, capacity=capacity, **options), tensors, 6 if capacity else 1


def small_epsilon() -> tuple[Router, dict[str, Any], int]:
    """A bias keeps the chosen probabilities so large that the epsilon hardly shows."""
    bias = torch.tensor([0.3, -0.05, -0.4])
    return Router(3, 1, "softmax", "sum", epsilon=1e-6, bias=tuple(bias.tolist())), {"bias": bias}, 1


@settings(max_examples=60, deadline=None)
@example(small_epsilon())
@given(routers())
def test_any_router_is_found_from_the_weights_it_gives(case: tuple[Router, dict[str, Any], int]) -> None:
    router, tensors, tokens = case
    natural = torch.randn(48, router.experts, generator=torch.Generator().manual_seed(1))
    logits = telling_logits(router.experts, tokens, natural)
    best = solve(Seen(logits, weigh(logits, router, tokens)[0], tokens), tensors)[0]
    assert best.error <= TOLERANCE
    fresh = 3 * torch.randn(600, router.experts, generator=torch.Generator().manual_seed(2))
    (want, clear), (have, _) = weigh(fresh, router, tokens), weigh(fresh, best.router, tokens)
    assert float((want - have)[clear].abs().max()) <= 1e-4 * float(want.abs().max())
