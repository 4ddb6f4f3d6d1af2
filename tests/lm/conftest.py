"""The trained storyteller, exported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri import exporter
from colibri.frontends.checkpoints.language_models import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples/storyteller/checkpoint"


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with int8 weights, its tokenizer beside it. Not to be changed."""
    out = tmp_path_factory.mktemp("story")
    exporter.export_lm(load_checkpoint(CHECKPOINT), out, workers=1, tokenizer=CHECKPOINT)
    return out
