"""Tables of rotary positions: cosines and sines of the angles for every scaling of the open models.

Computed step by step in the precision of the transformers library, 5.24: frequencies, angles, and what they are
multiplied by in float32. A frequency off by one place would turn a late position by a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.common.names import shown
from colibri.errors import ExportError
from colibri.format import spec
from colibri.frontends.checkpoints.config_fields import ROPE_FIELDS, problem_of
from colibri.ir.graph import Array

F = np.float32

# Fields that each scaling must have, and fields that it may have.
NEEDED = {
    "default": (), "linear": ("factor",), "dynamic": (), "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
ALLOWED = {
    "default": (), "linear": (), "dynamic": ("factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "short_mscale", "long_mscale"), "llama3": (),
}  # fmt: skip
COMMON = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rotary:
    """How positions turn pairs: a scaling and its values.

    `longest` is the model's max_position_embeddings, `original` what it was trained with before it was scaled,
    `context` the most positions there will be: it decides between the short and the long factors of longrope, and how
    far dynamic scaling goes. `positions`, at least as many, are those the tables hold, for a context that may grow
    later (`most_positions` says how far). `mscales` (Phi-3.5-MoE): cosines are multiplied by short_mscale or
    long_mscale.
    """

    kind: str
    theta: float
    partial: float
    values: Mapping[str, Any]
    longest: int
    original: int
    context: int
    mscales: bool = False
    positions: int = 0

    @property
    def factor(self) -> float:
        """How many times the context is longer than the one trained with."""
        return float(self.values.get("factor") or self.longest / self.original)

    def most_positions(self) -> int:
        """Positions for which a longer context would have given the same angles."""
        if self.kind == "dynamic":
            return max(self.context, self.longest) if self.values.get("alpha") is None else spec.LIMIT
        if self.kind == "longrope":
            return self.original if self.context <= self.original else spec.LIMIT
        return spec.LIMIT

    def table(self, dim: int) -> Array:
        """(positions, 2 · half) float32: cosines, sines; for heads of size `dim`; `partial` is their rotated share."""
        turned = int(dim * self.partial)
        if turned < 2 or turned % 2:
            raise ExportError(
                f"rotary positions of {turned} elements of a head of {dim} are no pairs: correct config.json"
            )
        frequency, factor = self.frequencies(turned)
        angle = np.arange(max(self.context, min(self.positions, self.most_positions())), dtype=F)[
            :, None
        ] * frequency.astype(F)
        if not np.isfinite(angle).all() or not math.isfinite(factor):
            raise ExportError(
                "rotary positions have angles that are not finite: correct rope_parameters in config.json"
            )
        turn = np.concatenate([np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))], axis=1)
        return np.asarray(turn.astype(F) * F(factor), F)

    def frequencies(self, dim: int) -> tuple[Array, float]:
        """Radians a position for each of dim / 2 pairs, and what cosines and sines are multiplied by."""
        get, base = self.values.get, self.theta
        place = np.arange(0, dim, 2).astype(F) / F(dim)
        if self.kind == "dynamic":
            if dim < 4:
                raise ExportError("dynamic scaling needs heads with at least 4 rotated elements: correct config.json")
            if (alpha := get("alpha")) is not None:
                base = base * alpha ** (dim / (dim - 2))
            else:
                factor, length = self.values["factor"], max(self.context, self.longest)
                base = base * ((factor * length / self.longest) - (factor - 1)) ** (dim / (dim - 2))
        # Powers rounded once, so that every machine gives the same bits; vector libraries are off by a place or two.
        powers = np.power(np.float64(F(base)), place.astype(np.float64)).astype(F)
        plain = F(1) / powers
        if self.kind == "linear":
            return plain / F(self.values["factor"]), 1.0
        if self.kind == "llama3":
            return self._llama3(plain), 1.0
        if self.kind == "yarn":
            return self._yarn(powers, dim)
        if self.kind == "longrope":
            return self._longrope(powers)
        return plain, 1.0

    def _llama3(self, plain: Array) -> Array:
        factor, low, high = (self.values[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
        wave = F(2 * math.pi) / plain
        scaled = np.where(wave > F(self.original / low), plain / F(factor), plain)
        with np.errstate(all="ignore"):  # Llama-4 has high = low, and nothing between them
            smooth = (F(self.original) / wave - F(low)) / F(high - low)
            between = (F(1) - smooth) * scaled / F(factor) + smooth * scaled
        medium = ~(wave < F(self.original / high)) & ~(wave > F(self.original / low))
        return np.asarray(np.where(medium, between, scaled), F)

    def _yarn(self, powers: Array, dim: int) -> tuple[Array, float]:
        get = self.values.get
        factor = self.factor

        def place(turns: float) -> float:
            return (dim * math.log(self.original / (turns * 2 * math.pi))) / (2 * math.log(self.theta))

        low, high = place(get("beta_fast") or 32), place(get("beta_slow") or 1)
        if get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        ramp = np.clip((np.arange(dim // 2, dtype=F) - F(low)) / F(high - low), F(0), F(1))
        kept = F(1) - ramp
        frequency = F(1) / (F(factor) * powers) * (F(1) - kept) + F(1) / powers * kept
        attention = get("attention_factor")
        if attention is None:
            one, all_dim = get("mscale"), get("mscale_all_dim")
            attention = mscale(factor, one) / mscale(factor, all_dim) if one and all_dim else mscale(factor)
        return np.asarray(frequency, F), float(attention)

    def _longrope(self, powers: Array) -> tuple[Array, float]:
        long = self.context > self.original
        factors = np.asarray(self.values["long_factor" if long else "short_factor"], F)
        if factors.shape != powers.shape:
            raise ExportError(f"longrope has {factors.size} factors for {powers.size} pairs: correct config.json")
        factor, attention = self.factor, self.values.get("attention_factor")
        if self.mscales:
            attention = self.values.get("long_mscale" if long else "short_mscale")
            if not isinstance(attention, int | float):
                raise ExportError("longrope lacks short_mscale or long_mscale: add them to rope_scaling in config.json")
        elif attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self.original))
        return F(1) / (factors * powers), float(attention)

    def score_factor(self) -> float:
        """The factor on DeepSeek's attention scores in addition to 1 / √dim."""
        all_dim = self.values.get("mscale_all_dim", 0) if self.kind != "default" else 0
        if not all_dim:
            return 1.0
        if self.values.get("factor") is None:
            raise ExportError("rope_parameters.factor is null or missing beside mscale_all_dim: add it to config.json")
        return mscale(self.factor, all_dim) ** 2


