"""Which modules are Mixture-of-Experts blocks: structure proposes, numbers decide.

A candidate is a module with what may be experts below it. Where they are in what it computes is seen in its calls. What
it does with their logits is found by putting logits of our own in the place of the block's: near ties, very low ones,
a crowd for one expert. What is found is then compared with the block, on random tokens at several scales and on the
tokens the model really feeds it. Only an agreement to rounding counts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colibri.errors import ExportError
from colibri.frontends.torch_calls import UNITS, Calls, Rows, rows_of
from colibri.frontends.torch_experts import Experts, ModuleExperts, Place, mixed, stacked
from colibri.frontends.torch_moe import Block, Mixture, Registration, extras, kind_of
from colibri.frontends.torch_report import BlockFinding, Rejected
from colibri.frontends.torch_routing import TOLERANCE, Proposal, Seen, solve, telling_logits, weigh
from colibri.frontends.torch_stacks import stacks
from colibri.frontends.torch_watch import Probe, Watched, largest

SCALES = (0.25, 1.0, 4.0, 16.0)  # of random tokens, in units of the real ones; besides, there is one set of variance 1
TOKENS = 256  # random tokens at each scale
REAL = 8192  # at most this many real tokens are compared
RUNS = 4  # routers that agree on made-up logits and are compared with the block


# --- finding ----------------------------------------------------------------------------------------------------------


def find_blocks(
    module: nn.Module, runs: Sequence[Sequence[Tensor]], claims: Mapping[str, Registration]
) -> tuple[list[Block], list[Rejected]]:
    """The MoE blocks of `module` as it runs on `runs`, outer ones first, and the candidates that are none.

    Raises ExportError for a registered block that is not what was claimed.
    """
    candidates = {p: m for p, m in module.named_modules() if p in claims or next(_groups(m), None) is not None}
    calls = {path: Calls(m) for path, m in candidates.items()}
    hooks = [m.register_forward_hook(calls[p].hook, with_kwargs=True) for p, m in candidates.items()]
    try:
        for run in runs:
            module(*run)
    finally:
        for hook in hooks:
            hook.remove()
    checked = {path: check(path, candidates[path], claims[path], calls[path]) for path in claims}
    blocks = [block for block in checked.values() if block is not None]
    settled = _Settled()
    for block in blocks:
        settled.add(block)
    rejected: list[Rejected] = []
    for path, m in reversed(candidates.items()):  # inner ones first: what is around a block is not part of it
        if path in claims or settled.holds(m):
            continue
        found = _identify(path, m, calls[path], settled)
        if isinstance(found, Block):
            blocks.append(found)
            settled.add(found)
            rejected = [r for r in rejected if not _within(r.path, path)]
        elif found is not None and not any(_within(r.path, path) for r in rejected):
            rejected.append(found)
    for block in blocks:
        inside = {id(m) for expert in block.experts for m in expert.modules()}
        block.nested = any(id(other.module) in inside for other in blocks)
    order = list(candidates)
    return sorted(blocks, key=lambda b: order.index(b.path)), rejected[::-1]


def _within(path: str, outer: str) -> bool:
    return outer in ("", path) or path.startswith(f"{outer}.")


class _Settled:
    """The modules and tensors that belong to blocks already found, those inside experts aside."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def add(self, block: Block) -> None:
        inside = {id(m) for expert in block.experts for m in expert.modules()}
        ours = [m for m in block.module.modules() if m is not block.module and id(m) not in inside]
        self._ids |= {id(m) for m in (*ours, *block.experts)}
        self._ids |= {id(t) for m in (block.module, *ours) for t in m.parameters(recurse=False)}

    def holds(self, module: nn.Module) -> bool:
        return id(module) in self._ids

    def has(self, experts: Experts) -> bool:
        things: Sequence[object] = experts.watched or experts.tensors
        return all(id(thing) in self._ids for thing in things)


def _groups(block: nn.Module) -> Iterator[Experts]:
    """What may be the experts of `block`: a container's children, children of one class, slices of parameters."""
    seen = set()
    places = [*block.children(), *(g for c in block.children() for g in c.children()), block]
    for place in places:
        children = list(place.children())
        groups = [children] if isinstance(place, nn.ModuleList | nn.ModuleDict) else []
        groups += [list(g) for _, g in itertools.groupby(sorted(children, key=kind_of), key=kind_of)]
        for group in groups:
            key = tuple(map(id, group))
            if len(group) > 1 and key not in seen:
                seen.add(key)
                yield ModuleExperts(group)
    for stack in stacks(block).values():
        yield from stacked(stack)


# --- one candidate ----------------------------------------------------------------------------------------------------


