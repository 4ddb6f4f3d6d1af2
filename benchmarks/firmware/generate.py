"""Lets the peers write their C; runs with the interpreter that has them (requirements.txt), not with the project's.

    python generate.py emlearn|onnx-dense|onnx-gather WEIGHTS.npz FOLDER

WEIGHTS.npz holds the checkpoint's tensors by their names. Writes emlearn.h, or model.onnx and model.c, into FOLDER.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = Mapping[str, NDArray[np.float32]]
EXPERTS = 3


def emlearn(weights: Weights, folder: Path) -> None:
    """Each expert with the head behind it as a scikit-learn MLP 70-32-16-1, converted; emlearn takes no mixture.

    A positive probability passes the ReLU before the head, so routing and the head's bias can be added around the nets.
    """
    import emlearn
    from sklearn.neural_network import MLPRegressor

    code = []
    for e in range(EXPERTS):
        net = MLPRegressor(hidden_layer_sizes=(32, 16), activation="relu")
        expert = f"moe.experts.{e}"
        net.coefs_ = [weights[f"{expert}.0.weight"].T, weights[f"{expert}.2.weight"].T, weights["head.weight"].T]
        net.intercepts_ = [weights[f"{expert}.0.bias"], weights[f"{expert}.2.bias"], np.zeros(1, np.float32)]
        net.n_layers_, net.out_activation_ = 4, "identity"
        code.append(emlearn.convert(net, method="loadable", return_type="regressor").save(name=f"expert{e}"))
    (folder / "emlearn.h").write_text("\n".join(code))


def onnx_dense(weights: Weights, folder: Path) -> None:
    """All experts, with a mask that keeps the chosen one's output: operators without control flow allow no more."""
    nodes = [*_gate(), ("ReduceMax", ["scores"], ["best"], {"axes": [1], "keepdims": 1}),
             ("Equal", ["scores", "best"], ["is_best"], {}), ("Cast", ["is_best"], ["mask"], {"to": 1}),
             ("Mul", ["mask", "scores"], ["share"], {})]  # fmt: skip
    for e in range(EXPERTS):
        nodes += _expert("x", f"moe.experts.{e}.0.weight", f"moe.experts.{e}.0.bias", f"moe.experts.{e}.2.weight",
                         f"moe.experts.{e}.2.bias", f"y{e}")  # fmt: skip
    nodes += [("Concat", [f"y{e}" for e in range(EXPERTS)], ["all"], {"axis": 0}),
              ("MatMul", ["share", "all"], ["mixed"], {})]  # fmt: skip
    _compile(nodes, dict(weights), folder)


def onnx_gather(weights: Weights, folder: Path) -> None:
    """The chosen expert's matrices, gathered out of all: routing by copying weights to RAM."""
    stacked = {
        f"{layer}.{kind}": np.stack([weights[f"moe.experts.{e}.{layer}.{kind}"] for e in range(EXPERTS)])
        for layer in (0, 2)
        for kind in ("weight", "bias")
    }
    nodes = [*_gate(), ("ArgMax", ["scores"], ["row"], {"axis": 1, "keepdims": 0}),
             ("Squeeze", ["row", "axis"], ["chosen"], {}),
             ("ReduceMax", ["scores"], ["share"], {"axes": [1], "keepdims": 1})]  # fmt: skip
    nodes += [("Gather", [name, "chosen"], [f"{name}.own"], {"axis": 0}) for name in stacked]
    nodes += [*_expert("x", "0.weight.own", "0.bias.own", "2.weight.own", "2.bias.own", "y"),
              ("Mul", ["share", "y"], ["mixed"], {})]  # fmt: skip
    shared = {name: weights[name] for name in weights if ".experts." not in name}
    _compile(nodes, {**shared, **stacked, "axis": np.array([0], np.int64)}, folder)


_Node = tuple[str, list[str], list[str], dict[str, Any]]


def _gate() -> list[_Node]:
    return [("Gemm", ["x", "moe.gate.weight", "moe.gate.bias"], ["logits"], {"transB": 1}),
            ("Softmax", ["logits"], ["scores"], {"axis": 1})]  # fmt: skip


def _expert(x: str, first: str, first_bias: str, second: str, second_bias: str, y: str) -> list[_Node]:
    return [("Gemm", [x, first, first_bias], [f"{y}.hidden"], {"transB": 1}),
            ("Relu", [f"{y}.hidden"], [f"{y}.active"], {}),
            ("Gemm", [f"{y}.active", second, second_bias], [y], {"transB": 1})]  # fmt: skip


def _compile(nodes: list[_Node], constants: dict[str, NDArray[Any]], folder: Path) -> None:
    """Adds the end of the model, and has it compiled: float32, no heap, weights in the C file."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = [*nodes, ("Relu", ["mixed"], ["active"], {}),
             ("Gemm", ["active", "head.weight", "head.bias"], ["change"], {"transB": 1})]  # fmt: skip
    row = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 70])
    change = helper.make_tensor_value_info("change", TensorProto.FLOAT, [1, 1])
    made_nodes = [helper.make_node(op, inputs, outputs, **more) for op, inputs, outputs, more in nodes]
    initializers = [numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(made_nodes, "smart_meter", [row], [change], initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(made)
    onnx.save(made, folder / "model.onnx")
    tool = Path(sys.executable).with_name("emx-onnx-cgen")
    subprocess.run([tool, "compile", "--model-name", "model", "--large-temp-threshold", "0", "--large-weight-threshold",
                    "0", folder / "model.onnx", folder / "model.c"], check=True)  # fmt: skip


PEERS: dict[str, Callable[[Weights, Path], None]] = {
    "emlearn": emlearn,
    "onnx-dense": onnx_dense,
    "onnx-gather": onnx_gather,
}

if __name__ == "__main__":
    PEERS[sys.argv[1]](np.load(sys.argv[2]), Path(sys.argv[3]))
