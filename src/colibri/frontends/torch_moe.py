"""Mixture-of-Experts blocks in a PyTorch module: structure proposes, numbers decide.

A block is any module with a group of experts below it and something that gives one logit per expert. What it does with
them is found by trying every router the engine knows against the block's own outputs, on random tokens at several
scales and on the tokens the model really feeds it. Only an agreement to rounding counts; a block that agrees is replaced,
while the module is traced, by one `colibri::moe` operation between its own gate, norm and shared expert.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.errors import ExportError
from colibri.frontends.torch_report import BlockFinding
from colibri.graph import NORMALIZE, SCORES, Router

TOLERANCE = 2e-5  # largest |difference| / max |output| of a block that counts as recognised
MARGIN = 1e-6  # a choice of experts closer than this (relative) may go either way
SCALES = (0.25, 1.0, 4.0, 16.0)  # random tokens, in units of the real ones
TOKENS = 256  # random tokens at each scale
SEARCH = 48  # tokens on which all routers are tried first
REAL = 2048  # at most this many real tokens are compared

Rows = Callable[[Tensor], Tensor]

torch.library.define("colibri::moe", "(Tensor x, Tensor logits, int width, int block) -> Tensor")
torch.library.define("colibri::unavailable", "(Tensor x, int[] shape) -> Tensor")


@torch.library.register_fake("colibri::moe")  # type: ignore[untyped-decorator]
def _moe_fake(x: Tensor, logits: Tensor, width: int, block: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


@torch.library.register_fake("colibri::unavailable")  # type: ignore[untyped-decorator]
def _unavailable_fake(x: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty(shape)


# --- explicit annotation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registration:
    """What `register_moe` was told about a block."""

    experts: Any
    gate: Any
    k: int
    score: str
    normalize: str
    scale: float
    shared: Any
    prenorm: Any
    residual: bool


_REGISTERED: weakref.WeakKeyDictionary[Any, Registration] = weakref.WeakKeyDictionary()


def register_moe(
    target: type[nn.Module] | nn.Module,
    *,
    experts: Any,
    gate: Any,
    k: int,
    score: str = "softmax",
    normalize: str = "none",
    scale: float = 1.0,
    shared: Any = None,
    prenorm: Any = None,
    residual: bool = False,
) -> None:
    """Say that `target`, a class or one instance, computes scale·Σ w·expert(z) [+ shared(z)] [+ x], z = prenorm(x) or x.

    `experts`, `gate`, `shared` and `prenorm` are dotted attribute paths or functions of the block that return the module
    (for `experts`: modules (tokens, in) -> (tokens, out)); a gate may also be a weight of shape (experts, in). The claim
    is checked against the block at every export, which raises ExportError with the measured error when it is wrong.
    """
    if score not in SCORES or normalize not in NORMALIZE:
        raise ExportError(f"score is one of {', '.join(SCORES)}, normalize one of {', '.join(NORMALIZE)}")
    _REGISTERED[target] = Registration(experts, gate, k, score, normalize, scale, shared, prenorm, residual)


def registered(module: nn.Module) -> dict[str, Registration]:
    """The registrations that apply inside `module`, by path; an instance's own wins over its class's."""
    found = {}
    for path, m in module.named_modules():
        for key in (m, *type(m).__mro__):
            if key in _REGISTERED:
                found[path] = _REGISTERED[key]
                break
    return found


# --- what a block is taken for ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A piece of a block: how it is called, its name for the report."""

    name: str
    call: Rows


IDENTITY = Part("x", lambda x: x)