def _identify(path: str, m: nn.Module, calls: Calls, settled: _Settled) -> Block | Rejected | None:
    """The simplest claim that agrees to rounding, or why there is none; None for what is not built like an MoE."""
    if not calls.usable or not calls.seen:
        return None
    reasons: list[Rejected] = []
    for unit in UNITS:
        rows = Rows(calls, unit)
        if not rows.usable or (unit == "sample" and len(rows.inner[0]) == 1):
            continue
        plain: Probe | None = None  # of experts that are no modules
        for experts in _groups(m):
            if settled.has(experts):
                continue
            try:
                probe = Probe(rows, experts.watched, experts.tensors, plain)
            except Exception:  # it does not run on rows like these
                continue
            plain = plain if experts.watched else probe
            if not _plausible(probe, experts):
                continue
            try:
                found = _search(path, m, probe, experts)
            except Exception as error:
                found = f"it cannot be run on random tokens: {type(error).__name__}: {error}"
            if isinstance(found, Block):
                return found
            macs = _macs(experts) if _dense(probe, experts) else 0
            reasons.append(Rejected(path, kind_of(m), found, macs, experts.count))
    return reasons[0] if reasons else None


def _plausible(probe: Probe, experts: Experts) -> bool:
    """Whether these are experts beside each other, chosen by something."""
    if probe.sequential or (experts.watched and not probe.seen.used):
        return False
    if probe.before(experts.count):
        return True
    return bool(experts.watched) and not _dense(probe, experts)


def _search(path: str, m: nn.Module, probe: Probe, experts: Experts) -> Block | str:
    """The simplest claim with these experts that agrees to rounding, or why none does."""
    rows, shared = probe.rows, 1
    reason = rows.dependence(sets(rows)[0])
    if reason is not None and "random" not in reason and rows.unit == "token" and rows.per_sample > 1:
        whole = Rows(rows.calls, "sample")
        shared = rows.per_sample
        reason = whole.dependence(sets(whole)[0])
    if reason is not None:
        return reason
    candidates = probe.before(experts.count)
    if not candidates:
        return (
            f"nothing gives one logit for each of the {experts.count} experts a {rows.unit}: let a tensor "
            f"(…, {experts.count}) decide, the largest winning"
        )
    best = (math.inf, f"its output is no weighted sum of what the {experts.count} experts give")
    vectors = _vectors(m, experts)
    for place in experts.places(probe):
        for value in candidates:
            for proposal in _routers(probe, experts, place, value, shared, vectors)[:RUNS]:
                router = replace(proposal.router, apply=place.apply)
                around = Watched(probe, value, place.input, place.mixture, place.base)
                body = None if place.body is None else str(place.body)
                block = Block(path, m, rows, place.experts, router, around, around.widths[1], place.width,
                              proposal.tensors, body)  # fmt: skip
                error = proposal.error
                if error <= TOLERANCE:
                    block.finding = measure(block, error)
                    error = block.finding.error
                if error <= TOLERANCE:
                    hidden = _unexplained(block, experts, probe)
                    return block if hidden is None else f"it looks like {block}, but also depends on {hidden}"
                best = min(best, (error, f"no router reproduces it; the nearest is {block}, with error {error:.1e}"))
    return best[1]


def _routers(
    probe: Probe, experts: Experts, place: Place, value: int, shared: int, vectors: Mapping[str, Tensor]
) -> list[Proposal]:
    """The routers that give the block's weights where the value is replaced by made-up logits, or else the nearest."""
    natural = probe.at(value)
    assert natural is not None
    logits = probe.rows.whole(telling_logits(experts.count, shared, natural))
    tokens = torch.randn(len(logits), probe.tokens.shape[1], generator=torch.Generator().manual_seed(7))

    def run(outputs: Any) -> Any:
        return probe.driven(tokens, value, logits, outputs)

    try:
        weights = experts.weights(probe, place, run)
    except Exception:  # what follows does not take any logits: they are none
        return []
    return [] if weights is None else solve(Seen(logits, weights, shared), vectors)


def _vectors(m: nn.Module, experts: Experts) -> dict[str, Tensor]:
    """The block's tensors that may be a selection bias or the experts' scales."""
    theirs = {id(t) for t in experts.tensors}
    return {
        name: t.detach().flatten()
        for name, t in (*m.named_parameters(), *m.named_buffers())
        if t.numel() == experts.count and t.is_floating_point() and id(t) not in theirs
    }


