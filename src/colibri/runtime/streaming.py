"""Model over time: rows are time steps, and a call continues where the previous one ended."""

from __future__ import annotations

import threading

from colibri.format.package import Package
from colibri.ir.graph import Array
from colibri.runtime.engine import Model, Recorded


class StreamModel(Model):
    """A model exported with `stream`: `model(rows)` gives the outputs of the next time steps, rows (time steps, …)."""

    def __init__(
        self, package: Package, verify: bool | None = None, kernels: str | None = None, threads: int = 1
    ) -> None:
        super().__init__(package, verify, kernels, threads)
        self._goes_on, self._one = True, threading.Lock()

    @property
    def latency(self) -> dict[str, int]:
        """By output, time steps that pass before the first that the whole sequence's model would give."""
        found: dict[str, int] = self.package.info.get("latency", {})
        return found

    def reset(self) -> None:
        """Forget the past."""
        with self._one:
            self._contexts.clear()

    def _run(self, rows: Array, recorded: list[Recorded] | None = None, logits: bool = False) -> Array:
        with self._one:  # there is one past
            return super()._run(rows, recorded, logits)

    def selftest(self) -> None:
        """As `Model.selftest`; the past is kept."""
        with self._one:
            kept, self._contexts[:] = list(self._contexts), []
            try:
                super().selftest()
            finally:
                self._contexts[:] = kept


__all__ = ["StreamModel"]
