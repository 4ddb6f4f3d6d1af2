"""A bad file cannot hurt: every hostile model of the tables is refused by name, or runs inside its own memory."""

from __future__ import annotations

import numpy as np
import pytest

from colibri.errors import ModelError
from colibri.format import spec
from colibri.runtime import engine
from tests.hostile.cases import CASES, operations
from tests.hostile.cases.table import NO_CERTIFICATE
from tests.hostile.driver import Case, E, Fuzz, Result
from tests.hostile.editor import BASES, BATCH, Editor, sealed

REFUSED = [name for name, case in CASES.items() if not {"OK", "SELFTEST"} & set(case.errors)]


@pytest.mark.parametrize("name", CASES)
def test_hostile_model_is_refused_or_harmless(fuzz: Fuzz, name: str) -> None:
    case = Case.of(name, CASES[name].edited())
    assert case.patches, "nothing is changed"
    (result,) = fuzz([case])
    if CASES[name].errors == ("SELFTEST",):
        assert result == Result(0, 0, 0, 0, E["SELFTEST"])
    else:
        assert spec.ERRORS[result.check][0] in CASES[name].errors


@pytest.mark.parametrize("name", REFUSED)
def test_load_refuses_what_the_engine_refuses(name: str) -> None:
    with pytest.raises(ModelError, match="model") as caught:
        engine.load(sealed(CASES[name].edited().image))
    assert caught.value.code not in (None, E["OK"])


def test_every_operation_has_its_cases() -> None:
    assert set(operations.BASES) == set(spec.OPCODES)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("value", [1, spec.UNARY.index("silu"), len(spec.UNARY), 0xFFFF])
def test_only_binary_has_a_function_around_it_and_a_known_one(fuzz: Fuzz, value: int, place: str) -> None:
    cases, good = [], []
    for base in BASES:
        for n, code in enumerate(Editor(base).ops["code"]):
            edit = Editor(base)
            edit[f"ops[{n}].{place}"] = value
            cases.append(Case.of(f"{base} {n}", edit))
            good.append(spec.OPCODES[code] == "binary" and value < len(spec.UNARY))
    assert [result.check != E["PROGRAM"] for result in fuzz(cases)] == good


def macs(ops: np.ndarray) -> np.uint64:
    """Multiply-accumulates of operations on one sample."""
    products = ops[ops["code"] == spec.OPCODES.index("linear")]
    return np.sum(products["rows"].astype(np.uint64) * products["dims"][:, 0] * products["dims"][:, 1], dtype=np.uint64)


def many_experts(count: int) -> Case:
    """A sound layer of `count` experts, each with the same `count` operations: 256 bytes apiece in the file."""
    edit = Editor("top1")
    h, main, moe = edit.header[0], edit.main_ops, edit.find("moe")
    logits = spec.align(8 * count + 100_000, 32)  # one of the three, again and again
    again = edit.ops[moe].copy()
    again["code"], again["rows"], again["w0"], again["w1"] = spec.OPCODES.index("unary"), 1, spec.NONE, spec.NONE
    again["a"], again["out"] = edit.ops["b"][moe], edit.ops["b"][moe]
    again["out"]["offset"], again["out"]["sample_stride"] = logits, count
    again["a"]["row_stride"] = again["out"]["row_stride"] = 0
    again["b"] = again["work"] = np.zeros((), spec.OPERAND.dtype)
    again["dims"], again["strides_a"], again["strides_out"] = (1, 1, 1, count), 0, (count, count, count, 1)
    body = np.concatenate([np.repeat(edit.ops[main : main + 1], count - 1), edit.ops[main + 1 : main + 2]])
    words = 3 * BATCH * int(edit.ops["rows"][moe]) * int(edit.records["layers"]["k"][0]) + 2 * count + 1
    scratch = int(edit.ops["work"]["offset"][moe]) + 4 * spec.align(words, 8)  # behind the workspace, which grows
    body["out"]["offset"][:-1] = body["a"]["offset"][-1] = scratch
    ops = np.concatenate([edit.ops[:moe], [again], edit.ops[moe:main], body])
    experts = np.repeat(edit.records["experts"][:1], count)
    layers = edit.records["layers"].copy()
    experts["first_op"], experts["ops"], layers["experts"] = main + 1, count, count
    old_macs, experts["macs"] = experts["macs"][0], macs(ops[main + 1 :])
    h["worst_macs"] += ops["rows"][moe + 1] * layers["k"][0] * (experts["macs"][0] - old_macs)
    touched = min(count, int(ops["rows"][moe + 1]) * int(layers["k"][0]))
    h["worst_bytes"] = int(h["shared_bytes"]) + touched * int(experts["bytes"][0])
    ops["b"]["offset"][moe + 1], ops["b"]["sample_stride"][moe + 1], ops["b"]["row_stride"][moe + 1] = logits, count, 0
    h["main_ops"] += 1
    h["tail_op"] += 1
    old = int(h["meta_bytes"])
    room = spec.align(ops.nbytes + experts.nbytes + layers.nbytes, 64)
    experts["offset"] += np.uint64(room)
    edit.records["tensors"]["offset"][edit.records["tensors"]["scope"] == 0] += np.uint64(room)
    h["ops_offset"], h["ops"] = old, len(ops)
    h["experts_offset"], h["experts"] = old + ops.nbytes, count
    h["layers_offset"] = old + ops.nbytes + experts.nbytes
    h["meta_bytes"] += np.uint64(room)
    h["total_bytes"] += np.uint64(room)
    h["context_bytes"] = h["cleared_bytes"] = logits + 4 * BATCH * count
    edit.update(NO_CERTIFICATE)
    added = (ops.tobytes() + experts.tobytes() + layers.tobytes()).ljust(room, b"\0")
    data = bytes(edit.image[:old]) + added + bytes(edit.image[old:])
    return Case(f"{count} experts of {count} operations", "top1", ((0, data),), len(data))


def test_a_layer_of_many_experts_is_sound(fuzz: Fuzz) -> None:
    assert fuzz([many_experts(50)])[0].check == E["OK"]


@pytest.mark.slow
def test_checking_takes_time_in_proportion_to_the_file(fuzz: Fuzz) -> None:
    # 10 MB; the driver's alarm ends a check that takes experts times operations.
    assert fuzz([many_experts(40_000)])[0].check in range(len(spec.ERRORS))
