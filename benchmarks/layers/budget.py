"""The time a run may take, shared out over what is still to be measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_SPARE = 90.0  # seconds kept for the page and for rounds that take longer than expected


class Shares:
    """Seconds until `end`, for things in order: each gets its share of what is left, so that time saved goes on."""

    def __init__(self, end: float, shares: list[float]) -> None:
        self._end, self._shares = end, shares

    def next(self) -> float:
        """Seconds for what comes next."""
        every = sum(self._shares)
        return max(0.0, self._end - time.monotonic()) * self._shares.pop(0) / every


def end_of_run(minutes: float) -> float:
    """On the monotonic clock; counts from the start of the process, so that setting up the environment is included."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - began  # `exec` into the environment keeps the process
    return time.monotonic() - age + 60 * minutes - _SPARE
