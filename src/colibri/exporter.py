"""The exporter: `python -m colibri.exporter --model … --dtype … --output DIR/` is the same as `colibri export`."""

from colibri.emit.c_source import PLAIN, Style
from colibri.passes.prune import PROVEN, Selection
from colibri.pipeline.language import export_lm
from colibri.pipeline.module import Export, Quantization, alignment, build, write

__all__ = [
    "PLAIN",
    "PROVEN",
    "Export",
    "Quantization",
    "Selection",
    "Style",
    "alignment",
    "build",
    "export_lm",
    "write",
]

if __name__ == "__main__":
    from colibri.cli.app import exporter_main

    exporter_main()
