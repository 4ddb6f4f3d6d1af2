"""The archive of a saved program (.pt2), read without running anything of it.

PyTorch's loader unpickles what the archive's configurations call pickled, loads compiled code, looks operators up by
any dotted name below `torch`, imports what its trees name, and evaluates sizes and guards as Python. So the archive is
read here first. What a program of tensors needs is written into a new archive, and that alone is handed to the loader;
anything else is refused by name.
"""

from __future__ import annotations

import ast
import io
import json
import operator
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from colibri.errors import ExportError

TRUST = "if you made this file yourself, or trust who did as you would trust a program of theirs, pass --trust"

_MARKS = ("archive_format", "archive_version", "byteorder", "version", ".data/version", ".data/serialization_id")
_TENSOR = re.compile(r"data/(weights|constants)/(weight|tensor)_\d+")
_CONFIG = re.compile(r"data/(weights|constants)/model_(weights|constants)_config\.json")
_SAMPLE, _MODEL = "data/sample_inputs/model.pt", "models/model.json"
_WRITTEN = ("byteorder", "version", ".data/version", ".data/serialization_id")  # by PyTorch's writer itself

_ATEN = re.compile(r"torch\.ops\.(aten|prims|higher_order)\.\w+(\.\w+)?|torch\.sym_\w+|math\.\w+")
_FILES = re.compile(r"\.from_file\b")
_OPERATORS = frozenset(
    {"add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs", "getitem", "eq", "ne", "lt", "le",
     "gt", "ge", "and_", "or_", "not_"}
)  # fmt: skip
_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})
_SIZES = frozenset(
    {"Symbol", "Integer", "Add", "Mul", "Pow", "Max", "Min", "Mod", "FloorDiv", "PythonMod", "CleanDiv", "CeilDiv",
     "IntTrueDiv", "FloatTrueDiv", "TruncToInt", "FloorToInt", "CeilToInt", "ToFloat", "Eq", "Ne", "Equality",
     "Unequality", "LessThan", "GreaterThan", "StrictLessThan", "StrictGreaterThan", "And", "Or", "Not"}
)  # fmt: skip
_SYMBOL, _LONGEST, _LARGEST_POWER = re.compile(r"[a-z]{1,6}\d{1,6}"), 10_000, 8


def read(path: str | Path) -> tuple[io.BytesIO, list[str]]:
    """The program in the archive at `path` as an archive PyTorch may load, and its guards, which are left out of it.

    Raises ExportError naming what could run code, or what is no part of a program of tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = _records(archive)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise ExportError(f"{path}: torch.export cannot load it: {error}") from None
    try:
        guards = _checked(records)
    except ExportError as error:
        raise ExportError(f"{path}: {error}; {TRUST}") from None
    return _packed(records), guards


def _records(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """The records by their names below the archive's one folder."""
    names = [info.filename for info in archive.infolist()]
    if len({name.lower() for name in names}) != len(names):
        raise zipfile.BadZipFile("it holds two records of one name")
    root = names[0].partition("/")[0] if names else ""
    if not all(name.startswith(f"{root}/") for name in names):
        raise zipfile.BadZipFile("its records are not in one folder")
    return {name[len(root) + 1 :]: archive.read(name) for name in names}


def _checked(records: dict[str, bytes]) -> list[str]:
    """The program's guards; the program's text in `records` is replaced by what was understood of it."""
    for name in records:
        if not (name in (*_MARKS, _SAMPLE, _MODEL) or _TENSOR.fullmatch(name) or _CONFIG.fullmatch(name)):
            raise ExportError(f"record {name!r} is no part of a program of tensors, and loading it may run code")
    if _MODEL not in records:
        raise ExportError(f"it holds no {_MODEL}: it is no program saved by torch.export.save of PyTorch 2.9 or newer")
    for name in filter(_CONFIG.fullmatch, list(records)):
        records[name] = _config(name, records[name])
    try:
        torch.load(io.BytesIO(records.get(_SAMPLE) or _nothing()), weights_only=True, map_location="cpu")
    except Exception:
        raise ExportError("its example inputs are pickled objects, and loading these runs code") from None
    program = _json(_MODEL, records[_MODEL])
    guards = program.get("guards_code") or []
    if not isinstance(guards, list) or not all(isinstance(guard, str) for guard in guards):
        raise ExportError("its guards are no list of texts")
    program["guards_code"] = []
    for name in program.get("range_constraints") or {}:
        check_size(name)
    for part in _dicts(program):
        _check_part(part)
    records[_MODEL] = json.dumps(program).encode()
    return guards


def _nothing() -> bytes:
    buffer = io.BytesIO()
    torch.save(((), {}), buffer)
    return buffer.getvalue()


