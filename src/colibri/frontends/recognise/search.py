"""Search for the claim about one candidate that agrees with the block to rounding, or the reason why there is none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colibri.errors import ExportError
from colibri.frontends.recognise.chains import chained
from colibri.frontends.recognise.experts import Experts, ModuleExperts, Placement
from colibri.frontends.recognise.extremes import EPS, Extremes
from colibri.frontends.recognise.measure import measure, sets
from colibri.frontends.recognise.moe import Block
from colibri.frontends.recognise.recording.calls import Rows
from colibri.frontends.recognise.recording.tape import Recording
from colibri.frontends.recognise.routing import ALMOST, TOLERANCE, Proposal, Seen, solve, telling_logits
from colibri.frontends.recognise.watch import Probe, Watched

_Miss = tuple[bool, float, str]  # whether a claim is contrived, its error, and what it says
TRIED = 4  # routers that agree on made-up logits and are compared with the block


class Search:
    """The search for what a module does with a group of experts, seen through a probe."""

    def __init__(self, path: str, module: nn.Module, probe: Probe, experts: Experts) -> None:
        self.path, self.module, self.probe, self.experts = path, module, probe, experts
        self.natural = probe
        self.rows = probe.rows
        self.shared = 1  # rows that may share a capacity
        self.named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        theirs = {id(t) for t in experts.tensors}
        self.vectors = {  # what may be a selection bias or the experts' scales
            name: t.detach().flatten()
            for name, t in self.named.items()
            if t.numel() == experts.count and t.is_floating_point() and id(t) not in theirs
        }

    def run(self) -> Block | str:
        """The simplest claim that agrees to rounding, or why none does; where other results of the module need the
        experts too, with a claim for each of them."""
        found = self._run()
        if not isinstance(found, Block) or not isinstance(found.around, Watched):
            return found
        others: list[Block] = []
        for result in self.probe.missing(found.around.mixture):
            known = [use.around.logits for use in (found, *others) if isinstance(use.around, Watched)]
            search = Search(self.path, self.module, self.probe.of_result(result, known), self.experts)
            other = search._run()
            if not isinstance(other, Block) or not isinstance(other.around, Watched):
                return found
            if (other.around.z, other.around.program) != (found.around.z, found.around.program):
                return found
            others.append(other)
        if others:
            found.others = others
            for use in (found, *others):
                use.nested = True
        return found

    def _run(self) -> Block | str:
        reason = self._dependence()
        if reason is not None:
            return reason
        count, unit = self.experts.count, self.rows.unit
        candidates = self.probe.before(count)
        if not candidates:
            return (
                f"nothing gives one logit for each of the {count} experts a {unit}: let a tensor (…, {count}) decide, "
                "the largest winning"
            )
        best: _Miss = (True, math.inf, f"its output is no weighted sum of what the {count} experts give")
        for view, some in self._views(candidates):
            for probe, experts in self._with_and_without_calls(view):
                self.probe, self.experts = probe, experts
                found = self._among(some, best)
                if isinstance(found, Block | str):
                    return found
                best = found
        if self.shared > 1:
            return (
                f"{best[2]}; its tokens depend on the other tokens of their sample, and of what makes them do so only "
                "a capacity that takes tokens in their order is known"
            )
        return best[2]

    def _views(self, candidates: list[int]) -> Iterator[tuple[Probe, list[int]]]:
        """The probe with what may be the logits; where it does not reach every expert, one that does for each."""
        if not self.probe.unreached:
            yield self.probe, candidates
            return
        probe = self.probe
        for logits in candidates:
            with contextlib.suppress(Exception):  # what follows does not take these for logits
                reaching = probe.reaching_all(logits)
                if not reaching.unreached:
                    yield reaching, [logits]
        yield probe, candidates

    def _with_and_without_calls(self, probe: Probe) -> Iterator[tuple[Probe, Experts]]:
        """The probe and the experts; behind them the same with the calls around each expert as part of it."""
        experts = self.experts
        yield probe, experts
        if isinstance(experts, ModuleExperts):
            chains = chained(probe.seen, experts.watched)
            if any(chain.around != (0, 0) for chain in chains):
                with contextlib.suppress(Exception):  # they are not the same in every call of an expert
                    probe = probe.with_calls([chain.around for chain in chains])
                    yield probe, ModuleExperts(experts.watched, chains)
        self.experts = experts

    def _among(self, candidates: list[int], best: _Miss) -> Block | str | _Miss:
        """The first claim that holds, why one almost does, or the nearest of those that do not."""
        for place in self.experts.places(self.probe):
            for logits in candidates:
                for proposal in self._proposals(place, logits)[:TRIED]:
                    found = self._claim(place, logits, proposal)
                    if isinstance(found, Block | str):
                        return found
                    best = min(best, found)
        return best

    def _dependence(self) -> str | None:
        """Why the block is no function of its rows, not even of the rows of a sample together."""
        reason = self.rows.dependence(sets(self.rows)[0])
        if reason is None or "random" in reason or self.rows.unit != "token" or self.rows.per_sample == 1:
            return reason
        whole = Rows(self.rows.calls, "sample")
        whole.main = self.rows.main
        self.shared = self.rows.per_sample
        return whole.dependence(sets(whole)[0])

    def _claim(self, place: Placement, logits: int, proposal: Proposal) -> Block | str | _Miss:
        """The block where the proposal is right; a string where it almost is; else whether it is contrived, its error,
        and what it says."""
        around = Watched(self.probe, logits, place.input, place.mixture, place.base)
        block = Block(
            self.path, self.module, self.rows, place.experts, replace(proposal.router, apply=place.apply), around,
            around.widths[1], place.width, proposal.tensors, None if place.body is None else str(place.body),
        )  # fmt: skip
        error = proposal.error
        if error <= TOLERANCE:
            block.finding = measure(block, error)
            error = block.finding.error
        if error > TOLERANCE:
            if proposal.error == ALMOST and (hidden := self._hidden(block)) is not None:
                return False, error, f"it looks like {block}, but also depends on {hidden}"
            contrived = proposal.complexity > 1
            return contrived, error, f"no router reproduces it; the nearest is {block}, with relative error {error:.1e}"
        beside = Extremes(self.probe, place, logits, self._made(logits), block.router, self.shared).reason()
        if beside is not None:
            return False, 0.0, f"it looks like {block}, but {beside}"
        hidden = self._hidden(block)
        if hidden is None:
            return block
        biased = self._biased(place, logits, proposal, hidden)
        return (
            f"it looks like {block}, but also depends on {hidden}"
            if biased is None
            else (self._claim(place, logits, biased))
        )

    # --- routers ------------------------------------------------------------------------------------------------------

    def _proposals(self, place: Placement, logits: int) -> list[Proposal]:
        """The routers that give the block's weights where the value is replaced by made-up logits, or the nearest."""
        seen = self._driven(place, logits)
        return [] if seen is None else solve(seen, self.vectors, self.probe.program.numbers)

    def _made(self, logits: int) -> Tensor:
        """Logits that bring every branch about, beside those the block has by itself."""
        natural = self.natural.at(logits)
        assert natural is not None
        return self.rows.whole(telling_logits(self.experts.count, self.shared, natural))

    def _driven(self, place: Placement, logits: int) -> Seen | None:
        """The weights the block gives its experts for logits that bring every branch about."""
        made = self._made(logits)
        rows = torch.randn(len(made), self.probe.tokens.shape[1], generator=torch.Generator().manual_seed(7))

        def run(outputs: Any) -> Any:
            return self.probe.driven(rows, {logits: made}, outputs)

        try:
            weights = self.experts.weights(self.probe, place, run)
            if weights is None:
                return None
            return Seen(made, weights, self.shared, self._floor(place, weights, run))
        except Exception:  # what follows does not take any logits: they are none
            return None

    def _floor(self, place: Placement, weights: Tensor, run: Callable[[Any], Recording]) -> Tensor | None:
        """How small weights are seen: beside what they are added to, and in experts' outputs of many values, no more
        than rounding leaves of them."""
        if place.body is not None:
            return weights.abs().amax(1, keepdim=True)
        base = None if place.base is None else self.probe.at(place.base, run(None))
        return None if base is None else 4 * EPS / TOLERANCE * base.abs().amax(1, keepdim=True)

    # --- what a claim leaves out --------------------------------------------------------------------------------------

    def _hidden(self, block: Block) -> str | None:
        """The name of a tensor of the block that the claim does not account for, but the output depends on.

        A selection bias of 1e-8 changes no choice that comparing outputs would show. A tensor of one value throughout
        shifts or scales all experts alike, which the comparison does see.
        """
        accounted = {id(t) for t in (*self.experts.tensors, *block.around.held())}
        accounted |= {id(self.named[name]) for name in block.tensors}
        rows = sets(self.rows)[0]
        y = self.rows(rows)
        loose = ((f"a tensor {tuple(t.shape)} that is no parameter", t) for t in self.probe.program.constants)
        for name, tensor in (*self.named.items(), *loose):
            if id(tensor) in accounted or not tensor.is_floating_point() or (tensor == tensor.flatten()[:1]).all():
                continue
            with _Disturbed(tensor):
                changed = not torch.equal(self.rows(rows), y)
            if changed:
                return name
        return None

    def _biased(self, place: Placement, logits: int, proposal: Proposal, name: str) -> Proposal | None:
        """The proposal with the hidden tensor as selection bias, where the block follows it when it is disturbed."""
        if name not in self.vectors or proposal.router.bias:
            return None
        tensor = self.named[name]
        with _Disturbed(tensor):
            seen, moved = self._driven(place, logits), tensor.detach().flatten().clone()
        try:
            router, there = (replace(proposal.router, bias=tuple(v.tolist())) for v in (self.vectors[name], moved))
        except ExportError:
            return None
        if seen is None or seen.deviation(there) > TOLERANCE:
            return None
        return Proposal(proposal.error, router, (*proposal.tensors, name))


class _Disturbed:
    """While this is open, the tensor is another one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.held = tensor, tensor.detach().clone()

    def __enter__(self) -> None:
        self.tensor.data.add_(torch.randn(self.held.shape, generator=torch.Generator().manual_seed(3)))

    def __exit__(self, *error: object) -> None:
        self.tensor.data.copy_(self.held)


__all__ = ["Search"]
