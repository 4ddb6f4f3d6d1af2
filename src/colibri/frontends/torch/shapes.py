"""ATen operations that move elements, look rows up, or stand for a Mixture of Experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from colibri.errors import ExportError
from colibri.frontends.torch.aten import converts
from colibri.frontends.torch.convert import WAY_OUT, Const, Converter, Value, op_name


@converts("view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten")
def _view(c: Converter, x: Value, *sizes: Any, **named: Any) -> Value:
    new = c.result()
    outer, rest = divmod(math.prod(x.shape[: x.lead]) * x.outer, math.prod(new.shape[: new.lead]))
    if rest or (new.shape[new.lead] if new.merged else 1) % outer:
        raise ExportError("joins axes before the batch with axes behind it, which mixes samples")
    return replace(c.reshaped(x), outer=outer)


_WHOLE = {"embedding", "one_hot"}  # what reads numbers as integers anyway
_MOVES = {"view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten", "select", "slice", "clone"}


@converts("clone", "contiguous", "detach", "alias", "lift_fresh_copy", "_to_copy", "to", "dropout", "alpha_dropout",
          "feature_dropout")  # fmt: skip
def _same(c: Converter, x: Value, *options: Any, **named: Any) -> Value:
    source, result = c.node.all_input_nodes[0].meta["val"], c.node.meta["val"]
    if source.is_floating_point() and not result.is_floating_point() and not _only_ids(c.node):
        raise ExportError("cuts floats down to integers, which is only supported for the ids of an embedding")
    return c.value(x.name)


def _only_ids(node: Any) -> bool:
    """Whether all that is made of an integer tensor are rows of tables."""
    names = {user: op_name(user).removeprefix("aten.") for user in node.users}
    return all(n in _WHOLE or (n in _MOVES and _only_ids(user)) for user, n in names.items())


@converts("permute")
def _permute(c: Converter, x: Value, dims: list[int]) -> Value:
    dims = [d % x.rank for d in dims]
    perm = tuple(dims if x.merged else [c.axis(x, d) for d in dims if d != x.lead])
    return c.value(x.name if perm == tuple(sorted(perm)) else c.add("transpose", x, perm=perm))


@converts("transpose", "t")
def _transpose(c: Converter, x: Value, dim0: int = 0, dim1: int = 1) -> Value:
    dims = list(range(x.rank))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(c, x, dims)


@converts("slice", "narrow")
def _slice(c: Converter, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    if c.result().shape == x.shape:
        return c.value(x.name)
    if c.op == "narrow":
        end = start + end
    axis = c.axis(x, dim)
    first, last, step = slice(start, end, step).indices(x.shape[axis])
    return c.emit("slice", x, axis=axis, start=first, stop=last, step=step)


@converts("select")
def _select(c: Converter, x: Value, dim: int, index: int) -> Value:
    axis = c.axis(x, dim)
    index %= x.shape[axis]
    return c.reshaped(c.add("slice", x, axis=axis, start=index, stop=index + 1, step=1))


@converts("split", "split_with_sizes", "unbind", "chunk")
def _split(c: Converter, x: Value, sizes: Any = None, dim: int = 0) -> list[Value]:
    """Also `unbind`, whose only argument is the axis: parts of size 1 without the axis."""
    if c.op == "unbind":
        sizes, dim = None, 0 if sizes is None else sizes
    axis, start, parts = c.axis(x, dim), 0, []
    for fake in c.node.meta["val"]:
        size = 1 if sizes is None else int(fake.shape[dim])
        part = c.add("slice", x, axis=axis, start=start, stop=start + size, step=1)
        parts.append(c.reshaped(part, fake))
        start += size
    return parts


@converts("cat", "stack")
def _cat(c: Converter, tensors: list[Any], dim: int = 0) -> Value:
    if not all(isinstance(t, Value) for t in tensors):
        raise ExportError("joins a constant that has no batch axis; expand it to the batch first")
    first = tensors[0]
    if c.op == "stack":
        dim %= first.rank + 1
        axis = dim if dim <= first.lead or first.merged else dim - 1
        columns = [c.add("reshape", t, shape=(*t.shape[:axis], 1, *t.shape[axis:])) for t in tensors]
        return c.emit("concat", *columns, axis=axis)
    if dim % first.rank == first.lead and not first.merged:  # batches one after the other: rows around the batch
        axis = first.lead
        columns = [c.add("reshape", t, shape=(*t.shape[:axis], 1, *t.shape[axis:])) for t in tensors]
        return replace(c.emit("concat", *columns, axis=axis), outer=len(tensors))
    return c.emit("concat", *tensors, axis=c.axis(first, dim))


@converts("flip")
def _flip(c: Converter, x: Value, dims: list[int]) -> Value:
    name = x.name
    for axis in (c.axis(x, d) for d in dims):
        name = picked(c, name, axis, range(x.shape[axis])[::-1])
    return c.value(name)


@converts("roll")
def _roll(c: Converter, x: Value, shifts: list[int], dims: list[int]) -> Value:
    if not dims:
        raise ExportError("is only supported along named axes")
    name = x.name
    for shift, dim in zip(shifts, dims, strict=True):
        axis = c.axis(x, dim)
        n = x.shape[axis]
        name = picked(c, name, axis, [(i - shift) % n for i in range(n)])
    return c.value(name)


@converts("index_select")
def _index_select(c: Converter, x: Value, dim: int, index: Any) -> Value:
    if not isinstance(index, Const):
        raise ExportError(f"is only supported with a constant index; {WAY_OUT}")
    return c.value(picked(c, x.name, c.axis(x, dim), index.tensor.tolist()))


@converts("index.Tensor")
def _index(c: Converter, x: Any, indices: list[Any]) -> Value:
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if isinstance(x, Const) and len(used) == 1 and used[0][0] == 0 and isinstance(used[0][1], Value):
        return lookup(c, x, used[0][1])
    constant = len(used) == 1 and isinstance(used[0][1], Const) and used[0][1].tensor.dim() == 1
    if not constant or not isinstance(x, Value):
        raise ExportError(f"is only supported with one constant index; {WAY_OUT}")
    ((dim, index),) = used
    if index.tensor.dtype == torch.bool:
        places = index.tensor.nonzero()[:, 0].tolist()
    else:
        places = [i % x.shape[c.axis(x, dim)] for i in index.tensor.tolist()]
    return c.value(picked(c, x.name, c.axis(x, dim), places))


def picked(c: Converter, name: str, axis: int, places: Sequence[int]) -> str:
    """Elements of an axis in any order: stretches of neighbours, joined."""
    parts, start = [], 0
    for n in range(1, len(places) + 1):
        if n == len(places) or places[n] != places[n - 1] + 1:
            parts.append(c.add("slice", name, axis=axis, start=places[start], stop=places[n - 1] + 1, step=1))
            start = n
    return parts[0] if len(parts) == 1 else c.add("concat", *parts, axis=axis)


@converts("embedding")
def _embedding(
    c: Converter, weight: Const, indices: Value, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> Value:
    return lookup(c, weight, indices)


@converts("one_hot")
def _one_hot(c: Converter, x: Value, num_classes: int = -1) -> Value:
    if num_classes < 1:
        raise ExportError("needs num_classes: how many there are must not depend on the data")
    return lookup(c, Const(torch.eye(num_classes), f"one_hot{num_classes}"), x)


def lookup(c: Converter, table: Const, ids: Value) -> Value:
    """Rows of a constant table (ids, …)."""
    if not isinstance(table, Const):
        raise ExportError("is only supported with a constant table")
    column = c.add("reshape", ids, shape=(*ids.shape, 1))
    return c.reshaped(c.add("embed", column, c.constant(table, table.tensor.reshape(len(table.tensor), -1))))


@converts("expand")
def _expand(c: Converter, x: Any, size: Any, implicit: bool = False) -> Value:
    new = c.result()
    shape = new.shape
    if isinstance(x, Value):
        return c.value(x.name) if shape == x.shape else c.emit("expand", x, shape=shape)
    row = c.without_batch(x.tensor, new)
    return c.value(c.constant(x, row.expand(shape), ".expanded" if row.shape != shape else ""))


@converts("repeat")
def _repeat(c: Converter, x: Any, repeats: list[Any]) -> Value:
    """Copies along axes; of a constant along the batch they are all one."""
    new = c.result()
    shape = new.shape
    if isinstance(x, Const):
        row = c.without_batch(x.tensor, new)
        times = [*(1,) * (len(shape) - row.dim()), *row.shape]
        return c.value(c.constant(x, row.repeat([n // t for n, t in zip(shape, times, strict=True)]), ".repeated"))
    name, own = x.name, (*(1,) * (len(shape) - len(x.shape)), *x.shape)
    if new.merged != x.merged or (new.merged and shape[new.lead] != x.shape[x.lead]):
        raise ExportError("repeats the batch itself")
    name = name if own == x.shape else c.add("reshape", name, shape=own)
    for axis, (n, of) in enumerate(zip(shape, own, strict=True)):
        name = name if n == of else c.add("concat", *[name] * (n // of), axis=axis)
    return c.value(name)


@converts("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones", "new_full")
def _full(c: Converter, *args: Any, **named: Any) -> Value:
    fill = 0 if "zeros" in c.op else 1 if "ones" in c.op else args[-1]
    shape = c.result().shape
    return c.value(c.graph.add_constant(f"full{fill:g}", np.full(shape, fill)))


# --- Mixture of Experts -----------------------------------------------------------------------------------------------


@converts("colibri.moe")
def _moe(c: Converter, x: Value, logits: Value, width: int, block: int) -> Value:
    c.axis(x, -1)
    body = c.bodies[block]
    return c.emit("moe", x, logits, router=body.router, experts=body.experts)


@converts("colibri.unavailable")
def _unavailable(c: Converter, x: Value, shape: list[int]) -> Value:
    raise ExportError(
        "is a second result of a Mixture-of-Experts block (router logits, a balancing loss, …), which is not exported; "
        "leave it out of what the module returns"
    )


__all__ = ["lookup", "picked"]
