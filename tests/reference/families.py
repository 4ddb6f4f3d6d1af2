"""A tiny random MoE block of every family, as its real module and as the graph made from the module's weights."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colibri.frontends.checkpoints.families import FAMILIES, Value, router_of
from colibri.ir.graph import Graph, Router

Array = np.ndarray[Any, Any]
Choices = tuple[Tensor, Tensor]  # experts and weights, (tokens, k) each, an expert of -1 being none

HIDDEN, INNER, TOKENS = 24, 20, 7


@dataclass(frozen=True)
class Block:
    """A module, its configuration, and what reads its router's choices from what the router returns."""

    config: Any
    module: nn.Module  # (batch, tokens, hidden) -> (batch, tokens, hidden), perhaps with more beside
    router: nn.Module
    choices: Callable[[Any], Choices]

    def run(self, x: Tensor) -> tuple[Tensor, Choices]:
        """The block's output (batch, tokens, hidden) for x, and the choices it made on the way."""
        seen: list[Choices] = []
        handle = self.router.register_forward_hook(lambda module, args, result: seen.append(self.choices(result)))
        with torch.no_grad():
            y = self.module(x)
        handle.remove()
        assert len(seen) == 1
        return (y[0] if isinstance(y, tuple) else y).reshape(x.shape), seen[0]

    def tensor(self, end: str) -> Array:
        """The module's only tensor whose name ends so."""
        (found,) = [v for name, v in self.module.state_dict().items() if name.endswith(end)]
        return found.numpy()


def _listed(result: Any) -> Choices:
    return result[2], result[1]


def _switch_choices(result: Any) -> Choices:
    mask, weight, _ = result
    expert = torch.where(mask.sum(-1) > 0, mask.argmax(-1), -1)
    return expert.reshape(-1, 1), weight.reshape(-1, 1)


def _llama4_choices(result: Any) -> Choices:
    scores, logits = result
    k = int((scores[0] > 0).sum())
    chosen = logits.topk(k, dim=-1).indices
    return chosen, scores.gather(1, chosen)


