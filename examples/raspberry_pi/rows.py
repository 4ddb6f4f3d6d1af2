"""Writes what the walk-through feeds the model: a week of rows in build/calibration.npy, a day in build/day.f32."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "smart_meter"))
import data

BUILD = Path("build")


def main() -> None:
    """Write both files."""
    demand = data.load()
    BUILD.mkdir(exist_ok=True)
    np.save(BUILD / "calibration.npy", data.split(demand, data.VALIDATION).features)
    data.split(demand, data.TEST).features[: data.DAY].astype("<f4").tofile(BUILD / "day.f32")


if __name__ == "__main__":
    main()
