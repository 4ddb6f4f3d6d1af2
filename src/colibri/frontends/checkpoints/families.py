"""Routing of the open model families: from a checkpoint's configuration to a routing descriptor.

One table, `FAMILIES`, and one function, `router_of`; docs/routing.md shows the table in words. Configurations are read
as plain attributes or dictionaries, so nothing here needs the library a checkpoint was made with. Where a checkpoint
says nothing, the default of its configuration *class* holds, for some families the opposite of what was released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.common.names import shown
from colibri.errors import ExportError
from colibri.frontends.checkpoints.config_fields import problem_of
from colibri.ir.graph import Router

_ABSENT = object()


@dataclass(frozen=True)
class Value:
    """A value of a configuration: the names it goes by, and its class's default; None where the class has none."""

    names: tuple[str, ...]
    default: Any


def _value(names: str, default: Any) -> Value:
    return Value(tuple(names.split()), default)


@dataclass(frozen=True)
class Family:
    """How one family routes: p = score(logits), chosen on p + bias, w = p at the chosen / their sum · scale.

    `normalized` says whether there is the division; `epsilon` is added to the sum, or with `clamped` its least value.
    `bias` and `expert_scale` name tensors of the block, as they end on disk; `bias_if` may switch the bias off. Groups
    take part always, or where the first of `groups_if` equals the second. `only` lists values that must be among those
    given, for nothing else is known to be computed. `around` is the rest of the block, for documents.
    """

    title: str
    experts: Value
    k: int | Value
    score: str = "softmax"
    normalized: bool | Value = False
    epsilon: float | Value = 0.0
    clamped: bool = False
    scale: float | Value = 1.0
    bias: str = ""
    bias_if: bool | Value = True
    groups: Value | None = None
    kept_groups: Value | None = None
    group_rule: str = "max"
    groups_if: tuple[Value, str] | None = None
    expert_scale: str = ""
    capacity: Value | None = None
    apply: str = "output"
    only: tuple[tuple[Value, tuple[Any, ...]], ...] = ()
    around: str = ""


_CORRECTION = "e_score_correction_bias"
_GATED_SHARED = "+ sigmoid(v·x) · shared(x)"
_SHARED = "+ shared(x)"
_ALWAYS_NORMALIZED = ((_value("norm_topk_prob", True), (True,)),)
_SIGMOID = (_value("scoring_func moe_router_activation_func", "sigmoid"), ("sigmoid",))
_NO_AUX = (_value("topk_method", "noaux_tc"), ("noaux_tc",))


def _deepseek_v3(title: str, experts: Value, k: Value, scale: float, groups: int, kept: int, around: str) -> Family:
    """Sigmoid scores with a correction bias and groups, as DeepSeek-V3 introduced them."""
    return Family(
        title, experts, k, "sigmoid", normalized=_value("norm_topk_prob moe_renormalize", True), epsilon=1e-20,
        scale=_value("routed_scaling_factor", scale), bias=_CORRECTION, group_rule="top2",
        groups=_value("n_group num_expert_group", groups), kept_groups=_value("topk_group", kept),
        only=(_SIGMOID, _NO_AUX), around=around,
    )  # fmt: skip


