"""The layer as ONNX graphs: the MoE and QMoE contrib operators, the loop over experts, and the dense form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from benchmarks.layers.sizes import Size, weights

_BLOCK = 32  # weights that share a scale in MatMulNBits and 4-bit QMoE
_ALIGN = 4096
_CONTRIB = "com.microsoft"
Arrays = dict[str, np.ndarray[Any, Any]]


def write(path: Path, size: Size, kind: str) -> None:
    """Write the model of one kind: moe, qmoe8, qmoe4, loop, dense, n8 or n4; or empty, which gives back its input."""
    nodes: list[NodeProto]
    constants: Arrays
    if kind == "empty":
        nodes, constants = [_node("Identity", ["x"], "y")], {}
    elif kind == "moe":
        nodes, constants = _contrib(size, 0)
    elif kind.startswith("qmoe"):
        nodes, constants = _contrib(size, int(kind[4:]))
    elif kind == "dense":
        nodes, constants = _dense(size)
    else:
        nodes, constants = _loop(size, int(kind[1:]) if kind.startswith("n") else 0)
    _save(path, size, nodes, constants)


def quantize_loop(source: Path, path: Path) -> None:
    """`source`, a loop, with onnxruntime's dynamic int8 quantisation of its experts' matrices."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, path, weight_type=QuantType.QInt8, per_channel=False, op_types_to_quantize=["MatMul"],
                     nodes_to_exclude=["router"], use_external_data_format=True)  # fmt: skip


def _save(path: Path, size: Size, nodes: list[NodeProto], constants: Arrays) -> None:
    """Weights go beside the model by hand: protobuf refuses tensors over 2 GB."""
    tensors = []
    with path.with_suffix(".data").open("wb") as file:
        for name, array in constants.items():
            if array.nbytes <= 1024:
                tensors.append(onnx.numpy_helper.from_array(array, name))
                continue
            tensor = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL,
                                 data_type=helper.np_dtype_to_tensor_dtype(array.dtype))  # fmt: skip
            place = {"location": path.with_suffix(".data").name, "offset": file.tell(), "length": array.nbytes}
            for key, value in place.items():
                entry = tensor.external_data.add()
                entry.key, entry.value = key, str(value)
            array.tofile(file)
            file.write(bytes(-file.tell() % _ALIGN))
            tensors.append(tensor)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size.d]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, size.name, ports[:1], ports[1:], tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(_CONTRIB, 1)]
    onnx.save_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def _node(op: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, [output], **attributes)


def _contrib(size: Size, bits: int) -> tuple[list[NodeProto], Arrays]:
    """MoE (bits 0) or QMoE. SwiGLU on CPU exists with gate and up rows interleaved only."""
    w = weights(size)
    both = np.empty((size.experts, 2 * size.ff, size.d), np.float32)
    both[:, 0::2], both[:, 1::2] = w["gate"], w["up"]
    attributes: dict[str, Any] = {
        "domain": _CONTRIB, "k": size.k, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0,
        "activation_beta": 0.0, "normalize_routing_weights": 1,
    }  # fmt: skip
    constants: Arrays = {"router": np.ascontiguousarray(w["router"].T)}
    first = _node("MatMul", ["x", "router"], "logits", name="router")
    if not bits:
        constants |= {"w1": both, "w2": np.ascontiguousarray(w["down"])}
        return [first, _node("MoE", ["x", "logits", "w1", "", "w2"], "y", **attributes)], constants
    block = _BLOCK if bits == 4 else 0
    for number, array in ((1, both), (2, w["down"])):
        packed = [_quantized(expert, bits, block) for expert in array]
        constants[f"w{number}"] = np.stack([values for values, _ in packed])
        constants[f"s{number}"] = np.stack([scales for _, scales in packed])
    if block:
        attributes["block_size"] = block
    inputs = ["x", "logits", "w1", "s1", "", "w2", "s2"]
    return [first, _node("QMoE", inputs, "y", **attributes, expert_weight_bits=bits)], constants


