"""Routing reports for a terminal: titles and tables, in the order they are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from colibri.format.package import Package
from colibri.report.advise import LEVEL, Advice, Pinning
from colibri.report.routes import LayerFlips, RouteBudget, Use

_LISTED = 64  # experts; of larger models only the layers are shown
_FLIPS = 3  # most frequent flips of a layer
_PINS = 32  # experts to pin; of more only their number
_BAR = 16  # characters


def _table(*columns: str, left: int = 1) -> Table:
    """A table of numbers, its first `left` columns text."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n < left else "right")
    return table


def use_tables(uses: Sequence[Use], package: Package, measured: str) -> Iterator[Table | str]:
    """Balance of every layer, and the share of every expert where there are not too many."""
    yield f"[bold]use of the experts[/], {measured}"
    table = _table("layer", "experts", "k", "entropy", "effective", "variation", "largest", "never chosen")
    for u in uses:
        table.add_row(str(u.layer), str(len(u.experts)), str(u.k), f"{u.entropy:.3f}", f"{u.effective:.2f}",
                      f"{u.variation:.3f}", f"{u.largest:.1%}", str(u.unused))  # fmt: skip
    yield table
    if len(package.experts) > _LISTED:
        return
    table = _table("layer", "expert", "", "share of tokens", "bytes", "MACs a token", left=3)
    entries = iter(package.experts)
    for u in uses:
        top = max(u.shares)
        for expert, share, entry in zip(u.experts, u.shares, entries, strict=False):
            bar = "█" * round(_BAR * share / top) if top else ""
            table.add_row(str(u.layer), str(expert), bar, f"{share:.1%}", f"{entry['bytes']:,}", f"{entry['macs']:,}")
    yield table


def budget_tables(budget: RouteBudget, stack: dict[str, int] | None) -> Iterator[Table | str]:
    """The costliest and the cheapest route, layer by layer; stack bytes where they are known."""
    yield "[bold]one row over all routes[/]"
    table = _table("", "MACs at most", "at least", "bytes at most", "at least")
    table.add_row("outside experts", *_pair(budget.shared_macs), *_pair(budget.shared_bytes))
    unlike = _table("layer", "costliest experts", "cheapest", left=3)
    for c in budget.layers:
        tokens = f", {c.tokens} tokens" if c.tokens > 1 else ""
        table.add_row(f"layer {c.layer}{tokens}", f"{c.worst_macs:,}", f"{c.least_macs:,}", f"{c.worst_bytes:,}",
                      f"{c.least_bytes:,}")  # fmt: skip
        if c.worst_macs != c.least_macs:
            unlike.add_row(str(c.layer), _few(c.costliest), _few(c.cheapest))
    table.add_row("together", f"{budget.worst_macs:,}", f"{budget.least_macs:,}", f"{budget.worst_bytes:,}",
                  f"{budget.least_bytes:,}", style="bold")  # fmt: skip
    table.add_row("in the header", f"{budget.header_macs:,}", "", f"{budget.header_bytes:,}", "")
    yield table
    if unlike.row_count:
        yield unlike
    if stack is not None:
        yield "[bold]stack, over all routes[/]"
        table = _table("function", "bytes at most")
        for name, used in stack.items():
            table.add_row(name, f"{used:,}")
        yield table


def _pair(value: int) -> tuple[str, str]:
    return f"{value:,}", f"{value:,}"


def _few(numbers: Sequence[int], most: int = 8) -> str:
    shown = " ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} … ({len(numbers)})"


