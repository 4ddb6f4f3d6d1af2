"""What the PyTorch front end found and measured: the report that comes with every graph."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from colibri.graph import Array, Graph
from colibri.passes.prune import Pruning
from colibri.quantize.report import Quality


@dataclass
class BlockFinding:
    """One block taken for a Mixture of Experts, and how closely the graph reproduces it.

    `error` is the largest |difference| / max |mixture| over `tokens` compared tokens; `ambiguous` tokens, whose choice
    of experts hangs on a margin below 1e-6, were left out; `never_chosen` experts were not chosen by the example or
    calibration rows, `untested` experts not even by random tokens.
    """

    path: str
    kind: str
    experts: int
    k: int
    score: str
    normalize: str
    scale: float
    gate: str
    gate_input: str
    prenorm: str | None
    shared: str | None
    residual: bool
    registered: bool
    error: float
    tokens: int
    ambiguous: int
    never_chosen: list[int]
    untested: list[int]

    def __str__(self) -> str:
        extras = [
            f"scale {self.scale:g}" if self.scale != 1.0 else "",
            f"first {self.prenorm}" if self.prenorm else "",
            f"plus shared expert {self.shared}" if self.shared else "",
            "plus residual" if self.residual else "",
        ]
        lines = [
            f"{self.path or 'the module'} ({self.kind}): {self.experts} experts, top-{self.k}, score {self.score}, "
            f"normalize {self.normalize}, gate {self.gate}({self.gate_input})" + "".join(f", {e}" for e in extras if e),
            f"  {'registered' if self.registered else 'recognised'}; relative error {self.error:.1e} over "
            f"{self.tokens} tokens" + (f", {self.ambiguous} ambiguous left out" if self.ambiguous else ""),
        ]
        if self.never_chosen:
            lines.append(f"  never chosen by the data: experts {', '.join(map(str, self.never_chosen))}")
        if self.untested:
            lines.append(f"  not even by random tokens: experts {', '.join(map(str, self.untested))}")
        return "\n".join(lines)


@dataclass
class Report:
    """The blocks found, what the user should know, and the error of the whole graph against the module.

    `error` is the largest |difference| / max |output| over `rows` rows (example, calibration and random ones);
    `ambiguous` more rows, in which some choice of experts hangs on a margin below rounding, were left out.
    """

    blocks: list[BlockFinding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: float = 0.0
    rows: int = 0
    ambiguous: int = 0
    quality: Quality | None = None
    pruning: Pruning | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, numbers and strings, ready for JSON."""
        quality = None if self.quality is None else self.quality.to_dict()
        pruning = None if self.pruning is None else self.pruning.to_dict()
        return {**asdict(replace(self, quality=None, pruning=None)), "quality": quality, "pruning": pruning}

    def __str__(self) -> str:
        lines = [str(block) for block in self.blocks] or ["no Mixture-of-Experts block recognised"]
        lines += [f"warning: {warning}" for warning in self.warnings]
        left_out = f", {self.ambiguous} ambiguous left out" if self.ambiguous else ""
        lines.append(f"the graph equals the module to {self.error:.1e} relative over {self.rows} rows{left_out}")
        if self.pruning is not None and self.pruning.experts:
            lines.append(str(self.pruning))
        if self.quality is not None:
            lines.append(str(self.quality))
        return "\n".join(lines)


class Imported(NamedTuple):
    """A module as a graph, what was found, and the rows that were given: calibration's, or else the example's."""

    graph: Graph
    report: Report
    rows: list[Array]  # one (rows, *shape) an input
    batch: int  # rows of the example


__all__ = ["BlockFinding", "Imported", "Report"]
