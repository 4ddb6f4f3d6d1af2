"""E1: one extra call anywhere in a block is exported and equal to PyTorch on rows of every size, or refused by name."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch.export import _clear, from_torch  # noqa: E402
from colibri.reference.interpreter import Trace, run  # noqa: E402
from tests.frontends.recognise import moe_extra_calls as extra  # noqa: E402
from tests.frontends.recognise.user_moes import DIM  # noqa: E402

torch.set_num_threads(1)

CASES = list(dict.fromkeys(extra.family()))
EXACT = {"dropout", "noise"}  # nothing in eval mode


def sets() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(64, DIM, generator=generator)
    spiked = rows.clone()
    spiked[torch.arange(64), torch.arange(64) % DIM] *= 1e3
    return {"ordinary": rows, "tiny": rows * 1e-4, "large": rows * 1e3, "spiked": spiked, "huge": rows * 1e6}


def outcome(place: str, call: str, idiom: str) -> str:
    """`exported` or `refused`; fails where the exported graph differs from PyTorch."""
    torch.manual_seed(0)
    model = extra.Extra(place, call, idiom).eval()
    x = torch.randn(40, DIM, generator=torch.Generator().manual_seed(1))
    try:
        graph, *_ = from_torch(model, x[:8], calibration=x)
    except ExportError as error:
        text = str(error)
        assert "unexpected" not in text and len(text) > 40
        return "refused"
    compared = 0
    for name, rows in sets().items():
        with torch.no_grad():
            want, moved = model(rows), model(rows * (1 + torch.finfo(torch.float32).eps))
        trace = Trace()
        ours = run(graph, [rows.numpy()], trace)[0]
        # Beyond what one rounding of the input changes: at a size of 1e6 logits have no digits behind the point.
        clear = ((moved - want).abs().amax(1) <= 1e-4 * want.abs().max()).numpy()
        clear &= _clear(graph, trace, len(rows))  # bounds make logits equal, and PyTorch says not who wins then
        if not clear.any():
            continue
        slack = 16 * float((moved - want)[torch.from_numpy(clear)].abs().max())
        worst = np.abs(ours - want.numpy())[clear].max()
        assert worst <= 1e-5 * float(want.abs().max()) + slack, (name, worst)
        compared += int(clear.sum())
    assert compared >= 40
    return "exported"


@pytest.mark.parametrize("case", CASES[::19], ids=" / ".join)
def test_an_extra_call_is_exported_exactly_or_refused(case: tuple[str, str, str]) -> None:
    """E1"""
    assert outcome(*case) == "exported" or case[1] not in EXACT


class Bounded(torch.nn.Module):
    """Top-2 of 4, with a call on what an expert gives, inside its own forward or outside, or on what all get."""

    def __init__(self, after: Any = None, before: Any = None, inside: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(DIM, 4)
        self.experts = torch.nn.ModuleList(Inside(inside) for _ in range(4))
        self.after, self.before = after or torch.nn.Identity(), before or torch.nn.Identity()

    def forward(self, x: Any) -> Any:
        weight, chosen = self.gate(self.before(x)).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == e)
            y[row] += weight[row, slot, None] * self.after(expert(self.before(x[row])))
        return y


class Inside(torch.nn.Module):
    def __init__(self, bound: Any) -> None:
        super().__init__()
        self.up, self.down, self.bound = (
            torch.nn.Linear(DIM, 16),
            torch.nn.Linear(16, DIM),
            bound or torch.nn.Identity(),
        )

    def forward(self, x: Any) -> Any:
        return self.bound(self.down(self.up(x).relu()))


BOUNDED = {"clamp": lambda y: y.clamp(-50, 50), "minimum": lambda y: torch.minimum(y, torch.tensor(30.0))}


@pytest.mark.parametrize("call", BOUNDED)
def test_a_bound_that_wide_rows_do_not_verify_is_refused_and_exports_inside_the_expert(call: str) -> None:
    """E1"""
    rows = torch.randn(256, DIM, generator=torch.Generator().manual_seed(1))
    with pytest.raises(
        ExportError, match=rf"{call} at test_moe_extra_calls.py:\d+.*rows of size.*expert's own forward"
    ):
        from_torch(Bounded(after=BOUNDED[call]).eval(), rows[:8], calibration=rows)
    model = Bounded(inside=BOUNDED[call]).eval()
    graph, *_ = from_torch(model, rows[:8], calibration=rows)
    assert len(list(graph.moe_nodes())) == 1
    for size in (1.0, 100.0):
        with torch.no_grad():
            want = model(rows * size).numpy()
            plain = Bounded().eval()(rows * size).numpy()
        ours = run(graph, [(rows * size).numpy()])[0]
        assert np.abs(ours - want).max() <= 1e-5 * np.abs(want).max()
    assert np.abs(plain - want).max() > 1  # the bound acts


def test_a_bound_that_wide_rows_verify_is_exported() -> None:
    """E1"""
    rows = torch.randn(256, DIM, generator=torch.Generator().manual_seed(1))
    model = Bounded(before=lambda x: x.clamp(-9, 9)).eval()
    graph, *_ = from_torch(model, rows[:8], calibration=rows)
    wide = rows[:32] * 1000
    wide[0] = 3e38
    with torch.no_grad():
        want = model(wide).numpy()
    ours = run(graph, [wide.numpy()])[0]
    assert (np.isfinite(ours) == np.isfinite(want)).all()
    assert np.abs(ours - want)[1:].max() <= 1e-5 * np.abs(want[1:]).max()


@pytest.mark.slow
def test_no_extra_call_of_the_whole_family_is_lost() -> None:
    """E1: every call at every place; how many are exported and how many refused is printed."""
    assert len(CASES) >= 200
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for case in CASES:
        try:
            found = outcome(*case)
        except AssertionError as error:
            wrong.append((case, str(error).splitlines()[0]))
            continue
        counts[found] += 1
        if found == "refused" and case[1] in EXACT:
            wrong.append((case, "refused"))
    print(counts)
    assert not wrong, wrong
