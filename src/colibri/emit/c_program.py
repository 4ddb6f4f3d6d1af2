"""Writer of a model's program as C: the operations as constants, and straight-line calls of the engine's kernels.

The engine's `generated.h` makes one unit of it; the compiler folds the constants into the calls, so that the records
themselves take no place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from colibri.emit.c_text import comment
from colibri.format import layouts, spec
from colibri.format.package import Package
from colibri.lowering.program import Op, Program

_ENUMS = {"code": "op", "space": "space", "layout": "layout", "scope": "scope", "score": "score",
          "normalize": "normalize", "group_rule": "group_rule", "apply": "apply", "before": "unary",
          "after": "unary"}  # fmt: skip
_SCORE_FUNCTIONS = [("exp",), ("sigmoid",), (), ("softplus", "sqrt"), ()]  # by `score` value: what routing.c calls
_NO_TENSOR = ("w0", "w1", "w2")
# Code for each operation alone takes up to a third fewer instructions than a walk that all share, and less flash where
# operations are few or mostly elementwise. Bytes on a Cortex-M7: a call, beyond which an operation takes what the table
# says; a product; the number of products above which they share their code; bytes in all up to which it is worth while.
_CALL, _PRODUCT, _PRODUCTS, _FOLDED = 40, 400, 4, 8000


def text(program: Program, package: Package, shared: int, experts: Sequence[str]) -> str:
    """The C of a planned program; `package` holds its records, `shared` says where in the model's array the weights
    outside the experts are, `experts` in C where each expert's are.
    """
    ops = [*program.ops, *program.expert_ops]
    folding = _folding(program)
    lines = [
        *(f"#define CLB_USED_{name} {sum(1 << n for n in used):#x}ull" for name, used in _used(package)),
        f"#define CLB_USED_OUTLIERS {int((package.ops['w2'] != spec.NONE).any())}",
        f"#define CLB_USED_TEXT {int(program.context_tokens > 0)}",
        f"#define CLB_USED_SOURCE {int(program.encoder_ops > 0)}",
        f"#define CLB_USED_BATCH {int(program.max_batch > 1)}",
        f"#define CLB_USED_COMPUTED {int(any(op.known.walk == 'product' and op['matrix'] is None for op in ops))}",
        *folding,
        f"#define CLB_TILE {_tile(program)}u", '#include "generated.h"', "",
    ]  # fmt: skip
    record = _table if folding else functools.partial(_records, package)
    lines += record("clb_op", "ops", package.ops, [op.comment for op in ops])
    lines += record("clb_tensor", "tensors", _moved(package, shared), [t.name for t in program.tensors])
    if program.layers:
        lines += record("clb_layer", "layers", package.layers, [str(layer.router) for layer in program.layers])
        lines += ["static const uint8_t *const expert_at[] = {", *(f"    {place}," for place in experts), "};", ""]
    for n, layer in enumerate(program.layers):
        lines += [f"/* {comment(str(layer.router))} */", f"ROUTE(route_{n}, &layers[{n}])"]
    if program.layers:
        names = ", ".join(f"route_{n}" for n in range(len(program.layers)))
        lines += ["", f"static clb_router *const routers[] = {{{names}}};", ""]
    for n in range(len(program.layers)):
        lines += [*_expert_function(program, package, n, ops), ""]
    samples = "1u" if program.max_batch == 1 else "samples"
    one = "0u" if program.max_batch == 1 else "frame->tail"  # of one sample the output is wanted
    tail = range(program.tail_op, len(program.ops))
    reads = ["    if (frame->ctx->source == 0) {", *_calls(ops, range(program.encoder_ops), samples, "        "),
             "        return;", "    }"] if program.encoder_ops else []  # fmt: skip
    lines += ["CLB_WALK void clb_run_program(uint32_t samples, clb_frame *frame)", "{",
              f"    AT_MOST(samples, {program.max_batch}u);", "    frame->tensors = tensors;", *reads,
              *_calls(ops, range(program.encoder_ops, program.tail_op), samples, "    "),
              *_calls(ops, tail, samples, "    ", one), "}", ""]  # fmt: skip
    return "\n".join(lines)


def folds(program: Program) -> bool:
    """Whether the records are constants of the code, which it does not read from the model's bytes."""
    return bool(_folding(program))


