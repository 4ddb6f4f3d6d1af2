"""Every family from a checkpoint through the engine: what transformers computes, however the text is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri.exporter import export_lm
from colibri.frontends.checkpoints.language_models import load_checkpoint
from colibri.runtime.language import LanguageModel
from tests.frontends.checkpoints.variants import ENCODERS, SOURCE, VARIANTS, VOCABULARY, Model, make

Array = np.ndarray[Any, Any]

PROMPT, NEW = 24, 64  # tokens; the windows of the variants are shorter
FAMILY = pytest.mark.parametrize("family", VARIANTS)


def exported(family: str, directory: Path, dtype: str = "fp32", cache: str = "fp32") -> tuple[Model, LanguageModel]:
    """A family's first variant in transformers and in the engine."""
    settings = {**next(iter(VARIANTS[family].values())), "max_position_embeddings": 128}
    if family in ENCODERS:
        settings["expert_capacity"] = 2 * (PROMPT + NEW)  # in its forward a decoder's tokens come together, here singly
    model = make(family, directory / "model", settings)
    graph = load_checkpoint(directory / "model", context=PROMPT + NEW, cache=cache)
    export_lm(graph, directory / "out", dtype=dtype, max_batch=len(SOURCE) if family in ENCODERS else 16, workers=1)
    lm = colibri.load(directory / "out")
    assert isinstance(lm, LanguageModel)
    if family in ENCODERS:
        lm.read(SOURCE)
    return model, lm


def prompt() -> Array:
    return np.random.default_rng(3).integers(0, VOCABULARY, PROMPT)


@FAMILY
def test_a_family_generates_what_transformers_does(family: str, tmp_path: Path) -> None:
    model, lm = exported(family, tmp_path)
    begin = [lm.start] if family in ENCODERS else prompt()
    new = lm.generate(SOURCE if family in ENCODERS else begin, NEW)
    text = np.concatenate([begin, new])
    want = model.logits(text)
    lm.reset()
    have = lm.logits(text)
    assert np.abs(have - want).max() <= 1e-4 * np.abs(want).max()
    assert want[len(begin) - 1 : -1].argmax(axis=-1).tolist() == new
    lm.reset()
    assert np.concatenate([lm.logits([token]) for token in text]).tobytes() == have.tobytes()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@FAMILY
def test_a_quantised_family_is_as_exact_however_it_is_cut(family: str, dtype: str, tmp_path: Path) -> None:
    model, lm = exported(family, tmp_path, dtype, "int8")
    lm.selftest()
    text = np.random.default_rng(3).integers(0, VOCABULARY, PROMPT + NEW)
    have = lm.logits(text)
    lm.reset()
    assert np.concatenate([lm.logits([token]) for token in text]).tobytes() == have.tobytes()
    want = model.logits(text)
    alike = np.sum(have * want) / np.linalg.norm(have) / np.linalg.norm(want)
    assert alike > {"int8": 0.98, "int4": 0.8}[dtype]
