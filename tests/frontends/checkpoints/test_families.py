"""From a configuration to a routing descriptor: class defaults, what checkpoints write, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from colibri.errors import ExportError
from colibri.frontends.checkpoints.families import FAMILIES, Family, Value, family_of, router_of
from colibri.ir.graph import Router
from tests.reference.families import CASES, Case, made

TENSORS = {"bias": "bias", "expert_scale": "expert_scale"}


def values(family: Family) -> Iterator[tuple[Value, bool]]:
    """Every value a family reads, and whether its class must know one of the names."""
    for field in dataclasses.fields(family):
        held = getattr(family, field.name)
        if isinstance(held, Value):
            yield held, True
    if family.groups_if:
        yield family.groups_if[0], True
    for value, _ in family.only:
        yield value, False


CLASSES: dict[str, Case] = {case.family: case for case in CASES.values()}


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_the_configuration_class(kind: str) -> None:
    made(next(name for name, case in CASES.items() if case.family == kind))
    module = sys.modules[f"transformers.models.{kind}.configuration_{kind}"]
    config = getattr(module, CLASSES[kind].config)()
    for value, known in values(FAMILIES[kind]):
        names = [name for name in value.names if hasattr(config, name)]
        assert names or not known, value
        for name in names:
            assert (getattr(config, name), type(getattr(config, name))) == (value.default, type(value.default)), name


@pytest.mark.parametrize("name", CASES)
def test_object_dictionary_and_file_say_the_same(name: str) -> None:
    case, block = CASES[name], made(name)
    tensors = {key: block.tensor(end) for key in TENSORS if (end := getattr(case, key))}
    want = router_of(block.config, **tensors)
    assert router_of(block.config.to_dict(), **tensors) == want
    shortest = block.config.to_diff_dict()  # leaves out what is as in the class
    shortest["model_type"] = block.config.model_type
    assert router_of(json.loads(json.dumps(shortest, default=str)), **tensors) == want
    nested = {"model_type": f"{case.family}_with_eyes", "text_config": block.config.to_dict()}
    assert router_of(nested, **tensors) == want
    assert router_of(SimpleNamespace(model_type=case.family, text_config=block.config), **tensors) == want


@pytest.mark.parametrize("name", CASES)
def test_the_tensors_a_family_names_are_the_module_s(name: str) -> None:
    case, family = CASES[name], FAMILIES[CASES[name].family]
    assert case.bias == (family.bias if case.bias else "")
    assert case.expert_scale == family.expert_scale


# As configuration files have it, cut to what routing reads, and what is made of it.
SAID: list[tuple[str, dict[str, Any], Router]] = [
    ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
     Router(128, 8, "logit", "softmax")),
    ("qwen3_moe", {}, Router(128, 8)),
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, Router(8, 2, "logit", "softmax")),
    ("olmoe", {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}, Router(64, 8)),
    ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4},
     Router(32, 4, "logit", "softmax")),
    ("deepseek_v2", {"n_routed_experts": 64, "num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 1,
                     "topk_group": 1, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
                     "norm_topk_prob": False}, Router(64, 6)),
    ("deepseek_v2", {"n_routed_experts": 160, "num_experts_per_tok": 6, "topk_method": "group_limited_greedy",
                     "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
     Router(160, 6, scale=16.0, groups=8, kept_groups=3)),
    ("switch_transformers", {"num_experts": 8, "router_type": "tokens_masked"}, Router(8, 1, capacity=64)),
    ("phimoe", {"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01},
     Router(16, 2, "sparse_mixer", epsilon=0.01)),
    ("jamba", {"num_experts": 16, "num_experts_per_tok": 2}, Router(16, 2)),
    ("hunyuan_v1_moe", {"num_experts": 64, "moe_topk": [8, 8, 8], "norm_topk_prob": True},
     Router(64, 8, "logit", "softmax")),
    ("llama4_text", {"num_local_experts": 16, "num_experts_per_tok": 1}, Router(16, 1, "sigmoid", apply="input")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "said", "want"), SAID, ids=[f"{n} {row[0]}" for n, row in enumerate(SAID)])
def test_what_a_configuration_file_says(kind: str, said: dict[str, Any], want: Router) -> None:
    assert router_of({"model_type": kind, **said}) == want


def test_deepseek_v3_from_its_class_and_a_bias() -> None:
    bias = [n / 256 for n in range(256)]
    want = Router(256, 8, "sigmoid", "sum", 2.5, tuple(bias), 8, 4, "top2", 1e-20)
    assert router_of({"model_type": "deepseek_v3"}, bias=bias) == want
    assert router_of({"model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
                     bias=[bias]) == want  # fmt: skip


def test_groups_of_a_state_space_layer_are_not_the_router_s() -> None:
    router = router_of({"model_type": "nemotron_h", "n_groups": 4}, bias=[0.0] * 8)
    assert router.groups == 1


def test_a_value_for_each_layer_needs_the_layer() -> None:
    config = {"model_type": "hunyuan_v1_moe", "num_experts": [4, 8], "moe_topk": [1, 2]}
    assert router_of(config, layer=1) == Router(8, 2, "logit", "softmax")
    with pytest.raises(ExportError, match="num_experts differs between layers: pass layer="):
        router_of(config)
    with pytest.raises(ExportError, match="num_experts has no entry for layer 2"):
        router_of(config, layer=2)


BIAS = [0.0] * 8
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("bert", {}, {}, "how model type 'bert' routes is not known"),
    ("", {}, {}, "how model type '' routes is not known"),
    ("deepseek_v2", {}, {}, "num_experts_per_tok is missing, and its class has no default"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, {}, "topk_method = 'noaux_tc' is not supported"),
    ("deepseek_v2", {"norm_topk_prob": True}, {}, "norm_topk_prob = True is not supported"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "group_limited_greedy"}, {}, "n_group is missing"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 2},
     {}, "64 experts in 7 groups"),
    ("deepseek_v3", {"scoring_func": "softmax"}, {"bias": BIAS}, "scoring_func = 'softmax' is not supported"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, {}, "moe_router_activation_func = 'softmax'"),
    ("deepseek_v3", {}, {}, "depends on the tensor …e_score_correction_bias: pass it as bias="),
    ("deepseek_v3", {"n_routed_experts": 8, "n_group": 3}, {"bias": BIAS}, "8 experts in 3 groups"),
    ("deepseek_v3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 3}, {"bias": BIAS}, "3 of 2 groups"),
    ("deepseek_v3", {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 8}, {"bias": BIAS}, "no two largest"),
    ("deepseek_v3", {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 4}, {"bias": BIAS},
     "k = 4, but 1 groups have 2 experts"),
    ("deepseek_v3", {"n_group": None}, {"bias": BIAS}, "n_group is null"),
    ("deepseek_v3", {"n_routed_experts": 16}, {"bias": BIAS}, "8 biases for 16 experts"),
    ("lfm2_moe", {"use_expert_bias": False}, {"bias": BIAS}, "routes without bias: leave it out"),
    ("gemma4", {"num_experts": 8, "top_k_experts": 2}, {}, "enable_moe_block = False is not supported"),
    ("gemma4", {"enable_moe_block": True}, {}, "num_experts is missing"),
    ("gemma4", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}, {}, "pass it as expert_scale="),
    ("mixtral", {"num_local_experts": 8, "num_experts": 4}, {}, "num_local_experts = 8, num_experts = 4: leave one"),
    ("mixtral", {"num_experts_per_tok": "2"}, {}, "num_experts_per_tok = '2' is not a whole number"),
    ("mixtral", {"num_experts_per_tok": True}, {}, "num_experts_per_tok = True is not a whole number"),
    ("mixtral", {"num_experts_per_tok": 0}, {}, "num_experts_per_tok = 0 is less than 1"),
    ("mixtral", {"num_experts_per_tok": 9}, {}, "k = 9 must be between 1 and the 8 experts"),
    ("qwen3_moe", {"norm_topk_prob": 1}, {}, "norm_topk_prob = 1 is not true or false"),
    ("qwen3_5_moe", {"norm_topk_prob": False}, {}, "norm_topk_prob = False is not supported"),
    ("minimax_m2", {"use_routing_bias": False}, {}, "use_routing_bias = False is not supported"),
    ("phimoe", {"num_experts_per_tok": 1}, {}, "num_experts_per_tok = 1 is not supported, only 2"),
    ("switch_transformers", {"expert_capacity": 0}, {}, "expert_capacity = 0 is less than 1"),
    ("switch_transformers", {"router_type": "experts_masked"}, {}, "router_type = 'experts_masked'"),
    ("hunyuan_v1_moe", {"moe_topk": []}, {}, "moe_topk is an empty list"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "said", "tensors", "message"), REFUSED, ids=[f"{r[0]}: {r[3]}" for r in REFUSED])
def test_what_is_not_known_to_be_computed_is_refused(
    kind: str, said: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        router_of({"model_type": kind, **said} if kind else said, **tensors)
    assert ":" in str(caught.value)


def test_a_family_is_found_by_the_model_s_type() -> None:
    assert family_of({"model_type": "llama4_text"}) is FAMILIES["llama4"]
    assert family_of({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}) is FAMILIES["llama4"]
    assert family_of({"model_type": "llama4", "text_config": {}}) is FAMILIES["llama4"]