def _unexplained(block: Block, experts: Experts, probe: Probe) -> str | None:
    """The name of a tensor of the block that the claim does not account for, but the output depends on.

    A selection bias of 1e-8 changes no choice that comparing outputs would show. A tensor of one value throughout
    shifts or scales all experts alike, which the comparison does see.
    """
    named = {**dict(block.module.named_parameters()), **dict(block.module.named_buffers())}
    accounted = {id(t) for t in (*experts.tensors, *block.around.held(), *(named[name] for name in block.tensors))}
    accounted |= {id(t) for expert in block.experts for t in expert.parameters()}
    tokens = sets(block.rows)[0]
    y = block.rows(tokens)
    for name, tensor in (*named.items(), *((f"a tensor {tuple(t.shape)}", t) for t in probe.program.constants)):
        if id(tensor) in accounted or not tensor.is_floating_point() or (tensor == tensor.flatten()[:1]).all():
            continue
        held = tensor.detach().clone()
        try:
            tensor.data.add_(torch.randn(held.shape, generator=torch.Generator().manual_seed(3)))
            changed = not torch.equal(block.rows(tokens), y)
        finally:
            tensor.data.copy_(held)
        if changed:
            return name
    return None


# --- a registered block -----------------------------------------------------------------------------------------------


class Claimed:
    """The surroundings that register_moe was told: a gate, perhaps a norm, a shared expert, a residual."""

    def __init__(self, module: nn.Module, claim: Registration, rows: Rows) -> None:
        self.module, self.claim, self.rows = module, claim, rows

    def resolve(self, spec: Any) -> Any:
        """What a dotted path or a function names, looked up at each call, since tracing exchanges the parameters."""
        return functools.reduce(getattr, spec.split("."), self.module) if isinstance(spec, str) else spec(self.module)

    def _apply(self, spec: Any, x: Tensor) -> Tensor:
        target = self.resolve(spec)
        y: Tensor = nn.functional.linear(x, target) if isinstance(target, Tensor) else target(x)
        return y

    def normed(self, x: Tensor) -> Tensor:
        """The experts' input."""
        return x if self.claim.prenorm is None else self._apply(self.claim.prenorm, x)

    def __call__(self, inputs: Sequence[Tensor], mixture: Mixture) -> list[Tensor | None]:
        """The block's outputs: the main one only."""
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        z = self.normed(x)
        y = mixture(z, self._apply(self.claim.gate, z))
        if self.claim.shared is not None:
            y = y + self._apply(self.claim.shared, z)
        y = y + x if self.claim.residual else y
        outs: list[Tensor | None] = [None] * self.rows.tensors
        outs[self.rows.main_tensor] = y.view((*inputs[0].shape[:-1], y.shape[-1]))
        return outs

    def held(self) -> list[Tensor]:
        """Not asked of a registered block."""
        return []

    def describe(self) -> tuple[str, str, list[str]]:
        """What the registration names."""
        def name(spec: Any, otherwise: str) -> str:
            return spec if isinstance(spec, str) else otherwise

        after = [] if self.claim.shared is None else [f"shared expert {name(self.claim.shared, 'registered')}"]
        after += ["residual"] if self.claim.residual else []
        normed = "x" if self.claim.prenorm is None else name(self.claim.prenorm, "prenorm")
        return name(self.claim.gate, "gate"), normed, after


def check(path: str, m: nn.Module, claim: Registration, calls: Calls) -> Block | None:
    """The registered block, its claim verified; None where it is never called."""
    where = f"{path or 'the module'} ({kind_of(m)})"
    if calls.usable and not calls.seen:
        return None
    rows = Rows(calls, "token") if calls.usable else None
    if rows is None or not rows.usable or len(rows.widths) != 1:
        raise ExportError(
            f"{where}: a registered block takes one float tensor (…, in), always alike, and gives (…, out)"
        )
    try:
        around = Claimed(m, claim, rows)
        group = around.resolve(claim.experts)
        experts = list(group.values() if isinstance(group, nn.ModuleDict) else group)
        router = Router(len(experts), claim.k, claim.score, claim.normalize, claim.scale)
        tokens = sets(rows)[0]
        reason = rows.dependence(tokens)
        width = rows(tokens[:1]).shape[-1]
        block = Block(path, m, rows, experts, router, around, around.normed(tokens[:1]).shape[-1], width)
        block.finding = measure(block, None)
    except ExportError as error:
        raise ExportError(f"{where}: register_moe: {error}") from None
    except Exception as error:
        raise ExportError(f"{where}: register_moe does not fit this block: {type(error).__name__}: {error}") from None
    if reason is None and (measured := block.finding.error) > TOLERANCE:
        reason = f"over {block.finding.tokens} tokens the relative error is {measured:.1e}, above {TOLERANCE}"
    if reason is not None:
        raise ExportError(f"{where}: it is not what register_moe says ({block}): {reason}")
    return block


# --- numbers ----------------------------------------------------------------------------------------------------------


