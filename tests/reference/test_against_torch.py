"""The reference interpreter against PyTorch: every operation close, every router's choices identical."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from colibri.format import spec
from colibri.ir.graph import Router
from colibri.reference import ops, sequence
from tests.graphs import routers, unary_attrs

Array = np.ndarray[Any, Any]
RANDOM = settings(deadline=None, max_examples=60)
ROW = st.tuples(st.integers(1, 7), st.integers(1, 300), st.integers(0, 1 << 16))


def close(have: Array, want: torch.Tensor) -> None:
    """Within 1e-5 of the largest magnitude, PyTorch computing in double."""
    expected = want.numpy()
    assert have.dtype == np.float32 and have.shape == expected.shape
    assert np.abs(have - expected).max() <= 1e-5 * max(1e-30, float(np.abs(expected).max()))


def sample(rows: int, columns: int, seed: int) -> tuple[Array, torch.Tensor]:
    x = (np.random.default_rng(seed).standard_normal((rows, columns)) * 3).astype(np.float32)
    return x, torch.from_numpy(x.astype(np.float64))


TORCH_UNARY: dict[str, Any] = {
    "identity": lambda x: x, "relu": F.relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "clamp": lambda x: x.clamp(-0.5, 0.75), "neg": torch.neg, "abs": torch.abs, "square": torch.square,
    "sqrt": lambda x: x.abs().sqrt(), "rsqrt": lambda x: x.abs().rsqrt(), "reciprocal": torch.reciprocal,
    "exp": torch.exp, "log": lambda x: x.abs().log(), "expm1": torch.expm1, "log1p": lambda x: x.abs().log1p(),
    "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus, "elu": F.elu,
    "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
}  # fmt: skip
POSITIVE = ("sqrt", "rsqrt", "log", "log1p")


@pytest.mark.parametrize("func", ops.UNARY)
def test_unary(func: str) -> None:
    x, wide = sample(50, 200, 1)
    close(ops.unary(np.abs(x) if func in POSITIVE else x, func, **unary_attrs(func)), TORCH_UNARY[func](wide))


TORCH_BINARY = {"fill": lambda a, b: torch.where(b.isnan(), a, b)}


@pytest.mark.parametrize("func", ops.BINARY)
def test_binary(func: str) -> None:
    a, wide_a = sample(30, 40, 1)
    b, wide_b = sample(30, 40, 2)
    if func == "fill":
        b[::3], wide_b[::3] = np.nan, torch.nan
    close(np.asarray(ops.BINARY[func](a, b)), TORCH_BINARY.get(func, getattr(torch, func))(wide_a, wide_b))


@given(ROW, st.integers(1, 40), st.booleans())
@RANDOM
def test_linear(row: tuple[int, int, int], outputs: int, bias: bool) -> None:
    x, wide = sample(*row)
    weight, wide_weight = sample(outputs, row[1], row[2] + 1)
    b, wide_b = sample(1, outputs, row[2] + 2)
    have = ops.linear(x, weight, b[0] if bias else None)
    want = F.linear(wide, wide_weight, wide_b[0] if bias else None).numpy()
    # What rounding can do to chains of GROUP products and their sum: terms may cancel, so it is no share of the sum.
    terms = np.abs(wide.numpy()) @ np.abs(wide_weight.numpy()).T + np.abs(wide_b.numpy()) * bias
    assert have.dtype == np.float32
    assert (np.abs(have - want) <= (spec.GROUP + row[1] / spec.GROUP + 3) * 2.0**-24 * terms).all()


@given(ROW)
@RANDOM
def test_softmax_norms_and_reductions(row: tuple[int, int, int]) -> None:
    x, wide = sample(*row)
    gamma, wide_gamma = sample(1, row[1], row[2] + 1)
    beta, wide_beta = sample(1, row[1], row[2] + 2)
    close(ops.softmax(x), wide.softmax(-1))
    if row[1] > 1:
        close(
            ops.layernorm(x, gamma[0], beta[0], 1e-5), F.layer_norm(wide, wide.shape[-1:], wide_gamma[0], wide_beta[0])
        )
    close(ops.rmsnorm(x, gamma[0], None, 1e-6), F.rms_norm(wide, wide.shape[-1:], wide_gamma[0], 1e-6))
    for axis in (0, 1):
        close(ops.reduce(np.abs(x), "sum", axis), wide.abs().sum(axis))
        close(ops.reduce(np.abs(x), "mean", axis), wide.abs().mean(axis))
        close(ops.reduce(x, "max", axis), wide.amax(axis))


def torch_mixer(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """As Phi-3.5-MoE's modelling file has it, for any number of experts a token."""
    left, chosen, weights = logits, [], []
    for _ in range(router.k):
        top = left.max(-1, keepdim=True).values
        far = (top - logits) / logits.abs().clamp(min=top) > 2 * router.epsilon
        best = left.argmax(-1, keepdim=True)
        chosen.append(best)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        left = left.scatter(-1, best, -torch.inf)
    return torch.cat(chosen, 1), torch.cat(weights, 1)