_NUM_EXPERTS = "num_experts num_local_experts"
_LOCAL_EXPERTS = "num_local_experts num_experts"
_ROUTED = "n_routed_experts num_local_experts num_experts"
_K = "num_experts_per_tok"

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family("Qwen3-MoE", _value(_NUM_EXPERTS, 128), _value(_K, 8),
                        normalized=_value("norm_topk_prob", False)),
    "gpt_oss": Family("GPT-OSS", _value(_LOCAL_EXPERTS, 128), _value(f"{_K} experts_per_token", 4), normalized=True,
                      around="logits and experts have biases; gate g and up u interleaved, g at most 7, u within ±7, "
                             "(u + 1) · g · sigmoid(1.702 · g)"),
    "qwen3_next": Family("Qwen3-Next", _value(_NUM_EXPERTS, 512), _value(_K, 10),
                         normalized=_value("norm_topk_prob", True), around=_GATED_SHARED),
    "qwen3_5_moe": Family("Qwen3.5-MoE, Qwen3.6-MoE", _value(_NUM_EXPERTS, 256), _value(_K, 8), normalized=True,
                          only=_ALWAYS_NORMALIZED, around=_GATED_SHARED),
    "olmoe": Family("OLMoE", _value(_NUM_EXPERTS, 64), _value(_K, 8), normalized=_value("norm_topk_prob", False)),
    "granitemoe": Family("GraniteMoE", _value(_LOCAL_EXPERTS, 8), _value(_K, 2), normalized=True),
    "lfm2_moe": Family("LFM2-MoE", _value(_NUM_EXPERTS, 32), _value(_K, 4), "sigmoid",
                       normalized=_value("norm_topk_prob", True), epsilon=1e-6,
                       scale=_value("routed_scaling_factor", 1.0), bias="expert_bias",
                       bias_if=_value("use_expert_bias", True)),
    "gemma4": Family("Gemma-4 MoE", _value("num_experts", None), _value("top_k_experts", None), normalized=True,
                     expert_scale="router.per_expert_scale", only=((_value("enable_moe_block", False), (True,)),),
                     around="h the residual: logits = W (norm(h) · s / √d), experts take norm₂(h), GELU; "
                            "norm₁(mlp(norm(h))) + norm₂(mixture)"),
    "deepseek_v2": Family("DeepSeek-V2", _value(_ROUTED, 64), _value(_K, None),
                          scale=_value("routed_scaling_factor", 1.0), groups=_value("n_group", None),
                          kept_groups=_value("topk_group", None),
                          groups_if=(_value("topk_method", "greedy"), "group_limited_greedy"),
                          only=((_value("topk_method", "greedy"), ("greedy", "group_limited_greedy")),
                                (_value("scoring_func", "softmax"), ("softmax",)),
                                (_value("norm_topk_prob", False), (False,))), around=_SHARED),
    "ernie4_5_moe": Family("Ernie-4.5", _value(f"moe_num_experts {_NUM_EXPERTS}", 64), _value(f"moe_k {_K}", 6),
                           normalized=True, epsilon=_value("moe_norm_min", 1e-12), clamped=True,
                           bias=f"moe_statics.{_CORRECTION}", around="+ shared(x) where there are shared experts"),
    "deepseek_v3": _deepseek_v3("DeepSeek-V3", _value(_ROUTED, 256), _value(_K, 8), 2.5, 8, 4, _SHARED),
    "glm4_moe": _deepseek_v3("GLM-4.5, GLM-4.6, GLM-4.7", _value(_ROUTED, 128), _value(_K, 8), 1.0, 1, 1, _SHARED),
    "kimi_linear": _deepseek_v3("Kimi-Linear", _value(_NUM_EXPERTS, 256), _value(f"num_experts_per_token {_K}", 8),
                                2.446, 1, 1, _SHARED),
    "nemotron_h": _deepseek_v3("Nemotron-H", _value(_ROUTED, 8), _value(_K, 2), 1.0, 1, 1,
                               "+ shared(x); experts are W₂ relu(W₁x)², not gated, perhaps between two projections"),
    "mixtral": Family("Mixtral", _value(_LOCAL_EXPERTS, 8), _value(_K, 2), normalized=True),
    "minimax_m2": Family("MiniMax-M2", _value(_LOCAL_EXPERTS, 256), _value(_K, 8), "sigmoid", normalized=True,
                         bias=_CORRECTION, only=(_SIGMOID, (_value("use_routing_bias", True), (True,)))),
    "phimoe": Family("Phi-3.5-MoE", _value(_LOCAL_EXPERTS, 16), _value(_K, 2), "sparse_mixer",
                     epsilon=_value("router_jitter_noise", 0.01), only=((_value(_K, 2), (2,)),)),
    "qwen2_moe": Family("Qwen2-MoE", _value(_NUM_EXPERTS, 60), _value(_K, 4),
                        normalized=_value("norm_topk_prob", False), around=_GATED_SHARED),
    "hunyuan_v1_moe": Family("HunYuan-MoE-V1", _value(_NUM_EXPERTS, 1), _value(f"moe_topk {_K}", 1), normalized=True,
                             only=_ALWAYS_NORMALIZED, around=_SHARED),
    "jamba": Family("Jamba", _value(_NUM_EXPERTS, 16), _value(_K, 2)),
    "switch_transformers": Family("Switch Transformer", _value("num_experts", 8), 1,
                                  capacity=_value("expert_capacity", 64),
                                  only=((_value("router_type", "tokens_masked"), ("tokens_masked",)),),
                                  around="logits perhaps with a bias; experts are W₂ relu(W₁x), not gated"),
    "llama4": Family("Llama-4", _value(_LOCAL_EXPERTS, 16), _value(_K, 1), "sigmoid", apply="input", around=_SHARED),
}  # fmt: skip


