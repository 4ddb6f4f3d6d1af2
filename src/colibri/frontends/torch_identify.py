"""Which modules are Mixture-of-Experts blocks: structure proposes, numbers decide.

A candidate is a module with a group of experts below it and something that gives one logit per expert. What it does
with them is found by trying every router the engine knows against the block's own outputs, on random tokens at several
scales and on the tokens the model really feeds it. Only an agreement to rounding counts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colibri.errors import ExportError
from colibri.frontends.torch_calls import Calls, attempt, dependence
from colibri.frontends.torch_moe import (
    IDENTITY,
    Block,
    Part,
    Registration,
    Rejected,
    kind_of,
    registered,
    route,
)
from colibri.frontends.torch_report import BlockFinding
from colibri.graph import Router

TOLERANCE = 2e-5  # largest |difference| / max |mixture| of a block that counts as recognised
SCALES = (0.25, 1.0, 4.0, 16.0)  # of random tokens, in units of the real ones; besides, there is one set of variance 1
TOKENS = 256  # random tokens at each scale
SEARCH, COLUMNS = 48, 64  # tokens, and outputs of each, on which all routers are tried first
REAL = 8192  # at most this many real tokens are compared


# --- finding ----------------------------------------------------------------------------------------------------------


def find_blocks(
    module: nn.Module, runs: Sequence[Sequence[Tensor]], claims: Mapping[str, Registration]
) -> tuple[list[Block], list[Rejected]]:
    """The outermost MoE blocks of `module` as it runs on `runs`, and the candidates that are none.

    Raises ExportError for a registered block that is not what was claimed, and for a block inside an expert.
    """
    candidates = {p: m for p, m in module.named_modules() if p in claims or next(expert_groups(m), None) is not None}
    calls = {path: Calls(m) for path, m in candidates.items()}
    hooks = [m.register_forward_hook(calls[p].hook, with_kwargs=True) for p, m in candidates.items()]
    try:
        for run in runs:
            module(*run)
    finally:
        for hook in hooks:
            hook.remove()
    blocks: list[Block] = []
    rejected: list[Rejected] = []
    for path, m in candidates.items():
        if any(b.path in ("", path) or path.startswith(f"{b.path}.") for b in blocks):
            continue
        if path in claims:
            found: Block | Rejected | None = _check(path, m, claims[path], calls[path])
        else:
            found = _identify(path, m, calls[path])
        if isinstance(found, Block):
            _refuse_nested(found, calls[path])
            found.result, found.main, found.input_width = calls[path].result, calls[path].main, calls[path].x.shape[-1]
            blocks.append(found)
        elif found is not None:
            rejected.append(found)
    return blocks, rejected


def _identify(path: str, m: nn.Module, calls: Calls) -> Block | Rejected | None:
    """The simplest claim that agrees to rounding, or why there is none; None for what is not built like an MoE."""
    if not calls.usable or not calls.leaves or calls.x.dtype != torch.float32:
        return None
    tokens = _sets(calls)[0]
    drafts = [Block(path, m, group, IDENTITY, Router(len(group), 1)) for group in expert_groups(m)]
    drafts = [d for d in drafts if _plausible(d, tokens)]
    if not drafts:
        return None
    try:
        found = dependence(calls, tokens) or _search(drafts, calls, tokens)
    except Exception as error:
        found = f"it cannot be run on random tokens: {type(error).__name__}: {error}"
    if isinstance(found, Block):
        return found
    group = drafts[0].experts
    return Rejected(path, kind_of(m), found, _macs(group) if _dense(group, calls) else 0, len(group))


def _search(drafts: Sequence[Block], calls: Calls, tokens: Tensor) -> Block | str:
    """The simplest claim with one of these groups of experts that agrees to rounding, or why none does."""
    best = (math.inf, "no router comes near")
    y = calls(tokens[:SEARCH])
    proposals = [p for draft in drafts for p in _proposals(draft, tokens[:SEARCH], y)]
    for error, block in sorted(proposals, key=lambda p: (p[0] > TOLERANCE, p[1].parts, p[0])):
        if error <= TOLERANCE:
            block.finding = measure(block, calls)
            error = block.finding.error
        if error <= TOLERANCE:
            hidden = _unexplained(block, calls, tokens)
            return block if hidden is None else f"it looks like {block}, but also depends on {hidden}"
        best = min(best, (error, f"the nearest is {block}, with relative error {error:.1e}"))
    return f"no router reproduces it; {best[1]}"


def _unexplained(block: Block, calls: Calls, tokens: Tensor) -> str | None:
    """The name of a tensor of the block that the claim does not account for, but the output depends on.

    A selection bias of 1e-4 changes one choice in ten thousand, which comparing outputs may miss. A tensor of one value
    throughout shifts or scales all experts alike, which the comparison does see.
    """
    accounted: set[int] = set()
    for part in (*block.experts, *(p.call for p in (block.gate, block.pre, block.gate_pre, block.shared) if p)):
        if isinstance(part, nn.Module):
            accounted |= {id(t) for t in (*part.parameters(), *part.buffers())}
        elif isinstance(part, functools.partial):
            holder, *names = part.args
            accounted |= {id(getattr(holder, name)) for name in names if name is not None}
    y = calls(tokens)
    for name, tensor in (*block.module.named_parameters(), *block.module.named_buffers()):
        if id(tensor) in accounted or not tensor.is_floating_point() or (tensor == tensor.flatten()[:1]).all():
            continue
        held = tensor.detach().clone()
        try:
            tensor.data.add_(torch.randn(held.shape, generator=torch.Generator().manual_seed(3)))
            changed = not torch.equal(calls(tokens), y)
        finally:
            tensor.data.copy_(held)
        if changed:
            return name
    return None


def _plausible(draft: Block, tokens: Tensor) -> bool:
    """Whether something in the block gives one logit for each of these experts."""
    few, parts = tokens[:4], [m for m in draft.module.children() if m not in draft.experts]
    inputs = [x for x in (few, *(attempt(m, few) for m in parts)) if x is not None]
    runs = any(all(attempt(e, x) is not None for e in draft.experts) for x in inputs)
    outs = (attempt(g.call, x) for g in _gates(draft.module, draft.experts) for x in inputs)
    return runs and any(o is not None and o.shape[1] == len(draft.experts) for o in outs)


def _check(path: str, m: nn.Module, claim: Registration, calls: Calls) -> Block | None:
    """The registered block, its claim verified."""
    where = f"{path or 'the module'} ({kind_of(m)})"
    if calls.usable and not calls.leaves:
        return None  # never called
    if not calls.usable:
        raise ExportError(
            f"{where}: a registered block takes one float tensor (…, in), always alike, and gives (…, out)"
        )

    def resolve(spec: Any) -> Any:
        return functools.reduce(getattr, spec.split("."), m) if isinstance(spec, str) else spec(m)

    def part(spec: Any, what: str) -> Part:
        def call(x: Tensor) -> Tensor:  # looked up at each call, since tracing exchanges the parameters
            target = resolve(spec)
            return nn.functional.linear(x, target) if isinstance(target, Tensor) else target(x)

        return Part(spec if isinstance(spec, str) else what, call)

    try:
        group = resolve(claim.experts)
        experts = list(group.values() if isinstance(group, nn.ModuleDict) else group)
        router = Router(len(experts), claim.k, claim.score, claim.normalize, claim.scale)
        pre = IDENTITY if claim.prenorm is None else part(claim.prenorm, "prenorm")
        shared = None if claim.shared is None else part(claim.shared, "shared")
        block = Block(path, m, experts, part(claim.gate, "gate"), router, pre, pre, shared, pre, claim.residual)
        tokens = _sets(calls)[0]
        reason = dependence(calls, tokens)
        block.width = calls(tokens[:1]).shape[-1]
        block.finding = measure(block, calls)
    except ExportError as error:
        raise ExportError(f"{where}: register_moe: {error}") from None
    except Exception as error:
        raise ExportError(f"{where}: register_moe does not fit this block: {type(error).__name__}: {error}") from None
    if reason is None and (measured := block.finding.error) > TOLERANCE:
        reason = f"over {block.finding.tokens} tokens the relative error is {measured:.1e}, above {TOLERANCE}"
    if reason is not None:
        raise ExportError(f"{where}: it is not what register_moe says ({block}): {reason}")
    block.finding.registered = True
    return block


def _refuse_nested(block: Block, calls: Calls) -> None:
    tokens = block.pre.call(_sets(calls)[0])
    for n, expert in enumerate(block.experts):
        inner, _ = find_blocks(expert, [(tokens,)], registered(expert))
        if inner:
            raise ExportError(
                f"{block.path or 'the module'}: expert {n} contains a Mixture of Experts itself "
                f"({inner[0].path or 'the whole expert'}), which is not supported; flatten the two levels into one"
            )


# --- structure --------------------------------------------------------------------------------------------------------


def expert_groups(block: nn.Module) -> Iterator[list[nn.Module]]:
    """Groups of modules under `block` that may be its experts: a container's children, or children of one class."""
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
                yield group


