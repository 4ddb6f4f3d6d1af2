"""Layers that torch.export leaves in one piece: convolutions, pools, padding, attention, recurrent layers.

Written with what the graph has: a convolution is a product with windows, a pool a reduction over them, a transposed
convolution a product whose outputs interleave. Channels go last inside; `passes.layout` removes the turning between
layers. Axes are counted from the end, for in front of a sample's own there may be some that were merged with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from colibri.errors import ExportError
from colibri.frontends.torch.aten import OPS, converts
from colibri.frontends.torch.convert import Const, Converter, Value
from colibri.frontends.torch.shapes import picked

# --- spatial helpers: names of values (…, *space, channels) -----------------------------------------------------------


def _channels_last(c: Converter, name: str, space: int) -> str:
    """(…, channels, *space) with the channels last."""
    rank = len(c.graph.shapes[name])
    lead = range(rank - space - 1)
    return c.add("transpose", name, perm=(*lead, *range(rank - space, rank), rank - space - 1))


def _channels_first(c: Converter, name: str, space: int) -> str:
    rank = len(c.graph.shapes[name])
    lead = range(rank - space - 1)
    return c.add("transpose", name, perm=(*lead, rank - 1, *range(rank - space - 1, rank - 1)))


def _pad(c: Converter, name: str, axis: int, before: int, after: int, value: float = 0.0) -> str:
    """A negative number takes away."""
    shape = c.graph.shapes[name]
    axis %= len(shape)
    if min(before, after) < 0:
        stop = shape[axis] + min(after, 0)
        name = c.add("slice", name, axis=axis, start=max(-before, 0), stop=stop, step=1)

    def border(n: int) -> list[str]:
        filled = np.full((*shape[:axis], max(n, 1), *shape[axis + 1 :]), value)
        return [c.graph.add_constant(f"pad{value:g}", filled)] if n > 0 else []

    parts = [*border(before), name, *border(after)]
    return name if len(parts) == 1 else c.add("concat", *parts, axis=axis)


def _windows(c: Converter, name: str, size: Sequence[int], step: Sequence[int], dilation: Sequence[int]) -> str:
    """(…, *space, channels) -> (…, *counts, *sizes, channels)."""
    space, rank = len(size), len(c.graph.shapes[name])
    first = rank - space - 1
    for n in reversed(range(space)):
        name = c.add("window", name, axis=first + n, size=size[n], step=step[n], dilation=dilation[n])
    counts, sizes = range(first, first + 2 * space, 2), range(first + 1, first + 2 * space, 2)
    return c.add("transpose", name, perm=(*range(first), *counts, *sizes, first + 2 * space))


def _space(c: Converter) -> int:
    """Axes of space of an operation that says so in its name."""
    return 1 if c.op.endswith("1d") else 2


def _each(value: int | Sequence[int], space: int) -> list[int]:
    """One number for each axis of space."""
    values = [value] if isinstance(value, int) else list(value)
    return values * space if len(values) == 1 else values


# --- convolutions -----------------------------------------------------------------------------------------------------


def _tensors(*values: Any) -> None:
    if not all(v is None or isinstance(v, Const) for v in values):
        raise ExportError("is only supported with constant weights")


@converts("conv1d", "conv2d")
def _conv(
    c: Converter, input: Value, weight: Const, bias: Const | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Value:  # fmt: skip
    _tensors(weight, bias)
    _batch_first(c, input)
    space = weight.tensor.dim() - 2
    size = list(weight.tensor.shape[2:])
    step, apart = _each(stride, space), _each(dilation, space)
    if isinstance(padding, str):
        whole = [a * (s - 1) if padding == "same" else 0 for a, s in zip(apart, size, strict=True)]
        pads = [(w // 2, w - w // 2) for w in whole]
    else:
        pads = [(p, p) for p in _each(padding, space)]
    name = _channels_last(c, input.name, space)
    for n, (before, after) in enumerate(pads):
        name = _pad(c, name, n - space - 1, before, after)
    name = _windows(c, name, size, step, apart)
    name = _grouped(c, name, weight, groups, space)
    if bias is not None:
        name = c.add("binary", name, c.constant(bias), func="add")
    return c.value(_channels_first(c, name, space))


def _grouped(c: Converter, name: str, weight: Const, groups: int, space: int) -> str:
    """Windows (…, *counts, *sizes, channels) times weights (out, channels / groups, *sizes) -> (…, *counts, out)."""
    shape, out, w = c.graph.shapes[name], weight.tensor.shape[0], weight.tensor
    lead, channels, count = shape[: len(shape) - space - 1], shape[-1], math.prod(w.shape[2:])
    if groups > 1 and groups == channels:  # depthwise: a weighted sum over each channel's window
        rows = w.reshape(channels, out // groups, count).permute(2, 0, 1).contiguous()
        column = c.add("reshape", name, shape=(*lead, count, channels, 1))
        product = c.add("binary", column, c.constant(weight, rows, ".each"), func="mul")
        flat = c.add("reshape", product, shape=(*lead, count, out))
        return c.add("reduce", flat, func="sum", axis=len(lead))
    parts = []
    for g, rows in enumerate(w.chunk(groups)):
        each = channels // groups
        part = name
        if groups > 1:
            part = c.add("slice", name, axis=len(shape) - 1, start=g * each, stop=(g + 1) * each, step=1)
        flat = c.add("reshape", part, shape=(*lead, count * each))
        matrix = rows.permute(0, *range(2, 2 + space), 1).reshape(len(rows), -1)
        parts.append(c.add("linear", flat, c.constant(weight, matrix, f".{g}" if groups > 1 else "")))
    return parts[0] if groups == 1 else c.add("concat", *parts, axis=len(lead))


@converts("conv_transpose1d", "conv_transpose2d")
def _conv_transpose(
    c: Converter, input: Value, weight: Const, bias: Const | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Value:  # fmt: skip
    """y[q · s + r] = Σ_i x[q - i] · w[i · s + r] (Dumoulin & Visin 2016): of the outputs between two inputs each is an
    ordinary convolution, and one product gives all of them.
    """
    _tensors(weight, bias)
    _batch_first(c, input)
    space = weight.tensor.dim() - 2
    step, pads, more, apart = (_each(v, space) for v in (stride, padding, output_padding, dilation))
    size = [(k - 1) * a + 1 for k, a in zip(weight.tensor.shape[2:], apart, strict=True)]
    w = weight.tensor.new_zeros(*weight.tensor.shape[:2], *size)
    if space == 1:
        w[:, :, :: apart[0]] = weight.tensor
    else:
        w[:, :, :: apart[0], :: apart[1]] = weight.tensor
    taps = [-(-k // s) for k, s in zip(size, step, strict=True)]
    name = _channels_last(c, input.name, space)
    long = c.graph.shapes[name][-1 - space : -1]
    for n, t in enumerate(taps):
        name = _pad(c, name, n - space - 1, t - 1, t - 1)
    name = _windows(c, name, taps, [1] * space, [1] * space)
    spread = [n for t, s, k in zip(taps, step, size, strict=True) for n in (0, t * s - k)]
    w = F.pad(w, spread[-2:] + spread[:-2] if space == 2 else spread)
    w = w.reshape(*w.shape[:2], *(n for pair in zip(taps, step, strict=True) for n in pair))
    # (in, out / groups, taps, phases, …) -> (groups, in / groups, …) by group, as (phases, out, in, taps)
    order = (3, 5) if space == 2 else (3,)
    behind = (2, 4) if space == 2 else (2,)
    matrix = torch.cat([p.permute(*order, 1, 0, *behind).flatten(0, space - 1) for p in w.chunk(groups)], dim=1)
    matrix = matrix.flip(*range(3, 3 + space))  # windows run forward, taps back
    phases, out = math.prod(step), matrix.shape[1]
    flat = Const(matrix.reshape(phases * out, *matrix.shape[2:]), f"{weight.name}.phases")
    used = _used_taps(weight.tensor.shape[2:], step, apart, taps)
    if used.all():
        name = _by_phase(c, name, flat, groups, space, phases, out)
    else:
        name = _by_taps(c, name, flat, used, groups, space, out)
    lead, counts = c.graph.shapes[name][: -space - 1], c.graph.shapes[name][-space - 1 : -1]
    name = c.add("reshape", name, shape=(*lead, *counts, *step, out))
    first = len(lead)
    perm = [a for n in range(space) for a in (first + n, first + space + n)]
    name = c.add("transpose", name, perm=(*range(first), *perm, first + 2 * space))
    name = c.add("reshape", name, shape=(*lead, *(a * s for a, s in zip(counts, step, strict=True)), out))
    for n in range(space):
        wanted = (long[n] - 1) * step[n] - 2 * pads[n] + size[n] + more[n]
        name = _pad(c, name, n - space - 1, -pads[n], wanted + pads[n] - counts[n] * step[n])
    if bias is not None:
        name = c.add("binary", name, c.constant(bias), func="add")
    return c.value(_channels_first(c, name, space))


def _used_taps(
    size: Sequence[int], step: Sequence[int], apart: Sequence[int], taps: Sequence[int]
) -> np.ndarray[Any, Any]:  # fmt: skip
    """(phases, *taps): which taps, in the order windows run, have a weight of a kernel of this size in each phase."""
    used: Any = np.ones((), bool)
    for k, s, a, t in zip(size, step, apart, taps, strict=True):
        there = np.zeros(t * s, bool)
        there[: (k - 1) * a + 1 : a] = True
        used = np.logical_and.outer(used, there.reshape(t, s)[::-1].T)  # (…, phase, tap)
    space = len(size)
    order = (*range(0, 2 * space, 2), *range(1, 2 * space, 2))
    return np.asarray(used.transpose(order).reshape(math.prod(step), *taps))


def _by_phase(c: Converter, name: str, weight: Const, groups: int, space: int, phases: int, out: int) -> str:
    """`_grouped` for weights whose rows are (phase, output): a group's outputs of all phases are together there."""
    if groups == 1:
        return _grouped(c, name, weight, 1, space)
    rows = weight.tensor.reshape(phases, groups, out // groups, *weight.tensor.shape[1:]).transpose(0, 1).flatten(0, 2)
    name = _grouped(c, name, Const(rows, weight.name), groups, space)
    lead = c.graph.shapes[name][:-1]
    name = c.add("reshape", name, shape=(*lead, groups, phases, out // groups))
    rank = len(lead)
    name = c.add("transpose", name, perm=(*range(rank), rank + 1, rank, rank + 2))
    return c.add("reshape", name, shape=(*lead, phases * out))


def _by_taps(
    c: Converter, name: str, weight: Const, used: np.ndarray[Any, Any], groups: int, space: int, out: int
) -> str:  # fmt: skip
    """The same where some phases have no weight for some taps: each phase reads only those it has, for 0 times an input
    that is not finite is not 0. `used`: (phases, *taps)."""
    shape = c.graph.shapes[name]
    first, channels = len(shape) - space - 1, shape[-1]
    flat = c.add("reshape", name, shape=(*shape[:first], math.prod(shape[first:-1]), channels))
    parts = []
    for phase, taps in enumerate(used.reshape(len(used), -1)):
        rows = weight.tensor[phase * out : (phase + 1) * out].flatten(2)[..., taps]
        if not taps.any():
            parts.append(c.graph.add_constant("zeros", np.zeros((*shape[:first], out))))
            continue
        read = picked(c, flat, first, np.flatnonzero(taps).tolist())
        parts.append(_grouped(c, read, Const(rows, f"{weight.name}.{phase}"), groups, 1))
    return parts[0] if len(parts) == 1 else c.add("concat", *parts, axis=first)


def _batch_first(c: Converter, x: Value) -> None:
    if x.lead:
        raise ExportError(f"has the batch in axis {x.lead}; it must be in axis 0")


# --- pools ------------------------------------------------------------------------------------------------------------


def _pooled(
    c: Converter, x: Value, size: list[int], step: list[int], pads: list[tuple[int, int]], dilation: list[int],
    func: str,
) -> str:  # fmt: skip
    """The windows of (…, *space), reduced one axis of space after the other; the largest, or the sum."""
    name, space = x.name, len(size)
    for n in range(space):
        axis = len(c.graph.shapes[name]) - space + n
        name = _pad(c, name, axis, *pads[n], value=-math.inf if func == "max" else 0.0)
        windows = c.add("window", name, axis=axis, size=size[n], step=step[n], dilation=dilation[n])
        name = c.add("reduce", windows, func=func, axis=axis + 1)
    return name


def _pool_shape(
    long: Sequence[int], size: list[int], step: list[int], padding: list[int], dilation: list[int], ceil: bool
) -> list[tuple[int, int]]:
    """Padding before and behind; with `ceil` a last window that begins inside the input or its padding counts."""
    pads = []
    for n, k, s, p, a in zip(long, size, step, padding, dilation, strict=True):
        room = n + 2 * p - (k - 1) * a - 1
        count = (-(-room // s) if ceil else room // s) + 1
        if ceil and (count - 1) * s >= n + p:
            count -= 1
        pads.append((p, (count - 1) * s + (k - 1) * a + 1 - n - p))
    return pads


@converts("max_pool1d", "max_pool2d")
def _max_pool(
    c: Converter, x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Value:  # fmt: skip
    _batch_first(c, x)
    space = _space(c)
    size, apart = _each(kernel_size, space), _each(dilation, space)
    step = _each(stride or size, space)
    pads = _pool_shape(x.shape[-space:], size, step, _each(padding, space), apart, ceil_mode)
    return c.value(_pooled(c, x, size, step, pads, apart, "max"))


@converts("avg_pool1d", "avg_pool2d")
def _avg_pool(
    c: Converter, x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    _batch_first(c, x)
    space = _space(c)
    size, own = _each(kernel_size, space), _each(padding, space)
    step, ones, long = _each(stride or size, space), [1] * space, x.shape[-space:]
    pads = _pool_shape(long, size, step, own, ones, ceil_mode)
    total = _pooled(c, x, size, step, pads, ones, "sum")
    counts: Any = np.ones(())
    for n, (before, after) in enumerate(pads):
        there = np.zeros(before + long[n] + after)
        first, last = (0, long[n] + 2 * own[n]) if count_include_pad else (before, before + long[n])
        there[first:last] = 1
        each = np.lib.stride_tricks.sliding_window_view(there, size[n])[:: step[n]].sum(-1)
        counts = counts[..., None] * each
    divisor = np.full(counts.shape, divisor_override) if divisor_override else counts
    return c.emit("binary", total, c.graph.add_constant("window_sizes", divisor), func="div")


@converts("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d",
          "_adaptive_avg_pool2d")  # fmt: skip
def _adaptive_pool(c: Converter, x: Value, output_size: Any) -> Any:
    """Output i is of the inputs from ⌊i · n / out⌋ to below ⌈(i + 1) · n / out⌉."""
    _batch_first(c, x)
    space = _space(c)
    func, name = "max" if "max" in c.op else "mean", x.name
    for n, out in enumerate(_each(output_size, space)):
        axis = len(x.shape) - space + n
        long = c.graph.shapes[name][axis]
        if long % out == 0:
            windows = c.add("window", name, axis=axis, size=long // out, step=long // out, dilation=1)
            name = c.add("reduce", windows, func=func, axis=axis + 1)
            continue
        parts = []
        for i in range(out):
            part = c.add("slice", name, axis=axis, start=i * long // out, stop=-(-(i + 1) * long // out), step=1)
            shape = list(c.graph.shapes[name])
            shape[axis] = 1
            parts.append(c.add("reshape", c.add("reduce", part, func=func, axis=axis), shape=tuple(shape)))
        name = c.add("concat", *parts, axis=axis)
    fake = c.node.meta["val"]
    return c.value(name) if isinstance(fake, Tensor) else [c.value(name, fake[0])]


# --- padding and scaling ----------------------------------------------------------------------------------------------


@converts("constant_pad_nd")
def _constant_pad(c: Converter, x: Value, pad: list[int], value: Any = 0.0) -> Value:
    name = x.name
    for n in range(len(pad) // 2):
        if pad[2 * n] or pad[2 * n + 1]:
            name = _pad(c, name, c.axis(x, -1 - n), pad[2 * n], pad[2 * n + 1], float(value or 0.0))
    return c.value(name)


@converts("pad")
def _any_pad(c: Converter, x: Value, pad: list[int], mode: str = "constant", value: Any = None) -> Value:
    if mode == "constant":
        return _constant_pad(c, x, pad, value)
    name = x.name
    for n in range(len(pad) // 2):
        axis, long = c.axis(x, -1 - n), x.shape[c.axis(x, -1 - n)]
        before, after = pad[2 * n], pad[2 * n + 1]
        sides = {
            "reflect": ([*range(before, 0, -1)], [*range(long - 2, long - 2 - after, -1)]),
            "replicate": ([0] * before, [long - 1] * after),
            "circular": ([*range(long - before, long)], [*range(after)]),
        }[mode]
        if before or after:
            name = picked(c, name, axis, [*sides[0], *range(long), *sides[1]])
    return c.value(name)


@converts("unfold")
def _unfold(c: Converter, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows of an axis, their elements behind all other axes."""
    axis, rank = c.axis(x, dimension), len(x.shape)
    name = c.add("window", x, axis=axis, size=size, step=step, dilation=1)
    return c.emit("transpose", name, perm=(*(a for a in range(rank + 1) if a != axis + 1), axis + 1))


@converts("upsample_nearest1d", "upsample_nearest2d")
def _nearest(c: Converter, x: Value, output_size: Any, *scales: Any) -> Value:
    _batch_first(c, x)
    shape = c.result().shape
    name, space = x.name, _space(c)
    for axis in range(len(shape) - space, len(shape)):
        now = c.graph.shapes[name]
        if shape[axis] % now[axis]:
            raise ExportError(f"is only supported by a whole factor, not from {now[axis]} to {shape[axis]}")
        column = c.add("reshape", name, shape=(*now[: axis + 1], 1, *now[axis + 1 :]))
        wide = (*now[: axis + 1], shape[axis] // now[axis], *now[axis + 1 :])
        name = c.add("reshape", c.add("expand", column, shape=wide), shape=(*now[:axis], shape[axis], *now[axis + 1 :]))
    return c.value(name)


# --- attention --------------------------------------------------------------------------------------------------------


@converts("scaled_dot_product_attention")
def _attention(
    c: Converter, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    """softmax(q·kᵀ · scale + mask)·v (Vaswani et al. 2017), over the positions of a sample."""
    like = c.result()
    if dropout_p:
        raise ExportError("drops out at random; call it with dropout_p=0 in eval mode")
    if like.lead >= like.rank - 2:
        raise ExportError("attends along the batch axis: samples must not depend on each other (batch_first=True?)")
    stack = like.shape[:-2]
    q, k, v = (_stacked(c, x, like, stack, enable_gqa) for x in (query, key, value))
    long, dim, seen = like.shape[-2], c.graph.shapes[q][-1], c.graph.shapes[k][-2]
    factor = 1 / math.sqrt(dim) if scale is None else scale
    rank = len(stack) + 2
    turned = c.add("transpose", k, perm=(*range(rank - 2), rank - 1, rank - 2))
    scores = c.add("matmul", c.add("binary", q, c.number(float(factor)), func="mul"), turned)
    if is_causal:
        later = np.triu(np.full((long, seen), -np.inf), 1)
        scores = c.add("binary", scores, c.graph.add_constant("causal", later), func="add")
    if attn_mask is not None:
        mask = attn_mask
        if isinstance(mask, Const) and mask.tensor.dtype == torch.bool:
            mask = Const(torch.where(mask.tensor, 0.0, -torch.inf), mask.name)
        scores = c.add("binary", scores, c.operand(mask, like), func="add")
    return c.emit("matmul", c.add("softmax", scores), v)


def _stacked(c: Converter, x: Any, like: Value, stack: tuple[int, ...], grouped: bool) -> str:
    """A value or constant with the leading axes of the result; with `grouped`, heads are repeated."""
    name = c.operand(x, like)
    shape = c.graph.shapes[name]
    if grouped and shape[-3] != stack[-1]:
        heads = shape[-3]
        column = c.add("reshape", name, shape=(*shape[:-2], 1, *shape[-2:]))
        wide = c.add("expand", column, shape=(*shape[:-2], stack[-1] // heads, *shape[-2:]))
        name = c.add("reshape", wide, shape=(*shape[:-3], stack[-1], *shape[-2:]))
    wanted = (*stack, *c.graph.shapes[name][-2:])
    return name if c.graph.shapes[name] == wanted else c.add("expand", name, shape=wanted)


# --- recurrent layers -------------------------------------------------------------------------------------------------

# A step's projected inputs, the state, its matrix and bias, a matrix the output passes through -> the next state
Cell = Callable[[Converter, str, str, "list[Const]", "list[Const]"], str]


def _part(c: Converter, name: str, n: int, width: int, count: int = 1) -> str:
    """`count` stretches of `width` numbers on the last axis, from number n on."""
    axis = len(c.graph.shapes[name]) - 1
    return c.add("slice", name, axis=axis, start=n * width, stop=(n + count) * width, step=1)


def _gru_cell(c: Converter, x: str, h: str, weights: list[Const], project: list[Const]) -> str:
    """h' = n + z · (h - n), n = tanh(x_n + r · (V_n h + b_n)) (Cho et al. 2014, as PyTorch has it)."""
    width = c.graph.shapes[h][-1]
    recurrent = c.add("linear", h, *map(c.constant, weights))
    both = c.add("binary", _part(c, x, 0, width, 2), _part(c, recurrent, 0, width, 2), func="add")
    gates = c.unary("sigmoid", both)
    reset = c.add("binary", _part(c, gates, 0, width), _part(c, recurrent, 2, width), func="mul")
    new = c.unary("tanh", c.add("binary", _part(c, x, 2, width), reset, func="add"))
    kept = c.add("binary", _part(c, gates, 1, width), c.add("binary", h, new, func="sub"), func="mul")
    return c.add("binary", new, kept, func="add")


def _lstm_cell(c: Converter, x: str, state: str, weights: list[Const], project: list[Const]) -> str:
    """c' = f · c + i · g, h' = o · tanh(c') (Hochreiter & Schmidhuber 1997); the state is h, then c."""
    width = weights[0].tensor.shape[0] // 4
    out = c.graph.shapes[state][-1] - width
    axis = len(c.graph.shapes[state]) - 1
    h = c.add("slice", state, axis=axis, start=0, stop=out, step=1)
    cell = c.add("slice", state, axis=axis, start=out, stop=out + width, step=1)
    sums = c.add("binary", x, c.add("linear", h, *map(c.constant, weights)), func="add")
    i, f, o = (c.unary("sigmoid", _part(c, sums, n, width)) for n in (0, 1, 3))
    fresh = c.add("binary", i, c.unary("tanh", _part(c, sums, 2, width)), func="mul")
    cell = c.add("binary", c.add("binary", f, cell, func="mul"), fresh, func="add")
    h = c.add("binary", o, c.unary("tanh", cell), func="mul")
    h = c.add("linear", h, *map(c.constant, project)) if project else h
    return c.add("concat", h, cell, axis=axis)


def _rnn_cell(func: str) -> Cell:
    def cell(c: Converter, x: str, h: str, weights: list[Const], project: list[Const]) -> str:
        return c.unary(func, c.add("binary", x, c.add("linear", h, *map(c.constant, weights)), func="add"))

    return cell


def _layers(
    c: Converter, input: Value, starts: list[Any], params: list[Const], has_biases: bool, layers: int, both: bool,
    batch_first: bool, cell: Cell,
) -> tuple[str, list[str]]:  # fmt: skip
    """All layers and directions: the last layer's states (steps, …), directions side by side, and every last state.

    `starts` are h, and of an LSTM c: (layers · directions, …). The inputs' part of all steps is one product.
    """
    _tensors(*params)
    if not all(isinstance(start, Value) and start.lead == 1 for start in starts):
        raise ExportError("needs its first state as (layers, batch, width), or none")
    if input.lead != (not batch_first):
        raise ExportError(f"has the batch in axis {input.lead}, but batch_first is {bool(batch_first)}")
    x, width = input.name, starts[0].shape[-1]
    rank = len(c.graph.shapes[x])
    if rank == 3:  # rows merged with the batch come first: the steps are to
        x = c.add("transpose", x, perm=(1, 0, 2)) if batch_first else x
    each = len(params) // (layers * (1 + both))
    last: list[str] = []
    for layer in range(layers):
        sides = []
        for side in range(1 + both):
            n = layer * (1 + both) + side
            own = params[n * each : (n + 1) * each]
            w_in, w_state, *rest = own
            b_in, b_state = (rest[:1], rest[1:2]) if has_biases else ([], [])
            projected = c.add("linear", x, c.constant(w_in), *map(c.constant, b_in))
            heads = [_start(c, start, n) for start in starts]
            start = heads[0] if len(heads) == 1 else c.add("concat", *heads, axis=len(c.graph.shapes[heads[0]]) - 1)
            state = c.add("state", start)
            step = c.add("step", projected, state)
            after = cell(c, step, state, [w_state, *b_state], rest[2 * has_biases :])
            steps = c.graph.shapes[x][0]
            sides.append(c.add("collect", after, state, steps=steps, reverse=bool(side)))
            at = 0 if side else steps - 1
            row = c.add("slice", sides[-1], axis=0, start=at, stop=at + 1, step=1)
            last.append(row)
        outs = [c.add("slice", s, axis=len(c.graph.shapes[s]) - 1, start=0, stop=width, step=1) for s in sides]
        x = outs[0] if len(outs) == 1 else c.add("concat", *outs, axis=len(c.graph.shapes[outs[0]]) - 1)
    if rank == 3 and batch_first:
        x = c.add("transpose", x, perm=(1, 0, 2))
    return x, last


def _start(c: Converter, start: Value, n: int) -> str:
    row = c.add("slice", start, axis=0, start=n, stop=n + 1, step=1)
    return c.add("reshape", row, shape=start.shape[1:])


def _recurrent(cell: Cell) -> Callable[..., list[Value]]:
    def convert(
        c: Converter, input: Value, hx: Any, params: list[Const], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> list[Value]:  # fmt: skip
        starts = list(hx) if isinstance(hx, list | tuple) else [hx]
        out, last = _layers(c, input, starts, params, has_biases, num_layers, bidirectional, batch_first, cell)
        fakes, at, values = c.node.meta["val"], 0, []
        for start, fake in zip(starts, fakes[1:], strict=True):
            width = start.shape[-1]
            rows = [c.add("slice", s, axis=len(c.graph.shapes[s]) - 1, start=at, stop=at + width, step=1) for s in last]
            values.append(c.reshaped(c.add("concat", *rows, axis=0), fake))
            at += width
        return [c.value(out, fakes[0]), *values]

    return convert


converts("gru.input")(_recurrent(_gru_cell))
converts("lstm.input")(_recurrent(_lstm_cell))
converts("rnn_tanh.input")(_recurrent(_rnn_cell("tanh")))
converts("rnn_relu.input")(_recurrent(_rnn_cell("relu")))

__all__ = ["OPS"]
