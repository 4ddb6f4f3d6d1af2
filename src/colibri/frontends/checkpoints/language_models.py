"""Language models from a Hugging Face directory, without PyTorch and without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colibri.common.names import printable, shown
from colibri.errors import ExportError
from colibri.format import spec
from colibri.frontends.checkpoints.checkpoint import Checkpoint
from colibri.frontends.checkpoints.decoders import build
from colibri.frontends.checkpoints.encoder_decoders import EncoderDecoder, build_encoder_decoder
from colibri.frontends.checkpoints.language_families import SAME, adapter_of
from colibri.frontends.checkpoints.language_settings import Settings
from colibri.ir.graph import CACHES, Graph


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
    if cache not in CACHES:
        raise ExportError(f"cache {cache!r} is not one of {', '.join(CACHES)}")
    if context is not None and not 1 <= context <= spec.LIMIT:
        raise ExportError(f"context = {context} is not a number of tokens from 1 to {spec.LIMIT:,}")
    if nested is not None and text is config:
        raise ExportError(f"text_config is {shown(nested)}, not an object: correct config.json")
    if text is not config:
        text = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}
    settings = Settings(text, adapter, context, checkpoint)
    name, plan = printable(Path(directory).resolve().name) or kind, adapter.plan(settings)
    if isinstance(plan, EncoderDecoder):
        return build_encoder_decoder(name, plan, checkpoint, settings.context, cache)
    return build(name, plan, checkpoint, settings.context, cache)


__all__ = ["load_checkpoint"]
