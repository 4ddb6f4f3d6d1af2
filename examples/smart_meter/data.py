"""The demand series, what a device computes from it, and how forecasts are scored (NumPy only).

The forecast is one half hour ahead. The model takes one row of `FEATURES` float32 numbers and gives one: the
coming change of demand in units of `CHANGE_SCALE`, since a level would hide the small steps in rounding.
`feature_row` and `to_megawatts` are all a meter needs around the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Demand = NDArray[np.float64]  # MW, one value per half hour
Rows = NDArray[np.float32]

FILE = Path(__file__).with_name("demand.csv")
DAY, WEEK = 48, 7 * 48  # half hours
AROUND = 6  # half hours before and after the same time last week
HISTORY = WEEK + AROUND + 1  # values of demand a forecast needs
FEATURES = DAY + (2 * AROUND + 1) + 3 + 6  # changes of a day, changes last week, levels, clock

# Mean and spread of the level, and spread of the half-hourly change, over the training weeks, rounded (MW).
LEVEL_MEAN, LEVEL_SCALE, CHANGE_SCALE = 29_600.0, 5_600.0, 950.0

# The half hours to forecast, counted from the first Monday 0:00; the first week serves as history only.
TRAIN = range(HISTORY, 9 * WEEK)
VALIDATION = range(9 * WEEK, 10 * WEEK)
TEST = range(10 * WEEK, 12 * WEEK)


def load(path: Path = FILE) -> Demand:
    """The 4,032 half-hourly demands in MW, from Monday 0:00."""
    return np.loadtxt(path, comments="#", dtype=np.float64)


def feature_row(history: Demand, half_hour: int) -> Rows:
    """The model's input (FEATURES,) for the half hour after `history` (HISTORY,), demands in MW, newest last.

    `half_hour` is the number of the half hour to forecast, counted from any Monday 0:00.
    """
    change = np.diff(history) / CHANGE_SCALE
    now, yesterday, last_week = history[-1], history[-1 - DAY], history[-1 - WEEK]
    # The oldest changes are last week's around this time, those that came after it included.
    around_last_week = change[: 2 * AROUND + 1]
    level = [
        (now - LEVEL_MEAN) / LEVEL_SCALE,
        (now - yesterday) / CHANGE_SCALE,
        (now - last_week) / CHANGE_SCALE,
    ]
    angles = 2 * np.pi * half_hour * np.array([1 / DAY, 2 / DAY, 1 / WEEK])
    row = np.concatenate([change[-DAY:], around_last_week, level, np.sin(angles), np.cos(angles)])
    return row.astype(np.float32)


def to_megawatts(output: Rows, now: Demand) -> Demand:
    """The forecast in MW from the model's output and the newest demand known, both (rows,)."""
    return now + CHANGE_SCALE * output.astype(np.float64)


@dataclass(frozen=True)
class Split:
    """Everything about the half hours of one split, one row each."""

    features: Rows  # (rows, FEATURES)
    target: Rows  # (rows,) what the model should give
    now: Demand  # (rows,) the newest demand known at the time of the forecast
    demand: Demand  # (rows,) the demand that came


def split(demand: Demand, half_hours: range) -> Split:
    """The rows of `half_hours`, each computed from the HISTORY demands before it."""
    features = np.stack([feature_row(demand[t - HISTORY : t], t) for t in half_hours])
    coming, now = demand[half_hours], demand[half_hours.start - 1 : half_hours.stop - 1]
    return Split(features, ((coming - now) / CHANGE_SCALE).astype(np.float32), now, coming)


def seasonal_naive(demand: Demand, half_hours: range) -> Demand:
    """The usual baseline: the demand of the same half hour last week."""
    return demand[half_hours.start - WEEK : half_hours.stop - WEEK]


def last_weeks_change(demand: Demand, half_hours: range) -> Demand:
    """The hard baseline one step ahead: the newest demand plus last week's change at the same half hour."""
    now, week_ago = half_hours.start - 1, half_hours.start - 1 - WEEK
    rows = len(half_hours)
    return demand[now : now + rows] + np.diff(demand[week_ago : week_ago + rows + 1])


def mape(forecast: Demand, demand: Demand) -> float:
    """Mean absolute percentage error, in percent."""
    return float(100 * np.mean(np.abs(forecast - demand) / demand))