@dataclass
class Block:
    """A claim about a module: y = Σ w·expert(pre(x)) · scale [+ shared] [+ x], w from gate(gate_pre(x))."""

    path: str
    module: nn.Module
    experts: list[nn.Module]
    gate: Part
    router: Router
    pre: Part = IDENTITY
    gate_pre: Part = IDENTITY
    shared: Part | None = None
    shared_pre: Part = IDENTITY
    residual: bool = False
    input_width: int = 0
    width: int = 0
    result: Any = None  # an example of what its forward returns
    main: int = 0  # which leaf of it is y
    finding: BlockFinding | None = None

    @property
    def parts(self) -> int:
        """How much there is beside gate and experts; of two claims that agree, the smaller is right."""
        return sum((self.pre is not IDENTITY, self.gate_pre is not self.pre, self.shared is not None, self.residual))

    def around(self, x: Tensor, mixture: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The block on tokens (n, in), its mixture of (z, logits) computed by `mixture`."""
        inputs = {part.name: part.call(x) for part in (self.pre, self.gate_pre, self.shared_pre)}
        y = mixture(inputs[self.pre.name], self.gate.call(inputs[self.gate_pre.name]))
        if self.shared is not None:
            y = y + self.shared.call(inputs[self.shared_pre.name])
        return y + x if self.residual else y

    def __str__(self) -> str:
        r = self.router
        return f"top-{r.k} of {r.experts}, score {r.score}, normalize {r.normalize}, scale {r.scale:g}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that is no MoE as far as the numbers tell, and why; `dense` when all its experts see every token."""

    path: str
    kind: str
    reason: str
    dense_macs: int = 0  # multiply-accumulates a token in experts that all run
    experts: int = 0

    def __str__(self) -> str:
        return f"{self.path or 'the module'} ({self.kind}) was not taken for a Mixture of Experts: {self.reason}"


def kind_of(module: nn.Module) -> str:
    """The class name, also of a module unflattened from a saved program."""
    name = getattr(module, "type_name", None)
    return (name() if callable(name) else name or type(module).__name__).rpartition(".")[2]


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Weights (n, experts), zero where not chosen, and which of the n choices are clear of ties."""
    p = {"softmax": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid, "logit": lambda: logits}[router.score]()
    value, order = p.sort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order[:, : router.k], True)
    clear = torch.isfinite(p).all(-1)
    if router.k < router.experts:
        last, next_ = value[:, router.k - 1], value[:, router.k]
        clear &= (last - next_) > MARGIN * torch.maximum(last.abs(), next_.abs())
    w = torch.where(chosen, p, 0.0)
    if router.normalize == "sum":
        w = w / w.sum(-1, keepdim=True)
    elif router.normalize == "softmax":
        w = torch.where(chosen, p, -math.inf).softmax(-1)
    elif router.normalize == "one":
        w = chosen.float()
    return w * router.scale, clear


# --- running a block on tokens of one's own ---------------------------------------------------------------------------


class Calls:
    """How a module was called while the model ran: its arguments, its result's structure, the tokens it saw."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.usable = True
        self.leaves: list[Any] = []
        self.at = 0  # which leaf of the arguments is the tensor of tokens
        self.result: Any = None
        self.main = 0  # which leaf of the result is the mixture: the first with one row for each token
        self.tokens: list[Tensor] = []
        self.fixed = False  # only ever call it with the recorded shape

    def hook(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """A forward hook that remembers one call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(at) != 1 or leaves[at[0]].dim() < 2 or not leaves[at[0]].is_floating_point():
            self.usable = False
            return
        x = leaves[at[0]].detach()
        if self.leaves and x.shape[1:] != self.leaves[self.at].shape[1:]:
            self.usable = False  # called with different shapes: not a block one operation can stand for
            return
        if not self.leaves:
            rows = [isinstance(y, Tensor) and y.dim() == x.dim() and y.shape[:-1] == x.shape[:-1]
                    for y in pytree.tree_leaves(result)]  # fmt: skip
            self.usable = any(rows)
            self.main = rows.index(True) if self.usable else 0
            self.leaves, self.spec, self.at, self.result = leaves, spec, at[0], result
            self.fixed = any(isinstance(leaf, int) and not isinstance(leaf, bool) for leaf in leaves)
        self.tokens.append(x.reshape(-1, x.shape[-1]))

    @property
    def x(self) -> Tensor:
        """The first input."""
        tensor: Tensor = self.leaves[self.at]
        return tensor

    def _call(self, x: Tensor) -> Tensor:
        leaves = [*self.leaves[: self.at], x, *self.leaves[self.at + 1 :]]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        y: Tensor = pytree.tree_leaves(self.module(*args, **kwargs))[self.main]
        return y.reshape(-1, y.shape[-1])

    def __call__(self, tokens: Tensor) -> Tensor:
        """The block's output (n, out) for tokens (n, in), in batches of the shape it knows."""
        shape = self.x.shape
        per_row = math.prod(shape[1:-1])
        if not self.fixed:
            rows = -(-len(tokens) // per_row)
            try:
                return self._call(_padded(tokens, rows * per_row).view(rows, *shape[1:]))[: len(tokens)]
            except Exception:  # a program saved for one batch size runs with that size only
                self.fixed = True
        size = per_row * shape[0]
        parts = [self._call(_padded(part, size).view(shape))[: len(part)] for part in tokens.split(size)]
        return torch.cat(parts)


def _padded(tokens: Tensor, count: int) -> Tensor:
    return tokens[torch.arange(count) % len(tokens)]


def _attempt(call: Rows, tokens: Tensor) -> Tensor | None:
    """The output (n, out), or None if the part cannot be called so or gives anything else."""
    try:
        y = call(tokens)
    except Exception:
        return None
    fits = isinstance(y, Tensor) and y.dim() == 2 and len(y) == len(tokens) and y.dtype == torch.float32
    return y if fits else None


def _relative(difference: Tensor, reference: Tensor) -> float:
    return float(difference.abs().max() / reference.abs().max().clamp_min(1e-30))


def _dependence(call: Calls, tokens: Tensor) -> str | None:
    """Why the block is no function of one token at a time, or None if it is one."""
    y = call(tokens)
    if not torch.equal(y, call(tokens)):
        return "its output is random in eval mode"
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))
    others = tokens.clone()
    others[1:] = tokens[order][1:] * 0.5
    crowd = tokens[:1].expand(4 * len(tokens), -1)
    for difference in (call(tokens[order]) - y[order], (call(others) - y)[:1], call(crowd) - y[:1], call(tokens[:1]) - y[:1]):
        if not _relative(difference, y) <= 1e-5:
            return "the output of a token depends on other tokens (capacity or batch statistics)"
    return None


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
    """Token sets to compare on: random at several scales around the size of the real ones, and the real ones."""
    real = torch.cat(calls.tokens)[:REAL]
    unit = float(real.square().mean().sqrt()) or 1.0
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, real.shape[1], generator=generator) * unit * scale for scale in SCALES] + [real]


