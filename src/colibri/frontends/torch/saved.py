"""Programs saved by torch.export, as modules that take any batch size.

Unless told otherwise torch.export writes the example's batch size into every view. Here it is made free again; whether
that is right is decided by running both programs, and by the conversion that follows, which refuses what mixes rows.
"""

from __future__ import annotations

import io
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.common.compare import compare
from colibri.errors import ExportError
from colibri.frontends.torch import archive

_RESHAPES = ("view", "reshape", "_unsafe_view", "view_copy", "expand", "expand_copy")
_CREATIONS = ("new_zeros", "new_ones", "new_full", "new_empty")


def load_program(path: str | Path, trust: bool = False) -> tuple[nn.Module, tuple[Any, ...]]:
    """The saved program as a module hierarchy that takes any batch, and its example inputs.

    The archive is inspected first, and what could run code is refused; with `trust` PyTorch's loader gets it as it is.
    Raises ExportError where it cannot be loaded, holds no example, or depends on its batch size.
    """
    source, guards = (path, None) if trust else archive.read(path)
    try:
        program = torch.export.load(source)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(f"{path}: torch.export cannot load it: {reason}") from None
    try:
        return _freed(program, program._guards_code if guards is None else guards)
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from None


def copy_program(program: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """The same for a program that is in memory, which stays as it is."""
    copy = io.BytesIO()
    torch.export.save(program, copy)
    copy.seek(0)
    return _freed(torch.export.load(copy), getattr(program, "_guards_code", []))


def tamed(x: Tensor) -> Tensor:
    """The input with a mean number where it holds none: a missing reading must not hide what a module does."""
    finite = torch.isfinite(x)
    return x if bool(finite.all()) else torch.where(finite, x, x[finite].mean() if finite.any() else 0.0)


def _freed(program: Any, guards: Sequence[str]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The program without the batch size it was saved for, and its example inputs."""
    args, kwargs = program.example_inputs or ((), {})
    if kwargs:
        raise ExportError("the program takes keyword arguments; save it with positional tensors only")
    if not args:
        raise ExportError("the program holds no example inputs; save it as torch.export.export returned it")
    inputs = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
    shapes = [tuple(node.meta["val"].shape) for node in inputs]
    if not all(shapes):
        raise ExportError("an input has no axes; the first must be the batch")
    fixed = _fixed_size([shape[0] for shape in shapes])
    if fixed is None:
        _require_any_batch(guards, {n.name: tuple(x.shape) for n, x in zip(inputs, args, strict=True)})
    program._guards_code = []  # hold for any batch, or are those of the fixed size
    rows = [tamed(x) for x in args]
    with torch.no_grad():
        before = pytree.tree_leaves(program.module()(*(x.clone() for x in rows)))
        _free_batch(program.graph, inputs[0], fixed)
        module = torch.export.unflatten(program)
        module.check_input_constraints = False  # they are those of the sizes it was saved for
        try:
            after = pytree.tree_leaves(module(*(x.clone() for x in rows)))
            wider = pytree.tree_leaves(module(*(torch.cat([x, x, x]) for x in rows)))
        except Exception:
            after = wider = []
    same = len(before) == len(after) == len(wider) and all(map(_continues, before, after, wider))
    if not same:
        raise ExportError(
            f"the program was saved for a batch of {shapes[0][0] if fixed is None else fixed} and depends on it; save "
            "it with dynamic_shapes={0: torch.export.Dim.AUTO} for each input"
        )
    return module, tuple(args)


def _fixed_size(sizes: Sequence[Any]) -> int | None:
    """The batch size that is written into the program; None where it is a free symbol."""
    fixed = {size for size in sizes if isinstance(size, int)}
    free = [size.node.expr for size in sizes if not isinstance(size, int)]
    if len(fixed) > 1 or (fixed and free) or not all(size.is_Symbol for size in free):
        raise ExportError(
            f"the program only works for some batch sizes ({', '.join(map(str, sizes))}); save it with "
            "dynamic_shapes={0: torch.export.Dim.AUTO} for each input"
        )
    return next(iter(fixed), None)


def _require_any_batch(guards: Sequence[str], example: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse guards that are false of some batch size of 2 or more."""
    for guard in guards:
        numbers = {int(n) + d for n in re.findall(r"\b\d{1,9}\b", guard) for d in (-1, 0, 1)}
        for size in sorted({*range(2, 65), *numbers}):
            if size >= 2 and not archive.holds(guard, {name: (size, *shape[1:]) for name, shape in example.items()}):
                raise ExportError(
                    f"the program only works for some batch sizes, for it asks that {guard!r}; Python code that "
                    "branches on x.shape[0] must be written as tensor operations over all rows"
                )


def _continues(before: Any, after: Any, wider: Any) -> bool:
    """Whether a freed program gives the same rows, and the same rows three times over for three times the batch."""
    if not isinstance(before, Tensor):
        return True
    if before.dim() == 0:
        return False
    thrice = torch.cat([before] * 3)
    return all(compare(x.numpy(), y.numpy()).within(1e-5) for x, y in ((before, after), (thrice, wider)))


def _free_batch(graph: Any, like: Any, batch: int | None) -> None:
    """Take out what asserts sizes, and replace `batch`, and multiples of it, where it stands as the first size of a
    view or of a new tensor."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = str(getattr(node.target, "_opname", ""))
        if "_assert" in name or "_assert" in str(node.target):
            graph.erase_node(node)  # bounds worked out for the sizes it was saved for
            continue
        if batch is None:
            continue
        sizes = node.args[1] if len(node.args) > 1 else None
        if not isinstance(sizes, list | tuple) or not sizes or -1 in sizes[1:]:
            continue
        first = sizes[0]
        if not isinstance(first, int) or first < 1 or first % batch:
            continue
        if name in _RESHAPES:
            free: Any = -1
        elif name in _CREATIONS:
            with graph.inserting_before(node):
                free = graph.call_function(torch.ops.aten.sym_size.int, (like, 0))
                free = free if first == batch else graph.call_function(operator.mul, (free, first // batch))
        else:
            continue
        node.args = (node.args[0], [free, *sizes[1:]], *node.args[2:])
    graph.lint()


__all__ = ["copy_program", "load_program", "tamed"]
