"""Checks of a module before anything is traced, and of degenerate trained modules.

Weights that are NaN, infinite or all zero, and routers whose experts tie, make recognition fail for reasons that are
not the true one, or make PyTorch's own answer a matter of chance.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colibri.errors import ExportError
from colibri.frontends.torch.saved import copy_program
from colibri.ir.graph import Array, Graph
from colibri.reference import ops
from colibri.reference.interpreter import Trace

_NAMED = 4  # at most this many tensors or experts are listed


# --- what can be a module ---------------------------------------------------------------------------------------------


def checked_module(module: Any) -> nn.Module:
    """The torch.nn.Module to export; raises ExportError that says what was given instead, or what is wrong with it."""
    if isinstance(module, torch.export.ExportedProgram):
        return copy_program(module)[0]
    if isinstance(module, torch.jit.ScriptModule):
        raise ExportError(
            "the module is TorchScript, whose forward cannot be traced: pass the torch.nn.Module it was made from, or "
            "the program that torch.export.export makes of that"
        )
    if not isinstance(module, nn.Module):
        raise ExportError(f"{_given(module)}; what is exported is a torch.nn.Module or a torch.export.ExportedProgram")
    plain: nn.Module = getattr(module, "_orig_mod", module)  # what torch.compile wraps
    for kind, name, tensor in _tensors(plain):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) or tensor.is_meta:
            raise ExportError(f"{kind} {name!r} has no values yet: run or load the module first")
        if tensor.device.type != "cpu":
            raise ExportError(f"{kind} {name!r} is on {tensor.device}: move the module with .cpu() first")
        if kind == "parameter" and bool(torch.isnan(tensor).any()):
            raise ExportError(f"parameter {name!r} holds NaN: train or load the module again")
    return plain


def _given(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a state_dict holds weights and no program: build the module, call load_state_dict on it, and pass that"
    if isinstance(value, type) and issubclass(value, nn.Module):
        return f"{value.__name__} is a class: pass an instance of it"
    if inspect.isroutine(value):
        return f"{value.__name__} is a function: wrap it in a torch.nn.Module whose forward calls it"
    return f"a {type(value).__name__} is no module"


def _tensors(module: nn.Module) -> list[tuple[str, str, Tensor]]:
    parameters = [("parameter", name, tensor) for name, tensor in module.named_parameters()]
    return parameters + [("buffer", name, tensor) for name, tensor in module.named_buffers()]


# --- what makes a module degenerate -----------------------------------------------------------------------------------


def degenerate(module: nn.Module, routed: bool) -> str | None:
    """Why no claim about the module can be checked, naming its tensors; None where they are ordinary.

    `routed`: something in it looked like a Mixture of Experts, which weights of zero hide.
    """
    floats = [(kind, name, t.detach()) for kind, name, t in _tensors(module) if t.is_floating_point()]
    infinite = [name for kind, name, t in floats if kind == "parameter" and not bool(torch.isfinite(t).all())]
    if infinite:
        return f"infinite values in {_listed(infinite)}: train or load the module again"
    matrices = [(name, t) for kind, name, t in floats if kind == "parameter" and t.dim() > 1 and len(t) > 1]
    zero = [name for name, t in matrices if not bool(t.any())]
    if routed and zero:
        return (
            f"nothing but zeros in {_listed(zero)}: a router of zeros makes every choice of experts a tie, and experts "
            "of zeros cannot be told apart; train or load the weights first"
        )
    same = [name for name, t in matrices if bool((t == t[:1]).all())]
    if routed and same:
        return (
            f"all rows of {_listed(same)} are equal: a router made of them ties in every choice, which PyTorch "
            "resolves in no stated order; train or load the weights first"
        )
    return None


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more


class Ties:
    """Choices between experts of exactly equal scores, by layer, over all rows that are compared."""

    def __init__(self, graph: Graph, paths: Sequence[str]) -> None:
        self._routers = [node.attrs["router"] for node in graph.moe_nodes()]
        self._paths = list(paths) if len(paths) == len(self._routers) else ["" for _ in self._routers]
        self._met: list[Counter[tuple[int, ...]]] = [Counter() for _ in self._routers]
        self._rows = [0 for _ in self._routers]

    def look(self, trace: Trace, clear: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Count the ties in a run of the graph; `clear` rows (n,) have none."""
        for layer, logits in enumerate(trace.logits):
            each = logits.reshape(len(clear), -1, logits.shape[-1])
            self._rows[layer] += each.shape[0] * each.shape[1]
            for row in each[~clear].reshape(-1, logits.shape[-1]):
                tied = _tied(row, self._routers[layer])
                if tied:
                    self._met[layer][tied] += 1

    def warnings(self) -> list[str]:
        """A sentence for every layer in which experts tied."""
        told = []
        for path, met, rows in zip(self._paths, self._met, self._rows, strict=True):
            if not met:
                continue
            ((experts, _),) = met.most_common(1)
            told.append(
                f"{path or 'the module'}: experts {_listed(experts)} tie: their scores are exactly equal, as those of "
                f"equal rows of a router are, in {sum(met.values())} of {rows} choices, which were left out of the "
                f"comparison. The exported model takes the expert of the lowest number, {min(experts)}; PyTorch states "
                "no order and may take another. Train the router further, or make its rows differ"
            )
        return told


def _tied(logits: Array, router: Any) -> tuple[int, ...]:
    """The experts tied at the k-th score, where only some are chosen; empty if there is no such tie."""
    if router.k == router.experts or not np.isfinite(logits).all():
        return ()
    keys = ops.route_keys(logits[None], router)[0]
    order = np.argsort(-keys, kind="stable")
    last, other = keys[order[router.k - 1]], keys[order[router.k]]
    if last != other or not np.isfinite(last):
        return ()
    return tuple(np.flatnonzero(keys == last).tolist())


__all__ = ["Ties", "checked_module", "degenerate"]