def _gates(block: nn.Module, experts: Sequence[nn.Module]) -> Iterator[Part]:
    """Every submodule outside the experts, and every matrix used as one: what may give the logits."""
    inside = {id(m) for e in experts for m in e.modules()}
    for path, m in block.named_modules():
        if m is block or id(m) not in inside:
            if m is not block:
                yield Part(path, m)
            for name, weight in m.named_parameters(recurse=False):
                if not isinstance(m, nn.Linear) and weight.dim() == 2 and len(weight) == len(experts):
                    biases = [n for n, b in m.named_parameters(recurse=False) if b.shape == (len(experts),)]
                    for bias in (None, *biases):
                        yield Part(f"{path}.{name}".strip("."), functools.partial(_linear, m, name, bias))


def _linear(holder: nn.Module, weight: str, bias: str | None, x: Tensor) -> Tensor:
    # Looked up at each call, since tracing exchanges the parameters.
    return nn.functional.linear(x, getattr(holder, weight), None if bias is None else getattr(holder, bias))


def _routers(experts: int) -> list[Router]:
    """Every router worth trying, simplest first among those that may agree."""
    found = []
    for k in range(1, experts + 1):
        kinds = [("logit", "one"), ("softmax", "none"), ("sigmoid", "none")]
        if k > 1:
            kinds += [("logit", "softmax"), ("sigmoid", "sum")]
        found += [Router(experts, k, score, normalize) for score, normalize in kinds]
    return found


