"""Colibri turns a Mixture-of-Experts model into a tiny C inference engine with the same bits on every target.

colibri.export(module, example_inputs, "out/")     # PyTorch module -> model.bin, model.h, model.c
model = colibri.load("out/")                       # the C engine, from Python
y = model(x)                                       # NumPy in, NumPy out
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibri.errors import ColibriError, ExportError, ExportWarning, ModelError
from colibri.format.spec import VERSION as __version__

if TYPE_CHECKING:
    from colibri.api import export, register_moe
    from colibri.runtime.engine import Model
    from colibri.runtime.language import LanguageModel, load

__all__ = [
    "ColibriError",
    "ExportError",
    "ExportWarning",
    "LanguageModel",
    "Model",
    "ModelError",
    "__version__",
    "export",
    "load",
    "register_moe",
]

_LAZY = {
    "export": "colibri.api",
    "register_moe": "colibri.api",
    "load": "colibri.runtime.language",
    "Model": "colibri.runtime.engine",
    "LanguageModel": "colibri.runtime.language",
}


def __getattr__(name: str) -> Any:
    # The engine and PyTorch are imported when first used, so that `import colibri` stays instant.
    if name not in _LAZY:
        raise AttributeError(f"module 'colibri' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