class Gemma4Layer(nn.Module):
    """The real decoder layer, its attention silenced: what is left is the block around the mixture."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = _module("gemma4", "Gemma4TextDecoderLayer")(config, 0)
        self.layer.self_attn = _Silent()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class _Silent(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


# --- the graph --------------------------------------------------------------------------------------------------------


def _linear(graph: Graph, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
    extra = [] if bias is None else [graph.add_constant("b", bias.detach().numpy())]
    return graph.add("linear", x, graph.add_constant("w", weight.detach().numpy()), *extra)


def _activated(graph: Graph, x: str, func: str) -> str:
    if func == "relu2":
        return graph.add("unary", graph.add("unary", x, func="relu"), func="square")
    names = {"gelu_pytorch_tanh": "gelu_tanh"}
    return graph.add("unary", x, func=names.get(func, func))


def _gated(graph: Graph, x: str, gate: Tensor, up: Tensor, down: Tensor, func: str) -> str:
    both = graph.add("binary", _activated(graph, _linear(graph, x, gate), func), _linear(graph, x, up), func="mul")
    return _linear(graph, both, down)


def _plain(graph: Graph, x: str, up: nn.Linear, down: nn.Linear, func: str) -> str:
    return _linear(graph, _activated(graph, _linear(graph, x, up.weight, up.bias), func), down.weight, down.bias)


def _expert(width: int, body: Callable[[Graph, str], str]) -> Graph:
    graph = Graph("expert")
    graph.outputs = [body(graph, graph.add_input("x", (width,)))]
    return graph


def _stacked(experts: Any, func: str, transposed: bool = False) -> list[Graph]:
    """Experts whose gate and up rows lie one after the other in one tensor."""
    bodies = []
    for both, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = (both.T if transposed else both).chunk(2)
        out = down.T if transposed else down
        body = functools.partial(_gated, gate=gate, up=up, down=out, func=func)
        bodies.append(_expert(gate.shape[1], lambda g, x, body=body: body(g, x)))  # type: ignore[misc]
    return bodies


def _gpt_oss_experts(experts: Any) -> list[Graph]:
    def body(graph: Graph, x: str, e: int) -> str:
        def part(n: int) -> str:  # gate and up rows alternate
            return _linear(graph, x, experts.gate_up_proj[e].T[n::2], experts.gate_up_proj_bias[e][n::2])

        limit, one, alpha = (graph.add_constant(n, v) for n, v in (("limit", [experts.limit]), ("one", [1.0]),
                                                                   ("alpha", [experts.alpha])))  # fmt: skip
        gate = graph.add("binary", part(0), limit, func="minimum")
        up = graph.add("unary", part(1), func="clamp", alpha=-experts.limit, beta=experts.limit)
        slope = graph.add("unary", graph.add("binary", gate, alpha, func="mul"), func="sigmoid")
        glu = graph.add("binary", gate, slope, func="mul")
        both = graph.add("binary", graph.add("binary", up, one, func="add"), glu, func="mul")
        return _linear(graph, both, experts.down_proj[e].T, experts.down_proj_bias[e])

    return [_expert(HIDDEN, functools.partial(body, e=e)) for e in range(experts.num_experts)]


def _plain_stacked(experts: Any, func: str) -> list[Graph]:
    def body(graph: Graph, x: str, e: int) -> str:
        return _linear(graph, _activated(graph, _linear(graph, x, experts.up_proj[e]), func), experts.down_proj[e])

    return [_expert(experts.up_proj.shape[2], functools.partial(body, e=e)) for e in range(experts.num_experts)]


def _norm(graph: Graph, x: str, norm: Any, gamma: Tensor | None = None) -> str:
    scale = norm.weight if gamma is None else gamma
    return graph.add("rmsnorm", x, graph.add_constant("g", scale.detach().numpy()), eps=norm.eps)


# Mistakes others made, for the test that the comparison would see them; each changes how a graph is put together.
MISTAKES = ("shared forgotten", "shared gate skipped", "shared gate over the sum")


def _shared(graph: Graph, x: str, mlp: Any, func: str) -> str:
    gate, up, down = (getattr(mlp, f"{n}_proj", None) for n in ("gate", "up", "down"))
    if gate is None:
        return _plain(graph, x, up, down, func)
    return _gated(graph, x, gate.weight, up.weight, down.weight, func)


def _assemble(graph: Graph, x: str, block: Block, router: Router, mistake: str, *, func: str = "silu",
              experts: str = "gated", shared: str = "", shared_gate: str = "") -> str:  # fmt: skip
    module: Any = block.module
    gate = block.router
    gate = getattr(gate, "classifier", getattr(gate, "wg", gate))
    logits = _linear(graph, x, gate.weight, getattr(gate, "bias", None))  # type: ignore[arg-type]
    bodies = {
        "gated": lambda: _stacked(module.experts, func),
        "transposed": lambda: _stacked(module.experts, func, transposed=True),
        "gpt_oss": lambda: _gpt_oss_experts(module.experts),
        "plain": lambda: _plain_stacked(module.experts, func),
        "modules": lambda: [
            _expert(HIDDEN, lambda g, i, m=m: _plain(g, i, m.wi, m.wo, func))  # type: ignore[misc]
            for m in module.experts.values()
        ],
    }[experts]()
    inside = x
    if isinstance(getattr(module, "fc1_latent_proj", None), nn.Linear):
        inside = _linear(graph, x, module.fc1_latent_proj.weight, module.fc1_latent_proj.bias)
    y = graph.add("moe", inside, logits, router=router, experts=bodies)
    if inside is not x:
        y = _linear(graph, y, module.fc2_latent_proj.weight, module.fc2_latent_proj.bias)
    if not shared or getattr(module, shared) is None or mistake == "shared forgotten":
        return y
    part = _shared(graph, x, getattr(module, shared), func)
    if not shared_gate or mistake == "shared gate skipped":
        return graph.add("binary", y, part, func="add")
    open_ = graph.add("unary", _linear(graph, x, getattr(module, shared_gate).weight), func="sigmoid")
    if mistake == "shared gate over the sum":
        return graph.add("binary", graph.add("binary", y, part, func="add"), open_, func="mul")
    return graph.add("binary", y, graph.add("binary", part, open_, func="mul"), func="add")


def _assemble_gemma4(graph: Graph, x: str, block: Block, router: Router, mistake: str) -> str:
    layer: Any = block.module
    layer, gate, func = layer.layer, layer.layer.router, "gelu_pytorch_tanh"
    dense = _shared(graph, _norm(graph, x, layer.pre_feedforward_layernorm), layer.mlp, func)
    dense = _norm(graph, dense, layer.post_feedforward_layernorm_1)
    logits = _linear(graph, _norm(graph, x, gate.norm, gate.scale * gate.scalar_root_size), gate.proj.weight)
    inside = _norm(graph, x, layer.pre_feedforward_layernorm_2)
    y = graph.add("moe", inside, logits, router=router, experts=_stacked(layer.experts, func))
    y = _norm(graph, y, layer.post_feedforward_layernorm_2)
    both = y if mistake == "shared forgotten" else graph.add("binary", dense, y, func="add")
    y = graph.add("binary", x, _norm(graph, both, layer.post_feedforward_layernorm), func="add")
    return graph.add("binary", y, graph.add_constant("scalar", layer.layer_scalar.numpy()), func="mul")


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row: the module's class and configuration, where its router is, and how the graph is put together."""

    family: str
    block: str
    config: str
    settings: Mapping[str, Any]
    router: str = "gate"
    choices: Callable[[Any], Choices] = _listed
    assemble: Callable[..., str] = _assemble
    parts: Mapping[str, Any] = field(default_factory=dict)
    bias: str = ""
    expert_scale: str = ""

    def make(self, seed: int = 0) -> Block:
        """The block with random weights, biases and buffers; nothing is left at zero or one."""
        config = _module(self.family, self.config, "configuration")(hidden_size=HIDDEN, **self.settings)
        config._experts_implementation = config._attn_implementation = "eager"
        kind = Gemma4Layer if self.family == "gemma4" else _module(self.family, self.block)
        module = kind(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                noise = torch.randn(value.shape, generator=generator)
                if value.ndim >= 2 and "correction" not in name:
                    fan_in = value.shape[-2] if self.parts.get("experts") in ("gpt_oss", "transposed") and (
                        value.ndim == 3) else value.shape[-1]  # fmt: skip
                    value.copy_(noise * 1.5 / fan_in**0.5)
                elif "norm" in name or "scale" in name or "scalar" in name:
                    value.copy_(1 + 0.2 * noise)
                else:
                    value.copy_(0.4 * noise)
        return Block(config, module, module.get_submodule(self.router), self.choices)

    def descriptor(self, block: Block) -> Router:
        """What the front end makes of the configuration and the tensors beside it."""
        return router_of(
            block.config,
            bias=block.tensor(self.bias) if self.bias else None,
            expert_scale=block.tensor(self.expert_scale) if self.expert_scale else None,
        )

    def graph(self, block: Block, router: Router | None = None, mistake: str = "") -> Graph:
        """The block as a graph of (tokens, hidden) -> (tokens, hidden)."""
        graph = Graph(self.family)
        x = graph.add_input("x", (TOKENS, HIDDEN))
        graph.outputs = [self.assemble(graph, x, block, router or self.descriptor(block), mistake, **self.parts)]
        return graph


def _module(family: str, name: str, kind: str = "modeling") -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.{kind}_{family}"), name)


def case(family: str, prefix: str, block: str, config: str = "", **more: Any) -> Case:
    """A case whose classes share a prefix; what is no field of Case is a value of the configuration."""
    fields = {name: more.pop(name) for name in list(more) if name in Case.__dataclass_fields__}
    return Case(family, f"{prefix}{block}", f"{prefix}{config}Config", more, **fields)


MOE = "moe_intermediate_size"
GATED = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}
SHARED = {"shared": "shared_experts"}
QWEN = {"num_experts": 9, "num_experts_per_tok": 3, MOE: INNER}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": INNER}
CORRECTED = {"n_routed_experts": 12, "num_experts_per_tok": 4, "num_attention_heads": 2, MOE: INNER,
             "bias": "e_score_correction_bias", "parts": SHARED}  # fmt: skip