def family_of(config: Any) -> Family:
    """The family a configuration, an object or a dictionary, belongs to; raises ExportError where it is unknown."""
    return _Reader(config, None).family


def router_of(config: Any, *, layer: int | None = None, bias: Any = None, expert_scale: Any = None) -> Router:
    """The routing descriptor of a checkpoint's MoE layers, from its configuration: an object or a dictionary.

    `layer` is needed only where the configuration lists a value for each. `bias` and `expert_scale`, (experts,) or
    (1, experts) float32, are the tensors the family's entry names, and needed where it names one.
    Raises ExportError for an unknown family, and for every value that is missing, contradictory or not supported.
    """
    read = _Reader(config, layer)
    family = read.family
    for value, allowed in family.only:
        read.one_of(value, allowed)
    experts, k = read.count(family.experts), read.count(family.k)
    biased = bool(family.bias) and read.flag(family.bias_if)
    normalized = read.flag(family.normalized)
    groups: dict[str, Any] = {}
    if family.groups is not None and family.kept_groups is not None and read.grouped(family):
        groups = {"groups": read.count(family.groups), "kept_groups": read.count(family.kept_groups)}
        groups |= {"group_rule": family.group_rule} if groups["groups"] > 1 else {}
    score, normalize = family.score, "none"
    if normalized:
        normalize = "clamped" if family.clamped else "sum"
        if score == "softmax" and not biased and not groups:
            # p over the sum of the chosen p is the softmax of the chosen logits, which needs only k exponentials.
            score, normalize = "logit", "softmax"
    epsilon = 0.0
    if normalize in ("sum", "clamped") or score == "sparse_mixer":
        epsilon = read.number(family.epsilon)
    fields: dict[str, Any] = {
        "scale": read.number(family.scale), "bias": read.tensor("bias", family.bias if biased else "", bias),
        "epsilon": epsilon, "expert_scale": read.tensor("expert_scale", family.expert_scale, expert_scale),
        "capacity": 0 if family.capacity is None else read.count(family.capacity), "apply": family.apply, **groups,
    }  # fmt: skip
    try:
        return Router(experts, k, score, normalize, **fields)
    except ExportError as error:
        raise read.refuse(f"{error}: correct the configuration") from None


