"""Writer of arrays (.npz) under any name; `numpy.savez` takes `file` and `allow_pickle` as its own arguments."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colibri.common.names import check_port
from colibri.errors import ColibriError


def save(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Path:
    """Write the arrays by their names; the file's name gets the suffix .npz where it has none, and is returned.

    Raises ColibriError where the file cannot be written, or a name would be a path.
    """
    path = path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")
    for name in arrays:
        check_port(name, f"an array for {path}", ColibriError)
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
    except OSError as error:
        raise ColibriError(f"{path} cannot be written: {error.strerror}: choose another output file") from None
    return path


__all__ = ["save"]
