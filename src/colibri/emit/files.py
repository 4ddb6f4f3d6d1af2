"""Puts the files of an export in their places."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from colibri.errors import ExportError


def write_files(files: Mapping[Path, bytes], path: Path) -> None:
    """Write each file, replaced by rename; raises ExportError, naming the export's `path`, where that fails."""
    try:
        for target, data in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
                file.write(data)
            Path(file.name).chmod(0o666 & ~_umask())
            Path(file.name).replace(target)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}: choose another output directory") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