def flip_tables(layers: Sequence[LayerFlips], reference: str) -> Iterator[Table | str]:
    """Flipped tokens of every layer, the most frequent flips, and the reference's margins."""
    yield f"[bold]flips[/] against {reference}"
    table = _table("layer", "tokens", "flipped", "share", "margins, flipped", "all tokens", "most often")
    table.columns[-1].justify = "left"
    for n, layer in enumerate(layers):
        f = layer.flips
        pairs = ", ".join(f"{a}→{b} {times}×" for a, b, times in f.pairs[:_FLIPS])
        table.add_row(str(n), f"{f.tokens:,}", f"{f.flipped:,}", f"{f.share:.2%}", _spread(layer.flipped_margins),
                      _spread(layer.margins), pairs)  # fmt: skip
    yield table
    yield "margins: by how much the last chosen logit was ahead in the reference; 5 %, half and 95 % of them are below"


def _spread(quantiles: Sequence[float | None]) -> str:
    return "  ".join("" if q is None else f"{q:.3g}" for q in quantiles[::2])


_NAMES = {"lru": "LRU", "lfu": "LFU", "static": "static", "optimum": "optimum"}


def advice_tables(advice: Advice) -> Iterator[Table | str]:
    """Skew and locality of every layer, every policy at every budget, and the verdicts."""
    yield f"[bold]is the use uneven, is it local?[/] {advice.rows:,} rows"
    table = _table("layer", "", "p if even", "corrected", "design effect", "overlap", "by chance", left=2)
    for n, (t, near) in enumerate(zip(advice.skew, advice.locality, strict=True)):
        mark = "no choice" if t.method == "no choice" else "uneven" if t.p_all < LEVEL else "within chance"
        table.add_row(str(n), mark, _p(t.p), _p(t.p_all), f"{t.design_effect:.2f}", _percent(near.overlap),
                      _percent(near.chance))  # fmt: skip
    yield table
    yield (f"[bold]what would be read?[/] All experts take {size_text(advice.expert_bytes)}, a row asks for "
           f"{size_text(advice.asked)}; on the second half of the rows:")  # fmt: skip
    table = _table("memory", "policy", "read a row", "95 % interval", "hit rate", "95 % interval", left=2)
    for plan in advice.plans:
        first = [size_text(plan.budget), f"{plan.budget / advice.expert_bytes:.0%} of all", "", ""]
        for label, (name, policy) in zip(first, plan.policies.items(), strict=True):
            unit = _unit(policy.bytes.value)
            table.add_row(label, _NAMES[name], size_text(policy.bytes.value),
                          f"{_scaled(policy.bytes.low, unit)} … {_scaled(policy.bytes.high, unit)}",
                          _percent(policy.hits.value), f"{policy.hits.low:.1%} … {policy.hits.high:.1%}")  # fmt: skip
    yield table
    for plan in advice.plans:
        yield _verdict(plan)


def _verdict(plan: Pinning) -> str:
    head = f"[bold]{size_text(plan.budget)}: {'pin' if plan.pin else 'do not pin'}[/]: {plan.reason}"
    if not plan.pin:
        return head
    layers: dict[int, list[int]] = {}
    for p in plan.pins:
        layers.setdefault(p.layer, []).append(p.expert)
    if len(plan.pins) <= _PINS:
        shown = "; ".join(f"layer {n}: {_few(sorted(experts), _PINS)}" for n, experts in sorted(layers.items()))
    else:
        numbers = [len(experts) for experts in layers.values()]
        shown = f"{min(numbers)} to {max(numbers)} in each of {len(layers)} layers; --json names them"
    return f"{head}\n  {len(plan.pins)} to lock, {size_text(plan.pinned_bytes)}: {shown}"


def size_text(size: float) -> str:
    """Bytes for people: exact below 100 KB, in KB, MB and GB of 1,024 above."""
    unit = _unit(size)
    return f"{_scaled(size, unit)} {('bytes', 'KB', 'MB', 'GB')[unit]}"


def _unit(size: float) -> int:
    return 0 if size < 100 * 1024 else next(n for n in (3, 2, 1) if size >= 1024**n)


def _scaled(size: float, unit: int) -> str:
    return f"{size / 1024**unit:,.{1 if unit else 0}f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}" if value >= 1e-99 else "< 1e-99"
