"""Search for Mixture-of-Experts blocks among modules: structure proposes, numbers decide.

A candidate is a module with what may be experts below it. Where they are in what it computes is seen in its calls. What
it does with their logits is found by putting logits of our own in the place of the block's: near ties, very low ones,
a crowd for one expert. What is found is then compared with the block, on random tokens at several scales and on the
tokens the model really feeds it. Only an agreement to rounding counts.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from colibri.frontends.recognise.experts import Experts, ModuleExperts, OfRows, stacked
from colibri.frontends.recognise.moe import Block, Registration, kind_of
from colibri.frontends.recognise.recording.calls import UNITS, Calls, Rows
from colibri.frontends.recognise.register import check
from colibri.frontends.recognise.report import Rejected
from colibri.frontends.recognise.search import Search
from colibri.frontends.recognise.stacks import stacks
from colibri.frontends.recognise.watch import Probe

# --- finding ----------------------------------------------------------------------------------------------------------


def find_blocks(
    module: nn.Module, runs: Sequence[Sequence[Tensor]], claims: Mapping[str, Registration]
) -> tuple[list[Block], list[Rejected]]:
    """The MoE blocks of `module` as it runs on `runs`, outer ones first, and the candidates that are none.

    Raises ExportError for a registered block that is not what was claimed.
    """
    with separated(module):
        return _find(module, runs, claims)


@contextlib.contextmanager
def separated(module: nn.Module) -> Iterator[None]:
    """While this is open, no two children of one module are the same object, and no two numbers of a tensor one place
    in memory, so that each can be watched and changed by itself; the tensors are shared all the same."""
    tied = []
    for m in list(module.modules()):
        met: set[int] = set()
        for name, child in m._modules.items():
            if id(child) in met and child is not None:
                tied.append((m, name, child))
            met.add(id(child))
    expanded = [t for t in (*module.parameters(), *module.buffers())
                if any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True))]  # fmt: skip
    held = [(t, t.data) for t in expanded]
    try:
        for parent, name, child in tied:
            kept = {id(t): t for t in (*child.parameters(), *child.buffers())}
            with contextlib.suppress(Exception):  # what cannot be copied stays one object
                parent._modules[name] = copy.deepcopy(child, kept)
        for t in expanded:
            t.data = t.data.contiguous()
        yield
    finally:
        for parent, name, child in tied:
            parent._modules[name] = child
        for t, data in held:
            t.data = data


def _find(
    module: nn.Module, runs: Sequence[Sequence[Tensor]], claims: Mapping[str, Registration]
) -> tuple[list[Block], list[Rejected]]:
    candidates = {p: m for p, m in module.named_modules() if p in claims or next(_groups(m), None) is not None}
    calls = {path: Calls(m) for path, m in candidates.items()}
    with _watching(calls):
        for run in runs:
            module(*run)
        with contextlib.suppress(Exception):  # another number of samples, which some arguments may follow
            module(*(torch.cat([x, x[:1]]) for x in runs[0]))
    checked = {path: check(path, candidates[path], claims[path], calls[path]) for path in claims}
    blocks = [block for block in checked.values() if block is not None]
    settled = _Settled()
    for block in blocks:
        settled.add(block)
    rejected: list[Rejected] = []
    todo = [path for path in candidates if path not in claims]
    while todo:
        path = todo.pop()  # inner ones first: what is around a block is not part of it
        if settled.holds(candidates[path]):
            continue
        found = _identify(path, candidates[path], calls[path], settled)
        if isinstance(found, Block):
            blocks.append(found)
            settled.add(found)
            rejected = [r for r in rejected if not _within(r.path, path)]
            todo += _uncalled(found, calls)
        elif found is not None:
            # A bank of experts without a gate is part of what is around it, which has one.
            rejected = [r for r in rejected if r.gated or not found.gated or not _within(r.path, path)]
            rejected += [] if any(_within(r.path, path) for r in rejected) else [found]
    for block in blocks:
        inside = {id(m) for expert in block.experts for m in expert.modules()}
        block.nested |= any(id(other.module) in inside for other in blocks)
    order = list(candidates)
    blocks.sort(key=lambda b: order.index(b.path))
    return [use for block in blocks for use in (block, *block.others)], rejected[::-1]


@contextlib.contextmanager
def _watching(calls: Mapping[str, Calls]) -> Iterator[None]:
    hooks = [c.module.register_forward_hook(c.hook, with_kwargs=True) for c in calls.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _uncalled(block: Block, calls: Mapping[str, Calls]) -> list[str]:
    """The candidates inside experts that no row has chosen, after these experts have been called on random rows."""
    inside = {id(m): expert for expert in block.experts for m in expert.modules()}
    left = {path: c for path, c in calls.items() if id(c.module) in inside and c.usable and not c.seen}
    with _watching(left):
        for expert in {id(e): e for e in (inside[id(c.module)] for c in left.values())}.values():
            expert(torch.randn(8, block.input_width, generator=torch.Generator().manual_seed(8)))
    return list(left)


def _within(path: str, outer: str) -> bool:
    return outer in ("", path) or path.startswith(f"{outer}.")


class _Settled:
    """The modules and tensors that belong to blocks already found."""

    def __init__(self) -> None:
        self._around: set[int] = set()
        self._all: set[int] = set()

    def add(self, block: Block) -> None:
        """A block has been found."""
        inside = {id(m) for expert in block.experts for m in expert.modules()}
        ours = [m for m in block.module.modules() if m is not block.module and id(m) not in inside]
        self._around |= {id(m) for m in ours}
        experts = (expert.expert if isinstance(expert, OfRows) else expert for expert in block.experts)
        tensors = (t for m in (block.module, *ours) for t in m.parameters(recurse=False))
        self._all |= {*self._around, *map(id, experts), *map(id, tensors)}

    def holds(self, module: nn.Module) -> bool:
        """Whether the module is part of a block, but of none of its experts."""
        return id(module) in self._around

    def has(self, experts: Experts) -> bool:
        """Whether these are a block's experts, or part of it."""
        things: Sequence[object] = experts.watched or experts.tensors
        return all(id(thing) in self._all for thing in things)


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
                plausible = _plausible(probe, experts)
            except Exception:  # it does not run on rows like these
                continue
            plain = plain if experts.watched else probe
            if not plausible:
                continue
            try:
                found = Search(path, m, probe, experts).run()
            except Exception as error:
                found = f"it cannot be run on random tokens: {type(error).__name__}: {error}"
            if isinstance(found, Block):
                return found
            macs = _macs(experts) if _dense(probe, experts) else 0
            gated = bool(probe.before(experts.count))
            called = bool(experts.watched)
            reasons.append(Rejected(path, kind_of(m), found, macs, experts.count, gated, called))
    # What is called as an expert is one sooner than an axis of a parameter, which may be the features.
    return min(reasons, key=lambda r: (not r.called, not r.gated), default=None)


