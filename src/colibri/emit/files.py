"""Replacement of an export's files, such that files of two exports never appear as one.

All files are written beside their places and synced first. Then model.h, whose sizes programs are compiled with, is put
aside; renaming model.bin into place commits the export; the other files follow, model.h
last. Whoever is stopped in between leaves the old model or the new one, and a model.h that belongs to it or none.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from colibri.errors import ColibriError, ExportError
from colibri.format import spec

MODEL, HEADER = "model.bin", "model.h"
_GENERATED = (HEADER, "model.c", "experts.ld")  # beside model.bin in an export's directory
_DIGEST = re.compile(r"^#(?:define \w+_MODEL_DIGEST|if \w+_MODEL_DIGEST !=) (0x[0-9a-f]{8})u", re.M)
_MARK = "Written by colibri"


def write_files(files: Mapping[Path, bytes | Path], path: Path) -> None:
    """Replace the files of an export, all in one directory; a path among the contents is a synced file that moves.

    What an earlier export generated and this one does not goes, where model.h is among the files. Raises ExportError,
    naming the export's `path`, where that fails; before model.bin has taken its place all is then as it was.
    """
    staged: dict[Path, Path] = {}
    try:
        directory = next(iter(files)).parent
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            try:
                for target, data in files.items():
                    staged[target] = data if isinstance(data, Path) else _staged(target, data)
                _put_in_place(staged, directory)
            finally:
                for target, place in staged.items():
                    if not isinstance(files[target], Path):
                        place.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}: choose another output directory") from None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Waits for other exports to this directory; some network file systems have no locks."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")


def _staged(target: Path, data: bytes) -> Path:
    """A new file with the contents, on disk, beside its place."""
    place = _beside(target, "new")
    place.unlink(missing_ok=True)  # what a killed export left, or a link to somewhere else
    number = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        place.unlink(missing_ok=True)
        raise
    return place


def _put_in_place(staged: Mapping[Path, Path], directory: Path) -> None:
    header, model = directory / HEADER, directory / MODEL
    aside = _beside(header, "old")
    replaces = header in staged and (header.exists() or header.is_symlink())
    if replaces:
        header.replace(aside)
    try:
        _sync(directory)
        if model in staged:
            staged[model].replace(model)
    except BaseException:
        if replaces and (model not in staged or staged[model].exists()):
            aside.replace(header)
        raise
    _sync(directory)
    if header in staged:
        for name in _GENERATED:
            if directory / name not in staged and _is_generated(directory / name):
                (directory / name).unlink()
    for target in sorted(staged, key=lambda target: target == header):
        if target != model:
            staged[target].replace(target)
    aside.unlink(missing_ok=True)
    _sync(directory)


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system that syncs no directories
            os.fsync(number)
    finally:
        os.close(number)


def _head(path: Path) -> str:
    """The beginning of a text file; nothing where there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


def _is_generated(path: Path) -> bool:
    return not path.is_symlink() and _MARK in _head(path)


def require_one_export(directory: Path) -> None:
    """Raise ColibriError where model.h or model.c in a directory was written for another model than its model.bin."""
    try:
        with (directory / MODEL).open("rb") as file:
            header = file.read(spec.HEADER.bytes)
    except OSError:
        return
    if len(header) < spec.HEADER.bytes:
        return
    digest = int(np.frombuffer(header, spec.HEADER.dtype)[0]["header_crc"])
    for name in (HEADER, "model.c"):
        text = _head(directory / name)
        found = _DIGEST.search(text)
        if _MARK in text and (found is None or int(found[1], 16) != digest):
            raise ColibriError(f"{directory / name} was written for another model than the {MODEL} beside it: "
                               "export again, or copy all files of one export")  # fmt: skip
