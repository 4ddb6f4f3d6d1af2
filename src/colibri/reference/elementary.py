"""Elementary functions in binary32: the executable specification of ``engine/src/core/elementary.h``.

Each function is one fixed sequence of IEEE-754 binary32 operations, 32-bit integer operations and selects, in
the order of the C text with the same constants, so both give the same bits for every argument.  The C file
holds the reasons behind each sequence; ``docs/elementary.md`` lists the errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Uint32 = npt.NDArray[np.uint32]


class Bound(NamedTuple):
    """Largest error over all float32 arguments: in floats from the correctly rounded result where the argument
    is at least ``ulp_from``, and in absolute value below."""

    ulp: int
    ulp_from: float = -float("inf")
    absolute_below: float = 0.0


MAX_ERROR: Final[dict[str, Bound]] = {
    "exp": Bound(1),
    "expm1": Bound(2),
    "log": Bound(1),
    "log1p": Bound(1),
    "tanh": Bound(3),
    "erf": Bound(1),
    "sigmoid": Bound(2),
    "silu": Bound(2, -88.0, 3e-37),
    "gelu": Bound(8),
    "gelu_tanh": Bound(3, -1.0, 5e-8),
    "softplus": Bound(2),
    "elu": Bound(1),
    "hardsigmoid": Bound(1),
    "hardswish": Bound(2),
}
# Of silu, gelu and gelu_tanh, which approach zero on that side.
MAX_ABSOLUTE_BELOW_ZERO: Final = 7e-8


def _f32(text: str) -> np.float32:
    return np.float32(float.fromhex(text))


def _bits(x: Float32) -> Uint32:
    return x.view(np.uint32)


def _from_bits(u: Uint32) -> Float32:
    return u.view(np.float32)


def _select(condition: npt.NDArray[np.bool_], a: Float32 | np.float32, b: Float32 | np.float32) -> Float32:
    return np.where(condition, a, b)


def _elementwise(function: Callable[[Float32], Float32]) -> Callable[[npt.ArrayLike], Float32]:
    """Accept any shape, and silence the floating-point flags that arms not selected raise."""

    @functools.wraps(function)
    def wrapper(x: npt.ArrayLike) -> Float32:
        values = np.asarray(x, dtype=np.float32)
        with np.errstate(all="ignore"):
            return function(np.atleast_1d(values)).reshape(values.shape)

    return wrapper


ZERO: Final = np.float32(0.0)
HALF: Final = np.float32(0.5)
ONE: Final = np.float32(1.0)
INF: Final = np.float32(np.inf)
NAN: Final = np.float32(np.nan)
MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
SIGN: Final = np.uint32(0x80000000)
LOG2_E: Final = _f32("0x1.715476p+0")
LN2_HI: Final = _f32("0x1.62e4p-1")
LN2_LO: Final = _f32("0x1.7f7d1cp-20")
ROUND: Final = _f32("0x1.8p+23")
EXPONENT: Final = np.uint32(23)

# Coefficients from the highest power down, as Horner's rule takes them.
EXPM1_Q: Final = [
    _f32("0x1.6a445ep-10"),
    _f32("0x1.123b5cp-7"),
    _f32("0x1.5558bcp-5"),
    _f32("0x1.555490p-3"),
    _f32("0x1.fffffcp-2"),
]
LOG_P: Final = [
    _f32("-0x1.38c974p-4"),
    _f32("0x1.055eaep-3"),
    _f32("-0x1.0d8246p-3"),
    _f32("0x1.22d930p-3"),
    _f32("-0x1.54728ap-3"),
    _f32("0x1.99a01cp-3"),
    _f32("-0x1.000226p-2"),
    _f32("0x1.555554p-2"),
]
ERF_P: Final = [
    _f32("-0x1.4ea96cp-11"),
    _f32("0x1.4bcf64p-8"),
    _f32("-0x1.b7416ep-6"),
    _f32("0x1.ce25fap-4"),
    _f32("-0x1.812728p-2"),
    _f32("0x1.06eba8p-3"),
]
ERF_Q: Final = [
    _f32("-0x1.c3ddd8p-13"),
    _f32("0x1.a6ff3cp-9"),
    _f32("-0x1.77accep-6"),
    _f32("0x1.af67aep-4"),
    _f32("0x1.4576bap-1"),
    _f32("0x1.20e73ap+0"),
]
GELU_P: Final = [
    _f32("0x1.0c3a2cp-8"),
    _f32("0x1.4bb5c0p-5"),
    _f32("0x1.767494p-3"),
    _f32("0x1.c04db8p-2"),
    HALF,
]
GELU_Q: Final = [
    _f32("0x1.502b44p-7"),
    _f32("0x1.9fc376p-4"),
    _f32("0x1.dfa91cp-2"),
    _f32("0x1.336f52p+0"),
    _f32("0x1.ac690ap+0"),
    ONE,
]


def _horner(coefficients: list[np.float32], x: Float32) -> Float32:
    p = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        p = p * x + coefficient
    return p


def _abs(x: Float32) -> Float32:
    return _from_bits(_bits(x) & MAGNITUDE)


def _copysign(magnitude: Float32, sign: Float32) -> Float32:
    return _from_bits((_bits(magnitude) & MAGNITUDE) | (_bits(sign) & SIGN))


def _exp_reduce(x: Float32, lo: Float32 | np.float32) -> tuple[Float32, Uint32]:
    shifted = x * LOG2_E + ROUND
    k = shifted - ROUND
    n = _bits(shifted) - np.uint32(0x4B400000)
    return ((x - k * LN2_HI) - k * LN2_LO) - lo, n


def _expm1_kernel(r: Float32) -> Float32:
    return r + (r * r) * _horner(EXPM1_Q, r)


def _exp_kernel(x: Float32, lo: Float32 | np.float32) -> Float32:
    r, n = _exp_reduce(x, lo)
    y = ONE + _expm1_kernel(r)
    n = n + np.uint32(254)
    half = n >> np.uint32(1)
    return (y * _from_bits(half << EXPONENT)) * _from_bits((n - half) << EXPONENT)


@_elementwise
def exp(x: Float32) -> Float32:
    """e**x, float32 of any shape to float32 of that shape."""
    x = _select(x < np.float32(-104.0), np.float32(-104.0), x)
    x = _select(x > np.float32(89.0), np.float32(89.0), x)
    return _exp_kernel(x, ZERO)


@_elementwise
def expm1(x: Float32) -> Float32:
    """e**x - 1, float32 of any shape to float32 of that shape."""
    c = _select(x < np.float32(-20.0), np.float32(-20.0), x)
    c = _select(c > np.float32(89.0), np.float32(89.0), c)
    r, n = _exp_reduce(c, ZERO)
    scale = _from_bits((n + np.uint32(126)) << EXPONENT)
    y = scale * _expm1_kernel(r) + (scale - HALF)
    y = y + y
    return _select(_abs(x) < _f32("0x1p-25"), x, y)


def _log_kernel(n: Float32, f: Float32) -> Float32:
    s = f * f
    p = _horner(LOG_P, f)
    p = (s * f) * p + n * LN2_LO
    return n * LN2_HI + (f + (p - HALF * s))


def _log_edges(u: Float32, y: Float32) -> Float32:
    y = _select(u < INF, y, u)
    return _select(u > ZERO, y, _select(u == ZERO, -INF, NAN))


def _log_exponent(u: Float32) -> Uint32:
    return (_bits(u) + np.uint32(0x3F800000 - 0x3F3504F3)) >> EXPONENT


@_elementwise
def log(x: Float32) -> Float32:
    """Natural logarithm, float32 of any shape to float32 of that shape."""
    tiny = x < _f32("0x1p-126")
    u = _select(tiny, x * _f32("0x1p+23"), x)
    bias = _select(tiny, np.float32(150.0), np.float32(127.0))
    e = _log_exponent(u)
    f = _from_bits(_bits(u) - ((e - np.uint32(127)) << EXPONENT)) - ONE
    return _log_edges(x, _log_kernel(e.astype(np.float32) - bias, f))


@_elementwise
def log1p(x: Float32) -> Float32:
    """log(1 + x), float32 of any shape to float32 of that shape."""
    u = ONE + x
    e = _log_exponent(u)
    shift = (e - np.uint32(127)) << EXPONENT
    scale = np.float32(0.25) * _from_bits(np.uint32(0x40800000) - shift)
    f = _from_bits(_bits(x) - shift) + (scale - ONE)
    y = _log_kernel(e.astype(np.float32) - np.float32(127.0), f)
    return _copysign(_log_edges(u, y), x)


@_elementwise
def tanh(x: Float32) -> Float32:
    """Hyperbolic tangent, float32 of any shape to float32 of that shape."""
    t = _abs(x)
    t = _select(t > np.float32(10.0), np.float32(10.0), t)
    y = expm1(t + t)
    return _copysign(y / (y + np.float32(2.0)), x)


@_elementwise
def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)), float32 of any shape to float32 of that shape."""
    z = exp(-_abs(x))
    return _select(x < ZERO, z, ONE) / (ONE + z)


