"""E1: one extra call anywhere in a block is exported and equal to PyTorch on rows of every size, or refused by name."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch_export import _clear, from_torch  # noqa: E402
from colibri.reference.interpreter import Trace, run  # noqa: E402
from tests.frontends import moe_extra_calls as extra  # noqa: E402
from tests.frontends.user_moes import DIM  # noqa: E402

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
