"""MoE packages from PyPI, where they are installed: exported where they are functions of the input, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch.export import from_torch  # noqa: E402

torch.set_num_threads(1)


class First(torch.nn.Module):
    """The output of a block that also returns its losses."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Any) -> Any:
        y = self.moe(x)
        return y if isinstance(y, torch.Tensor) else y[0]


def recognised(make: Callable[[], Any], tokens: int = 6) -> Any:
    """The recognition report, and why the module is refused where it is."""
    torch.manual_seed(0)
    try:
        imported = from_torch(First(make()), torch.randn(2, tokens, 16), calibration=torch.randn(8, tokens, 16))
    except ExportError as error:
        return error.report, str(error)
    return imported.report, ""


def test_mixture_of_experts_is_recognised_where_it_is_not_random() -> None:
    package = pytest.importorskip("mixture_of_experts")
    report, why = recognised(
        lambda: package.MoE(16, num_experts=4, hidden_dim=24, second_policy_eval="all", capacity_factor_eval=4.0)
    )
    (block,) = report.blocks
    assert (block.path, block.experts, block.k, block.unit) == ("moe", 4, 2, "token") and block.error <= 2e-5
    assert not why


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "its output is random in eval mode"),
        ({"second_policy_eval": "all", "capacity_factor_eval": 1.0}, "its tokens depend on the other tokens"),
    ],
)
def test_mixture_of_experts_is_refused_with_the_reason(options: dict[str, Any], why: str) -> None:
    package = pytest.importorskip("mixture_of_experts")
    report, message = recognised(lambda: package.MoE(16, num_experts=4, hidden_dim=24, **options), 24)
    assert not report.blocks and "moe (MoE)" in message and why in message


def test_st_moe_is_refused_because_it_is_random() -> None:
    package = pytest.importorskip("st_moe_pytorch")
    report, message = recognised(lambda: package.MoE(16, num_experts=4))
    assert not report.blocks and "moe (MoE)" in message and "its output is random in eval mode" in message


def test_soft_moe_is_no_sparse_mixture_but_a_plain_program() -> None:
    package = pytest.importorskip("soft_moe_pytorch")
    report, message = recognised(lambda: package.SoftMoE(16, seq_len=6, num_experts=4))
    assert not report.blocks and not message and report.error <= 1e-5


def test_switch_transformers_is_refused_because_it_normalises_over_the_batch() -> None:
    package = pytest.importorskip("switch_transformers.model")
    report, message = recognised(lambda: package.SwitchMoE(16, hidden_dim=24, output_dim=16, num_experts=4))
    assert not report.blocks and "depends on other samples" in message
