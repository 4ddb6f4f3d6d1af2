"""A model as C in the style of onnx2c: each node a function over arrays with their shapes, loops, nothing fused.

onnx2c itself is C++ to be built from its repository, and neither in PyPI nor in Debian; this generator follows what its
templates write (static tensors, alpha and beta in a Gemm) and shares no code with them. The graph is that of
generate.py's onnx_dense: all experts, of which a mask keeps the chosen one's output.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Weights = Mapping[str, NDArray[np.float32]]


def generate(weights: Weights) -> str:
    """The C file; `entry` takes features (1, 70) and gives the change (1, 1)."""
    made = _Writer(weights)
    logits = made.gemm("x", (1, 70), "moe.gate")
    scores = made.softmax(logits)
    share = made.mask(scores)
    outputs = []
    for e in range(3):
        hidden = made.relu(made.gemm("x", (1, 70), f"moe.experts.{e}.0", "hidden"), "active")
        outputs.append(made.gemm(hidden, (1, 32), f"moe.experts.{e}.2"))
    mixed = made.relu(made.matmul(share, made.concat(outputs)))
    made.gemm(mixed, (1, 16), "head", "y")
    return made.text()


# onnx2c lets tensors whose lives do not overlap share memory: the experts' inner ones go by name here.


class _Writer:
    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.tensors: list[str] = []
        self.functions: list[str] = []
        self.calls: list[str] = []
        self.shapes: dict[str, tuple[int, int]] = {"x": (1, 70)}

    def text(self) -> str:
        entry = "static void entry(const float x[1][70], float y[1][1])\n{\n" + "".join(self.calls) + "}\n"
        return "\n".join(["#include <math.h>\n#include <stdint.h>\n", *self.tensors, *self.functions, entry])

    def gemm(self, a: str, shape: tuple[int, int], layer: str, to: str | None = None) -> str:
        w, c = (self._constant(f"{layer}.{kind}") for kind in ("weight", "bias"))
        rows, columns = self.weights[f"{layer}.weight"].shape
        body = f"""    const int M = {shape[0]}, K = {columns}, N = {rows};
    float alpha = 1.0f, beta = 1.0f;
    for (int r = 0; r < M; r++)
        for (int c = 0; c < N; c++) {{
            float sum = 0;
            for (int i = 0; i < K; i++) {{
                sum += A[r][i] * B[c][i];
            }}
            Y[r][c] = sum * alpha + C[c] * beta;
        }}
"""
        arguments = f"const float A[1][{columns}], const float B[{rows}][{columns}], const float C[{rows}]"
        return self._node(arguments, body, (a, w, c), (1, rows), to)

    def relu(self, a: str, to: str | None = None) -> str:
        shape = self.shapes[a]
        body = f"""    const float *x = (const float *)A;
    float *y = (float *)Y;
    for (uint32_t i = 0; i < {shape[0] * shape[1]}; i++)
        y[i] = x[i] > 0 ? x[i] : 0;
"""
        return self._node(f"const float A[{shape[0]}][{shape[1]}]", body, (a,), shape, to)

    def softmax(self, a: str) -> str:
        body = """    float max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < 3; i++)
        max = fmaxf(max, A[0][i]);
    for (uint32_t i = 0; i < 3; i++) {
        Y[0][i] = expf(A[0][i] - max);
        sum += Y[0][i];
    }
    for (uint32_t i = 0; i < 3; i++)
        Y[0][i] /= sum;
"""
        return self._node("const float A[1][3]", body, (a,), (1, 3))

    def mask(self, a: str) -> str:
        """ReduceMax, Equal, Cast and Mul of the scores: four nodes of the graph over three numbers, here one."""
        body = """    float max = A[0][0];
    for (uint32_t i = 1; i < 3; i++)
        max = fmaxf(max, A[0][i]);
    for (uint32_t i = 0; i < 3; i++)
        Y[0][i] = A[0][i] == max ? A[0][i] : 0;
"""
        return self._node("const float A[1][3]", body, (a,), (1, 3))

    def concat(self, parts: list[str]) -> str:
        body = "".join(
            f"    for (uint32_t i = 0; i < 16; i++)\n        Y[{n}][i] = A{n}[0][i];\n" for n in range(len(parts))
        )
        arguments = ", ".join(f"const float A{n}[1][16]" for n in range(len(parts)))
        return self._node(arguments, body, tuple(parts), (len(parts), 16))

    def matmul(self, a: str, b: str) -> str:
        body = """    for (uint32_t c = 0; c < 16; c++) {
        Y[0][c] = 0;
        for (uint32_t i = 0; i < 3; i++)
            Y[0][c] += A[0][i] * B[i][c];
    }
"""
        return self._node("const float A[1][3], const float B[3][16]", body, (a, b), (1, 16))

    def _constant(self, name: str) -> str:
        values, c_name = self.weights[name], "tensor_" + name.replace(".", "_")
        shape = "".join(f"[{n}]" for n in values.shape)
        text = ", ".join(float(x).hex() + "f" for x in values.ravel())
        self.tensors.append(f"static const float {c_name}{shape} = {{{text}}};")
        return c_name

    def _node(
        self, arguments: str, body: str, inputs: tuple[str, ...], shape: tuple[int, int], to: str | None = None
    ) -> str:
        number = len(self.functions)
        output = to or f"tensor_{number}"
        if output != "y" and output not in self.shapes:
            self.tensors.append(f"static float {output}[{shape[0]}][{shape[1]}];")
        self.shapes[output] = shape
        head = f"static inline void node_{number}({arguments}, float Y[{shape[0]}][{shape[1]}])"
        self.functions.append(f"{head}\n{{\n{body}}}\n")
        self.calls.append(f"    node_{number}({', '.join((*inputs, output))});\n")
        return output