def torch_route(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.tensor(router.expert_scale or (1.0,) * router.experts, dtype=torch.float64)
    if router.score == "sparse_mixer":
        chosen, weights = torch_mixer(logits, router)
        return chosen, weights * router.scale * own[chosen]
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "logit": logits,
              "sqrt_softplus": F.softplus(logits).sqrt()}[router.score]  # fmt: skip
    keys = scores + torch.tensor(router.bias or (0.0,) * router.experts, dtype=torch.float64)
    if router.groups > 1:
        parts = keys.view(len(keys), router.groups, -1)
        ranks = parts.amax(-1) if router.group_rule == "max" else parts.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(ranks).scatter(1, ranks.topk(router.kept_groups).indices, 1.0)
        keys = keys.masked_fill(kept.repeat_interleave(parts.shape[-1], 1) == 0, -torch.inf)
    chosen = keys.topk(router.k).indices
    weights = scores.gather(1, chosen)
    total = weights.sum(-1, keepdim=True)
    weights = {
        "none": weights,
        "sum": weights / (total + router.epsilon),
        "clamped": weights / total.clamp(min=router.epsilon),
        "softmax": weights.softmax(-1),
        "one": torch.ones_like(weights),
    }[router.normalize]
    return chosen, weights * router.scale * own[chosen]


@given(routers(70), st.integers(0, 1 << 16))
@RANDOM
def test_routing(router: Router, seed: int) -> None:
    assume(np.isfinite(router.bias).all())  # PyTorch may choose any of equal experts
    logits, wide = sample(9, router.experts, seed)
    chosen, weights = ops.route(logits, router)
    want_chosen, want_weights = torch_route(wide, router)
    assert np.array_equal(chosen, want_chosen.numpy())
    close(weights, want_weights)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), st.integers(1, 150))
@settings(RANDOM, max_examples=30)
def test_the_delta_rule_is_qwen3_nexts(kv: int, group: int, key: int, width: int, tokens: int) -> None:
    rng, heads = np.random.default_rng(tokens), kv * group
    q, k = (F.normalize(torch.from_numpy(rng.standard_normal((1, tokens, kv, key)))).float() for _ in range(2))
    v = torch.from_numpy(rng.standard_normal((1, tokens, heads, width))).float()
    decay = -torch.from_numpy(rng.exponential(1, (1, tokens, heads))).float()
    beta = torch.from_numpy(rng.random((1, tokens, heads))).float()
    have = sequence.delta(*(x[0].numpy() for x in (q, k, v, decay, beta)), scale=key**-0.5)
    for rule in (qwen3_next.torch_recurrent_gated_delta_rule, qwen3_next.torch_chunk_gated_delta_rule):
        close(have, rule(q, k, v, g=decay, beta=beta)[0][0])
