"""Mixture-of-Experts blocks: what a block may be taken for, register_moe, and the leaf it becomes while tracing.

`identify` decides which modules are such blocks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.errors import ExportError
from colibri.frontends.recognise.recording.calls import Rows, Turned, begins
from colibri.frontends.recognise.recording.tape import replaced
from colibri.frontends.recognise.report import BlockFinding
from colibri.ir.graph import NORMALIZE, SCORES, Router

torch.library.define("colibri::moe", "(Tensor x, Tensor logits, int width, int block) -> Tensor")
torch.library.define("colibri::unavailable", "(Tensor x, int[] shape) -> Tensor")


@torch.library.register_fake("colibri::moe")  # type: ignore[untyped-decorator]
def _moe_fake(x: Tensor, logits: Tensor, width: int, block: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


@torch.library.register_fake("colibri::unavailable")  # type: ignore[untyped-decorator]
def _unavailable_fake(x: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty(shape)


# --- explicit annotation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registration:
    """What `register_moe` was told about a block."""

    experts: Any
    gate: Any
    k: int
    score: str
    normalize: str
    scale: float
    shared: Any
    prenorm: Any
    residual: bool
    bias: Any
    expert_scale: Any
    rest: Mapping[str, Any]  # further fields of the router


_REGISTERED: weakref.WeakKeyDictionary[Any, Registration] = weakref.WeakKeyDictionary()


def register_moe(
    target: type[nn.Module] | nn.Module,
    *,
    experts: Any,
    gate: Any,
    k: int,
    score: str = "softmax",
    normalize: str = "none",
    scale: float = 1.0,
    shared: Any = None,
    prenorm: Any = None,
    residual: bool = False,
    epsilon: float = 0.0,
    bias: Any = None,
    expert_scale: Any = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_rule: str = "max",
    capacity: int = 0,
    apply: str = "output",
) -> None:
    """Say that `target`, a class or an instance, computes scale·Σ w·expert(z) [+ shared(z)] [+ x], z = prenorm(x) or x.

    `experts`, `gate`, `shared` and `prenorm` are dotted attribute paths, or functions of the block that return the
    module (for `experts`: modules (tokens, in) -> (tokens, out)); a gate may also be a weight of shape (experts, in).
    `epsilon` is added to the sum that `normalize` "sum" divides by, and the least that "clamped" does; `bias` (added to
    the scores for the choice only) and `expert_scale` are such a path, a function, or numbers, one an expert. The other
    fields are the router's as docs/routing.md describes it; a capacity is one for the tokens of each sample. The claim
    is checked at every export, which raises ExportError with the measured error when it is wrong.
    """
    if score not in SCORES or normalize not in NORMALIZE:
        raise ExportError(f"score is one of {', '.join(SCORES)}, normalize one of {', '.join(NORMALIZE)}")
    rest = {"epsilon": epsilon, "groups": groups, "kept_groups": kept_groups, "group_rule": group_rule,
            "capacity": capacity, "apply": apply}  # fmt: skip
    _REGISTERED[target] = Registration(
        experts, gate, k, score, normalize, scale, shared, prenorm, residual, bias, expert_scale, rest
    )


def registered(module: nn.Module) -> dict[str, Registration]:
    """The registrations that apply inside `module`, by path; an instance's own wins over its class's."""
    found = {}
    for path, m in module.named_modules():
        for key in (m, *type(m).__mro__):
            if key in _REGISTERED:
                found[path] = _REGISTERED[key]
                break
    return found


# --- what a block is taken for ----------------------------------------------------------------------------------------


Rowwise = Callable[[Tensor], Tensor]  # rows (n, in) -> (n, out)
Mixture = Callable[[Tensor, Tensor], Tensor]  # the experts' input (n, in), logits (n, experts) -> (n, out)


class Surroundings(Protocol):
    """What a block computes before and after its mixture."""

    def __call__(
        self, inputs: Sequence[Tensor], mixture: Mixture, known: dict[int, Tensor] | None = None
    ) -> list[Tensor | None]:
        """The tensors the block returns for its tensor inputs; None where one is not known."""

    def held(self) -> list[Tensor]:
        """The parameters, buffers and other tensors this reads."""

    def describe(self) -> tuple[str, str, list[str]]:
        """What gives the logits, what gives the experts' input, and what is done with the mixture."""