def _folding(program: Program) -> list[str]:
    """How the walk over the program becomes straight code, where it does."""
    ops = [*program.ops, *program.expert_ops]
    products = sum(op.known.walk == "product" for op in ops)
    size = sum(_CALL + op.known.flash for op in ops) + _PRODUCT * min(products, _PRODUCTS)
    if _tile(program) > 1 or size > _FOLDED:
        return []
    return ["#define CLB_FOLDED", *(["#define CLB_SHARED_PRODUCTS CLB_SCALAR"] if products > _PRODUCTS else [])]


def _used(package: Package) -> Iterable[tuple[str, set[int]]]:
    """What the operations need: numbers of elementwise functions, and layouts of matrices for float and int8 rows."""
    numbers = {name: n for n, name in enumerate(spec.ENUMS["unary"])}
    unary = {numbers[f] for layer in package.layers for f in _SCORE_FUNCTIONS[layer["score"]]}
    if any(layer["normalize"] == spec.ENUMS["normalize"].index("softmax") for layer in package.layers):
        unary.add(numbers["exp"])
    found: dict[str, set[int]] = {"BINARY": set(), "PRODUCTS": set(), "PRODUCTS_Q": set()}
    for record in package.ops:
        op, known = spec.named(record), spec.OPERATIONS[record["code"]]
        if known.walk == "product":
            computed = op["matrix"] == spec.NONE
            layout = spec.LAYOUTS.index("rows8_f32") if computed else package.tensors[op["matrix"]]["layout"]
            found["PRODUCTS_Q" if known.name == "linear_q" else "PRODUCTS"].add(int(layout))
        if "reads_kept" in known.traits:
            found["PRODUCTS"].add(spec.LAYOUTS.index(layouts.CACHE_LAYOUTS[spec.ENUMS["cache"][op["func"]]]))
        if known.functions == "binary":
            found["BINARY"].add(int(op["func"]))
        if "ends_in_function" in known.traits:
            unary.add(int(op["func"]))
        unary |= {int(op["before"]), int(op["after"]), *(numbers[name] for name in known.calls)}
    return [("UNARY", unary - {0}), *found.items()]


def _tile(program: Program) -> int:
    """Rows a kernel can be handed at once: a power of two up to the engine's own 8."""
    rows = [op.rows * program.max_batch for op in program.ops if op.code != "delay"]  # which takes them one by one
    rows += [program.expert_ops[e.first_op + n].rows * program.layers[e.layer].tile
             for e in program.experts for n in range(e.ops)]  # fmt: skip
    return int(min(8, 1 << (max(rows, default=1) - 1).bit_length()))


def _expert_function(program: Program, package: Package, layer: int, ops: Sequence[Op]) -> list[str]:
    """The function that runs an expert of a layer; experts of one shape share their operations."""
    tile = program.layers[layer].tile
    count = "1u" if tile == 1 else "count"
    head = [f"CLB_WALK void run_expert_{layer}(uint32_t expert, uint32_t count, clb_frame *frame)", "{",
            f"    AT_MOST(count, {tile}u);", "    frame->weights = expert_at[expert];"]  # fmt: skip
    shapes: dict[tuple[int, int], list[int]] = {}
    for number, record in enumerate(package.experts):
        if record["layer"] == layer:
            at = (int(record["first_op"]), int(record["ops"])) if record["ops"] else (0, 0)
            shapes.setdefault(at, []).append(number)
    if len(shapes) == 1 and (0, 0) not in shapes:
        first, size = next(iter(shapes))
        return [*head, *_calls(ops, range(first, first + size), count, "    "), "}"]
    body = []
    for (first, size), numbers in shapes.items():
        calls = _calls(ops, range(first, first + size), count, "        ")
        absent = [f"        clb_no_expert(frame->routed, {count});"]
        body += [f"    {' '.join(f'case {n}:' for n in numbers)}", *(calls if size else absent), "        break;"]
    return [*head, "    switch (expert) {", *body, "    default: break;", "    }", "}"]


