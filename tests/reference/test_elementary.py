"""The elementary functions: same bits in NumPy and C, errors within the stated bounds, edges as C99 has them."""

from __future__ import annotations

import ctypes
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from colibri.reference import elementary
from colibri.reference.elementary import MAX_ABSOLUTE_BELOW_ZERO, MAX_ERROR

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(MAX_ERROR)
# Small enough for the temporaries to stay in the cache.
CHUNK = 1 << 14
INF = float("inf")
NAN = float("nan")

Float32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=["-O2", "-O3 -fno-trapping-math"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """elementary.h as a shared library, with scalar code and with loops that gcc vectorises."""
    path = tmp_path_factory.mktemp("elementary") / "elementary.so"
    warn = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
    source = Path(__file__).with_name("elementary_sweep.c")
    flags = ["-std=c11", "-ffp-contract=off", *warn, *request.param.split(), f"-I{ROOT / 'engine' / 'src'}"]
    subprocess.run(["cc", *flags, "-shared", "-fPIC", str(source), "-o", str(path), "-lm"], check=True)
    return ctypes.CDLL(str(path))


def reference(name: str) -> Callable[[npt.ArrayLike], Float32]:
    function: Callable[[npt.ArrayLike], Float32] = getattr(elementary, name)
    return function


def pointer(x: Float32) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def compiled(library: ctypes.CDLL, name: str, x: Float32) -> Float32:
    y = np.empty_like(x)
    getattr(library, f"{name}_map")(pointer(x), pointer(y), ctypes.c_size_t(x.size))
    return y


def sample() -> Float32:
    """Every exponent and sign with mantissas at its ends and middle, the breakpoints of the functions with their
    neighbours, and 2^20 random bit patterns."""
    rng = np.random.default_rng(0)
    mantissas = [0, 1, 2, 0x3504F2, 0x3504F3, 0x3504F4, 0x400000, 0x7FFFFE, 0x7FFFFF]
    exponents = np.arange(512, dtype=np.uint32) << np.uint32(23)
    grid = (exponents[:, None] | np.array(mantissas, dtype=np.uint32)).ravel()
    breakpoints = [3.0, 4.0, 10.0, 15.0, 20.0, 27 / 32, 87.336, 88.0, 88.7228, 89.0, 103.28, 103.972, 104.0]
    breakpoints += [2.0**-25, 2.0**-24, 9.01, 3.8325, 10.055, 14.17, 0.34657359, 0.70710678, 1.41421356]
    centres = np.array(breakpoints + [-b for b in breakpoints], dtype=np.float32).view(np.uint32)
    near = (centres[:, None] + np.arange(-64, 65).astype(np.uint32)).ravel()
    # Uniform bit patterns seldom fall where the functions bend.
    dense = rng.uniform(-110.0, 110.0, 1 << 18).astype(np.float32).view(np.uint32)
    noise = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    return np.concatenate([grid, near, dense, noise]).view(np.float32)


def every_float() -> Iterator[Float32]:
    for start in range(0, 1 << 32, CHUNK):
        yield np.arange(start, start + CHUNK, dtype=np.uint32).view(np.float32)


def assert_same_bits(library: ctypes.CDLL, name: str, x: Float32) -> None:
    ours, theirs = reference(name)(x), compiled(library, name, x)
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    first = int(np.argmin(same))
    assert same.all(), f"{name}({x[first].hex()}): NumPy {ours[first].hex()}, C {theirs[first].hex()}"


class Errors:
    """The largest errors of one function over the arrays it was given."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.library, self.name = library, name
        self.ulp, self.at, self.absolute = ctypes.c_int64(0), ctypes.c_float(0.0), ctypes.c_double(0.0)

    def add(self, x: Float32) -> None:
        out = ctypes.byref(self.ulp), ctypes.byref(self.at), ctypes.byref(self.absolute)
        y = compiled(self.library, self.name, x)
        getattr(self.library, f"{self.name}_error")(pointer(x), pointer(y), ctypes.c_size_t(x.size), *out)


def assert_within_bound(library: ctypes.CDLL, name: str, chunks: Iterator[Float32]) -> None:
    bound = MAX_ERROR[name]
    above, below = Errors(library, name), Errors(library, name)
    for x in chunks:
        is_below = x < np.float32(bound.ulp_from)
        above.add(x[~is_below])
        below.add(x[is_below & np.isfinite(x)])
    assert above.ulp.value <= bound.ulp, f"{name}: {above.ulp.value} ulp at {above.at.value.hex()}"
    assert below.absolute.value <= bound.absolute_below


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_in_numpy_and_c(library: ctypes.CDLL, name: str) -> None:
    assert_same_bits(library, name, sample())


@pytest.mark.parametrize("name", NAMES)
def test_error_within_bound(library: ctypes.CDLL, name: str) -> None:
    assert_within_bound(library, name, iter([sample()]))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_absolute_error_below_zero(library: ctypes.CDLL, name: str) -> None:
    errors = Errors(library, name)
    errors.add(np.linspace(-120.0, 0.0, 1 << 20, dtype=np.float32))
    errors.add(np.linspace(-4.0, 0.0, 1 << 20, dtype=np.float32))
    assert errors.absolute.value <= MAX_ABSOLUTE_BELOW_ZERO


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_for_every_float(library: ctypes.CDLL, name: str) -> None:
    for x in every_float():
        assert_same_bits(library, name, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_error_within_bound_for_every_float(library: ctypes.CDLL, name: str) -> None:
    assert_within_bound(library, name, every_float())


TINY = 2.0**-149
EDGES: dict[str, list[tuple[float, float]]] = {
    "exp": [(INF, INF), (-INF, 0.0), (0.0, 1.0), (-0.0, 1.0), (89.0, INF), (-103.5, TINY), (-104.0, 0.0)],
    "expm1": [(INF, INF), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (TINY, TINY), (-TINY, -TINY), (89.0, INF)],
    "log": [(INF, INF), (0.0, -INF), (-0.0, -INF), (-TINY, NAN), (-INF, NAN), (1.0, 0.0)],
    "log1p": [(INF, INF), (-1.0, -INF), (-2.0, NAN), (-INF, NAN), (0.0, 0.0), (-0.0, -0.0), (-TINY, -TINY)],
    "tanh": [(INF, 1.0), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (TINY, TINY), (-TINY, -TINY)],
    "erf": [(INF, 1.0), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (TINY, TINY), (-TINY, -TINY)],
    "sigmoid": [(INF, 1.0), (-INF, 0.0), (0.0, 0.5), (-0.0, 0.5), (-103.5, TINY)],
    "silu": [(INF, INF), (-INF, NAN), (0.0, 0.0), (-0.0, -0.0), (-100.0, -0.0), (1e38, 1e38)],
    "gelu": [(INF, INF), (-INF, 0.0), (0.0, 0.0), (-0.0, -0.0), (-3e38, 0.0), (1e38, 1e38)],
    "gelu_tanh": [(INF, INF), (-INF, NAN), (0.0, 0.0), (-0.0, -0.0), (-1e38, -0.0), (1e38, 1e38)],
    "softplus": [(INF, INF), (-INF, 0.0), (20.5, 20.5), (-104.0, 0.0)],
    "elu": [(INF, INF), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (1e38, 1e38)],
    "hardsigmoid": [(INF, 1.0), (-INF, 0.0), (-3.0, 0.0), (0.0, 0.5), (3.0, 1.0)],
    "hardswish": [(INF, INF), (-INF, NAN), (-3.0, -0.0), (0.0, 0.0), (-0.0, -0.0), (3e38, 3e38)],
}


@pytest.mark.parametrize("name", NAMES)
def test_edges(name: str) -> None:
    arguments, results = np.array([*EDGES[name], (NAN, NAN)], dtype=np.float32).T
    actual = reference(name)(arguments)
    np.testing.assert_array_equal(actual, results)
    number = ~np.isnan(results)
    np.testing.assert_array_equal(np.signbit(actual[number]), np.signbit(results[number]))


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_dtype_are_kept_without_warnings(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in [(), (0,), (3,), (2, 3, 4)]:
            y = reference(name)(np.full(shape, -INF, dtype=np.float32))
            assert isinstance(y, np.ndarray)
            assert y.shape == shape and y.dtype == np.float32
        transposed = np.linspace(-5, 5, 12, dtype=np.float32).reshape(3, 4).T
        np.testing.assert_array_equal(reference(name)(transposed), reference(name)(transposed.copy()))


def test_constants_are_the_same_text_in_python_and_c() -> None:
    """Every hexadecimal float of the header appears in the specification, up to its sign."""
    number = re.compile(r"0x1(?:\.[0-9a-f]+)?p[+-]\d+")
    header = (ROOT / "engine" / "src" / "core" / "elementary.h").read_text()
    module = Path(elementary.__file__).read_text()
    assert set(number.findall(header)) == set(number.findall(module))


def test_documented_bounds_are_the_tested_bounds() -> None:
    text = (ROOT / "docs" / "elementary.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|", text, re.MULTILINE)
    expected = []
    for name, bound in MAX_ERROR.items():
        if bound.ulp_from == -INF:
            expected.append((name, str(bound.ulp), ""))
        else:
            ulp = f"{bound.ulp} for x ≥ {bound.ulp_from:g}"
            expected.append((name, ulp, f"{bound.absolute_below:g}"))
    assert [tuple(cell.strip() for cell in row) for row in rows] == expected
    assert f"at most {MAX_ABSOLUTE_BELOW_ZERO:g}." in text
