"""Compiling the C of a benchmark."""

from __future__ import annotations

import subprocess
from pathlib import Path


def compile_c(output: Path, sources: list[Path], flags: list[str], libraries: list[str]) -> Path:
    """`output`, compiled again where a source is newer."""
    headers = [header for folder in {source.parent for source in sources} for header in folder.glob("*.h")]
    inputs = [*sources, *headers, *(Path(f) for f in libraries if f.endswith(".a"))]
    if not output.exists() or output.stat().st_mtime < max(f.stat().st_mtime for f in inputs):
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f"{output.name}.{id(output)}")
        subprocess.run(["gcc", *flags, *map(str, sources), *libraries, "-o", str(partial)], check=True)
        partial.rename(output)
    return output