LFM2 = {**QWEN, "bias": "expert_bias", "routed_scaling_factor": 1.7}
ERNIE = {"moe_num_experts": 8, "moe_k": 3, MOE: INNER, "bias": "moe_statics.e_score_correction_bias", "parts": SHARED}
SWITCH = {"d_ff": INNER, "num_experts": 4, "choices": _switch_choices, "router": "router",
          "parts": {"experts": "modules", "func": "relu"}}  # fmt: skip
LLAMA4 = {"intermediate_size": INNER, "num_local_experts": 5, "router": "router", "choices": _llama4_choices,
          "parts": {"experts": "transposed", "shared": "shared_expert"}}  # fmt: skip
NEMOTRON = {**CORRECTED, "moe_shared_expert_intermediate_size": 28,
            "parts": {"experts": "plain", "func": "relu2", **SHARED}}  # fmt: skip
GEMMA4 = {"num_experts": 7, "top_k_experts": 3, MOE: INNER, "intermediate_size": 28, "enable_moe_block": True,
          "hidden_size_per_layer_input": 0, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "head_dim": 8}  # fmt: skip

CASES: dict[str, Case] = {
    "qwen3_moe": case("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", **QWEN, norm_topk_prob=True),
    "qwen3_moe, class default": case("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", **QWEN),
    "gpt_oss": case("gpt_oss", "GptOss", "MLP", **LOCAL, router="router", parts={"experts": "gpt_oss"}),
    "qwen3_next": case("qwen3_next", "Qwen3Next", "SparseMoeBlock", **QWEN, shared_expert_intermediate_size=28,
                       parts=GATED),
    "qwen3_5_moe": case("qwen3_5_moe", "Qwen3_5Moe", "SparseMoeBlock", "Text", **QWEN,
                        shared_expert_intermediate_size=28, parts=GATED),
    "olmoe": case("olmoe", "Olmoe", "SparseMoeBlock", num_experts=8, num_experts_per_tok=3, intermediate_size=INNER),
    "granitemoe": case("granitemoe", "GraniteMoe", "MoE", **LOCAL, router="router"),
    "lfm2_moe": case("lfm2_moe", "Lfm2Moe", "SparseMoeBlock", **LFM2),
    "lfm2_moe, no bias, no sum": case("lfm2_moe", "Lfm2Moe", "SparseMoeBlock", **{**LFM2, "bias": ""},
                                      use_expert_bias=False, norm_topk_prob=False),
    "gemma4": case("gemma4", "Gemma4", "TextDecoderLayer", "Text", **GEMMA4, router="layer.router",
                   expert_scale="router.per_expert_scale", assemble=_assemble_gemma4),
    "deepseek_v2, greedy": case("deepseek_v2", "DeepseekV2", "Moe", **{**CORRECTED, "bias": ""},
                                routed_scaling_factor=1.5),
    "deepseek_v2, groups": case("deepseek_v2", "DeepseekV2", "Moe", **{**CORRECTED, "bias": ""},
                                routed_scaling_factor=16.0, topk_method="group_limited_greedy", n_group=4,
                                topk_group=2),
    "ernie4_5_moe": case("ernie4_5_moe", "Ernie4_5_Moe", "SparseMoeBlock", **ERNIE),
    "ernie4_5_moe, no shared, least sum": case("ernie4_5_moe", "Ernie4_5_Moe", "SparseMoeBlock", **ERNIE,
                                               moe_num_shared_experts=0, moe_norm_min=0.6),
    "deepseek_v3": case("deepseek_v3", "DeepseekV3", "MoE", **CORRECTED, n_group=4, topk_group=2),
    "deepseek_v3, no groups, no sum": case("deepseek_v3", "DeepseekV3", "MoE", **CORRECTED, n_group=1, topk_group=1,
                                           norm_topk_prob=False),
    "glm4_moe": case("glm4_moe", "Glm4Moe", "MoE", **CORRECTED),
    "glm4_moe, groups": case("glm4_moe", "Glm4Moe", "MoE", **CORRECTED, n_group=3, topk_group=1,
                             routed_scaling_factor=2.5),
    "kimi_linear": case("kimi_linear", "KimiLinear", "MoE", num_experts=12, num_experts_per_token=4,
                        moe_intermediate_size=INNER, bias="e_score_correction_bias", parts=SHARED),
    "nemotron_h": case("nemotron_h", "NemotronH", "MoE", **NEMOTRON, n_group=2, topk_group=1),
    "nemotron_h, latent": case("nemotron_h", "NemotronH", "MoE", **NEMOTRON, moe_latent_size=16, mlp_bias=True),
    "mixtral": case("mixtral", "Mixtral", "SparseMoeBlock", **LOCAL),
    "minimax_m2": case("minimax_m2", "MiniMaxM2", "SparseMoeBlock", **LOCAL, bias="e_score_correction_bias"),
    "phimoe": case("phimoe", "Phimoe", "SparseMoeBlock", **{**LOCAL, "num_experts_per_tok": 2}, router="router"),
    "phimoe, wide": case("phimoe", "Phimoe", "SparseMoeBlock", **{**LOCAL, "num_experts_per_tok": 2},
                         router_jitter_noise=0.4, router="router"),
    "qwen2_moe": case("qwen2_moe", "Qwen2Moe", "SparseMoeBlock", **QWEN, shared_expert_intermediate_size=28,
                      parts=GATED),
    "qwen2_moe, sum": case("qwen2_moe", "Qwen2Moe", "SparseMoeBlock", **QWEN, shared_expert_intermediate_size=28,
                           norm_topk_prob=True, parts=GATED),
    "hunyuan_v1_moe": case("hunyuan_v1_moe", "HunYuanMoEV1", "Moe", num_experts=8, moe_topk=3, intermediate_size=INNER,
                           parts={"shared": "shared_mlp"}),
    "jamba": case("jamba", "Jamba", "SparseMoeBlock", num_experts=8, num_experts_per_tok=3, intermediate_size=INNER,
                  router="router"),
    "switch_transformers": case("switch_transformers", "SwitchTransformers", "SparseMLP", **SWITCH, expert_capacity=2),
    "switch_transformers, bias": case("switch_transformers", "SwitchTransformers", "SparseMLP", **SWITCH,
                                      router_bias=True),
    "llama4": case("llama4", "Llama4", "TextMoe", "Text", **LLAMA4),
    "llama4, two": case("llama4", "Llama4", "TextMoe", "Text", **LLAMA4, num_experts_per_tok=2),
}  # fmt: skip


@functools.cache
def made(name: str) -> Block:
    """The block of a case."""
    return CASES[name].make()


@functools.cache
def sized(name: str, experts: int, k: int) -> tuple[Case, Block]:
    """A case with so many experts, in one group, and so many of them chosen."""
    case = CASES[name]
    family = FAMILIES[case.family]
    changed = dict(case.settings)
    for value, number in ((family.experts, experts), (family.k, k), (family.groups, 1), (family.kept_groups, 1)):
        if isinstance(value, Value):
            present = [n for n in value.names if n in changed] or [value.names[0]]
            changed[present[0]] = number
    case = replace(case, settings=changed)
    return case, case.make(5)