def _plausible(probe: Probe, experts: Experts) -> bool:
    """Whether these are experts beside each other, chosen by something."""
    if probe.sequential or (experts.watched and not probe.seen.used):
        return False
    return bool(probe.before(experts.count)) or (bool(experts.watched) and not _dense(probe, experts))


# --- what running every expert costs ----------------------------------------------------------------------------------


def _macs(experts: Experts) -> int:
    """Multiply-accumulates of one token in all experts, matrices only."""
    return sum(p.numel() for p in experts.tensors if p.dim() in (2, 3))


def _dense(probe: Probe, experts: Experts) -> bool:
    """Whether every expert sees every row: each module is called on the same input, or nothing depends on the data."""
    if not experts.watched:
        return probe.program.first == len(probe.program.one.calls)
    inputs = {e: x for e, x, _ in probe.seen.used}
    return len(inputs) == experts.count and all(torch.equal(x, inputs[0]) for x in inputs.values())


def dense_cost(rejected: Rejected) -> str | None:
    """What a block that runs all its experts for every token costs, as a sentence; None for a sparse one."""
    if not rejected.dense_macs:
        return None
    return (
        f"{rejected.path or 'the module'} ({rejected.kind}) is exported as a plain program: it runs all "
        f"{rejected.experts} experts for every token, {rejected.dense_macs:,} multiply-accumulates where a top-1 "
        f"router would need about {rejected.dense_macs // rejected.experts:,}: {rejected.reason}"
    )


def unreached(block: Block) -> str | None:
    """The experts that no row has chosen, as a sentence; None if there are none."""
    experts = [] if block.finding is None else block.finding.untested
    if not experts:
        return None
    one = len(experts) == 1
    return (
        f"{block.path or 'the module'} ({kind_of(block.module)}): expert{'' if one else 's'} "
        f"{', '.join(map(str, experts))} {'was' if one else 'were'} not reached by any row; exported from "
        f"{'its module' if one else 'their modules'}, and chosen in the comparison only by made-up logits"
    )


def nested_cost(block: Block) -> str:
    """What a block whose experts are blocks costs, as a sentence."""
    count = len(block.experts)
    if block.others:
        return (
            f"{block.path or 'the module'} ({kind_of(block.module)}): {len(block.others) + 1} mixtures share {count} "
            "experts, which all run once for every token; each mixture weighs what they give"
        )
    return (
        f"{block.path or 'the module'} ({kind_of(block.module)}) is a Mixture of Experts of such mixtures: all its "
        f"{count} experts run for every token, {count / block.router.k:g} times what its router asks for, and it "
        "chooses among their outputs; flatten the levels into one to save that"
    )


__all__ = ["dense_cost", "find_blocks", "nested_cost", "unreached"]
