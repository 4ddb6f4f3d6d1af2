"""Comparison of a claim about a block with the block itself, on rows of many sizes and on the model's own rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from colibri.frontends.recognise.experts import mixed
from colibri.frontends.recognise.moe import Block, Mixture, extras, kind_of
from colibri.frontends.recognise.recording.calls import Rows, rows_of
from colibri.frontends.recognise.report import BlockFinding
from colibri.frontends.recognise.routing import TOLERANCE, weigh
from colibri.frontends.recognise.watch import largest

SCALES = (0.25, 1.0, 4.0, 16.0)  # of random rows, in units of the real ones; besides, there is one set of variance 1
ROWS = 256  # random rows at each scale
WIDE = (1e-6, 1e-3, 1e3, 1e6)  # of fewer random rows, in the same units
WIDE_ROWS = 48
REAL = 8192  # at most this many real rows are compared


def sets(rows: Rows) -> list[Tensor]:
    """Rows to compare on: random ones of variance 1, then of sizes around the real ones'; last the real ones."""
    real = rows.real[: max(1, REAL // rows.per_sample) * rows.per_sample]
    unit = float(real.square().mean().sqrt()) or 1.0
    generator = torch.Generator().manual_seed(0)
    sizes = (1.0, *(unit * scale for scale in SCALES))
    count = -(-ROWS // rows.per_sample) * rows.per_sample
    return [torch.randn(count, real.shape[1], generator=generator) * size for size in sizes] + [real]


def wide(rows: Rows) -> list[Tensor]:
    """Rows of sizes no model is trained on, at which bounds act, and ordinary ones with one large element."""
    real = rows.real[: max(1, REAL // rows.per_sample) * rows.per_sample]
    unit = float(real.square().mean().sqrt()) or 1.0
    generator = torch.Generator().manual_seed(6)
    count = -(-WIDE_ROWS // rows.per_sample) * rows.per_sample
    found = [torch.randn(count, real.shape[1], generator=generator) * unit * size for size in WIDE]
    spikes = torch.randn(count, real.shape[1], generator=generator) * unit
    row = torch.arange(count)
    spikes[row, row % spikes.shape[1]] *= 1e4
    return [*found, spikes]


def _bounded(block: Block) -> float:
    """The error on wide rows, beyond what one rounding of the input changes there."""
    errors = [0.0]
    for rows in wide(block.rows):
        y = block.rows(rows)
        if not torch.isfinite(y).all():
            continue
        ours, without, _, clear = _predict(block, rows, made=True)
        size = max(largest((ours - without)[clear]), 1e-3 * largest(y))
        if not clear.any() or size == 0:
            continue
        off = largest((ours - y)[clear])
        if off > TOLERANCE * size:
            moved = block.rows(rows * (1 + torch.finfo(torch.float32).eps))
            off -= 8 * largest((moved - y)[clear])
        errors.append(off / size)
    return max(errors)


def measure(block: Block, logits_error: float | None) -> BlockFinding:
    """Compare a claim with the block on every set of rows; `logits_error` is what made-up logits have shown.

    The finding's error is the largest |difference| over what the mixture changes most, beyond what rounding costs where
    something is added to it. Sets in which the mixture is lost beside the rest tell nothing; the error is infinite
    where too few rows are left.
    """
    compared, ambiguous, errors = 0, 0, [0.0]
    by_data = by_any = torch.zeros(len(block.experts), dtype=torch.int64)
    *random, real = sets(block.rows)
    for rows in (*random, real):
        y = block.rows(rows)
        if rows is not real and not torch.isfinite(y).all():
            continue  # an expert that overflows at this scale says nothing
        ours, without, weights, clear = _predict(block, rows)
        by_data = (weights != 0).sum(0)
        by_any = by_any + by_data
        ambiguous += int((~clear).sum())
        added = bool(without.any())
        slack = 4 * torch.finfo(torch.float32).eps * largest(y) if added else 0.0
        size = largest((ours - without)[clear])
        if size > (1e-3 * largest(y) if added else 0.0):
            compared += int(clear.sum())
            errors.append((largest((ours - y)[clear]) - slack) / size)
    worst = max(errors) if compared >= ROWS and all(map(math.isfinite, errors)) else math.inf
    if worst <= TOLERANCE:
        worst = max(worst, _bounded(block))
    r, (gate, z, after) = block.router, block.around.describe()
    return BlockFinding(
        block.path, kind_of(block.module), r.experts, r.k, r.score, r.normalize, r.scale, extras(r), block.rows.unit,
        gate, z, after, block.body, logits_error is None, worst, logits_error, compared, ambiguous,
        (by_data == 0).nonzero()[:, 0].tolist(), (by_any == 0).nonzero()[:, 0].tolist(),
    )  # fmt: skip


def _predict(block: Block, rows: Tensor, made: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the claim says: output, output of an empty mixture, the experts' weights, which choices are clear."""
    kept: list[Tensor] = []
    inputs = block.rows.split(rows)

    def mixture(z: Tensor, logits: Tensor) -> Tensor:
        weights, clear = weigh(logits, block.router, block.rows.per_sample, made)
        if block.router.apply == "input":  # an expert of nothing is not nothing, but does not show in the weights
            clear = clear & ((weights != 0).sum(1) == block.router.k)
        kept.extend((weights, clear))
        return mixed(block.experts, z, weights, block.router.apply, block.width)

    def nothing(z: Tensor, logits: Tensor) -> Tensor:
        return z.new_zeros(len(z), block.width)

    def main(what: Mixture) -> Tensor:
        out = block.around(inputs, what)[block.rows.main]
        y = None if out is None else rows_of(out, len(rows))
        assert y is not None
        return y

    return main(mixture), main(nothing), kept[0], kept[1]


__all__ = ["measure", "sets"]