def _quantized(
    weight: np.ndarray[Any, Any], bits: int, block: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Unsigned values around 2^(bits-1), two a byte for 4 bits, and scales: one a row, or one a block of a row."""
    rows, columns = weight.shape
    blocks = np.asarray(weight, np.float32).reshape(rows, -1, block or columns)
    largest = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(blocks).max(-1), 1e-8) / np.float32(largest)
    values = np.clip(np.rint(blocks / scale[..., None]), -largest - 1, largest) + 2 ** (bits - 1)
    packed = values.astype(np.uint8).reshape(rows, columns)
    if bits == 4:
        packed = packed[:, 0::2] | (packed[:, 1::2] << 4)
    return packed, (scale if block else scale[:, 0]).astype(np.float32)


def _route(size: Size) -> tuple[list[NodeProto], Arrays]:
    """share and chosen, both (batch, k)."""
    nodes = [
        _node("MatMul", ["x", "router"], "logits", name="router"),
        _node("Softmax", ["logits"], "scores", axis=-1),
        helper.make_node("TopK", ["scores", "k"], ["best", "chosen"], axis=-1),
        _node("ReduceSum", ["best", "axis1"], "total", keepdims=1),
        _node("Div", ["best", "total"], "share"),
    ]
    constants: Arrays = {
        "router": np.ascontiguousarray(weights(size)["router"].T),
        "k": np.array([size.k], np.int64), "axis0": np.array([0], np.int64), "axis1": np.array([1], np.int64),
        "axis2": np.array([2], np.int64), "zero": np.array(0, np.float32),
    }  # fmt: skip
    return nodes, constants


def _loop(size: Size, bits: int) -> tuple[list[NodeProto], Arrays]:
    """For each expert: find its rows, gather them, three products, scatter the results; bits 0 keeps float32."""
    nodes, constants = _route(size)
    nodes.append(_node("Mul", ["x", "zero"], "y0"))
    for e in range(size.experts):
        last = "y" if e == size.experts - 1 else f"y{e + 1}"
        constants[f"e{e}"] = np.array(e, np.int64)
        nodes += [
            _node("Equal", ["chosen", f"e{e}"], f"is{e}"),
            _node("Where", [f"is{e}", "share", "zero"], f"part{e}"),
            _node("ReduceSum", [f"part{e}", "axis1"], f"shares{e}", keepdims=0),
            _node("NonZero", [f"shares{e}"], f"found{e}"),
            _node("Transpose", [f"found{e}"], f"places{e}", perm=[1, 0]),
            _node("Squeeze", [f"found{e}", "axis0"], f"rows{e}"),
            _node("Gather", ["x", f"rows{e}"], f"x{e}", axis=0),
            _node("Gather", [f"shares{e}", f"rows{e}"], f"taken{e}", axis=0),
            _node("Unsqueeze", [f"taken{e}", "axis1"], f"column{e}"),
            *_product(size, e, "gate", f"x{e}", f"g{e}", bits, constants),
            _node("Sigmoid", [f"g{e}"], f"sigmoid{e}"),
            _node("Mul", [f"g{e}", f"sigmoid{e}"], f"silu{e}"),
            *_product(size, e, "up", f"x{e}", f"u{e}", bits, constants),
            _node("Mul", [f"silu{e}", f"u{e}"], f"hidden{e}"),
            *_product(size, e, "down", f"hidden{e}", f"d{e}", bits, constants),
            _node("Mul", [f"d{e}", f"column{e}"], f"out{e}"),
            _node("ScatterND", [f"y{e}", f"places{e}", f"out{e}"], last, reduction="add"),
        ]
    return nodes, constants


def _product(size: Size, e: int, name: str, x: str, y: str, bits: int, constants: Arrays) -> Iterator[NodeProto]:
    weight = weights(size)[name][e]
    if not bits:
        constants[f"{name}{e}"] = np.ascontiguousarray(weight.T)
        yield _node("MatMul", [x, f"{name}{e}"], y)
        return
    rows, columns = weight.shape
    values, scales = _quantized(weight, bits, _BLOCK)
    constants[f"{name}{e}"] = values.reshape(rows, columns // _BLOCK, -1)
    constants[f"{name}{e}.scale"] = scales
    yield _node("MatMulNBits", [x, f"{name}{e}", f"{name}{e}.scale"], y, domain=_CONTRIB, K=columns, N=rows, bits=bits,
                block_size=_BLOCK, accuracy_level=4)  # fmt: skip


def _dense(size: Size) -> tuple[list[NodeProto], Arrays]:
    """Every expert on every row as batched products, masked with the shares."""
    nodes, constants = _route(size)
    w = weights(size)
    constants["numbers"] = np.arange(size.experts, dtype=np.int64).reshape(1, 1, -1)
    for name in ("gate", "up", "down"):
        constants[name] = np.ascontiguousarray(w[name].transpose(0, 2, 1))
    nodes += [
        _node("Unsqueeze", ["chosen", "axis2"], "chosen3"),
        _node("Equal", ["chosen3", "numbers"], "is"),
        _node("Unsqueeze", ["share", "axis2"], "share3"),
        _node("Where", ["is", "share3", "zero"], "parts"),
        _node("ReduceSum", ["parts", "axis1"], "mask", keepdims=0),
        _node("Transpose", ["mask"], "mask_t", perm=[1, 0]),
        _node("Unsqueeze", ["mask_t", "axis2"], "mask3"),
        _node("Unsqueeze", ["x", "axis0"], "x3"),
        _node("MatMul", ["x3", "gate"], "g"),
        _node("Sigmoid", ["g"], "sigmoid"),
        _node("Mul", ["g", "sigmoid"], "silu"),
        _node("MatMul", ["x3", "up"], "u"),
        _node("Mul", ["silu", "u"], "hidden"),
        _node("MatMul", ["hidden", "down"], "each"),
        _node("Mul", ["each", "mask3"], "weighted"),
        _node("ReduceSum", ["weighted", "axis0"], "y", keepdims=0),
    ]
    return nodes, constants