# --- numbers ----------------------------------------------------------------------------------------------------------


def _sets(calls: Calls) -> list[Tensor]:
    """Token sets to compare on: random ones of variance 1, then of sizes around the real ones'; last the real ones."""
    real = torch.cat(calls.tokens)[:REAL]
    unit = float(real.square().mean().sqrt()) or 1.0
    generator = torch.Generator().manual_seed(0)
    sizes = (1.0, *(unit * scale for scale in SCALES))
    return [torch.randn(TOKENS, real.shape[1], generator=generator) * size for size in sizes] + [real]


def _proposals(draft: Block, tokens: Tensor, y: Tensor) -> Iterator[tuple[float, Block]]:
    """Claims with `draft`'s experts, and their error on a few tokens: every way to put the block's parts together."""
    parts = [Part(n, m) for n, m in draft.module.named_children() if m not in draft.experts]
    pres = [IDENTITY, *(p for p in parts if attempt(p.call, tokens) is not None)]
    routers = _routers(len(draft.experts))
    for pre in pres:
        each = [attempt(expert, pre.call(tokens)) for expert in draft.experts]
        outs = [o[:, :COLUMNS] for o in each if o is not None and o.shape == y.shape]
        if len(outs) < len(each):
            continue
        rests = list(_rests(parts, pre, tokens, y))
        for gate, gate_pre in itertools.product(_gates(draft.module, draft.experts), pres):
            logits = attempt(gate.call, gate_pre.call(tokens))
            if logits is None or logits.shape[1] != len(each):
                continue
            routed = [route(logits, router) for router in routers]
            weights, clear = torch.stack([w for w, _ in routed]), torch.stack([c for _, c in routed])
            mixes = torch.einsum("rte,teo->rto", weights, torch.stack(outs, 1))
            for around, rest in rests:
                for error, router in _closest(routers, mixes, clear, rest[:, :COLUMNS], _slack(y)):
                    block = replace(draft, gate=gate, gate_pre=gate_pre, pre=pre, router=router, **around)
                    yield error, replace(block, input_width=tokens.shape[1], width=y.shape[1])


def _rests(parts: Sequence[Part], pre: Part, tokens: Tensor, y: Tensor) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """What the mixture must be if the block adds nothing, or a shared expert, or its input, or both."""
    inputs = {p.name: p for p in (pre, IDENTITY)}.values()
    for residual in (False, True) if y.shape == tokens.shape else (False,):
        rest = y - tokens if residual else y
        yield {"residual": residual}, rest
        for shared, shared_pre in itertools.product(parts, inputs):
            o = None if shared is pre else attempt(shared.call, shared_pre.call(tokens))
            if o is not None and o.shape == y.shape:
                yield {"residual": residual, "shared": shared, "shared_pre": shared_pre}, rest - o


def _closest(
    routers: Sequence[Router], mixes: Tensor, clear: Tensor, rest: Tensor, slack: float
) -> Iterator[tuple[float, Router]]:
    """The routers whose mixtures (routers, tokens, out) are `rest` up to one factor, or else the nearest one."""
    ours, theirs = mixes * clear[..., None], rest * clear[..., None]
    scale = (ours * theirs).sum((1, 2)) / ours.square().sum((1, 2)).clamp_min(1e-30)
    scale = torch.where((scale - 1).abs() < 1e-5, 1.0, scale)
    miss = (ours * scale[:, None, None] - theirs).abs().amax((1, 2)) - slack
    error = torch.where(clear.any(1), miss / rest.abs().max().clamp_min(1e-30), math.inf).nan_to_num(math.inf)
    fits = [n for n, e in enumerate(error.tolist()) if e <= TOLERANCE]
    for n in fits or [int(error.argmin())]:
        yield float(error[n]), replace(routers[n], scale=_round(float(scale[n])))


