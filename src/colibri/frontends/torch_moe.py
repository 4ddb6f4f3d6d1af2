"""Mixture-of-Experts blocks: what a block may be taken for, register_moe, and the leaf it becomes while tracing.

`torch_identify` decides which modules are such blocks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.errors import ExportError
from colibri.frontends.torch_report import BlockFinding
from colibri.graph import NORMALIZE, SCORES, Router

MARGIN = 1e-6  # a choice of experts closer than this (relative) may go either way

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
) -> None:
    """Say that `target`, a class or an instance, computes scale·Σ w·expert(z) [+ shared(z)] [+ x], z = prenorm(x) or x.

    `experts`, `gate`, `shared` and `prenorm` are dotted attribute paths, or functions of the block that return the
    module (for `experts`: modules (tokens, in) -> (tokens, out)); a gate may also be a weight of shape (experts, in).
    The claim is checked at every export, which raises ExportError with the measured error when it is wrong.
    """
    if score not in SCORES or normalize not in NORMALIZE:
        raise ExportError(f"score is one of {', '.join(SCORES)}, normalize one of {', '.join(NORMALIZE)}")
    _REGISTERED[target] = Registration(experts, gate, k, score, normalize, scale, shared, prenorm, residual)


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


Rows = Callable[[Tensor], Tensor]  # tokens (n, in) -> (n, out)


@dataclass(frozen=True)
class Part:
    """A piece of a block: how it is called, its name for the report."""

    name: str
    call: Rows


IDENTITY = Part("x", lambda x: x)


@dataclass
class Block:
    """A claim about a module: y = Σ w·expert(pre(x)) · scale [+ shared] [+ x], w from gate(gate_pre(x))."""

    path: str
    module: nn.Module
    experts: list[nn.Module]
    gate: Part
    router: Router
    pre: Part = IDENTITY
    gate_pre: Part = IDENTITY
    shared: Part | None = None
    shared_pre: Part = IDENTITY
    residual: bool = False
    input_width: int = 0
    width: int = 0
    result: Any = None  # an example of what its forward returns
    main: int = 0  # which leaf of it is y
    finding: BlockFinding | None = None

    @property
    def parts(self) -> int:
        """How much there is beside gate and experts; of two claims that agree, the smaller is right."""
        return sum((self.pre is not IDENTITY, self.gate_pre is not self.pre, self.shared is not None, self.residual))

    def around(self, x: Tensor, mixture: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The block on tokens (n, in), its mixture of (z, logits) computed by `mixture`."""
        inputs = {part.name: part.call(x) for part in (self.pre, self.gate_pre, self.shared_pre)}
        y = mixture(inputs[self.pre.name], self.gate.call(inputs[self.gate_pre.name]))
        if self.shared is not None:
            y = y + self.shared.call(inputs[self.shared_pre.name])
        return y + x if self.residual else y

    def __str__(self) -> str:
        r = self.router
        return f"top-{r.k} of {r.experts}, score {r.score}, normalize {r.normalize}, scale {r.scale:g}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that is no MoE as far as the numbers tell, and why; `dense_macs` where all its experts run."""

    path: str
    kind: str
    reason: str
    dense_macs: int = 0  # multiply-accumulates a token in experts that all run
    experts: int = 0

    def __str__(self) -> str:
        return f"{self.path or 'the module'} ({self.kind}) was not taken for a Mixture of Experts: {self.reason}"


def kind_of(module: nn.Module) -> str:
    """The class name, also of a module unflattened from a saved program."""
    name = getattr(module, "type_name", None)
    return (name() if callable(name) else name or type(module).__name__).rpartition(".")[2]


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Weights (n, experts), zero where not chosen, and which of the n choices are clear of ties."""
    p = {"softmax": lambda: logits.softmax(-1), "sigmoid": lambda: logits.sigmoid(), "logit": lambda: logits}[
        router.score
    ]()
    value, order = p.sort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order[:, : router.k], True)
    # -inf masks an expert, which is as clear as can be while there are k others.
    clear = torch.isfinite(value[:, : router.k]).all(-1) & ~torch.isnan(p).any(-1)
    if router.k < router.experts:
        last, next_ = value[:, router.k - 1], value[:, router.k]
        clear &= ((last - next_) > MARGIN * torch.maximum(last.abs(), next_.abs())) | torch.isneginf(next_)
    w = torch.where(chosen, p, 0.0)
    if router.normalize == "sum":
        w = w / w.sum(-1, keepdim=True)
    elif router.normalize == "softmax":
        w = torch.where(chosen, p, -math.inf).softmax(-1)
    elif router.normalize == "one":
        w = chosen.float()
    return w * router.scale, clear


# --- tracing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def leaves(blocks: Sequence[Block]) -> Iterator[None]:
    """While this is open, each block's mixture is one `colibri::moe` operation numbered as in `blocks`."""
    with contextlib.ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.enter_context(_patched(block, number))
        yield


@contextlib.contextmanager
def _patched(block: Block, number: int) -> Iterator[None]:
    module = block.module
    held = module.__dict__.get("forward")

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        y = block.around(
            x.reshape(-1, x.shape[-1]), lambda z, logits: torch.ops.colibri.moe(z, logits, block.width, number)
        )
        results, spec = pytree.tree_flatten(block.result)
        results = [torch.ops.colibri.unavailable(x, r.shape) if isinstance(r, Tensor) else r for r in results]
        results[block.main] = y.view((*x.shape[:-1], block.width))
        return pytree.tree_unflatten(results, spec)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if held is not None:
            module.forward = held


__all__ = [
    "IDENTITY",
    "Block",
    "Part",
    "Registration",
    "Rejected",
    "Rows",
    "kind_of",
    "leaves",
    "register_moe",
    "registered",
    "route",
]  # fmt: skip
