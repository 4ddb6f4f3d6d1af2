"""Evaluation of a language model: how well it predicts a text, and how far it is from another export.

The text is cut into windows, each a text of its own to the model. What begins a text (BOS) begins each window; where
the model has none, the last token of the window before does. So every token is predicted once, but for the first of
all if nothing precedes it. Statistics are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from colibri.errors import ModelError
from colibri.reference import arithmetic
from colibri.runtime.language import LanguageModel, Routes
from colibri.text.tokenizer import Tokenizer

Doubles = np.ndarray[Any, np.dtype[np.float64]]

_DOUBLES = 1 << 23  # of one array of probabilities


@dataclass(frozen=True)
class Comparison:
    """A model beside the reference, over all predicted tokens. KL(reference ‖ model) is in nats; flips are the share of
    tokens whose set of experts differs, by layer, None where the layers are not the same."""

    perplexity: float
    bits_per_byte: float
    kl_mean: float
    kl_p99: float
    agreement: float
    flips: list[float] | None


@dataclass(frozen=True)
class Evaluation:
    """Predicted tokens, their bytes of text, the windows they were cut into, and how well they were predicted."""

    tokens: int
    bytes: int
    windows: int
    context: int
    perplexity: float
    byte_perplexity: float
    bits_per_byte: float
    against: Comparison | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@arithmetic.standard()
def evaluate(
    lm: LanguageModel,
    text: str | bytes,
    tokens: int | None = None,
    against: LanguageModel | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    special: bool = True,
) -> Evaluation:
    """Predict a text's tokens, or its first `tokens`; `against` is the reference. The texts that the models hold end.

    special: special tokens that the text spells are tokens, such as the marks between documents; else they stay text.
    Raises ModelError where there is nothing to predict, or the models do not have the same tokens.
    """
    for model in filter(None, (lm, against)):
        if model.longest_source:
            raise ModelError(f"{model.package.path} answers a source text, and does not go on with one: read the "
                             "source and take the logits of its answer (colibri.load, read, logits)")  # fmt: skip
    ids, start = lm.tokenizer.encode(text, special=False, parse=special), _beginning(lm.tokenizer)
    first = 0 if start else 1
    end = len(ids) if tokens is None else min(len(ids), first + tokens)
    if end <= first:
        raise ModelError("there is nothing to predict: pass a longer text")
    context = lm.context
    if against is not None:
        context = min(context, against.context)
        theirs = against.tokenizer.encode(text, special=False, parse=special)
        if against.vocabulary != lm.vocabulary or theirs != ids:
            raise ModelError(
                f"{against.package.path} has other tokens than {lm.package.path}: compare exports of one model"
            )
    step = context + 1 - max(len(start), 1)
    if step < 1:
        raise ModelError(f"a context of {context} tokens has no room for what begins a text: give it a longer one")
    likely, likely_there, divergences, same = [], [], [], []
    flips = None if against is None or not _same_layers(lm, against) else np.zeros(len(lm.package.layers), np.int64)
    windows = range(first, end, step)
    for at in windows:
        wanted = ids[at : min(at + step, end)]
        window = [*(start or [ids[at - 1]]), *wanted[:-1]]
        for model in filter(None, (lm, against)):
            model.reset()
        skip, piece = len(window) - len(wanted), max(1, min(lm.max_batch, _DOUBLES // lm.vocabulary))
        for n in range(0, len(window), piece):
            part, answers = window[n : n + piece], np.array(wanted[max(n - skip, 0) : n + piece - skip], np.int64)
            here, routes = _predictions(lm, part, len(answers))
            rows = np.arange(len(answers))
            likely.append(here[rows, answers])
            if against is not None:
                there, others = _predictions(against, part, len(answers))
                likely_there.append(there[rows, answers])
                divergences.append(_divergence(there, here))
                same.append(here.argmax(1) == there.argmax(1))
                if flips is not None:
                    flips += [_flipped(a, b) for a, b in zip(routes, others, strict=True)]
            on_progress(at - first + min(max(n + piece - skip, 0), len(wanted)), end - first)
    if tokens is None and start:
        size = len(text if isinstance(text, bytes) else text.encode())
    else:
        size = len(lm.tokenizer.decode(ids[:end], False).encode()) - len(
            lm.tokenizer.decode(ids[:first], False).encode()
        )
    count, size = end - first, max(size, 1)

    def figures(logarithms: list[Doubles]) -> tuple[float, float]:
        """Perplexity of a token, nats of a byte."""
        total = -float(np.concatenate(logarithms).sum())
        return _exp(total / count), total / size

    compared = None
    if against is not None:
        perplexity, nats = figures(likely_there)
        distance = np.concatenate(divergences)
        compared = Comparison(
            perplexity, nats / math.log(2), float(distance.mean()), float(np.quantile(distance, 0.99)),
            float(np.concatenate(same).mean()), None if flips is None else (flips / count).tolist(),
        )  # fmt: skip
    perplexity, nats = figures(likely)
    return Evaluation(count, size, len(windows), context, perplexity, _exp(nats), nats / math.log(2), compared)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text."""
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", special=False)
    at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    return whole[:at]


def _predictions(model: LanguageModel, part: list[int], wanted: int) -> tuple[Doubles, list[Routes]]:
    """The logarithms of the probabilities behind the last `wanted` of some tokens, and the experts those chose."""
    logits, routes = model.logits_and_routes(part)
    x = logits[len(part) - wanted :].astype(np.float64)
    if not wanted:
        return x, [layer[:0] for layer in routes]
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True)), [layer[len(part) - wanted :] for layer in routes]


def _divergence(reference: Doubles, model: Doubles) -> Doubles:
    """KL(reference ‖ model) of each row of logarithms; what the reference excludes does not count."""
    p = np.exp(reference)
    with np.errstate(invalid="ignore"):  # −∞ less −∞
        return np.asarray(np.where(p > 0, p * (reference - model), 0.0).sum(1))


def _same_layers(a: LanguageModel, b: LanguageModel) -> bool:
    return [int(layer["k"]) for layer in a.package.layers] == [int(layer["k"]) for layer in b.package.layers]


def _flipped(a: Routes, b: Routes) -> int:
    return int((np.sort(a, 1) != np.sort(b, 1)).any(1).sum())


__all__ = ["Comparison", "Evaluation", "evaluate"]