class _Reader:
    """Reads values of one configuration, each of its kind or refused by name."""

    def __init__(self, config: Any, layer: int | None) -> None:
        kind = _get(config, "model_type")
        nested = _get(config, "text_config")  # of a model that also sees or hears
        self.config = config if nested in (_ABSENT, None) else nested
        self.layer = layer
        inner = _get(self.config, "model_type")
        found = kind if inner is _ABSENT else inner
        self.kind = "" if found is _ABSENT else str(found).removesuffix("_text")
        if self.kind not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ExportError(
                f"how model type {shown(self.kind)} routes is not known; known are {known}: export the PyTorch module "
                "instead, or build its graph with a colibri.ir.graph.Router"
            )
        self.family = FAMILIES[self.kind]

    def refuse(self, message: str) -> ExportError:
        return ExportError(f"{self.family.title} ({self.kind}): {message}")

    def find(self, value: Value) -> tuple[str, Any]:
        """What the configuration says, and by which name; else the class's default."""
        said = {name: x for name in value.names if (x := _get(self.config, name)) is not _ABSENT}
        if not said:
            return value.names[0], value.default
        name, found = next(iter(said.items()))
        if any(x != found for x in said.values()):
            pairs = ", ".join(f"{name} = {shown(x)}" for name, x in said.items())
            raise self.refuse(f"the configuration contradicts itself, {pairs}: leave one of them")
        if found is None and value.default is not None:
            raise self.refuse(f"{name} is null: write its value into the configuration")
        return name, self._of_layer(name, found) if isinstance(found, list | tuple) else found

    def _of_layer(self, name: str, found: Sequence[Any]) -> Any:
        if not found:
            raise self.refuse(f"{name} is an empty list: write its values into the configuration")
        if self.layer is None and all(x == found[0] for x in found):
            return found[0]
        if self.layer is None:
            raise self.refuse(f"{name} differs between layers: pass layer=")
        if not 0 <= self.layer < len(found):
            raise self.refuse(f"{name} has no entry for layer {self.layer}: it lists {len(found)}")
        return found[self.layer]

    def _typed(self, value: Value, kinds: tuple[type, ...], what: str) -> Any:
        name, found = self.find(value)
        if found is None:
            raise self.refuse(f"{name} is missing, and its class has no default: add it to the configuration")
        if not isinstance(found, kinds) or isinstance(found, bool) != (bool in kinds):
            raise self.refuse(f"{name} = {shown(found)} is not {what}: correct the configuration")
        return found

    def _ranged(self, name: str, found: Any) -> Any:
        if problem := problem_of(name, found):
            raise self.refuse(problem.replace("config.json", "the configuration"))
        return found

    def count(self, value: int | Value) -> int:
        """A whole number of at least one; a capacity of zero would mean that nothing runs, not that anything may."""
        if isinstance(value, int):
            return value
        found: int = self._typed(value, (int,), "a whole number")
        if found < 1:
            raise self.refuse(f"{self.find(value)[0]} = {found} is less than 1: correct the configuration")
        return int(self._ranged(self.find(value)[0], found))

    def number(self, value: float | Value) -> float:
        if not isinstance(value, Value):
            return value
        return float(self._ranged(self.find(value)[0], self._typed(value, (int, float), "a number")))

    def flag(self, value: bool | Value) -> bool:
        return bool(self._typed(value, (bool,), "true or false")) if isinstance(value, Value) else value

    def one_of(self, value: Value, allowed: tuple[Any, ...]) -> None:
        name, found = self.find(value)
        if not any(type(found) is type(a) and found == a for a in allowed):
            able = " or ".join(map(repr, allowed))
            raise self.refuse(
                f"{name} = {shown(found)} is not supported, only {able}: export the PyTorch module instead"
            )

    def grouped(self, family: Family) -> bool:
        return family.groups_if is None or self.find(family.groups_if[0])[1] == family.groups_if[1]

    def tensor(self, argument: str, name: str, given: Any) -> tuple[float, ...]:
        """The values of a tensor the family has (`name`), as the descriptor holds them."""
        if given is None and name:
            raise self.refuse(f"its routing depends on the tensor …{name}: pass it as {argument}=")
        if given is not None and not name:
            raise self.refuse(f"this configuration routes without {argument}: leave it out")
        return () if given is None else tuple(np.asarray(given, np.float32).reshape(-1).tolist())


def _get(config: Any, name: str) -> Any:
    return config.get(name, _ABSENT) if isinstance(config, Mapping) else getattr(config, name, _ABSENT)


__all__ = ["FAMILIES", "Family", "Value", "family_of", "router_of"]
