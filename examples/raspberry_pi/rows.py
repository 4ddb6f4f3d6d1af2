"""Writes what the walk-through feeds the model: build/calibration.npy, a week of rows, and build/day.f32, a day of others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "smart_meter"))
import data  # noqa: E402

BUILD = Path("build")


def main() -> None:
    """Write both files."""
    demand = data.load()
    BUILD.mkdir(exist_ok=True)
    np.save(BUILD / "calibration.npy", data.split(demand, data.VALIDATION).features)
    data.split(demand, data.TEST).features[: data.DAY].astype("<f4").tofile(BUILD / "day.f32")


if __name__ == "__main__":
    main()