def mscale(scale: float, by: float = 1) -> float:
    """YaRN's attention factor for a context `scale` times as long (Peng et al. 2023)."""
    return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0


def rotary_of(
    config: Mapping[str, Any],
    context: int,
    *,
    theta: float,
    longest: int,
    partial: float = 1.0,
    mscales: bool = False,
    positions: int = 0,
) -> Rotary:
    """Read the rotary positions of a configuration; `theta` and `partial` are the defaults of its class.

    `rope_scaling` is the older name of `rope_parameters` and goes first, as values inside go before values beside.
    Raises ExportError for a scaling that is not known, incomplete, or says something unknown.
    """
    said = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = _checked(said, config)
    original = config.get("original_max_position_embeddings") or said.get("original_max_position_embeddings") or longest
    base, part = said.get("rope_theta"), said.get("partial_rotary_factor")
    base = config.get("rope_theta", theta) if base is None else base
    part = config.get("partial_rotary_factor", partial) if part is None else part
    base, part = theta if base is None else base, partial if part is None else part
    return Rotary(kind, float(base), float(part), dict(said), longest, int(original), context, mscales, positions)


def _checked(said: Any, config: Mapping[str, Any]) -> str:
    """The type of positions that rope_parameters name, once all they say is known and in its range."""
    if not isinstance(said, dict):
        raise ExportError(f"rope_parameters is {shown(said)}, not an object: correct config.json")
    kind = said.get("rope_type", said.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if not isinstance(kind, str) or kind not in NEEDED:
        raise ExportError(f"rotary positions of type {shown(kind)} are not supported, only {', '.join(NEEDED)}")
    known = {*COMMON, *NEEDED[kind], *ALLOWED[kind]}
    unknown = [f"{name} = {shown(value)}" for name, value in said.items() if name not in known and value is not None]
    if unknown:
        raise ExportError(f"rope_parameters has {', '.join(unknown)}, not known of type {kind!r}: it may change the "
                          "result")  # fmt: skip
    missing = [n for n in NEEDED[kind] if n not in said]
    if kind == "dynamic" and said.get("factor") is None and said.get("alpha") is None:
        missing = ["factor"]
    if missing:
        raise ExportError(f"rope_parameters of type {kind!r} lack {missing[0]}: add it to config.json")
    outside = [name for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
               if name in config]  # fmt: skip
    values = [*((n, said[n]) for n in known if n in said), *((n, config[n]) for n in outside)]
    for name, value in values:
        if problem := problem_of(name, value, ROPE_FIELDS):
            raise ExportError(problem)
    if kind in ("linear", "llama3") and said["factor"] is None:
        raise ExportError("rope_parameters.factor is null: write its value into config.json")
    return kind