def sets(rows: Rows) -> list[Tensor]:
    """Rows to compare on: random ones of variance 1, then of sizes around the real ones'; last the real ones."""
    real = rows.real[: max(1, REAL // rows.per_sample) * rows.per_sample]
    unit = float(real.square().mean().sqrt()) or 1.0
    generator = torch.Generator().manual_seed(0)
    sizes = (1.0, *(unit * scale for scale in SCALES))
    count = -(-TOKENS // rows.per_sample) * rows.per_sample
    return [torch.randn(count, real.shape[1], generator=generator) * size for size in sizes] + [real]


def measure(block: Block, logits_error: float | None) -> BlockFinding:
    """Compare a claim with the block on every set of rows.

    The finding's error is the largest |difference| over what the mixture changes most, beyond what rounding costs where
    something is added to it. Sets in which the mixture is lost beside the rest tell nothing; the error is infinite where
    too few rows are left.
    """
    compared, ambiguous, errors = 0, 0, [0.0]
    by_data = by_any = torch.zeros(len(block.experts), dtype=torch.int64)
    *random, real = sets(block.rows)
    for rows in (*random, real):
        y = block.rows(rows)
        if rows is not real and not torch.isfinite(y).all():
            continue  # an expert that overflows at this scale says nothing
        ours, without, weights, clear = _predict(block, rows)
        by_data = (weights != 0).sum(0)
        by_any = by_any + by_data
        ambiguous += int((~clear).sum())
        slack = 4 * torch.finfo(torch.float32).eps * largest(y) if without.any() else 0.0
        size = largest((ours - without)[clear])
        if size > (1e-3 * largest(y) if without.any() else 0.0):
            compared += int(clear.sum())
            errors.append((largest((ours - y)[clear]) - slack) / size)
    worst = max(errors) if compared >= TOKENS and all(map(math.isfinite, errors)) else math.inf
    r, (gate, z, after) = block.router, block.around.describe()
    return BlockFinding(
        block.path, kind_of(block.module), r.experts, r.k, r.score, r.normalize, r.scale, extras(r), block.rows.unit,
        gate, z, after, block.body, logits_error is None, worst, logits_error, compared, ambiguous,
        (by_data == 0).nonzero()[:, 0].tolist(), (by_any == 0).nonzero()[:, 0].tolist(),
    )  # fmt: skip


def _predict(block: Block, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the claim says: the output, the output of an empty mixture, the experts' weights, which choices are clear."""
    kept: list[Tensor] = []
    inputs = block.rows.split(rows)

    def mixture(z: Tensor, logits: Tensor) -> Tensor:
        weights, clear = weigh(logits, block.router, block.shared_rows)
        kept.extend((weights, clear))
        return mixed(block.experts, z, weights, block.router.apply, block.width)

    def nothing(z: Tensor, logits: Tensor) -> Tensor:
        return z.new_zeros(len(z), block.width)

    def main(what: Mixture) -> Tensor:
        out = block.around(inputs, what)[block.rows.main_tensor]
        y = None if out is None else rows_of(out, len(rows))
        assert y is not None
        return y

    return main(mixture), main(nothing), kept[0], kept[1]


# --- what running every expert costs ----------------------------------------------------------------------------------


def _macs(experts: Experts) -> int:
    """Multiply-accumulates of one token in all experts, matrices only."""
    return sum(p.numel() for p in experts.tensors if p.dim() in (2, 3))


def _dense(probe: Probe, experts: Experts) -> bool:
    """Whether every expert sees every row: each module is called on the same input, or nothing depends on the data."""
    if not experts.watched:
        return probe.program.first == len(probe.program.one.calls)
    inputs = {e: x for e, x, _ in probe.seen.used}
    first = next(iter(inputs.values()), None)
    return len(inputs) == experts.count and all(torch.equal(x, first) for x in inputs.values())


def dense_cost(rejected: Rejected) -> str | None:
    """What a block that runs all its experts for every token costs, as a sentence; None for a sparse one."""
    if not rejected.dense_macs:
        return None
    return (
        f"{rejected.path or 'the module'} ({rejected.kind}) is exported as a plain program: it runs all "
        f"{rejected.experts} experts for every token, {rejected.dense_macs:,} multiply-accumulates where a top-1 "
        f"router would need about {rejected.dense_macs // rejected.experts:,}: {rejected.reason}"
    )


def nested_cost(block: Block) -> str:
    """What a block whose experts are blocks costs, as a sentence."""
    count = len(block.experts)
    return (
        f"{block.path or 'the module'} ({kind_of(block.module)}) is a Mixture of Experts of such mixtures: all its "
        f"{count} experts run for every token, {count // block.router.k} times what its router asks for, and it chooses "
        "among their outputs; flatten the levels into one to save that"
    )


__all__ = ["dense_cost", "find_blocks", "nested_cost"]