def _calls(ops: Sequence[Op], numbers: Iterable[int], samples: str, indent: str, first: str = "0u") -> list[str]:
    calls, looped, step = [], 0, "frame->step"
    for n in numbers:
        op = ops[n]
        if op.code == "loop":
            steps, looped, backward = op["steps"], op["body"], op["backward"]
            forward = f"for ({step} = 0; {step} < {steps}u; ++{step}) {{"
            calls.append(indent + (f"for ({step} = {steps}u; {step}-- > 0;) {{" if backward else forward))
            continue
        inner, known = indent + "    " * (looped > 0), op.known
        if op.code == "moe":
            m = op["layer"]
            call = f"clb_run_moe(&layers[{m}], &ops[{n}], routers[{m}], run_expert_{m}, {samples}, frame);"
        elif known.walk == "batch":
            call = f"clb_{known.kernel}(&ops[{n}], {samples}, frame);"
        elif known.walk == "product":
            call = f"clb_{known.kernel}(&ops[{n}], {first}, {samples}, frame);"
        else:
            call = f"clb_run_rows(clb_{known.kernel}, &ops[{n}], {first}, {samples}, frame);"
        calls.append(inner + call)
        looped -= looped > 0
        if inner != indent and looped == 0:
            calls += [f"{indent}}}", f"{indent}{step} = 0;"]
    return calls


def _table(kind: str, name: str, records: Any, comments: Sequence[str]) -> list[str]:
    """An array of records, each with a comment."""
    lines = [f"static const {kind} {name}[] = {{"]
    for n, (record, about) in enumerate(zip(records, comments, strict=True)):
        lines += [f"    /* {n}: {comment(about)} */", f"    {_initializer(record)},"]
    return [*lines, "};", ""]


def _moved(package: Package, shared: int) -> Any:
    """The tensors, those outside the experts where the model's array has them."""
    tensors = package.tensors.copy()
    own = tensors["scope"] == spec.SCOPES.index("shared")
    if own.any():  # otherwise there is no such place
        tensors["offset"][own] -= np.uint64(int(package.header["meta_bytes"]) - shared)
    return tensors


def _records(package: Package, kind: str, name: str, records: Any, comments: Sequence[str]) -> list[str]:
    """The same records where the model's bytes have them."""
    at = int(package.header[f"{name}_offset"])
    lines = [f"/* {n}: {comment(about)} */" for n, about in enumerate(comments)]
    place = f"(const {kind} *)(const void *)(colibri_model + {at})"
    return [*lines, f"static const {kind} *const {name} = {place};", ""]


def _initializer(record: Any) -> str:
    """A record as a C initialiser: the fields that are not zero, by name."""
    parts = [f".{field} = {_value(field, record[field])}" for field in record.dtype.names if _bytes_of(record[field])]
    return "{" + ", ".join(parts or ["0"]) + "}"


def _bytes_of(value: Any) -> bool:
    return any(np.asarray(value).tobytes())


def _value(field: str, value: Any) -> str:
    if value.dtype.names:
        return _initializer(value)
    if value.ndim:
        return "{" + ", ".join(_value(field, v) for v in value) + "}"
    if field in _ENUMS:
        enum = _ENUMS[field]
        return f"CLB_{enum.upper()}_{spec.ENUMS[enum][int(value)].upper()}"
    if field in _NO_TENSOR and value == spec.NONE:
        return "CLB_NONE"
    if value.dtype.kind == "f":
        return f"{float(value).hex()}f" if np.isfinite(value) else f"{'-' * bool(value < 0)}HUGE_VALF"
    return f"{int(value)}u"