@dataclass
class Block:
    """A claim about a module: it computes Σ w·expert(z) amid its `around`, w being the `router`'s.

    z, the logits and the mixture have one row for each of `rows`. `nested`: experts hold blocks themselves or serve
    several mixtures, so all run in the main program, and the mixture chooses among their outputs. `others` are further
    mixtures of the same experts, which other results of the module need.
    """

    path: str
    module: nn.Module
    rows: Rows
    experts: list[nn.Module]
    router: Router
    around: Surroundings
    input_width: int
    width: int
    tensors: tuple[str, ...] = ()  # of the module, that the router holds
    body: str | None = None
    nested: bool = False
    others: list[Block] = field(default_factory=list)
    finding: BlockFinding | None = None

    def leaf(self, number: int, shared: list[Tensor]) -> Mixture:
        """The mixture as one operation, numbered `number`; `shared` keeps what experts gave for other mixtures."""

        def mixture(z: Tensor, logits: Tensor) -> Tensor:
            x = z
            if self.nested:
                x = shared[0] if shared else torch.cat([expert(z) for expert in self.experts], -1)
                shared[:] = [x]
            y: Tensor = torch.ops.colibri.moe(x, logits, self.width, number)
            return y

        return mixture

    def bodies(self) -> tuple[list[nn.Module], int]:
        """The experts of that operation, and the width of their input."""
        if not self.nested:
            return self.experts, self.input_width
        count = len(self.experts)
        return [Picked(n, self.width) for n in range(count)], count * self.width

    def __str__(self) -> str:
        r = self.router
        return f"top-{r.k} of {r.experts}, score {r.score}, normalize {r.normalize}, scale {r.scale:g}" + "".join(
            f", {extra}" for extra in extras(r)
        )


def extras(router: Router) -> list[str]:
    """What a router does beside score, normalisation and scale, in words."""
    r = router
    told = [
        (bool(r.bias), "a selection bias"),
        (r.groups > 1, f"{r.kept_groups} of {r.groups} groups by {r.group_rule}"),
        (bool(r.expert_scale), "a scale an expert"),
        (r.epsilon > 0, f"epsilon {r.epsilon:g}"),
        (r.capacity > 0, f"at most {r.capacity} tokens an expert"),
        (r.apply == "input", "weights on the input"),
    ]
    return [text for holds, text in told if holds]


class Picked(nn.Module):
    """Expert `number` of those whose outputs, `width` wide, are laid side by side."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.start, self.stop = number * width, (number + 1) * width

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, experts · width) -> (tokens, width)."""
        return x[:, self.start : self.stop]


def kind_of(module: nn.Module) -> str:
    """The class name, also of a module unflattened from a saved program."""
    name = getattr(module, "type_name", None)
    return (name() if callable(name) else name or type(module).__name__).rpartition(".")[2]


# --- tracing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def leaves(blocks: Sequence[Block]) -> Iterator[None]:
    """While this is open, each block's mixture is one `colibri::moe` operation numbered as in `blocks`."""
    of_module: dict[int, list[tuple[int, Block]]] = {}
    for number, block in enumerate(blocks):
        of_module.setdefault(id(block.module), []).append((number, block))
    with contextlib.ExitStack() as stack:
        for uses in of_module.values():
            stack.enter_context(replaced(uses[0][1].module, functools.partial(_leaf, uses)))
        yield


def _leaf(uses: Sequence[tuple[int, Block]], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        calls = uses[0][1].rows.calls
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        turned = isinstance(calls.runs, Turned)
        inputs = [x.transpose(0, 1) for x in inputs] if turned else inputs
        known: dict[int, Tensor] = {}
        shared: list[Tensor] = []
        given = [block.around(inputs, block.leaf(number, shared), known) for number, block in uses]
        outs = (next((y for y in of if y is not None), None) for of in zip(*given, strict=True))
        results, spec = pytree.tree_flatten(calls.result)
        lead = tuple(calls.seen[0][0].shape[:2])
        for n, r in enumerate(results):
            if isinstance(r, Tensor):
                out = next(outs)
                results[n] = torch.ops.colibri.unavailable(inputs[0], r.shape) if out is None else out
                results[n] = results[n].transpose(0, 1) if turned and begins(r, lead) else results[n]
        return pytree.tree_unflatten(results, spec)

    return run


__all__ = [
    "Block",
    "Mixture",
    "Picked",
    "Registration",
    "Rowwise",
    "Surroundings",
    "extras",
    "kind_of",
    "leaves",
    "register_moe",
    "registered",
]  # fmt: skip