def _json(name: str, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ExportError(f"{name} is no table")
    return value


def _config(name: str, text: bytes) -> bytes:
    """The text of a configuration of weights or constants, none of them pickled."""
    config = _json(name, text)
    entries = config.get("config")
    if not isinstance(entries, dict):
        raise ExportError(f"{name} has no table of tensors")
    for tensor, entry in entries.items():
        place = entry.get("path_name") if isinstance(entry, dict) else None
        if place is None or entry.get("use_pickle") is not False:
            raise ExportError(f"{tensor!r} is stored as a pickled object, and loading it runs code")
        if not isinstance(place, str) or not re.fullmatch(r"(weight|tensor)_\d+", place):
            raise ExportError(f"{tensor!r} is no tensor: it is stored as {place!r}, and loading it may run code")
    return json.dumps(config).encode()


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def _check_part(part: dict[str, Any]) -> None:
    for key, value in part.items():
        if key in ("target", "as_operator") and "inputs" in part | {"inputs": key == "as_operator"}:
            _check_operator(value)
        elif key == "expr_str":
            check_size(value)
        elif key in ("in_spec", "out_spec"):
            _check_tree(value)
        elif key in ("as_custom_obj", "custom_obj") or (key == "custom_obj_values" and value):
            raise ExportError("it holds objects that are no tensors, and loading them may run code")
        elif key == "metadata" and isinstance(value, dict):
            part[key] = {name: text for name, text in value.items() if name == "nn_module_stack"}


def _check_operator(name: Any) -> None:
    known = isinstance(name, str) and (name.removeprefix("_operator.") in _OPERATORS or _ATEN.fullmatch(name))
    if not known or _FILES.search(name):
        raise ExportError(f"it calls {name!r}, which is no operation on tensors")


def _check_tree(text: Any) -> None:
    """The structure of arguments or results: tuples, lists and dictionaries with keys that are plain."""
    if text in (None, ""):
        return
    try:
        tree = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise ExportError("the structure of its arguments is no JSON") from None
    for part in _dicts(tree):
        if part.get("type") not in _TREES or "__enum__" in str(part.get("context")):
            raise ExportError(f"its arguments or results are held in a {part.get('type')}: take and return plain "
                              "tuples and dictionaries of tensors")  # fmt: skip


# --- expressions ------------------------------------------------------------------------------------------------------


def check_size(text: Any) -> None:
    """Refuse what is no size made of symbols, numbers and the arithmetic of sizes."""
    try:
        sound = isinstance(text, str) and _sound(_parsed(text))
    except RecursionError:
        sound = False
    if not sound:
        raise ExportError(f"it holds the expression {str(text)[:80]!r}, which is no size: evaluating it would run code")


def _parsed(text: str) -> Any:
    try:
        return ast.parse(text, mode="eval").body if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _sound(node: Any) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    if isinstance(node, ast.Name):
        return _SYMBOL.fullmatch(node.id) is not None
    if isinstance(node, ast.UnaryOp):
        return _sound(node.operand)
    if isinstance(node, ast.BinOp):
        small = isinstance(node.right, ast.Constant) and node.right.value in range(_LARGEST_POWER + 1)
        return _sound(node.left) and _sound(node.right) and (small or not isinstance(node.op, ast.Pow | ast.LShift))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _SIZES:
        return False
    if node.func.id == "Symbol":
        plain = all(isinstance(flag.value, ast.Constant) and flag.arg is not None for flag in node.keywords)
        name = node.args[0] if len(node.args) == 1 else None
        return plain and isinstance(name, ast.Constant) and _SYMBOL.fullmatch(str(name.value)) is not None
    if node.func.id == "Pow" and not (len(node.args) == 2 and _small_power(node.args[1])):
        return False
    return not node.keywords and all(map(_sound, node.args))


def _small_power(node: Any) -> bool:
    number = re.fullmatch(r"Integer\((-?\d)\)|(-?\d)", ast.unparse(node))
    return number is not None and abs(int(number[1] or number[2])) <= _LARGEST_POWER


Shapes = Mapping[str, tuple[int, ...]]

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_CHOICES: dict[str, Callable[..., Any]] = {"min": min, "torch.sym_min": min, "max": max, "torch.sym_max": max}


def holds(guard: str, shapes: Shapes) -> bool:
    """Whether a guard, such as L['x'].size()[0] != 40, is true of inputs of these shapes.

    Raises ExportError for what is no comparison of sizes.
    """
    try:
        return bool(_value(_parsed(guard), shapes))
    except ZeroDivisionError:
        return False
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ExportError(
            f"the program asks of its inputs that {guard[:200]!r}, which is no comparison of sizes"
        ) from None


def _value(node: Any, shapes: Shapes) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_value(node.left, shapes), _value(node.right, shapes))
    if isinstance(node, ast.Compare):
        values = [_value(part, shapes) for part in (node.left, *node.comparators)]
        compared = zip(node.ops, values, values[1:], strict=False)
        return all(_ARITHMETIC[type(op)](a, b) for op, a, b in compared)
    if isinstance(node, ast.BoolOp):
        parts = [bool(_value(part, shapes)) for part in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        inner = _value(node.operand, shapes)
        return -inner if isinstance(node.op, ast.USub) else not inner
    if isinstance(node, ast.Call):
        return _CHOICES[ast.unparse(node.func)](_value(part, shapes) for part in node.args)
    name = re.fullmatch(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", ast.unparse(node))
    if name is None:
        raise TypeError
    return shapes[name[1]][int(name[2])]


# --- writing ----------------------------------------------------------------------------------------------------------


def _packed(records: Mapping[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, data in records.items():
        if name not in _WRITTEN:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    buffer.seek(0)
    return buffer


__all__ = ["TRUST", "holds", "read"]
