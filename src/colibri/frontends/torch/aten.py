"""The ATen operations the front end knows, each as nodes of the graph.

A converter has the operation's schema names as parameters (torch passes some by keyword) and returns the result as a
Value; `c` is the conversion in progress. What is not in the table is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from colibri.errors import ExportError
from colibri.frontends.torch.convert import WAY_OUT, Const, Converter, Value

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


@converts("matmul", "mm", "mv", "bmm")
def _matmul(c: Converter, a: Any, b: Any) -> Value:
    if isinstance(a, Value) and isinstance(b, Const) and b.tensor.dim() in (1, 2):
        c.axis(a, -1)
        matrix = b.tensor.T if b.tensor.dim() == 2 else b.tensor[None]
        return c.reshaped(c.add("linear", a, c.constant(b, matrix, ".T" if b.tensor.dim() == 2 else "")))
    if isinstance(b, Value) and isinstance(a, Const) and a.tensor.dim() == 2 and b.rank == 2 and b.lead == 1:
        return c.emit("linear", b, c.constant(a))  # matrix · xᵀ, the batch behind
    if isinstance(a, Value) and isinstance(b, Const) and a.lead == a.rank - 2:
        return _rows_by_stack(c, a, b)
    shape = c.result().shape
    for x in (a, b):
        if isinstance(x, Value) and x.lead >= x.rank - 2:
            raise ExportError("multiplies along the batch axis: samples must not depend on each other")
    if len(shape) < 2 or any((x.tensor.dim() if isinstance(x, Const) else x.rank) < 2 for x in (a, b)):
        raise ExportError("multiplies a vector computed from the input; give it an axis more with unsqueeze")
    names = []
    for x in (a, b):
        name = c.operand(x, a if isinstance(a, Value) else b)
        stack = (*shape[:-2], *c.graph.shapes[name][-2:])
        names.append(name if c.graph.shapes[name] == stack else c.add("expand", name, shape=stack))
    return c.emit("matmul", *names)


def _rows_by_stack(c: Converter, a: Value, b: Const) -> Value:
    """Rows that hold the batch times a stack of constant matrices."""
    rows = a.name if a.merged else c.add("reshape", a, shape=(*a.shape[:-1], 1, a.shape[-1]))
    stack = (*b.tensor.shape[:-2], *c.graph.shapes[rows][-2:])
    rows = rows if c.graph.shapes[rows] == stack else c.add("expand", rows, shape=stack)
    matrices = b.tensor.expand(*stack[:-2], *b.tensor.shape[-2:])
    return c.reshaped(c.add("matmul", rows, c.constant(b, matrices)))


@converts("addmm", "baddbmm")
def _addmm(c: Converter, input: Any, mat1: Any, mat2: Any, beta: float = 1, alpha: float = 1) -> Value:
    product = _matmul(c, mat1, mat2)
    if alpha != 1:
        product = c.value(c.binary("mul", product, alpha))
    if beta == 0:
        return product
    return c.value(c.binary("add", product, input if beta == 1 else c.value(c.binary("mul", input, beta))))


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


@converts("log_sigmoid_forward", "log_sigmoid")
def _log_sigmoid(c: Converter, x: Value) -> Any:
    low = c.unary("neg", c.unary("softplus", c.unary("neg", x)))
    fake = c.node.meta["val"]
    return c.value(low) if isinstance(fake, Tensor) else [c.value(low, fake[0])]


@converts("prelu", "_prelu_kernel")
def _prelu(c: Converter, x: Value, weight: Const) -> Value:
    """max(x, 0) + w · min(x, 0), w per channel (axis 1) or one for all."""
    behind = (x.rank - 2) * (weight.tensor.numel() > 1)
    channels = weight.tensor.reshape(-1, *(1,) * behind)
    low = c.add("binary", c.add("binary", x, c.number(0), func="minimum"), c.constant(weight, channels), func="mul")
    return c.emit("binary", c.unary("relu", x), low, func="add")


@converts("pow.Tensor_Scalar")
def _pow(c: Converter, x: Value, exponent: float) -> Value:
    func = {2: "square", 0.5: "sqrt", -1: "reciprocal", -0.5: "rsqrt", 1: "identity"}.get(exponent)
    if func is not None:
        return c.value(c.unary(func, x))
    if exponent != int(exponent) or not 2 < exponent <= 8:
        raise ExportError(f"is not supported with exponent {exponent}, only 1 to 8, 0.5, -0.5 and -1")
    name = c.unary("square", x)
    for _ in range(int(exponent) - 2):
        name = c.add("binary", name, x, func="mul")
    return c.value(name)


@converts("masked_fill", "where", "tril", "triu")
def _masked(c: Converter, x: Any, *args: Any) -> Value:
    """A choice by a constant mask, exact for all numbers, and for NaN and infinity where they are hidden."""
    if c.op in ("tril", "triu"):
        rows, cols = x.shape[-2:]
        kept = getattr(torch, c.op)(torch.ones(rows, cols), *args).bool()
        mask, value, shown = Const(~kept, c.op), 0.0, x
    elif c.op == "where":
        mask, value, shown = x, *args
        if not isinstance(shown, Value):  # the other way round
            mask = Const(~mask.tensor, f"{mask.name}.not") if isinstance(mask, Const) else mask
            value, shown = shown, value
    else:
        mask, value, shown = args[0], args[1], x
    if isinstance(mask, Value) or not isinstance(shown, Value) or isinstance(value, Value):
        raise ExportError(f"is only supported with a constant mask and a constant value; {WAY_OUT}")
    number = value.tensor if isinstance(value, Const) else torch.tensor(float(value))
    if bool(torch.isnan(number).any()):
        raise ExportError("puts NaN in the place of what it hides; use a number or an infinity")
    cover = torch.where(mask.tensor, number.to(torch.float32), torch.tensor(torch.nan))
    return c.value(c.add("binary", shown, c.operand(Const(cover, f"{mask.name}.cover"), shown), func="fill"))


@converts("cumsum")
def _cumsum(c: Converter, x: Value, dim: int, dtype: Any = None) -> Value:
    """Sums over windows that end at each element, with zeros before the first."""
    axis = c.axis(x, dim)
    n = x.shape[axis]
    zeros = (
        c.graph.add_constant(f"zeros{n - 1}", np.zeros((*x.shape[:axis], n - 1, *x.shape[axis + 1 :]))) if n > 1 else ""
    )
    name = c.add("concat", zeros, x, axis=axis) if zeros else x.name
    windows = c.add("window", name, axis=axis, size=n, step=1, dilation=1)
    return c.value(c.add("reduce", windows, func="sum", axis=axis + 1))


@converts("add", "sub")
def _add(c: Converter, a: Any, b: Any, alpha: float = 1) -> Value:
    func = "add" if c.op == "add" else "sub"
    if alpha != 1:
        if isinstance(b, Value):
            b = replace(b, name=c.add("binary", b, c.number(alpha), func="mul"))
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


@converts("group_norm")
def _group_norm(
    c: Converter, input: Value, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:  # fmt: skip
    """Channels are torch's axis 1: a layernorm over each group of them with all that is behind."""
    axis = c.axis(input, 1)
    lead, channels, behind = input.shape[:axis], input.shape[axis], input.shape[axis + 1 :]
    width = channels // num_groups * int(np.prod(behind))
    name = c.add("layernorm", c.add("reshape", input, shape=(*lead, num_groups, width)), eps=float(eps))
    name = c.add("reshape", name, shape=input.shape)
    for func, part in (("mul", weight), ("add", bias)):
        if part is not None:
            each = part.tensor.reshape(-1, *(1,) * len(behind))
            name = c.add("binary", name, c.constant(part, each), func=func)
    return c.value(name)