def _proposals(block: Block, calls: Calls, tokens: Tensor, y: Tensor) -> Iterator[tuple[float, Block]]:
    """Blocks with `block`'s experts, and the error of the best router of each on a few tokens."""
    parts = [Part(n, m) for n, m in block.module.named_children() if m not in block.experts]
    pres = [IDENTITY, *(p for p in parts if _attempt(p.call, tokens) is not None)]
    routers = _routers(len(block.experts))
    for pre in pres:
        z = pre.call(tokens)
        outs = [_attempt(e, z) for e in block.experts]
        if any(o is None or o.shape != y.shape for o in outs):
            continue
        stacked = torch.stack([o for o in outs if o is not None], 1)
        sums: list[tuple[Part | None, Part, bool, Tensor]] = [(None, IDENTITY, False, y)]
        for shared, shared_pre in itertools.product(parts, {p.name: p for p in (pre, IDENTITY)}.values()):
            o = None if shared is pre else _attempt(shared.call, shared_pre.call(tokens))
            if o is not None and o.shape == y.shape:
                sums.append((shared, shared_pre, False, y - o))
        if y.shape == tokens.shape:
            sums += [(s, p, True, rest - tokens) for s, p, _, rest in sums]
        for gate, gate_pre in itertools.product(_gates(block.module, block.experts), pres):
            logits = _attempt(gate.call, gate_pre.call(tokens))
            if logits is None or logits.shape[1] != len(block.experts):
                continue
            weights, clear = zip(*(route(logits, r) for r in routers), strict=True)
            mixes = torch.einsum("rte,teo->rto", torch.stack(weights), stacked) * torch.stack(clear)[..., None]
            for shared_, shared_pre, residual, rest in sums:
                target = rest * torch.stack(clear)[..., None]
                scale = (mixes * target).sum((1, 2)) / mixes.square().sum((1, 2)).clamp_min(1e-30)
                scale = torch.where((scale - 1).abs() < 1e-5, 1.0, scale)
                error = (mixes * scale[:, None, None] - target).abs().amax((1, 2)) / rest.abs().max().clamp_min(1e-30)
                fits = [n for n, e in enumerate(error.tolist()) if e <= TOLERANCE and any(clear[n])]
                for n in fits or [int(error.nan_to_num(math.inf).argmin())]:
                    router = Router(**{**routers[n].__dict__, "scale": _round(float(scale[n]))})
                    yield float(error[n]), Block(
                        block.path, block.module, block.experts, gate, router, pre, gate_pre,
                        shared_, shared_pre, residual, tokens.shape[1], y.shape[1],
                    )  # fmt: skip


