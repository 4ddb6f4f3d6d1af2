"""The engine under sanitizers, built once."""

from __future__ import annotations

import pytest

from tests.hostile.driver import Fuzz, build


@pytest.fixture(scope="session")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    return build(tmp_path_factory.mktemp("fuzz"))
