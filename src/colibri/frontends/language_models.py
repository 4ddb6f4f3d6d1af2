"""Language models from a Hugging Face directory, without PyTorch and without the library they were made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colibri import spec
from colibri.errors import ExportError
from colibri.frontends.checkpoint import Checkpoint
from colibri.frontends.decoders import build
from colibri.frontends.encoder_decoders import Exchange, build_exchange
from colibri.frontends.language_families import SAME, adapter_of
from colibri.frontends.language_settings import Settings
from colibri.graph import CACHES, Graph


def load_checkpoint(directory: str | Path, context: int | None = None, cache: str = "fp32") -> Graph:
    """The graph of a language model saved as Hugging Face does: one token's id (1,) to the `logits` (vocabulary,).

    `context` is the most tokens of a text, by default the model's max_position_embeddings, but at most 4096; `cache`
    the format keys and values are kept in. Weights are read when they are needed, so the graph of any model is small.
    Raises ExportError for an unknown architecture, every configuration field and tensor that is not accounted for, and
    every file that is damaged; so does reading a weight that holds a NaN.
    """
    checkpoint = Checkpoint(directory)
    config = checkpoint.config
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    kind = str(text.get("model_type", config.get("model_type", ""))).removesuffix("_text")
    if kind in SAME:
        text, kind = {**text, "model_type": SAME[kind]}, SAME[kind]
    adapter = adapter_of(kind, config)
    _check_quantization(config)
    if cache not in CACHES:
        raise ExportError(f"cache {cache!r} is not one of {', '.join(CACHES)}")
    if context is not None and not 1 <= context <= spec.LIMIT:
        raise ExportError(f"context = {context} is not a number of tokens from 1 to {spec.LIMIT:,}")
    if text is not config:
        text = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}
    settings = Settings(text, adapter, context, checkpoint)
    name, plan = Path(directory).resolve().name or kind, adapter.plan(settings)
    if isinstance(plan, Exchange):
        return build_exchange(name, plan, checkpoint, settings.context, cache)
    return build(name, plan, checkpoint, settings.context, cache)


def _check_quantization(config: Mapping[str, Any]) -> None:
    said = config.get("quantization_config")
    if said is None:
        return
    said = said if isinstance(said, dict) else {"quant_method": said}
    method, scheme, kind = (said.get(n) for n in ("quant_method", "activation_scheme", "fmt"))
    fp8 = method == "fp8" and scheme in (None, "dynamic") and kind in (None, "e4m3", "float8_e4m3fn")
    if method != "mxfp4" and not fp8:
        raise ExportError(
            f"quantization_config {said!r} is not supported, only mxfp4 and fp8 (e4m3, scaled in blocks): use the "
            "checkpoint in floats"
        )


__all__ = ["load_checkpoint"]
