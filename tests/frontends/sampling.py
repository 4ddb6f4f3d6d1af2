"""Tables of cases of which a sample is always run, and the rest with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases for `pytest.mark.parametrize`: the first of each `every` is fast, the others are slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] if n % every else [])
        for n, case in enumerate(cases)
    ]