def _round(scale: float) -> float:
    short = float(f"{scale:.4g}")
    return short if abs(short - scale) <= 1e-5 * abs(scale) else scale


def measure(block: Block, calls: Calls) -> BlockFinding:
    """Compare a claim with the block on every set of tokens.

    The finding's error is the largest |difference| / max |mixture|, beyond what rounding the shared expert's and the
    residual's addition costs; infinite where the mixture is too small beside them, or ties too common, to tell.
    """
    compared, ambiguous, worst = 0, 0, 0.0
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
        compared += int(clear.sum())
        if clear.any():
            most, size = float(y.abs().max()), float(mix[clear].abs().max())
            miss = float((ours - y)[clear].abs().max()) - 4 * torch.finfo(torch.float32).eps * most
            worst = max(worst, miss / size) if size > 1e-3 * most else math.inf
    if compared < TOKENS or math.isnan(worst):
        worst = math.inf
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
    tokens = _sets(calls)[1]
    drafts = [Block(path, m, group, IDENTITY, Router(len(group), 1)) for group in expert_groups(m)]
    drafts = [d for d in drafts if _plausible(d, tokens)]
    if not drafts:
        return None
    try:
        reason = _dependence(calls, tokens)
        y = calls(tokens[:SEARCH])
    except Exception as error:
        reason = f"it cannot be run on random tokens ({error})"
    best: tuple[float, str] = (math.inf, "no router comes near")
    if reason is None:
        proposals = [p for d in drafts for p in _proposals(d, calls, tokens[:SEARCH], y)]
        for rough, block in sorted(proposals, key=lambda p: (p[0] > TOLERANCE, p[1].parts, p[0])):
            if rough <= TOLERANCE:
                block.finding = measure(block, calls)
                rough = block.finding.error
                hidden = _unexplained(block, calls, tokens) if rough <= TOLERANCE else None
                if hidden is not None:
                    return Rejected(path, kind_of(m), f"it looks like {block}, but also depends on {hidden}")
                if rough <= TOLERANCE:
                    return block
            best = min(best, (rough, f"the nearest is {block}, with relative error {rough:.1e}"))
        reason = f"no router reproduces it; {best[1]}"
    group = drafts[0].experts
    macs = _macs(group) if _dense(group, calls) else 0
    return Rejected(path, kind_of(m), reason, macs, len(group))


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
        if id(tensor) in accounted or not tensor.is_floating_point() or tensor.numel() < 2 or tensor.min() == tensor.max():
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
    inputs = [x for x in (few, *(_attempt(m, few) for m in parts)) if x is not None]
    runs = any(all(_attempt(e, x) is not None for e in draft.experts) for x in inputs)
    outs = (_attempt(g.call, x) for g in _gates(draft.module, draft.experts) for x in inputs)
    return runs and any(o is not None and o.shape[1] == len(draft.experts) for o in outs)