@converts("instance_norm")
def _instance_norm(
    c: Converter, input: Value, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Value:  # fmt: skip
    if not use_input_stats:
        raise ExportError("is not supported with running statistics; use BatchNorm, which is the same in eval mode")
    return _group_norm(c, input, input.shape[c.axis(input, 1)], weight, bias, eps)


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
    for axis in range(1, len(over) + 1):
        c.axis(x, -axis)
    if bias is not None and weight is None:
        raise ExportError("is not supported with a bias but no weight")
    parts = [c.constant(p, p.tensor.reshape(-1)) for p in (weight, bias) if p is not None]
    flat = x.name if len(over) == 1 else c.add("reshape", x, shape=(*x.shape[: -len(over)], int(np.prod(over))))
    return c.reshaped(c.add(op, flat, *parts, eps=float(eps)))


@converts("_native_batch_norm_legit_no_training")
def _batch_norm(
    c: Converter, x: Value, weight: Any, bias: Any, mean: Const, var: Const, momentum: float, eps: float
) -> list[Value]:
    """x · scale + shift per channel (torch axis 1), computed in double precision."""
    if x.lead:
        raise ExportError("is only supported with the batch in axis 0")
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


@converts("amin", "min.dim")
def _min(c: Converter, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    """-max(-x)."""
    least = c.unary("neg", c.reduce("max", replace(x, name=c.unary("neg", x)), dim))
    return c.reshaped(least) if c.op == "amin" else [c.reshaped(least, c.node.meta["val"][0])]


@converts("logsumexp")
def _logsumexp(c: Converter, x: Value, dim: Any, keepdim: bool = False) -> Value:
    dims = [dim] if isinstance(dim, int) else list(dim)
    axes = [c.axis(x, d) for d in dims]
    column = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    top = c.reduce("max", x, dims)
    low = c.add("binary", x, c.add("reshape", top, shape=column), func="sub")
    total = c.unary("log", c.reduce("sum", replace(x, name=c.unary("exp", low)), dims))
    return c.reshaped(c.add("binary", total, top, func="add"))


@converts("var.correction")
def _var(c: Converter, x: Value, dim: Any = None, correction: float | None = 1, keepdim: bool = False) -> Value:
    axes = [c.axis(x, d) for d in (range(x.rank) if dim is None else dim)]
    count = int(np.prod([x.shape[a] for a in axes]))
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise ExportError(f"has {count} values and correction {correction}, which divides by zero")
    column = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    centred = c.add("binary", x, c.add("reshape", c.reduce("mean", x, dim), shape=column), func="sub")
    total = c.reduce("sum", replace(x, name=c.unary("square", centred)), dim)
    return c.reshaped(c.add("binary", total, c.number(divisor), func="div"))


@converts("linalg_vector_norm")
def _vector_norm(c: Converter, x: Value, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Value:
    if ord not in (1, 2):
        raise ExportError(f"is only supported of order 1 and 2, not {ord}")
    powers = replace(x, name=c.unary("abs" if ord == 1 else "square", x))
    total = c.reduce("sum", powers, dim)
    return c.reshaped(total if ord == 1 else c.unary("sqrt", total))


__all__ = ["OPS", "converts"]
