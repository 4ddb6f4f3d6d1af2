"""Error messages for model paths that Colibri cannot export: what the path is, and what to pass instead."""

from __future__ import annotations

import re
from pathlib import Path

from colibri.errors import ExportError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WHAT_TO_PASS = (
    "pass a .pt2 program, a .safetensors file with its architecture file, or the directory of a language model "
    "(config.json, *.safetensors, tokenizer.json)"
)
_ITS_CHECKPOINT = "pass the directory of the checkpoint it was made from (config.json, *.safetensors, tokenizer.json)"
_IN_A_DIRECTORY = {  # by the end of a file's name: what it is, and what to do
    "model.bin": ("an export", "it needs no other; use `colibri run`, `generate` or `build` with it"),
    ".gguf": ("a GGUF file, which Colibri does not read", _ITS_CHECKPOINT),
    ".pt2": ("a program", "pass that file"),
    ".safetensors": ("weights", "copy the model's config.json and tokenizer.json next to them, or pass the file with "
                     "its architecture file"),
    ".bin": ("pickled weights", "save the model as safetensors, with its config.json"),
}  # fmt: skip


def require_source(model: Path) -> None:
    """Raises ExportError where `model` is neither a file that may hold a model nor a directory with a config.json."""
    if not model.exists():
        if _HUB_NAME.fullmatch(str(model)) and not model.suffix:
            raise ExportError(f"there is no directory {model} here, and nothing is downloaded: if it is a model on the "
                              f"Hugging Face hub, fetch it first (hf download {model} --local-dir DIRECTORY) and pass "
                              "that directory")  # fmt: skip
        raise ExportError(f"{model} does not exist: {_WHAT_TO_PASS}")
    if model.is_dir():
        _require_checkpoint(model)
    elif model.suffix.lower() == ".gguf" or _begins_with(model, b"GGUF"):
        raise ExportError(f"{model} is a GGUF file, which Colibri does not read: {_ITS_CHECKPOINT}")
    elif not model.is_file():
        raise ExportError(f"{model} is not a regular file: {_WHAT_TO_PASS}")
    elif model.stat().st_size == 0:
        raise ExportError(f"{model} is empty: copy it again; {_WHAT_TO_PASS}")


def _require_checkpoint(model: Path) -> None:
    if (model / "config.json").is_file():
        return
    names = sorted(file.name for file in model.iterdir())
    for suffix, (what, way) in _IN_A_DIRECTORY.items():
        found = [name for name in names if name.endswith(suffix)]
        if found:
            raise ExportError(f"{model} is a directory with {what} ({found[0]}) and without a config.json: {way}")
    raise ExportError(f"{model} is a directory without a config.json: {_WHAT_TO_PASS}")


def _begins_with(model: Path, magic: bytes) -> bool:
    if not model.is_file():
        return False
    try:
        with model.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise ExportError(f"{model} cannot be read: {error.strerror}") from None