def _check(path: str, m: nn.Module, claim: Registration, calls: Calls) -> Block | None:
    """The registered block, its claim verified."""
    where = f"{path or 'the module'} ({kind_of(m)})"
    if calls.usable and not calls.leaves:
        return None  # never called
    if not calls.usable:
        raise ExportError(f"{where}: a registered block takes one float tensor (…, in) and gives (…, out), always alike")

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
        tokens = _sets(calls)[1]
        reason = _dependence(calls, tokens)
        block.width = calls(tokens[:1]).shape[-1]
        block.finding = measure(block, calls)
    except ExportError as error:
        raise ExportError(f"{where}: register_moe: {error}") from None
    except Exception as error:
        raise ExportError(f"{where}: register_moe does not fit this block: {type(error).__name__}: {error}") from None
    if reason is None and block.finding.error > TOLERANCE:
        reason = f"over {block.finding.tokens} tokens the relative error is {block.finding.error:.1e}, above {TOLERANCE}"
    if reason is not None:
        raise ExportError(f"{where}: it is not what register_moe says ({block}): {reason}")
    block.finding.registered = True
    return block


def _refuse_nested(block: Block, calls: Calls) -> None:
    tokens = block.pre.call(_sets(calls)[1])
    for n, expert in enumerate(block.experts):
        inner, _ = find_blocks(expert, [(tokens,)], registered(expert))
        if inner:
            raise ExportError(
                f"{block.path or 'the module'}: expert {n} contains a Mixture of Experts itself ({inner[0].path or 'whole'}), "
                "which is not supported; flatten the two levels into one"
            )


def _macs(experts: Sequence[nn.Module]) -> int:
    """Multiply-accumulates of one token in all `experts`, matrices only."""
    return sum(p.numel() for e in experts for p in e.parameters() if p.dim() == 2)


def _dense(experts: Sequence[nn.Module], calls: Calls) -> bool:
    """Whether every expert sees every token: each is called on the same input."""
    seen: dict[int, Tensor] = {}

    def enter(module: nn.Module, args: Any) -> None:
        seen.setdefault(id(module), args[0])

    hooks = [e.register_forward_pre_hook(enter) for e in experts]
    try:
        calls(calls.tokens[0])
    finally:
        for hook in hooks:
            hook.remove()
    first = next(iter(seen.values()), None)
    return len(seen) == len(experts) and all(x.shape == first.shape and torch.equal(x, first) for x in seen.values())


def dense_cost(block: Block | Rejected) -> str | None:
    """What a block that runs all its experts for every token costs, as a sentence; None for a sparse one."""
    if isinstance(block, Block):
        r = block.router
        path, kind, experts = block.path, kind_of(block.module), r.experts
        macs = _macs(block.experts) if r.k == r.experts else 0
    else:
        path, kind, experts, macs = block.path, block.kind, block.experts, block.dense_macs
    if not macs:
        return None
    return (
        f"{path or 'the module'} ({kind}) runs all {experts} experts for every token: {macs:,} multiply-accumulates, where a "
        f"top-1 router would need about {macs // experts:,}"
    )


# --- tracing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def leaves(blocks: Sequence[Block]) -> Iterator[None]:
    """While this is open, each block's mixture is one `colibri::moe` operation numbered as in `blocks`."""
    with contextlib.ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.enter_context(_patched(block, number))
        yield


@contextlib.contextmanager
def _patched(block: Block, number: int) -> Iterator[None]:
    module = block.module
    held = module.__dict__.get("forward")

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        y = block.around(
            x.reshape(-1, x.shape[-1]), lambda z, logits: torch.ops.colibri.moe(z, logits, block.width, number)
        )
        results, spec = pytree.tree_flatten(block.result)
        results = [torch.ops.colibri.unavailable(x, r.shape) if isinstance(r, Tensor) else r for r in results]
        results[block.main] = y.view((*x.shape[:-1], block.width))
        return pytree.tree_unflatten(results, spec)

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if held is not None:
            module.forward = held


__all__ = ["Block", "Rejected", "Registration", "dense_cost", "find_blocks", "leaves", "register_moe", "registered"]
