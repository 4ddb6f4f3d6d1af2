"""Programs saved by torch.export, as modules that take any batch size.

Unless told otherwise torch.export writes the example's batch size into every view. Here it is made free again; whether
that is right is decided by running both programs, and by the conversion that follows, which refuses what mixes rows.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.errors import ExportError

_RESHAPES = ("view", "reshape", "_unsafe_view", "view_copy", "expand", "expand_copy")
_CREATIONS = ("new_zeros", "new_ones", "new_full", "new_empty")


def load_program(path: str | Path) -> tuple[nn.Module, tuple[Any, ...]]:
    """The saved program as a module hierarchy that takes any batch, and its example inputs.

    Raises ExportError where it cannot be loaded, holds no example, or depends on its batch size.
    """
    try:
        program = torch.export.load(path)
        args, kwargs = program.example_inputs or ((), {})
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(f"{path}: torch.export cannot load it: {reason}") from None
    if kwargs:
        raise ExportError(f"{path}: the program takes keyword arguments; save it with positional tensors only")
    if not args:
        raise ExportError(f"{path}: the program holds no example inputs; save it as torch.export.export returned it")
    inputs = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
    sizes = [node.meta["val"].shape[0] for node in inputs]
    fixed = sizes[0]
    if not all(isinstance(size, int) and size == fixed for size in sizes):
        return torch.export.unflatten(program), tuple(args)
    with torch.no_grad():
        before = pytree.tree_leaves(program.module()(*args))
        _free_batch(program.graph, inputs[0], fixed)
        module = torch.export.unflatten(program)
        module.check_input_constraints = False  # they are the fixed size's
        try:
            after = pytree.tree_leaves(module(*args))
            wider = pytree.tree_leaves(module(*(torch.cat([x, x, x]) for x in args)))
        except Exception:
            after = wider = []
    same = len(before) == len(after) == len(wider) and all(map(_continues, before, after, wider))
    if not same:
        raise ExportError(
            f"{path}: the program was saved for a batch of {fixed} and depends on it; save it with "
            "dynamic_shapes={0: torch.export.Dim.AUTO} for each input"
        )
    return module, tuple(args)


def _continues(before: Any, after: Any, wider: Any) -> bool:
    """Whether a freed program gives the same rows, and the same rows three times over for three times the batch."""
    if not isinstance(before, Tensor):
        return True
    thrice = torch.cat([before] * 3)
    return bool(
        before.shape == after.shape
        and thrice.shape == wider.shape
        and torch.allclose(before, after, rtol=1e-5, atol=1e-6)
        and torch.allclose(thrice, wider, rtol=1e-4, atol=1e-5)
    )


def _free_batch(graph: Any, like: Any, batch: int) -> None:
    """Replace `batch`, and multiples of it, where it stands as the first size of a view or of a new tensor."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = str(getattr(node.target, "_opname", ""))
        if "_assert" in name or "_assert" in str(node.target):
            graph.erase_node(node)  # bounds worked out for the fixed size
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


__all__ = ["load_program"]