def _slack(y: Tensor) -> float:
    """What rounding may cost where something is added to the mixture."""
    return 4 * torch.finfo(torch.float32).eps * float(y.abs().max())


def _round(scale: float) -> float:
    short = float(f"{scale:.4g}")
    return short if abs(short - scale) <= 1e-5 * abs(scale) else scale


def measure(block: Block, calls: Calls) -> BlockFinding:
    """Compare a claim with the block on every set of tokens.

    The finding's error is the largest |difference| / max |mixture|, beyond what rounding costs where a shared expert or
    the residual is added. Sets in which the mixture is lost beside them tell nothing; the error is infinite where too
    few tokens are left.
    """
    compared, ambiguous, errors = 0, 0, [0.0]
    by_data = by_any = torch.zeros(len(block.experts), dtype=torch.int64)
    *random, real = _sets(calls)
    for tokens in (*random, real):
        y = calls(tokens)
        if tokens is not real and not torch.isfinite(y).all():
            continue  # an expert that overflows at this scale says nothing
        ours, mix, weights, clear = _predict(block, tokens)
        by_data = (weights != 0).sum(0)
        by_any = by_any + by_data
        ambiguous += int((~clear).sum())
        added = block.shared is not None or block.residual
        size = float(mix[clear].abs().max()) if clear.any() else 0.0
        if size > (1e-3 * float(y.abs().max()) if added else 0.0):
            compared += int(clear.sum())
            errors.append((float((ours - y)[clear].abs().max()) - (_slack(y) if added else 0.0)) / size)
    worst = max(errors) if compared >= TOKENS and all(map(math.isfinite, errors)) else math.inf
    r = block.router
    return BlockFinding(
        block.path, kind_of(block.module), r.experts, r.k, r.score, r.normalize, r.scale, block.gate.name,
        block.gate_pre.name, None if block.pre is IDENTITY else block.pre.name,
        None if block.shared is None else block.shared.name, block.residual, False, worst, compared, ambiguous,
        (by_data == 0).nonzero()[:, 0].tolist(), (by_any == 0).nonzero()[:, 0].tolist(),
    )  # fmt: skip


def _predict(block: Block, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the claim says: output, mixture, weights of the experts, and which choices are clear."""
    kept: list[Tensor] = []

    def mixture(z: Tensor, logits: Tensor) -> Tensor:
        weights, clear = route(logits, block.router)
        out = z.new_zeros(len(z), block.width)
        for e, expert in enumerate(block.experts):
            rows = weights[:, e].nonzero()[:, 0]
            if len(rows):
                out[rows] += weights[rows, e, None] * expert(z[rows])
        kept.extend((out, weights, clear))
        return out

    y = block.around(tokens, mixture)
    return y, kept[0], kept[1], kept[2]


# --- what running every expert costs ----------------------------------------------------------------------------------


def _macs(experts: Sequence[nn.Module]) -> int:
    """Multiply-accumulates of one token in all `experts`, matrices only."""
    return sum(p.numel() for e in experts for p in e.parameters() if p.dim() == 2)


def _dense(experts: Sequence[nn.Module], calls: Calls) -> bool:
    """Whether every expert sees every token: each is called on the same input."""
    seen: dict[int, Tensor] = {}

    def enter(module: nn.Module, args: Any) -> None:
        if args:
            seen.setdefault(id(module), args[0])

    hooks = [e.register_forward_pre_hook(enter) for e in experts]
    try:
        with contextlib.suppress(Exception):
            calls(calls.tokens[0])
    finally:
        for hook in hooks:
            hook.remove()
    inputs = list(seen.values())
    return len(inputs) == len(experts) and all(torch.equal(x, inputs[0]) for x in inputs)


def dense_cost(rejected: Rejected) -> str | None:
    """What a block that runs all its experts for every token costs, as a sentence; None for a sparse one."""
    if not rejected.dense_macs:
        return None
    return (
        f"{rejected.path or 'the module'} ({rejected.kind}) is exported as a plain program: it runs all "
        f"{rejected.experts} experts for every token, {rejected.dense_macs:,} multiply-accumulates where a top-1 "
        f"router would need about {rejected.dense_macs // rejected.experts:,}: {rejected.reason}"
    )


__all__ = ["dense_cost", "find_blocks"]
