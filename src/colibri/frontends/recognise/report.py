"""Report of the PyTorch front end: what it found and measured, with every graph and every refusal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from colibri.ir.graph import Array, Graph
from colibri.passes.prune import Pruning
from colibri.quantize.report import Quality


@dataclass
class BlockFinding:
    """One block taken for a Mixture of Experts, and how closely the graph reproduces it.

    `unit`: what is routed, each token or a whole sample. `router`: what there is beside score, normalisation and scale.
    `gate` and `input` are what computes the logits and the experts' input, `after` what is done with the mixture.

    `error` is the largest |difference| / max |mixture| over `tokens` compared rows; `ambiguous` rows, whose choice of
    experts hangs on a margin below 1e-6, were left out; `logits_error` is the largest difference of an expert's weight
    over made-up logits that bring every branch of the router about, None where the block was registered.
    `never_chosen` experts were not chosen by the example or calibration rows, `untested` not even by random ones.
    """

    path: str
    kind: str
    experts: int
    k: int
    score: str
    normalize: str
    scale: float
    router: list[str]
    unit: str
    gate: str
    input: str
    after: list[str]
    body: str | None  # of experts that are slices of parameters
    registered: bool
    error: float
    logits_error: float | None
    tokens: int
    ambiguous: int
    never_chosen: list[int]
    untested: list[int]

    def __str__(self) -> str:
        extras = [
            f"scale {self.scale:g}" if self.scale != 1.0 else "", *self.router,
            f"experts {self.body}" if self.body else "",
            f"of {self.input}" if self.input != "x" else "",
            f"then {', '.join(self.after)}" if self.after else "",
        ]  # fmt: skip
        made = "" if self.logits_error is None else f", {self.logits_error:.1e} over made-up logits"
        lines = [
            f"{self.path or 'the module'} ({self.kind}): {self.experts} experts, top-{self.k} a {self.unit}, score "
            f"{self.score}, normalize {self.normalize}, logits {self.gate}" + "".join(f", {e}" for e in extras if e),
            f"  {'registered' if self.registered else 'recognised'}; relative error {self.error:.1e} over "
            f"{self.tokens} {self.unit}s{made}" + (f", {self.ambiguous} ambiguous left out" if self.ambiguous else ""),
        ]
        if self.never_chosen:
            kind = "experts" if len(self.never_chosen) > 1 else "expert"
            lines.append(f"  the data never choose {kind} number {', '.join(map(str, self.never_chosen))}")
        if self.untested:
            lines.append(f"  not even by random {self.unit}s: experts {', '.join(map(str, self.untested))}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Rejected:
    """A candidate that is no MoE as far as the numbers tell, and why; `dense_macs` where all its experts run.

    `gated`: whether something in it gives one value an expert. `called`: whether the experts are modules.
    """

    path: str
    kind: str
    reason: str
    dense_macs: int = 0  # multiply-accumulates a token in experts that all run
    experts: int = 0
    gated: bool = True
    called: bool = True

    def __str__(self) -> str:
        return f"{self.path or 'the module'} ({self.kind}) was not taken for a Mixture of Experts: {self.reason}"


@dataclass
class Report:
    """The blocks found, what the user should know, and the error of the whole graph against the module.

    `error` is the largest |difference| / max |output| over `rows` rows (example, calibration and random ones);
    `ambiguous` more rows, in which some choice of experts hangs on a margin below rounding, were left out.
    """

    blocks: list[BlockFinding] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
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

    def recognition(self) -> str:
        """What each block was taken for, with its evidence, every candidate that was rejected, and the warnings."""
        return "\n".join(self._found(explain=True))

    def _found(self, explain: bool) -> list[str]:
        lines = [str(block) for block in self.blocks] or ["no Mixture-of-Experts block recognised"]
        lines += [str(rejected) for rejected in self.rejected] if explain else []
        return lines + [f"warning: {warning}" for warning in self.warnings]

    def text(self, explain: bool = False) -> str:
        """The report for a reader; `explain`: with the candidates that were rejected."""
        lines = self._found(explain)
        left_out = f", {self.ambiguous} ambiguous left out" if self.ambiguous else ""
        lines.append(f"the graph equals the module to {self.error:.1e} relative over {self.rows} rows{left_out}")
        if self.pruning is not None and self.pruning.experts:
            lines.append(str(self.pruning))
        if self.quality is not None:
            lines.append(str(self.quality))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


class Imported(NamedTuple):
    """A module as a graph, what was found, and the rows that were given: calibration's, or else the example's."""

    graph: Graph
    report: Report
    rows: list[Array]  # one (rows, *shape) an input
    batch: int  # rows of the example


__all__ = ["BlockFinding", "Imported", "Rejected", "Report"]