@_elementwise
def erf(x: Float32) -> Float32:
    """Error function, float32 of any shape to float32 of that shape."""
    s = x * x
    t = _abs(x)
    p = x + x * _horner(ERF_P, s)
    t = _select(t > np.float32(4.0), np.float32(4.0), t)
    q = ONE - _exp_kernel(-(_horner(ERF_Q, t) * t), ZERO)
    return _select(t < np.float32(0.84375), p, _copysign(q, x))


@_elementwise
def silu(x: Float32) -> Float32:
    """x * sigmoid(x), float32 of any shape to float32 of that shape."""
    return x / (ONE + exp(-x))


@_elementwise
def gelu(x: Float32) -> Float32:
    """Exact GELU, x times the normal distribution function, float32 of any shape to float32 of that shape."""
    t = _abs(x)
    t = _select(t > np.float32(15.0), np.float32(15.0), t)
    hi = _from_bits(_bits(t) & np.uint32(0xFFFFF000))
    e = _exp_kernel(-((HALF * hi) * hi), (HALF * (t - hi)) * (t + hi))
    p = _horner(GELU_P, t)
    q = _horner(GELU_Q, t)
    return _select(x < ZERO, ZERO, x) - ((t * p) / q) * e


@_elementwise
def gelu_tanh(x: Float32) -> Float32:
    """GELU with PyTorch's tanh approximation, float32 of any shape to float32 of that shape."""
    y = x * (_f32("0x1.988454p+0") + _f32("0x1.2444f2p-4") * (x * x))
    return x / (ONE + exp(-y))


@_elementwise
def softplus(x: Float32) -> Float32:
    """log(1 + exp(x)), and x above 20, float32 of any shape to float32 of that shape."""
    y = log1p(exp(x))
    return _select(x > np.float32(20.0), x, y)


@_elementwise
def elu(x: Float32) -> Float32:
    """x above 0 and expm1(x) below, float32 of any shape to float32 of that shape."""
    y = expm1(x)
    return _select(x > ZERO, x, y)


def _hardsigmoid(x: Float32) -> Float32:
    y = x + np.float32(3.0)
    y = _select(y < ZERO, ZERO, y)
    y = _select(y > np.float32(6.0), np.float32(6.0), y)
    return y / np.float32(6.0)


@_elementwise
def hardsigmoid(x: Float32) -> Float32:
    """min(max(x + 3, 0), 6) / 6, float32 of any shape to float32 of that shape."""
    return _hardsigmoid(x)


@_elementwise
def hardswish(x: Float32) -> Float32:
    """x * hardsigmoid(x), float32 of any shape to float32 of that shape."""
    return x * _hardsigmoid(x)
