"""Blocks that register_moe describes: the claim as surroundings of a mixture, verified like any other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colibri.errors import ExportError
from colibri.frontends.recognise.measure import measure, sets
from colibri.frontends.recognise.moe import Block, Mixture, Registration, kind_of
from colibri.frontends.recognise.recording.calls import Calls, Rows
from colibri.frontends.recognise.routing import TOLERANCE
from colibri.ir.graph import Router


class Claimed:
    """The surroundings that register_moe was told: a gate, perhaps a norm, a shared expert, a residual."""

    def __init__(self, module: nn.Module, claim: Registration, rows: Rows) -> None:
        self.module, self.claim, self.rows = module, claim, rows

    def resolve(self, spec: Any) -> Any:
        """What a dotted path or a function names, looked up at each call, since tracing exchanges the parameters."""
        return functools.reduce(getattr, spec.split("."), self.module) if isinstance(spec, str) else spec(self.module)

    def numbers(self, spec: Any) -> tuple[float, ...]:
        """One number an expert: of a tensor the block holds, or as given."""
        if spec is None:
            return ()
        values = self.resolve(spec) if isinstance(spec, str) or callable(spec) else spec
        return tuple(torch.as_tensor(values).detach().flatten().tolist())

    def _apply(self, spec: Any, x: Tensor) -> Tensor:
        target = self.resolve(spec)
        y: Tensor = nn.functional.linear(x, target) if isinstance(target, Tensor) else target(x)
        return y

    def normed(self, x: Tensor) -> Tensor:
        """The experts' input."""
        return x if self.claim.prenorm is None else self._apply(self.claim.prenorm, x)

    def __call__(
        self, inputs: Sequence[Tensor], mixture: Mixture, known: dict[int, Tensor] | None = None
    ) -> list[Tensor | None]:
        """The block's outputs: the main one only."""
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        z = self.normed(x)
        y = mixture(z, self._apply(self.claim.gate, z))
        if self.claim.shared is not None:
            y = y + self._apply(self.claim.shared, z)
        y = y + x if self.claim.residual else y
        outs: list[Tensor | None] = [None] * self.rows.results
        outs[self.rows.main] = y.view((*inputs[0].shape[:-1], y.shape[-1]))
        return outs

    def held(self) -> list[Tensor]:
        """Not asked of a registered block."""
        return []

    def describe(self) -> tuple[str, str, list[str]]:
        """What the registration names."""

        def name(spec: Any, otherwise: str) -> str:
            return spec if isinstance(spec, str) else otherwise

        after = [] if self.claim.shared is None else [name(self.claim.shared, "shared")]
        after += ["residual"] if self.claim.residual else []
        normed = "x" if self.claim.prenorm is None else name(self.claim.prenorm, "prenorm")
        return name(self.claim.gate, "gate"), normed, after


def check(path: str, m: nn.Module, claim: Registration, calls: Calls) -> Block | None:
    """The registered block, its claim verified; None where it is never called. Raises ExportError where it is wrong."""
    where = f"{path or 'the module'} ({kind_of(m)})"
    if calls.usable and not calls.seen:
        return None
    rows = Rows(calls, "token") if calls.usable else None
    if rows is None or not rows.usable or len(rows.widths) != 1:
        raise ExportError(
            f"{where}: a registered block takes one float tensor (…, in), always alike, and gives (…, out)"
        )
    try:
        around = Claimed(m, claim, rows)
        group = around.resolve(claim.experts)
        experts = list(group.values() if isinstance(group, nn.ModuleDict) else group)
        router = Router(
            len(experts), claim.k, claim.score, claim.normalize, claim.scale, around.numbers(claim.bias),
            expert_scale=around.numbers(claim.expert_scale), **claim.rest,
        )  # fmt: skip
        tokens = sets(rows)[0]
        group = Rows(calls, "sample") if router.capacity else rows
        reason = group.dependence(sets(group)[0])
        width = experts[0](around.normed(tokens[:1])).shape[-1]
        block = Block(path, m, rows, experts, router, around, around.normed(tokens[:1]).shape[-1], width)
        block.finding = measure(block, None)
    except ExportError as error:
        raise ExportError(f"{where}: register_moe: {error}") from None
    except Exception as error:
        raise ExportError(f"{where}: register_moe does not fit this block: {type(error).__name__}: {error}") from None
    if reason is None and (measured := block.finding.error) > TOLERANCE:
        reason = f"over {block.finding.tokens} tokens the relative error is {measured:.1e}, above {TOLERANCE}"
    if reason is not None:
        raise ExportError(f"{where}: it is not what register_moe says ({block}): {reason}")
    return block


__all__ = ["check"]
