"""The ATen operations the front end knows, each as nodes of the graph.

A converter has the operation's schema names as parameters (torch passes some by keyword) and returns the result as a
Value; `c` is the conversion in progress. What is not in the table is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from colibri.errors import ExportError
from colibri.frontends.torch_convert import Const, Converter, Value

OPS: dict[str, Callable[..., Any]] = {}


F = TypeVar("F", bound=Callable[..., Any])


def converts(*names: str) -> Callable[[F], F]:
    """Enter a converter under ATen names, with overload (`max.dim`) or for every overload (`add`)."""

    def enter(function: F) -> F:
        OPS.update(dict.fromkeys(names, function))
        return function

    return enter


# --- matrix products --------------------------------------------------------------------------------------------------


@converts("linear")
def _linear(c: Converter, input: Value, weight: Const, bias: Const | None = None) -> Value:
    c.axis(input, -1)
    return c.emit("linear", input, c.constant(weight), *([] if bias is None else [c.constant(bias)]))


@converts("matmul", "mm", "mv")
def _matmul(c: Converter, a: Any, b: Any) -> Value:
    if isinstance(a, Value) and isinstance(b, Const) and b.tensor.dim() in (1, 2):
        c.axis(a, -1)
        matrix = b.tensor.T if b.tensor.dim() == 2 else b.tensor[None]
        return c.reshaped(c.add("linear", a, c.constant(b, matrix, ".T" if b.tensor.dim() == 2 else "")))
    if isinstance(b, Value) and isinstance(a, Const) and a.tensor.dim() == 2 and b.rank >= 3:
        c.axis(b, -2)
        return c.value(_swapped(c, c.add("linear", _swapped(c, b.name, -2), c.constant(a)), -2))
    raise ExportError("is only supported between a tensor and a constant matrix")


@converts("addmm")
def _addmm(c: Converter, input: Any, mat1: Value, mat2: Const, beta: float = 1, alpha: float = 1) -> Value:
    if (beta, alpha) != (1, 1) or not isinstance(input, Const) or not isinstance(mat2, Const):
        raise ExportError("is only supported with constant bias and weight, and without alpha and beta")
    c.axis(mat1, -1)
    product = c.add("linear", mat1, c.constant(mat2, mat2.tensor.T, ".T"))
    return c.value(c.add("binary", product, c.operand(input, mat1), func="add"))


# --- elementwise ------------------------------------------------------------------------------------------------------

UNARY = (
    "relu", "sigmoid", "tanh", "silu", "exp", "log", "log1p", "expm1", "erf", "sqrt", "rsqrt", "reciprocal", "neg",
    "abs", "square", "hardswish", "hardsigmoid",
)  # fmt: skip


def _plain_unary(func: str) -> Callable[[Converter, Value], Value]:
    return lambda c, x: c.value(c.unary(func, x))


for _name in UNARY:
    OPS[_name] = _plain_unary(_name)


@converts("gelu")
def _gelu(c: Converter, x: Value, approximate: str = "none") -> Value:
    return c.value(c.unary("gelu" if approximate == "none" else "gelu_tanh", x))


@converts("leaky_relu")
def _leaky_relu(c: Converter, x: Value, negative_slope: float = 0.01) -> Value:
    return c.value(c.unary("leaky_relu", x, negative_slope))


@converts("hardtanh")
def _hardtanh(c: Converter, x: Value, min_val: float = -1, max_val: float = 1) -> Value:
    return c.value(c.unary("clamp", x, min_val, max_val))


@converts("relu6")
def _relu6(c: Converter, x: Value) -> Value:
    return c.value(c.unary("clamp", x, 0, 6))


@converts("clamp", "clip")
def _clamp(c: Converter, x: Value, min: Any = None, max: Any = None) -> Value:
    if isinstance(min, int | float) and isinstance(max, int | float):
        return c.value(c.unary("clamp", x, min, max))
    name = x.name
    for func, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            name = c.add("binary", name, c.operand(bound, x), func=func)
    return c.value(name)


@converts("clamp_min")
def _clamp_min(c: Converter, x: Value, min: Any) -> Value:
    return _clamp(c, x, min, None)


@converts("clamp_max")
def _clamp_max(c: Converter, x: Value, max: Any) -> Value:
    return _clamp(c, x, None, max)


@converts("elu")
def _elu(c: Converter, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    """scale · (max(x, 0) + alpha · expm1(input_scale · min(x, 0)))."""
    if (alpha, scale, input_scale) == (1, 1, 1):
        return c.value(c.unary("elu", x))
    zero = c.number(0)
    low = c.add("binary", x, zero, func="minimum")
    if input_scale != 1:
        low = c.add("binary", low, c.number(input_scale), func="mul")
    low = c.add("binary", c.unary("expm1", low), c.number(alpha * scale), func="mul")
    high = c.unary("relu", x)
    if scale != 1:
        high = c.add("binary", high, c.number(scale), func="mul")
    return c.emit("binary", high, low, func="add")


@converts("selu")
def _selu(c: Converter, x: Value) -> Value:
    return _elu(c, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@converts("celu")
def _celu(c: Converter, x: Value, alpha: float = 1) -> Value:
    return _elu(c, x, alpha, 1, 1 / alpha)


@converts("softplus")
def _softplus(c: Converter, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    if (beta, threshold) != (1, 20):
        raise ExportError(f"is only supported with beta 1 and threshold 20, not {beta} and {threshold}")
    return c.value(c.unary("softplus", x))


@converts("mish")
def _mish(c: Converter, x: Value) -> Value:
    return c.emit("binary", x, c.unary("tanh", c.unary("softplus", x)), func="mul")


@converts("pow.Tensor_Scalar")
def _pow(c: Converter, x: Value, exponent: float) -> Value:
    func = {2: "square", 0.5: "sqrt", -1: "reciprocal", -0.5: "rsqrt", 1: "identity"}.get(exponent)
    if func is not None:
        return c.value(c.unary(func, x))
    if exponent == 3:
        return c.emit("binary", c.unary("square", x), x, func="mul")
    raise ExportError(f"is not supported with exponent {exponent}, only 3, 2, 1, 0.5, -0.5 and -1")


@converts("add", "sub")
def _add(c: Converter, a: Any, b: Any, alpha: float = 1) -> Value:
    func = "add" if c.op == "add" else "sub"
    if alpha != 1:
        if isinstance(b, Value):
            b = Value(c.add("binary", b, c.number(alpha), func="mul"), b.shape, b.merged)
        else:
            b = Const(b.tensor * alpha, f"{b.name}.{alpha:g}") if isinstance(b, Const) else b * alpha
    return c.value(c.binary(func, a, b))


@converts("rsub")
def _rsub(c: Converter, a: Value, b: Any, alpha: float = 1) -> Value:
    return c.value(c.binary("sub", b, c.value(c.binary("mul", a, alpha)) if alpha != 1 else a))


@converts("mul", "div", "maximum", "minimum")
def _binary(c: Converter, a: Any, b: Any) -> Value:
    return c.value(c.binary(c.op, a, b))


# --- norms, softmax, reductions ---------------------------------------------------------------------------------------


@converts("layer_norm")
def _layer_norm(
    c: Converter, input: Value, normalized_shape: list[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Value:  # fmt: skip
    return _norm(c, "layernorm", input, normalized_shape, weight, bias, eps)


@converts("rms_norm")
def _rms_norm(
    c: Converter, input: Value, normalized_shape: list[int], weight: Any = None, eps: float | None = None
) -> Value:
    return _norm(
        c, "rmsnorm", input, normalized_shape, weight, None, torch.finfo(torch.float32).eps if eps is None else eps
    )


def _norm(c: Converter, op: str, x: Value, over: list[int], weight: Any, bias: Any, eps: float) -> Value:
    c.axis(x, -1)
    if len(over) != 1:
        raise ExportError(f"is only supported over the last axis, not over {list(over)}")
    if bias is not None and weight is None:
        raise ExportError("is not supported with a bias but no weight")
    return c.emit(op, x, *(c.constant(p) for p in (weight, bias) if p is not None), eps=float(eps))


@converts("_native_batch_norm_legit_no_training")
def _batch_norm(
    c: Converter, x: Value, weight: Any, bias: Any, mean: Const, var: Const, momentum: float, eps: float
) -> list[Value]:
    """x · scale + shift per channel (torch axis 1), computed in double precision."""
    c.axis(x, 1)
    scale = 1 / (var.tensor.double() + eps).sqrt()
    scale = scale if weight is None else scale * weight.tensor
    shift = -mean.tensor.double() * scale
    shift = shift if bias is None else shift + bias.tensor
    stem, channel = mean.name.removesuffix(".running_mean"), (-1, *(1,) * (x.rank - 2))
    scaled = c.add("binary", x, c.constant(Const(scale.view(channel), f"{stem}.scale")), func="mul")
    shifted = c.add("binary", scaled, c.constant(Const(shift.view(channel), f"{stem}.shift")), func="add")
    return [c.value(shifted, c.node.meta["val"][0])]


@converts("_native_batch_norm_legit", "native_batch_norm", "batch_norm")
def _batch_norm_training(c: Converter, *args: Any, **kwargs: Any) -> Value:
    raise ExportError("uses the statistics of the batch (training mode), which mixes samples")


def _swapped(c: Converter, name: str, axis: int) -> str:
    """The value with per-sample `axis` and the last axis exchanged."""
    rank = len(c.graph.shapes[name])
    perm = list(range(rank))
    perm[axis], perm[-1] = perm[-1], perm[axis]
    return name if perm == list(range(rank)) else c.add("transpose", name, perm=tuple(perm))


@converts("softmax", "_softmax")
def _softmax(c: Converter, x: Value, dim: int, half_to_float: Any = None) -> Value:
    axis = c.axis(x, dim)
    return c.value(_swapped(c, c.add("softmax", _swapped(c, x.name, axis)), axis))


@converts("log_softmax", "_log_softmax")
def _log_softmax(c: Converter, x: Value, dim: int, half_to_float: Any = None) -> Value:
    """(x − max) − log Σ exp(x − max), exact also where the softmax itself underflows."""
    axis = c.axis(x, dim)
    column = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    top = c.add("reshape", c.reduce("max", x, dim), shape=column)
    low = c.add("binary", x, top, func="sub")
    total = c.add("reduce", c.unary("exp", low), func="sum", axis=axis)
    return c.emit("binary", low, c.add("reshape", c.unary("log", total), shape=column), func="sub")


@converts("mean", "sum", "amax")
def _reduce(c: Converter, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return c.reshaped(c.reduce("max" if c.op == "amax" else c.op, x, dim))


@converts("max.dim")
def _max(c: Converter, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    return [c.reshaped(c.reduce("max", x, dim), c.node.meta["val"][0])]


@converts("var.correction")
def _var(c: Converter, x: Value, dim: Any = None, correction: float | None = 1, keepdim: bool = False) -> Value:
    axes = [c.axis(x, d) for d in (range(x.rank) if dim is None else dim)]
    count = int(np.prod([x.shape[a] for a in axes]))
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise ExportError(f"has {count} values and correction {correction}, which divides by zero")
    column = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    centred = c.add("binary", x, c.add("reshape", c.reduce("mean", x, dim), shape=column), func="sub")
    total = c.reduce("sum", Value(c.unary("square", centred), x.shape, x.merged), dim)
    return c.reshaped(c.add("binary", total, c.number(divisor), func="div"))


@converts("linalg_vector_norm")
def _vector_norm(c: Converter, x: Value, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Value:
    if ord not in (1, 2):
        raise ExportError(f"is only supported of order 1 and 2, not {ord}")
    powers = Value(c.unary("abs" if ord == 1 else "square", x), x.shape, x.merged)
    total = c.reduce("sum", powers, dim)
    return c.reshaped(total if ord == 1 else c.unary("sqrt", total))


# --- shapes -----------------------------------------------------------------------------------------------------------


@converts("view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten")
def _view(c: Converter, x: Value, *sizes: Any, **named: Any) -> Value:
    return c.reshaped(x)


@converts("clone", "contiguous", "detach", "alias", "lift_fresh_copy", "_to_copy", "to")
def _same(c: Converter, x: Value, *options: Any, **named: Any) -> Value:
    return c.value(x.name)


@converts("permute")
def _permute(c: Converter, x: Value, dims: list[int]) -> Value:
    dims = [d % x.rank for d in dims]
    if dims[0] != 0:
        raise ExportError("moves the batch away from axis 0; keep the batch first (batch_first=True)")
    perm = dims if x.merged else [d - 1 for d in dims[1:]]
    return c.emit("transpose", x, perm=tuple(perm))


@converts("transpose", "t")
def _transpose(c: Converter, x: Value, dim0: int = 0, dim1: int = 1) -> Value:
    dims = list(range(x.rank))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(c, x, dims)


@converts("slice", "narrow")
def _slice(c: Converter, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    fake = c.node.meta["val"]
    if c.sample(fake) == (x.shape, x.merged):
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
    if c.op == "stack":
        rank = tensors[0].rank + 1
        if dim % rank == 0:
            raise ExportError("stacks along axis 0, the batch")
        axis = dim % rank - (not tensors[0].merged)
        columns = [c.add("reshape", t, shape=(*t.shape[:axis], 1, *t.shape[axis:])) for t in tensors]
        return c.emit("concat", *columns, axis=axis)
    return c.emit("concat", *tensors, axis=c.axis(tensors[0], dim))


@converts("expand")
def _expand(c: Converter, x: Any, size: Any, implicit: bool = False) -> Value:
    shape, merged = c.sample(c.node.meta["val"])
    if isinstance(x, Value):
        if len(shape) != len(x.shape):
            raise ExportError("adds an axis in front of the batch")
        return c.value(x.name) if shape == x.shape else c.emit("expand", x, shape=shape)
    rank = len(shape) + (not merged)
    if merged or (x.tensor.dim() == rank and x.tensor.shape[0] != 1):
        raise ExportError("expands a constant along the batch")
    row = x.tensor[0] if x.tensor.dim() == rank else x.tensor
    return c.value(c.constant(x, row.expand(shape), ".expanded" if row.shape != shape else ""))


@converts("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones", "new_full")
def _full(c: Converter, *args: Any, **named: Any) -> Value:
    fill = 0 if "zeros" in c.op else 1 if "ones" in c.op else args[-1]
    shape, _ = c.sample(c.node.meta["val"])
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


__all__ = ["OPS"]
